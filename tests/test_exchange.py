"""Edges of the exchange between devices, and of what finds states on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_equal, normal_steps, normals, worst
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shampoo_optax as so

PLAIN = dict(b1=0.0, graft="sgd", refresh_every=100)  # the gradient itself travels


def mesh_of(*shape, kinds=None):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple("xyz"[: len(shape)]), axis_types=kinds)


def first_update(placement, grads, **options):
    tx = so.scale_by_shampoo(**(PLAIN | options), placement=placement)
    return jax.jit(tx.update)(grads, tx.init(grads), grads)[0]


def test_float16_gradients_lose_nothing():
    grads = {"w": jnp.logspace(4, -4, 8)[:, None] * normals(0, 8, 8) / 8}
    grads = jax.tree.map(lambda x: x.astype(jnp.float16), grads)
    assert_equal(
        first_update(so.Placement(mesh_of(8)), grads), first_update(None, grads)
    )


def test_float16_keeps_small_blocks_beside_large_ones():
    grads = {name: normals(i, 3, 3) for i, name in enumerate("abcd")}
    grads["b"], grads["d"] = 1e-9 * grads["b"], 1e8 * grads["d"]
    placement = so.Placement(mesh_of(2), dtype="float16")
    got, want = first_update(placement, grads), first_update(None, grads)
    for name in grads:
        assert worst(got[name], want[name]) < 2**-11


def test_mean_of_float16_gradients_stays_in_range():
    mesh = mesh_of(4)
    tx = so.scale_by_shampoo(**PLAIN, placement=so.Placement(axes="x", reduce=True))
    grads = {"w": jnp.full((4, 4), 3e4, jnp.float16)}

    def step(grads):
        return tx.update(grads, tx.init(grads), grads)[0]

    step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    np.testing.assert_array_equal(jax.jit(step)(grads)["w"], grads["w"])


@pytest.mark.parametrize("axes", [("y", "x"), ("x",)], ids=str)
def test_mean_over_some_axes_in_any_order(axes):
    mesh = mesh_of(4, 2)
    tx = so.scale_by_shampoo(**PLAIN, placement=so.Placement(axes=axes, reduce=True))
    local = normals(3, 8, 6, 5)  # one gradient a device

    def step(local):
        grads = {"w": local[0]}
        rest = [axis for axis in ("x", "y") if axis not in axes]
        grads = jax.lax.pmean(grads, rest) if rest else grads
        return tx.update(grads, tx.init(grads), grads)[0]

    step = jax.shard_map(
        step, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(), check_vma=False
    )
    mean = {"w": np.asarray(local, np.float64).mean(0)}
    assert worst(jax.jit(step)(local), mean) < 1e-6


@pytest.mark.parametrize("axes", [None, "x", "y"])
def test_axes_of_two_types(axes):
    mesh = mesh_of(2, 2, kinds=(AxisType.Explicit, AxisType.Auto))
    grads = normal_steps({"a": (6, 5), "b": (7,)}, 1)[0]
    tx = so.scale_by_shampoo(refresh_every=1, placement=so.Placement(mesh, axes))
    state = tx.init(grads)
    update, after = jax.jit(tx.update)(grads, state, grads)
    alone = so.scale_by_shampoo(refresh_every=1)
    want, _ = jax.jit(alone.update)(grads, alone.init(grads), grads)
    assert worst(update, want) < 1e-5
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


def test_portable_form_of_a_state_made_in_a_shard_map():
    mesh = mesh_of(4)
    grads = normal_steps({"a": (6, 5), "b": (7,)}, 1)[0]
    tx = so.scale_by_shampoo(placement=so.Placement(axes="x"))
    specs = jax.tree.map(lambda s: s.spec, so.state_shardings(tx, grads, mesh))
    step = jax.shard_map(
        lambda grads: tx.update(grads, tx.init(grads), grads)[1],
        mesh=mesh,
        in_specs=P(),
        out_specs=specs,
        check_vma=False,
    )
    portable = so.to_portable(tx, jax.jit(step)(grads), grads, mesh)
    alone = so.scale_by_shampoo()
    state = jax.jit(alone.update)(grads, alone.init(grads), grads)[1]
    assert worst(portable, so.to_portable(alone, state, grads)) < 1e-6


def test_nothing_to_divide_needs_no_shard_map():
    """As `optax.tree.map_params` wants, which calls `init` on a placeholder."""
    tx, alone = (
        so.scale_by_shampoo(placement=so.Placement(axes="x")),
        so.scale_by_shampoo(),
    )
    assert_equal(tx.init(()), alone.init({}))
    assert_equal(tx.update({}, tx.init({})), alone.update({}, alone.init({})))


def test_no_two_numbers_of_owners_share_a_state():
    params = normal_steps({"a": (8, 8), "b": (8, 8)}, 1)[0]
    states = [
        so.scale_by_shampoo(placement=so.Placement(mesh_of(n))).init(params)
        for n in (1, 2, 4)
    ]
    keys = [frozenset(state.factors) for state in states]
    assert len(set(keys)) == 3
    four = so.scale_by_shampoo(placement=so.Placement(mesh_of(4)))
    with pytest.raises(ValueError, match="`state`.*from_portable"):
        four.update(params, states[1], params)


def test_momentum_of_parameters_that_are_nowhere_in_particular():
    params = normal_steps({"a": (6, 5), "b": (7,)}, 1)[0]
    tx = so.shampoo(1e-2, momentum=0.9, placement=so.Placement(mesh_of(4)))
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        _, state = jax.block_until_ready(update(params, state, params))
    assert update._cache_size() == 1


def test_raw_bytes_of_bfloat16_buffers(tmp_path):
    params = {"a": jnp.ones((3, 2), jnp.bfloat16)}
    tx = optax.chain(so.scale_by_shampoo(), optax.trace(0.9))
    _, state = tx.update(params, tx.init(params), params)
    np.savez(tmp_path / "state.npz", **so.to_portable(tx, state, params))
    with np.load(tmp_path / "state.npz") as file:
        assert_equal(so.from_portable(tx, dict(file), params), state)


def other_mesh():
    return Mesh(np.array(jax.devices()[:2]), "q")


@pytest.mark.parametrize(
    "placement, mesh, match",
    [
        (so.Placement(axes="x"), other_mesh, "`axes`.*'q'.*'x'"),
        (so.Placement(axes="x"), lambda: "x", "`mesh`.*'x'"),
        (None, lambda: None, "`mesh`.*None"),
        (so.Placement(axes="x"), lambda: None, "`placement`.*mesh"),
    ],
)
def test_meshes_that_do_not_fit(placement, mesh, match):
    tx = so.scale_by_shampoo(placement=placement)
    with pytest.raises(ValueError, match=match):
        so.state_shardings(tx, {"a": jnp.ones((3, 2))}, mesh())


def test_a_mesh_beside_that_of_the_placement():
    tx = so.scale_by_shampoo(placement=so.Placement(mesh_of(4)))
    with pytest.raises(ValueError, match="`mesh`.*placement"):
        so.state_shardings(tx, {"a": jnp.ones((3, 2))}, mesh_of(2))


def test_two_placements_on_meshes_of_their_own():
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones((4,))}
    meshes = {"a": mesh_of(2), "b": other_mesh()}
    partition = getattr(optax, "partition", optax.multi_transform)
    transforms = {
        name: so.scale_by_shampoo(placement=so.Placement(mesh))
        for name, mesh in meshes.items()
    }
    tx = partition(transforms, {"a": "a", "b": "b"})
    shardings = jax.tree.leaves(so.state_shardings(tx, params))
    found = {s.mesh for s in shardings if isinstance(s, NamedSharding) and s.spec}
    assert found == set(meshes.values())


def test_a_foreign_shard_map_is_named():
    tx = so.scale_by_shampoo(placement=so.Placement(mesh_of(4)))
    params = {"a": jnp.ones((3, 2))}
    inside = jax.shard_map(
        tx.init, mesh=other_mesh(), in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"`placement`.*Placement\(axes=\('q',\)\)"):
        inside(params)
