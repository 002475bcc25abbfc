"""Local mode: every device works on the blocks inside the shards that it holds."""

import functools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import divide, mesh_of, quick_jit, same_sharding, worst
from helpers import worst_of_steps as error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shampoo_optax as so

# {parameter: (shape, spec on the mesh (4, 2), what is declared on one device to cut it
# at the same places)}; blocks have sides of up to 8.
FORMS = {
    "rows": ((48, 6), P("x"), so.Batch(split={0: 4})),  # shards of 12
    "columns": ((8, 24), P(None, "x"), so.Batch(split={1: 4})),
    "both": ((16, 12), P("x", "y"), so.Batch(split={0: 4, 1: 2})),
    "joint": ((32, 6), P(("x", "y")), so.Batch(split={0: 8})),
    "crossed": ((4, 48), P(None, ("y", "x")), so.Batch(split={1: 8})),
    "whole": ((4, 6), P(), None),
    "bias": ((20,), P("x"), so.Batch(split={0: 4})),
    "scale": ((5,), P(), None),
    "scalar": ((), P(), None),
    "experts": ((8, 4, 6), P("x"), so.Batch(0)),
    "experts_apart": ((8, 4, 12), P("x", None, "y"), so.Batch(0, {2: 2})),
    "layers": ((3, 16, 6), P(None, "x"), so.Batch(0, {1: 4})),
    "qkv": ((8, 48), P(None, "x"), so.Batch(split={1: 8})),  # two parts a shard
    "kernel": ((2, 2, 24), P(None, None, "x"), so.Batch(split={2: 4})),  # merged
    "absent": ((16, 6), P("x"), so.Batch(split={0: 4})),  # without a gradient
}
SPECS = {name: spec for name, (_, spec, _) in FORMS.items()}
FEW = ("both", "crossed", "whole", "experts", "qkv")
BATCH = {"^experts|^layers$": 0, "^qkv$": so.Batch(split={1: 8})}
APART = {f"^{name}$": batch for name, (*_, batch) in FORMS.items()}
# Sums, and a first refresh at full rank.
STEADY = dict(b2=1.0, graft_b2=0.9, refresh_every=4, start=8, relative_eps=0.1)
METHODS = {
    "shampoo": (so.scale_by_shampoo, STEADY, tuple(FORMS)),
    "soap": (so.scale_by_soap, dict(refresh_every=8), FEW),
    "spectral": (so.scale_by_spectral_descent, {}, ("both", "crossed", "qkv")),
}


def rules(specs):
    return {f"^{name}$": spec for name, spec in specs.items()}


def build(name, placement=None):
    """On one device it is said where shards would be cut."""
    make, kwargs, _ = METHODS[name]
    batch = APART if placement is None else BATCH
    blocking = so.Blocking(8, batch=batch)
    return make(**kwargs, blocking=blocking, placement=placement)


def local(*sizes, kind="Auto", specs=None, **kwargs):
    """Shardings are declared on Auto axes, and are those of the types on Explicit."""
    specs = specs if kind == "Auto" else None
    mesh = mesh_of(*sizes, kind=kind)
    return so.Placement(mesh, specs=specs, mode="local", **kwargs)


SENDING = (
    r" ((?:ragged-)?all-[a-z\-]+|reduce-scatter[a-z\-]*|collective-[a-z\-]+"
    r"|send[a-z\-]*|recv[a-z\-]*|infeed|outfeed)\("
)


def sends(text):
    """The collectives of a compiled step, and what else leaves a device."""
    return re.findall(SENDING, text)


def test_what_sends_is_found():
    step = jax.shard_map(
        lambda x: (jax.lax.all_to_all(x, "x", 0, 0), jax.lax.psum(x, "x").sum()),
        mesh=mesh_of(8),
        in_specs=P("x"),
        out_specs=(P("x"), P()),
    )
    text = jax.jit(step).lower(jnp.ones(64)).compile().as_text()
    kinds = {one.removesuffix("-start") for one in sends(text)}
    assert kinds >= {"all-to-all", "all-reduce"}


# ---- the trajectory


