"""Acceptance cases of the placement as users meet it: meshes, jit, composition."""

import functools
import io

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMS, mesh_of, replicate, same_sharding, set_mesh
from helpers import worst_of_steps as error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shampoo_optax as so

# One stack, in which `v` is padded.
SHAPES = {"w": (6, 4), "v": (5, 4)}
STEPS = helpers.normal_steps(SHAPES, 5)
# A ridge of 1e-2 leaves no factor ill-conditioned.
SETTINGS = {
    "shampoo": dict(b2=0.9, refresh_every=2, relative_eps=1e-2),
    "soap": dict(b2=0.9, refresh_every=2),
    # The one whose directions grow with the gradients.
    "sgd": dict(b2=0.9, refresh_every=2, relative_eps=1e-2, graft="sgd"),
}


def build(name, placement=None):
    return TRANSFORMS["soap" if name == "soap" else "shampoo"](
        **SETTINGS[name], placement=placement
    )


# ---- C18: both kinds of mesh, replicated parameters


def use(tx, params, steps, jit=None, init=None):
    """Updates and the last state; checks types and shardings along the way."""
    update, state = (jit or (lambda f: f))(tx.update), (init or tx.init)(params)
    before, updates = jax.tree.map(jax.typeof, state), []
    for grads in steps:
        found, state = jax.block_until_ready(update(grads, state, params))
        assert jax.tree.map(jax.typeof, state) == before
        updates.append(found)
    return updates, state


def donating(update):
    return jax.jit(update, donate_argnums=1)


@functools.lru_cache
def on_one_device(name):
    return helpers.trace(build(name), STEPS[0], STEPS)[0]


@pytest.mark.parametrize(
    "name, kind, replicated",
    [
        ("shampoo", "Auto", True),
        ("shampoo", "Auto", False),
        ("shampoo", "Explicit", True),
        ("shampoo", "Explicit", False),
        ("soap", "Auto", False),
        ("soap", "Explicit", True),
    ],
)
def test_both_kinds_of_mesh(name, kind, replicated):
    """Plain, jitted, with donated state, and under `jax.set_mesh`."""
    mesh = mesh_of(4, 2, kind=kind)
    steps, want = STEPS, on_one_device(name)
    if replicated:
        steps = [replicate(step, mesh) for step in steps]
    tx = build(name, so.Placement(mesh))
    runs = [use(tx, steps[0], steps, jit) for jit in (None, jax.jit, donating)]
    runs.append(use(tx, steps[0], steps, jax.jit, jax.jit(tx.init)))
    with set_mesh(mesh):
        runs += [use(tx, steps[0], steps, jit) for jit in (None, jax.jit)]
    for got, state in runs:
        assert error(jax.device_get(got), want) <= 1e-6
        for leaf in jax.tree.leaves(got):
            assert leaf.sharding.is_fully_replicated
            assert leaf.sharding.device_set == set(mesh.devices.flat)
        if replicated:
            assert all(jax.tree.leaves(jax.tree.map(same_sharding, got[-1], steps[-1])))
        for leaf in jax.tree.leaves(state):
            spec = P(("x", "y")) if leaf.ndim else P()
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


# ---- inside the user's own shard_map


def in_own_shard_map(tx, mesh, params, steps, in_spec, local):
    """The documented use; `local` makes a device's gradient of what it is given."""
    shardings = so.state_shardings(tx, params, mesh)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    options = dict(mesh=mesh, check_vma=False)

    def update(grads, state, params):
        return tx.update(jax.tree.map(local, grads), state, params)

    init = jax.shard_map(tx.init, in_specs=P(), out_specs=specs, **options)
    update = jax.shard_map(
        update, in_specs=(in_spec, specs, P()), out_specs=(P(), specs), **options
    )
    state = jax.jit(init)(params)
    return use(
        optax.GradientTransformation(lambda _: state, update), params, steps, jax.jit
    )


def spread(steps, owners):
    """A different gradient for each owner, `[owners, …]`, with the mean in `steps`."""
    signs = np.resize([1.0, -1.0], owners).astype(np.float32)
    weights = signs * (1 + np.arange(owners, dtype=np.float32) // 2)
    noise = helpers.normal_steps(SHAPES, len(steps), seed=7)
    return [
        jax.tree.map(lambda g, n: jnp.stack([g + w * n for w in weights]), g, n)
        for g, n in zip(steps, noise, strict=True)
    ]


@pytest.mark.parametrize(
    "name, sizes, axes",
    [
        ("shampoo", (8,), "x"),
        ("shampoo", (4, 2), "y"),
        ("soap", (4, 2), ("x", "y")),
    ],
    ids=str,
)
def test_axis_form(name, sizes, axes):
    """With the mean gradient; along an axis that is not named there are copies."""
    mesh = mesh_of(*sizes)
    tx = build(name, so.Placement(axes=axes))
    got, state = in_own_shard_map(tx, mesh, STEPS[0], STEPS, P(), lambda g: g)
    assert error(got, on_one_device(name)) <= 1e-6
    of_mesh = build(name, so.Placement(mesh, axes)).init(STEPS[0])
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, of_mesh)
    assert all(jax.tree.leaves(jax.tree.map(same_sharding, state, of_mesh)))


