"""What travels between devices in a step, and what each of them holds."""

import math
import re

import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import TRANSFORMS, mesh_of, plan_of, replicate
from jax.sharding import PartitionSpec as P

import shampoo_optax as so
from benchmarks.hlo import collectives, computations

names = pytest.mark.parametrize("name", TRANSFORMS)
EIGHT = {f"w{i}": (6, 4) for i in range(8)}  # one block a device, no padding
MIXED = {"w": (6, 4), "v": (5, 4), "b": (5,), "s": (), "t": (3, 2, 4)}
KEEP = so.Blocking(merge_to=None)


def ones(shapes, dtype=jnp.float32):
    return {name: jnp.ones(shape, dtype) for name, shape in shapes.items()}


def entries(plan):
    """The number of entries of all blocks, padding included."""
    return sum(s.size * math.prod(s.block) for s in plan.stacks.values())


# ---- reading compiled programs


def inside_conditionals(text):
    """The computations that run inside of a conditional, at any depth."""
    bodies = computations(text)
    calls = {
        name: set(re.findall(r"%([\w.\-]+)", " ".join(lines))) & set(bodies)
        for name, lines in bodies.items()
    }
    waiting = [
        called
        for lines in bodies.values()
        for line in lines
        if re.search(r" conditional\(", line)
        for called in set(re.findall(r"%([\w.\-]+)", line)) & set(bodies)
    ]
    assert waiting
    reached = set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += calls[name]
    return reached


def compiled_step(tx, params):
    lowered = jax.jit(tx.update).lower(params, tx.init(params), params)
    return lowered.compile().as_text()


# ---- C17: what travels


@names
@pytest.mark.parametrize("kind, sizes", [("Auto", (8,)), ("Explicit", (4, 2))], ids=str)
def test_one_gather_of_directions(name, kind, sizes):
    mesh = mesh_of(*sizes, kind=kind)
    tx = TRANSFORMS[name](blocking=KEEP, placement=so.Placement(mesh))
    params = replicate(ones(MIXED), mesh)
    text = compiled_step(tx, params)
    found = collectives(text)
    size = 4 * entries(plan_of(tx, params))
    assert [kind_and_size[1:] for kind_and_size in found] == [("all-gather", size)]
    assert not {where for where, _, _ in found} & inside_conditionals(text)


def test_one_gather_for_each_dtype(x64):
    mesh = mesh_of(8)
    tx = so.scale_by_shampoo(placement=so.Placement(mesh))
    params = {
        "single": jnp.ones((6, 4), jnp.float32),
        "double": jnp.ones((6, 4), jnp.float64),
    }
    params = replicate(params, mesh)
    found = collectives(compiled_step(tx, params))
    assert sorted(size for _, _, size in found) == [8 * 24 * 4, 8 * 24 * 8]
    assert {kind for _, kind, _ in found} == {"all-gather"}


SENDING = ("all_gather", "psum", "reduce_scatter", "all_to_all", "ppermute", "pmax")


def is_sending(eqn):
    return eqn.primitive.name.startswith(SENDING)


def sent(tx, params):
    """The operand of each collective of a traced step, and what it is nested in."""
    return [
        (eqn.invars[0].aval, inside)
        for eqn, inside in helpers.update_equations(tx, params)
        if is_sending(eqn)
    ]


@names
def test_no_collective_in_a_branch(name):
    tx = TRANSFORMS[name](blocking=KEEP, placement=so.Placement(mesh_of(8)))
    ((_, inside),) = sent(tx, ones(MIXED))
    assert "shard_map" in inside
    assert not any(part.startswith("cond") for part in inside)


def matrices_of_eigh(tx, params):
    """`{side: number of matrices}` of the eigendecompositions of one device.

    On CPU each is the body of a loop over the matrices of one side.
    """
    found = {}
    for eqn, inside in helpers.update_equations(tx, params):
        if eqn.primitive.name == "scan":
            assert "shard_map" in inside
            for sub, _ in helpers.equations(eqn.params["jaxpr"].jaxpr):
                if sub.primitive.name == "eigh":
                    side = sub.invars[0].aval.shape[-1]
                    found[side] = found.get(side, 0) + eqn.params["length"]
    return found


@names
def test_a_device_decomposes_its_share(name):
    """20 blocks on 8 devices: 3 slots each."""
    params = ones({f"w{i:02}": (6, 4) for i in range(20)})
    tx = TRANSFORMS[name](placement=so.Placement(mesh_of(8)))
    assert matrices_of_eigh(tx, params) == {6: 3, 4: 3}


def full_bytes(text, owners):
    """Bytes of the whole arrays in collectives: twice for an all-reduce.

    A ring sends (owners - 1) / owners of the whole array in a reduce-scatter and in
    an all-gather, and an all-reduce is one of each: the common factor is left out.
    """
    weights = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": owners}
    return sum(weights[kind] * size for _, kind, size in collectives(text))


@names
@pytest.mark.parametrize("sizes", [(8,), (4, 2)], ids=str)
def test_reduce_sends_no_more_than_an_all_reduce(name, sizes):
    mesh = mesh_of(*sizes)
    axes, params = mesh.axis_names, ones(EIGHT)
    tx = TRANSFORMS[name](placement=so.Placement(axes=axes, reduce=True))
    specs = jax.tree.map(lambda s: s.spec, so.state_shardings(tx, params, mesh))
    state = so.abstract_state(tx, params, mesh)

    def compiled(step, in_specs, out_specs, *args):
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return jax.jit(mapped).lower(*args).compile().as_text()

    def data_parallel(grads):
        return jax.lax.pmean(jax.tree.map(lambda g: g[0], grads), axes)

    def step(grads, state):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    grads = {key: jnp.ones((8, *g.shape)) for key, g in params.items()}
    plain = compiled(data_parallel, (P(axes),), P(), grads)
    ours = compiled(step, (P(axes), specs), (P(), specs), grads, state)
    gradient = 8 * 24 * 4
    assert full_bytes(plain, 8) == 2 * gradient
    assert {kind for _, kind, _ in collectives(ours)} == {
        "reduce-scatter",
        "all-gather",
    }
    assert full_bytes(ours, 8) <= 1.05 * full_bytes(plain, 8)