def doubles(names):
    rng = np.random.default_rng(0)
    shapes = {name: FORMS[name][0] for name in names}
    return [
        {n: None if n == "absent" else rng.standard_normal(shapes[n]) for n in shapes}
        for _ in range(10)
    ]


@functools.cache
def on_one_device(name):
    with helpers.enable_x64():
        return helpers.scanned(build(name), doubles(METHODS[name][-1]))[0]


@pytest.mark.parametrize(
    "name, kind, axes",
    [
        ("shampoo", "Auto", None),
        ("soap", "Explicit", ("y", "x")),
        ("spectral", "Explicit", None),
    ],
    ids=str,
)
def test_as_on_one_device_that_cuts_where_shards_end(x64, name, kind, axes):
    """In float64; and nothing travels."""
    placement = local(4, 2, kind=kind, specs=rules(SPECS), axes=axes)
    names = METHODS[name][-1]
    tx, lay = (
        build(name, placement),
        functools.partial(divide, mesh=placement.mesh, specs=SPECS),
    )
    params = lay({key: np.zeros(FORMS[key][0]) for key in names})
    trees, state = list(map(lay, doubles(names))), tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    step = quick_jit(tx.update).lower(trees[0], state, params).compile()
    assert not sends(step.as_text())
    updates = []
    for grads in trees:
        update, state = jax.block_until_ready(step(grads, state, params))
        updates.append(update)
    assert error(jax.device_get(updates), on_one_device(name)) <= 1e-12
    assert jax.tree.map(jax.typeof, state) == types
    for key in set(names) - {"absent"}:
        assert same_sharding(updates[-1][key], params[key]), key
    for leaf in jax.tree.leaves(state):
        owners = P(placement.axes) if leaf.ndim else P()
        divided = NamedSharding(placement.mesh, owners)
        assert leaf.sharding.is_equivalent_to(divided, leaf.ndim)
    assert all(stack.endswith("@8local") for stack in state.skipped)


# ---- what a device keeps

WELL = dict(b2=0.9, refresh_every=2, relative_eps=0.1)


def test_experts_stay_where_they_are():
    """A router on all devices, and experts of which each device has its own two.

    Types say it, on Explicit axes.
    """
    mesh = mesh_of(4, kind="Explicit")
    specs = {"experts": P("x"), "router": P()}
    grads = helpers.normal_steps({"experts": (8, 6, 4), "router": (6, 8)}, 3)
    placed = [divide(tree, mesh, specs) for tree in grads]
    placement = local(4, kind="Explicit")
    blocking = so.Blocking(batch={"^experts$": 0})
    tx, alone = (
        so.scale_by_kl_shampoo(**WELL, blocking=blocking, placement=each)
        for each in (placement, None)
    )
    state = tx.init(placed[0])
    step = quick_jit(tx.update).lower(placed[0], state, placed[0]).compile()
    assert not sends(step.as_text())
    updates = []
    for tree in placed:
        update, state = jax.block_until_ready(step(tree, state, placed[0]))
        updates.append(update)
    want, single = helpers.scanned(alone, grads)
    assert error(updates, want) <= 1e-6
    for axis in ("0", "1"):
        factors = state.factors["6x4@4local"][axis]
        wanted = single.factors["6x4"][axis]
        for device, shard in enumerate(factors.addressable_shards):
            own = slice(2 * device, 2 * device + 2)
            assert shard.index[0] == own
            np.testing.assert_allclose(shard.data, wanted[own], rtol=1e-5, atol=1e-6)
        copies = [
            np.asarray(shard.data)
            for shard in state.factors["6x8@4local"][axis].addressable_shards
        ]
        assert len(copies) == 4 and copies[0].shape[0] == 1
        for copy in copies:  # redundant work gives the same bits
            np.testing.assert_array_equal(copy, copies[0])