@pytest.mark.parametrize("name, sizes", [("sgd", (8,)), ("soap", (4, 2))], ids=str)
def test_axis_form_that_reduces(name, sizes):
    """With the gradient of each device's own loss."""
    mesh = mesh_of(*sizes)
    axes = mesh.axis_names
    tx = build(name, so.Placement(axes=axes, reduce=True))
    got, _ = in_own_shard_map(
        tx, mesh, STEPS[0], spread(STEPS, 8), P(axes), lambda g: g[0]
    )
    # The mean of eight gradients, up to four times as large, is rounded differently.
    assert error(got, on_one_device(name)) <= 1e-5


def test_mesh_form_in_the_users_shard_map():
    mesh = mesh_of(8)
    tx = so.shampoo(0.1, placement=so.Placement(mesh))
    params = {"w": jnp.ones((6, 4))}
    state = tx.init(params)
    remedy = r"`placement` with a mesh .* outside .*Placement\(axes=\('x',\)\)"

    def inside(function, *args):
        mapped = jax.shard_map(
            lambda *a: function(*a)[0], mesh=mesh, in_specs=P(), out_specs=P()
        )
        return jax.eval_shape(mapped, *args)

    with pytest.raises(ValueError, match=remedy):
        inside(tx.init, params)
    with pytest.raises(ValueError, match=remedy):
        inside(tx.update, params, jax.tree.map(jnp.zeros_like, state), params)


def test_axis_form_outside_of_a_shard_map():
    tx = so.scale_by_shampoo(placement=so.Placement(axes="x"))
    with pytest.raises(ValueError, match="`placement` without a mesh .*'x'"):
        tx.init({"w": jnp.ones((6, 4))})


# ---- C12: one compilation


def schedule(count):
    return 0.1 / (1 + count)


RUNS = {
    "shampoo": lambda p: so.shampoo(
        schedule, weight_decay=0.1, momentum=0.9, refresh_every=2, placement=p
    ),
    "nesterov": lambda p: so.shampoo(
        schedule, weight_decay=0.1, decay="l2", momentum=0.9, nesterov=True,
        refresh_every=2, placement=p,
    ),
    "soap": lambda p: so.soap(
        schedule, weight_decay=0.1, refresh_every=2, placement=p
    ),
}  # fmt: skip


def from_disk(state):
    """The state after a round trip through a file, placed as it was."""
    file = io.BytesIO()
    leaves, treedef = jax.tree.flatten(state)
    np.savez(file, *leaves)
    file.seek(0)
    arrays = np.load(file)
    placed = [
        jax.device_put(arrays[f"arr_{n}"], leaf.sharding)
        for n, leaf in enumerate(leaves)
    ]
    return treedef.unflatten(placed)


def compiled_in(tx, mesh, init, steps=7):
    """Compilations of each step, the fifth after a restart; and the last state."""
    grads = [replicate(g, mesh) for g in helpers.normal_steps(SHAPES, steps)]
    params = replicate(helpers.zeros_like(grads[0]), mesh)
    state = (jax.jit(tx.init) if init == "jit" else tx.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    counts = []
    for number, grad in enumerate(grads):
        if number == 4:
            state = from_disk(state)
        with helpers.compilations() as found:
            params, state = jax.block_until_ready(step(params, state, grad))
        counts += found
    return counts, state


@pytest.mark.parametrize(
    "run, kind, init",
    [
        ("shampoo", "Auto", "plain"),
        ("shampoo", "Auto", "jit"),
        ("shampoo", "Explicit", "jit"),
        ("nesterov", "Explicit", "plain"),
        ("soap", "Auto", "jit"),
        ("soap", "Explicit", "plain"),
    ],
)
def test_one_compilation(run, kind, init):
    """Over refreshes, changing learning rates, and a state restored from disk."""
    mesh = mesh_of(8, kind=kind)
    counts, state = compiled_in(RUNS[run](so.Placement(mesh)), mesh, init)
    assert counts == [1, 0, 0, 0, 0, 0, 0]
    assert int(helpers.field(state[0] if run != "nesterov" else state[1], "count")) == 7


# ---- composition


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(0.5), tx, optax.trace(0.9))


def masked(tx):
    return optax.masked(tx, {"w": False, "v": True})


def accumulated(tx):
    multi = optax.MultiSteps(tx, 2)
    return optax.GradientTransformation(multi.init, multi.update)


def guarded(tx):
    return optax.apply_if_finite(tx, 2)