# ---- the dtype in which directions travel


def first_direction(grads, dtype, **kwargs):
    """The direction of the first step, before any refresh."""
    placement = so.Placement(mesh_of(8), dtype=dtype)
    tx = so.scale_by_shampoo(b1=0.0, placement=placement, **kwargs)
    return jax.jit(tx.update)(grads, tx.init(grads))[0]


@pytest.mark.parametrize("dtype", ["float32", None])
def test_full_precision_loses_nothing(dtype):
    """Without grafting and before the first refresh the direction is the gradient."""
    (grads,) = helpers.normal_steps(MIXED, 1)
    got = first_direction(grads, dtype, graft=None, blocking=KEEP)
    helpers.assert_equal(got, grads)


@pytest.mark.parametrize("scale", [1.0, 1e15, 1e-30])
def test_bfloat16_rounds_once(scale):
    (grads,) = helpers.normal_steps(MIXED, 1, scale=scale)
    got = first_direction(grads, "bfloat16", graft=None, blocking=KEEP)
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(jnp.float32), grads)
    helpers.assert_equal(got, rounded)
    assert helpers.worst(got, grads) > 1e-4


@pytest.mark.parametrize("scale", [1.0, 1e8, 1e-8, 1e15, 1e-15])
def test_float16_is_scaled_into_its_range(scale):
    """Half a unit in the last place of the largest number of a block."""
    grads = {
        name: scale * helpers.normals(n, *shape)
        for n, (name, shape) in enumerate(EIGHT.items())
    }
    got = first_direction(grads, "float16", graft=None)
    assert 0 < helpers.worst(got, grads) <= 2.0**-11


def test_float16_of_blocks_far_apart():
    """Every block has a scale of its own; zeros stay zeros."""
    scales = dict(
        zip(EIGHT, [1e12, 1e8, 1.0, 0.0, 1e-4, 1e-8, 1e-12, 1e-15], strict=True)
    )
    grads = {
        name: scales[name] * helpers.normals(n, 6, 4) for n, name in enumerate(EIGHT)
    }
    got = first_direction(grads, "float16", graft=None)
    for name in EIGHT:  # one by one, each relative to its own largest entry
        assert helpers.worst(got[name], grads[name]) <= 2.0**-11


def wire_of(grads, dtype=None):
    placement = so.Placement(mesh_of(8), dtype=dtype)
    tx = so.scale_by_shampoo(blocking=KEEP, placement=placement)
    return {aval.dtype.name for aval, _ in sent(tx, grads)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_directions_travel_as_gradients_do(dtype):
    """Read in the traced step: on CPU, XLA sends bfloat16 as float32."""
    assert wire_of(ones(MIXED, dtype)) == {dtype}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_directions_travel_as_asked(dtype):
    assert wire_of(ones(MIXED), dtype) == {dtype}


def test_mixed_gradients_travel_in_the_widest_dtype():
    grads = ones({"w": (6, 4)}, jnp.bfloat16) | ones({"v": (6, 4)})
    assert wire_of(grads) == {"float32"}


def test_float16_is_half_in_the_compiled_step():
    mesh = mesh_of(8)
    params = replicate(ones(MIXED), mesh)
    tx = so.scale_by_shampoo(
        blocking=KEEP, placement=so.Placement(mesh, dtype="float16")
    )
    plan = plan_of(tx, params)
    powers = sum(stack.size for stack in plan.stacks.values())  # one for each block
    size = 2 * (entries(plan) + powers)
    assert [found[1:] for found in collectives(compiled_step(tx, params))] == [
        ("all-gather", size)
    ]


# ---- C16: what a device holds

LARGE = {f"w{i:02}": (128, 128) for i in range(64)}
FACTORS = 2 * 64 * 128 * 128 * 4


@names
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_device_holds_its_share(name, kind):
    mesh = mesh_of(8, kind=kind)
    tx = TRANSFORMS[name](placement=so.Placement(mesh))
    params = {key: jax.ShapeDtypeStruct(s, jnp.float32) for key, s in LARGE.items()}
    state = jax.jit(lambda: tx.init(ones(LARGE)))()
    derived = state.roots if name == "shampoo" else state.bases
    for matrices in (state.factors, derived):
        held = dict.fromkeys(mesh.devices.flat, 0)
        for leaf in jax.tree.leaves(matrices):
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {FACTORS // 8}
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    memory = jax.jit(tx.init).lower(params).compile().memory_analysis()
    most = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert total / 8 <= most <= 1.5 * total / 8


@names
def test_abstract_init_needs_no_memory(name):
    """The factors alone would take 512 GiB."""
    params = {
        str(n): jax.ShapeDtypeStruct((8192, 8192), jnp.float32) for n in range(1024)
    }
    tx = TRANSFORMS[name](placement=so.Placement(mesh_of(8)))
    arrays = len(jax.live_arrays())
    state = jax.eval_shape(tx.init, params)
    assert len(jax.live_arrays()) == arrays
    bytes_of_factors = sum(
        math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state.factors)
    )
    assert bytes_of_factors == 2**39