def test_devices_along_other_axes_hold_copies():
    """Blocks divided over one axis of two."""
    specs = {"w": P("y")}
    placement = local(2, 4, axes="y", specs=rules(specs))
    grads = helpers.normal_steps({"w": (16, 6)}, 3)
    placed = [divide(tree, placement.mesh, specs) for tree in grads]
    split = so.Blocking(batch=so.Batch(split={0: 4}))
    tx = so.scale_by_shampoo(**WELL, placement=placement)
    alone = so.scale_by_shampoo(**WELL, blocking=split)
    got, (*_, state) = helpers.trace(tx, placed[0], placed, jit=quick_jit)
    want, _ = helpers.scanned(alone, grads)
    assert error(got, want) <= 1e-6
    (stack,) = state.factors
    assert stack.endswith("@4local")
    for leaf in jax.tree.leaves(state.factors):
        assert len(leaf) == 4 and len(leaf.addressable_shards) == 8


# ---- portable states, in float64: padding changes how a block is rounded

ALIGNED = {"w": (32, 8), "v": (6, 16), "b": (5,)}  # shards of 8 rows, of 4 columns
ALONG = {"w": P("x"), "v": P(None, "x"), "b": P()}
SIZES = so.Blocking(8, batch={"^v$": so.Batch(split={1: 4})})


@functools.cache
def saved():
    """A local state after three steps, its portable form, and the two steps after."""
    rng = np.random.default_rng(0)
    steps = [
        {name: rng.standard_normal(shape) for name, shape in ALIGNED.items()}
        for _ in range(5)
    ]
    placement = local(4, specs=rules(ALONG))
    tx = so.scale_by_shampoo(**WELL, blocking=SIZES, placement=placement)
    placed = [divide(tree, placement.mesh, ALONG) for tree in steps]
    updates, states = helpers.trace(tx, placed[0], placed, jit=quick_jit)
    return tx, states[2], so.to_portable(tx, states[2], placed[0]), updates[3:], steps


def lossless(mesh):
    return so.Placement(mesh, specs=rules(ALONG))


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: lossless(mesh_of(8)),
        lambda: local(2, specs=rules(ALONG)),
    ],
    ids=["no mesh", "lossless on more devices", "local on fewer devices"],
)
def test_goes_on_elsewhere(x64, make):
    """Blocks are those of the whole parameters."""
    _, _, portable, want, steps = saved()
    placement = make()
    tx = so.scale_by_shampoo(**WELL, blocking=SIZES, placement=placement)
    lay = functools.partial(divide, specs=ALONG) if placement else lambda tree, _: tree
    params, *rest = (
        lay(tree, placement and placement.mesh) for tree in (steps[0], *steps[3:])
    )
    state, update = so.from_portable(tx, portable, params), quick_jit(tx.update)
    got = []
    for grads in rest:
        found, state = jax.block_until_ready(update(grads, state, params))
        got.append(found)
    assert error(got, want) <= 1e-12


def test_there_and_back_is_the_same_state(x64):
    tx, state, portable, _, steps = saved()
    params = divide(steps[0], mesh_of(4), ALONG)
    restored = so.from_portable(tx, portable, params)
    helpers.assert_equal(restored, state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)


def test_portable_arrays_are_those_of_one_device(x64):
    _, _, portable, _, steps = saved()
    alone = so.scale_by_shampoo(**WELL, blocking=SIZES)
    _, state = helpers.scanned(alone, steps[:3])
    want = so.to_portable(alone, state, steps[0])
    shapes, wanted = (
        {key: value.shape for key, value in each.items()} for each in (portable, want)
    )
    assert shapes == wanted
    factors = [key for key in want if ".factors" in key]
    assert len(factors) > 4
    for key in factors:
        assert worst(portable[key], want[key]) <= 1e-12


def test_blocks_that_end_with_shards_only_are_refused():
    """Shards of 5 rows: a whole parameter has blocks of 8, 8 and 4."""
    params = {"w": jnp.ones((20, 6))}
    tx, whole = (
        so.scale_by_shampoo(blocking=so.Blocking(8), placement=each)
        for each in (local(4, specs=P("x")), None)
    )
    portable = so.to_portable(tx, tx.init(params), params)
    with pytest.raises(ValueError, match=r"`portable` .*\['w'\]"):
        so.from_portable(whole, portable, params)
