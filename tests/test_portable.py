"""States across device counts and on disk: portable forms, targets, shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_equal,
    mesh_of,
    normal_steps,
    partition,
    quick_jit,
    replicate,
    worst,
)
from jax.sharding import NamedSharding, PartitionSpec

import shampoo_optax as so

SHAPES = {
    "bias": (9,),
    "kernel": (3, 2, 4, 6),
    "long": (20, 6),
    "scalar": (),
    "square": (8, 8),
    "tall": (12, 5),
    "wide": (5, 12),
}
STEPS = normal_steps(SHAPES, 15)
PARAMS = STEPS[0]
BLOCKING = so.Blocking(8)


def placed_on(mesh):
    return None if mesh is None else so.Placement(mesh)


@functools.cache  # one transform for a mesh: it compiles once
def shampoo_on(mesh):
    """Sums, a late start and momentum: factors have full rank when they are rooted."""
    return so.shampoo(
        1e-2,
        b2=1.0,
        graft="sgd",
        refresh_every=4,
        start=12,
        relative_eps=1e-2,
        momentum=0.9,
        blocking=BLOCKING,
        placement=placed_on(mesh),
    )


@functools.cache  # one transform for a mesh: it compiles once
def soap_on(mesh):
    """No refresh within the steps: bases of rank-deficient factors are arbitrary."""
    return so.soap(1e-2, refresh_every=20, blocking=BLOCKING, placement=placed_on(mesh))


def advance(tx, state, steps, mesh):
    """The updates of some more steps, and the last state."""
    update, params, updates = quick_jit(tx.update), replicate(PARAMS, mesh), []
    for grads in steps:
        found = update(replicate(grads, mesh), state, params)
        update_now, state = jax.block_until_ready(found)
        updates.append(update_now)
    return updates, state


@functools.cache
def saved(make):
    """The portable state after seven steps on eight devices, and what came after."""
    mesh = mesh_of(8)
    tx = make(mesh)
    _, state = advance(tx, tx.init(replicate(PARAMS, mesh)), STEPS[:7], mesh)
    later, _ = advance(tx, state, STEPS[7:], mesh)
    return state, so.to_portable(tx, state, PARAMS), later


@pytest.mark.parametrize("make", [shampoo_on, soap_on])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 2)], ids=str)
def test_goes_on_on_other_devices(make, shape):
    _, portable, expected = saved(make)
    mesh = mesh_of(*shape)
    tx = make(mesh)
    state = so.from_portable(tx, portable, replicate(PARAMS, mesh))
    updates, _ = advance(tx, state, STEPS[7:], mesh)
    assert worst(updates, expected) < 1e-5


@pytest.mark.parametrize("make", [shampoo_on, soap_on])
def test_there_and_back_is_the_same_state(make):
    state, portable, _ = saved(make)
    mesh = mesh_of(8)
    restored = so.from_portable(make(mesh), portable, replicate(PARAMS, mesh))
    again = so.to_portable(make(mesh), restored, PARAMS)
    assert again.keys() == portable.keys()
    assert_equal(again, portable)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert new.sharding == old.sharding and new.dtype == old.dtype


def test_portable_arrays_are_those_of_the_parameters():
    _, portable, _ = saved(shampoo_on)
    long = np.stack([np.asarray(grads["long"], np.float64) for grads in STEPS[:7]])
    blocks = long[:, :16].reshape(7, 2, 8, 6)
    rows = np.einsum("tbij,tbkj->bik", blocks, blocks)
    columns = np.einsum("tij,tik->jk", long[:, 16:], long[:, 16:])
    np.testing.assert_allclose(
        portable["[0].factors/['long']/0,0/0"], rows, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        portable["[0].factors/['long']/16,0/1"][0], columns, rtol=1e-5, atol=1e-5
    )


def test_portable_is_the_same_from_every_mesh():
    _, portable, _ = saved(soap_on)
    tx = soap_on(None)
    _, state = advance(tx, tx.init(PARAMS), STEPS[:7], None)
    single = so.to_portable(tx, state, PARAMS)
    assert single.keys() == portable.keys()
    assert worst(portable, single) < 1e-6


def test_npz_continues_bit_for_bit(tmp_path):
    state, portable, expected = saved(shampoo_on)
    np.savez(tmp_path / "state.npz", **portable)
    with np.load(tmp_path / "state.npz") as file:
        loaded = dict(file)
    mesh = mesh_of(8)
    tx = shampoo_on(mesh)
    restored = so.from_portable(tx, loaded, replicate(PARAMS, mesh))
    updates, _ = advance(tx, restored, STEPS[7:], mesh)
    assert_equal(updates, expected)
    assert all(leaf.size for leaf in jax.tree.leaves(state))


def test_masked_and_partitioned_parameters():
    mesh = mesh_of(4)
    labels = {name: "so" if name != "bias" else "adam" for name in SHAPES}

    def make(mesh):
        inner = so.scale_by_shampoo(blocking=BLOCKING, placement=placed_on(mesh))
        return partition({"so": inner, "adam": optax.scale_by_adam()}, labels)

    tx = make(mesh)
    _, state = advance(tx, tx.init(replicate(PARAMS, mesh)), STEPS[:2], mesh)
    portable = so.to_portable(tx, state, PARAMS)
    assert not any("factors/['bias']" in name for name in portable)
    assert any("mu['bias']" in name for name in portable)
    restored = so.from_portable(make(None), portable, PARAMS)
    again = so.to_portable(make(None), restored, PARAMS)
    assert_equal(again, portable)


def test_state_shardings_are_those_of_the_state():
    mesh = mesh_of(4, 2)
    tx = shampoo_on(mesh)
    params = replicate(PARAMS, mesh)
    shardings = so.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    expected = tx.init(params)
    assert_equal(state, expected)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    for leaf, old in pairs:
        assert leaf.sharding.is_equivalent_to(old.sharding, leaf.ndim)


def test_buffers_lie_as_their_parameters():
    mesh = mesh_of(4, 2)
    tx = shampoo_on(mesh)
    divided = NamedSharding(mesh, PartitionSpec(None, "y"))
    params = replicate(PARAMS, mesh)
    params["square"] = jax.device_put(params["square"], divided)
    momentum = so.state_shardings(tx, params)[1].momentum
    assert momentum["square"].spec == divided.spec
    assert momentum["tall"].spec == PartitionSpec()


def test_abstract_state_is_the_state():
    mesh = mesh_of(8)
    tx = shampoo_on(mesh)
    params = replicate(PARAMS, mesh)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    state, abstract = tx.init(params), so.abstract_state(tx, structs)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, struct in zip(
        jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (struct.shape, struct.dtype)
        assert leaf.sharding.is_equivalent_to(struct.sharding, leaf.ndim)


def test_specs_of_a_shard_map():
    mesh = mesh_of(8)
    tx = so.scale_by_shampoo(blocking=BLOCKING, placement=so.Placement(axes="x"))
    shardings = so.state_shardings(tx, PARAMS, mesh)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False
    )
    state = jax.jit(init)(PARAMS)
    other = so.scale_by_shampoo(blocking=BLOCKING, placement=so.Placement(mesh))
    assert_equal(state, other.init(PARAMS))


def test_no_mesh_is_an_error():
    with pytest.raises(ValueError, match="`mesh`.*None"):
        so.state_shardings(so.scale_by_shampoo(), PARAMS)


def test_another_block_size_is_refused():
    _, portable, _ = saved(shampoo_on)
    tx = so.shampoo(1e-2, graft="sgd", momentum=0.9, blocking=so.Blocking(16))
    with pytest.raises(ValueError, match=r"`portable`.*`blocking`"):
        so.from_portable(tx, portable, PARAMS)


def test_leftovers_and_gaps_are_refused():
    tx = so.scale_by_shampoo(blocking=BLOCKING)
    portable = so.to_portable(tx, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="`portable`.*'spare'"):
        so.from_portable(tx, portable | {"spare": np.zeros(3)}, PARAMS)
    del portable[".filtered/['bias']/0"]
    with pytest.raises(ValueError, match=r"`portable`.*filtered/\['bias'\]/0"):
        so.from_portable(tx, portable, PARAMS)


def test_a_foreign_state_is_refused():
    tx = so.scale_by_shampoo(blocking=BLOCKING)
    with pytest.raises(ValueError, match="`state`"):
        so.to_portable(tx, so.scale_by_soap(blocking=BLOCKING).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="`state`"):
        so.to_portable(tx, tx.init({"other": jnp.ones(3)}), PARAMS)


def test_a_tree_without_blocks():
    tx = so.scale_by_shampoo(placement=so.Placement(mesh_of(2)))
    portable = so.to_portable(tx, tx.init({}), {})
    assert list(portable) == [".count"]
    assert_equal(so.from_portable(tx, portable, {}), tx.init({}))