@pytest.mark.parametrize(
    "wrap, kind",
    [
        (clipped, "Explicit"),
        (masked, "Auto"),
        (accumulated, "Auto"),
        (accumulated, "Explicit"),
        (guarded, "Explicit"),
    ],
)
def test_composition(wrap, kind):
    """The chain on a mesh gives the updates of the chain without one."""
    mesh = mesh_of(4, 2, kind=kind)
    steps = helpers.normal_steps(SHAPES, 6)
    steps[2] = steps[2] | {"w": steps[2]["w"].at[0, 0].set(np.nan)}
    if wrap is not guarded:
        steps[2] = jax.tree.map(jnp.nan_to_num, steps[2])
    want, _ = helpers.trace(wrap(build("shampoo")), steps[0], steps)
    steps = [replicate(step, mesh) for step in steps]
    tx = wrap(build("shampoo", so.Placement(mesh)))
    got, _ = helpers.trace(tx, steps[0], steps)
    assert error(jax.device_get(got), want) <= 1e-6
    for leaf in jax.tree.leaves(got[-1]):
        assert leaf.sharding.is_fully_replicated


# ---- arguments


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(mesh="x"), "`mesh` must be a jax.sharding.Mesh, got 'x'"),
        (dict(), "`axes` must be one or more .*, got None"),
        (dict(axes=()), r"`axes` must be one or more .*, got \(\)"),
        (dict(axes=3), "`axes` must be one or more .*, got 3"),
        (dict(axes=("x", 3)), r"`axes` must be one or more .*, got \('x', 3\)"),
        (dict(axes=("x", "x")), r"`axes` must be one or more .*, got \('x', 'x'\)"),
        (dict(mesh=8, axes="w"), r"`axes` must be among .*\('x',\), got 'w'"),
        (dict(axes="x", dtype="int8"), "`dtype` must be one of .*, got 'int8'"),
        (dict(axes="x", dtype="float64"), "`dtype` must be one of .*, got 'float64'"),
        (dict(axes="x", dtype=[]), r"`dtype` must be one of .*, got \[\]"),
        (dict(axes="x", cost="work"), "`cost` must be .*, got 'work'"),
        (dict(axes="x", cost=()), r"`cost` must be .*, got \(\)"),
        (dict(axes="x", cost=(0, 0)), r"`cost` must be .*, got \(0, 0\)"),
        (dict(axes="x", cost=(1, -1)), "`cost` must be .*, got -1"),
        (dict(axes="x", cost=(1, "a")), "`cost` must be .*, got 'a'"),
        (dict(axes="x", cost=(1, np.inf)), "`cost` must be .*, got inf"),
        (dict(axes="x", reduce=2), "`reduce` must be one of .*, got 2"),
        (dict(axes="x", reduce=None), "`reduce` must be one of .*, got None"),
        (dict(mesh=8, reduce=True), "`reduce` must be False with a mesh.*, got True"),
    ],
    ids=str,
)
def test_bad_placements(kwargs, message):
    if kwargs.get("mesh") == 8:
        kwargs = kwargs | dict(mesh=mesh_of(8))
    with pytest.raises(ValueError, match=message):
        so.Placement(**kwargs)


@pytest.mark.parametrize(
    "make", [so.scale_by_shampoo, so.scale_by_soap, so.shampoo, so.soap]
)
def test_what_is_no_placement(make):
    rate = () if make.__name__.startswith("scale") else (0.1,)
    with pytest.raises(ValueError, match="`placement` must be a Placement, got 'x'"):
        make(*rate, placement="x")


def test_good_placements():
    mesh = mesh_of(4, 2)
    assert so.Placement(mesh).axes == ("x", "y")
    assert so.Placement(mesh, "y").axes == ("y",)
    assert so.Placement(mesh, ["y", "x"]).axes == ("y", "x")
    assert so.Placement(axes="data", cost=[0, 0, 0, 1]).cost == (0.0, 0.0, 0.0, 1.0)


# ---- C12: chains of our own transforms, from a plain `init`

CHAINED = {
    "schedule_free": lambda tx: optax.chain(tx, so.schedule_free(0.1)),
    "multi_steps": lambda tx: so.multi_steps(optax.chain(tx, optax.scale(-0.1)), 2),
    "decay_weights": lambda tx: optax.chain(
        tx,
        so.decay_weights(
            0.1,
            decay="corrected",
            learning_rate=lambda count: 0.1 / (1 + count),
            peak_learning_rate=0.1,
        ),
    ),
}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", CHAINED)
def test_chains_compile_once(name, kind):
    placement = helpers.placement_of(8, kind=kind)
    tx = CHAINED[name](so.scale_by_sign_descent(placement=placement))
    params = helpers.replicate({"w": jnp.ones((8, 4))}, placement.mesh)
    state = tx.init(params)

    @helpers.quick_jit
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    with helpers.compilations() as first:
        params, state = jax.block_until_ready(step(params, state))
    with helpers.compilations() as later:
        for _ in range(3):
            params, state = jax.block_until_ready(step(params, state))
    assert (first, later) == ([1], [0])
