"""Parameters divided over a mesh: the steps, shardings and memory of lossless mode."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import divide, mesh_of, quick_jit, same_sharding, set_mesh
from helpers import worst_of_steps as error
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_placement import use
from test_wire import inside_conditionals

import shampoo_optax as so
from benchmarks.hlo import collectives

# {parameter: (shape, spec on the mesh (4, 2))}; blocks have sides of up to 8.
FORMS = {
    "rows": ((16, 8), P("x")),
    "columns": ((8, 16), P(None, "x")),
    "both": ((16, 8), P("x", "y")),
    "joint": ((16, 8), P(("x", "y"))),
    "crossed": ((8, 16), P(None, ("y", "x"))),
    "uneven": ((20, 14), P("x", "y")),  # shards of 5 and 7, blocks of 8, 4 and 6
    "whole": ((8, 6), P()),
    "bias": ((16,), P("x")),
    "scale": ((5,), P()),
    "scalar": ((), P()),
    "experts": ((4, 8, 8), P("x", None, "y")),
    "layers": ((3, 8, 8), P(None, "x")),
    "qkv": ((8, 24), P(None, "x")),  # shards of 6, parts of 8
    "kernel": ((3, 2, 4, 8), P(None, None, "x", "y")),  # merged to (6, 4, 8)
    "merged": ((2, 4, 8), P(None, "x")),  # to (8, 8)
    "front": ((2, 4, 8), P("y", "x")),
    "absent": ((8, 8), P("x")),  # without a gradient
}
SPECS = {name: spec for name, (_, spec) in FORMS.items()}
FEW = ("both", "crossed", "experts", "qkv", "merged")  # of one shape of blocks
BATCH = {"experts|layers": 0, "qkv": so.Batch(split={1: 3})}
BLOCKING = so.Blocking(8, batch=BATCH)
# Sums, and a first refresh at full rank.
STEADY = dict(b2=1.0, graft_b2=0.9, refresh_every=4, start=8, relative_eps=0.1)
UNGRAFTED = dict(b2=1.0, graft=None, refresh_every=4, start=8, relative_eps=0.1)
METHODS = {
    "shampoo": (so.scale_by_shampoo, STEADY, tuple(FORMS)),
    "soap": (so.scale_by_soap, dict(refresh_every=8), FEW),
    "kl": (so.scale_by_kl_shampoo, dict(refresh_every=8, relative_eps=1e-2), FEW),
    "spectral": (so.scale_by_spectral_descent, {}, ("both", "crossed", "qkv")),
    "sign": (so.scale_by_sign_descent, dict(scale="l1"), tuple(FORMS)),
}


def rules(specs):
    return {f"^{name}$": spec for name, spec in specs.items()}


def build(name, placement=None):
    make, kwargs, _ = METHODS[name]
    return make(**kwargs, blocking=BLOCKING, placement=placement)


def placement_of(kind, sizes=(4, 2), **kwargs):
    """Shardings are declared on Auto axes, and are those of the types on Explicit."""
    if kind == "Auto":
        kwargs = dict(specs=rules(SPECS)) | kwargs
    return so.Placement(mesh_of(*sizes, kind=kind), **kwargs)


def doubles(names, steps=10):
    rng = np.random.default_rng(0)
    shapes = {name: FORMS[name][0] for name in names}
    return [
        {n: None if n == "absent" else rng.standard_normal(shapes[n]) for n in shapes}
        for _ in range(steps)
    ]


# ---- the trajectory of one device


@functools.cache
def on_one_device(name):
    """In float64: rounding is no matter, whatever is decomposed."""
    with helpers.enable_x64():
        return helpers.scanned(build(name), doubles(METHODS[name][-1]))[0]


def on_mesh(name, placement):
    """The updates, each with the sharding of its parameter."""
    names = METHODS[name][-1]
    lay = functools.partial(divide, mesh=placement.mesh, specs=SPECS)
    params = lay({name: np.zeros(FORMS[name][0]) for name in names})
    updates, states = helpers.trace(
        build(name, placement), params, list(map(lay, doubles(names))), jit=quick_jit
    )
    for key in set(names) - {"absent"}:
        assert same_sharding(updates[-1][key], params[key]), key
        assert jax.typeof(updates[-1][key]) == jax.typeof(params[key]), key
    types = [jax.tree.map(jax.typeof, state) for state in (states[0], states[-1])]
    assert types[0] == types[1]
    return jax.device_get(updates)


@pytest.mark.parametrize(
    "name, kind, axes",
    [
        ("shampoo", "Auto", None),
        ("shampoo", "Explicit", None),
        ("soap", "Auto", ("y", "x")),
        ("kl", "Explicit", None),
        ("spectral", "Auto", None),
        ("sign", "Explicit", ("y", "x")),
    ],
)
def test_as_on_one_device(x64, name, kind, axes):
    """Replicated, FSDP, tensor parallel, batch-stacked and split, in one tree."""
    got = on_mesh(name, placement_of(kind, axes=axes))
    assert error(got, on_one_device(name)) <= 1e-12


# ---- (replica, shard) meshes

ROWS = {"w": P("y"), "v": P(None, "y"), "u": P(), "b": P("y")}
SHAPES = {"w": (16, 6), "v": (8, 16), "u": (8, 6), "b": (16,)}


@functools.cache
def replicas_on_one_device():
    steps = helpers.normal_steps(SHAPES, 10)
    tx = so.scale_by_shampoo(**UNGRAFTED, blocking=so.Blocking(8))
    return steps, helpers.scanned(tx, steps)[0]


@pytest.mark.parametrize(
    "axes, kind", [("y", "Explicit"), (("x", "y"), "Auto")], ids=str
)
def test_replicas_of_shards(axes, kind):
    """HSDP: a state that is divided over the shards only, or over all devices."""
    steps, want = replicas_on_one_device()
    mesh = mesh_of(2, 4, kind=kind)
    specs = rules(ROWS) if kind == "Auto" else None
    placement = so.Placement(mesh, axes, specs=specs)
    blocking = so.Blocking(8)
    tx = so.scale_by_shampoo(**UNGRAFTED, blocking=blocking, placement=placement)
    placed = [divide(step, mesh, ROWS) for step in steps]
    got, states = helpers.trace(tx, placed[0], placed, jit=quick_jit)
    assert error(got, want) <= 1e-6
    assert all(jax.tree.leaves(jax.tree.map(same_sharding, got[-1], placed[-1])))
    divided = NamedSharding(mesh, P(axes))
    for leaf in jax.tree.leaves(states[-1].factors):
        assert leaf.sharding.is_equivalent_to(divided, leaf.ndim)


# ---- blocks that the number of devices does not divide

ODD = {
    "vector": ((96,), P("x")),
    "rest": ((20,), P("x")),  # blocks of 6 and 2
    "joint": ((96,), P(("x", "y"))),
    "both": ((96, 48), P("x", "y")),
    "crossed": ((12, 24), P("y", "x")),
}


def of_odd_blocks(params, placement=None):
    """The updates of blocks of 4 and of 6, in one program."""
    sizes = [so.Blocking(4), so.Blocking(6)]
    make = functools.partial(so.scale_by_sign_descent, b1=0.0, scale="l1")
    txs = [make(blocking=each, placement=placement) for each in sizes]

    def step(params):
        return [tx.update(params, tx.init(params), params)[0] for tx in txs]

    return jax.device_get(quick_jit(step)(params))


@functools.cache
def odd_on_one_device():
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(shape) for name, (shape, _) in ODD.items()}
    with helpers.enable_x64():
        return grads, of_odd_blocks(grads)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 3)], ids=str)
def test_blocks_that_devices_do_not_divide(x64, sizes):
    grads, want = odd_on_one_device()
    specs = {name: spec for name, (_, spec) in ODD.items()}
    placement = so.Placement(mesh_of(*sizes), specs=rules(specs))
    got = of_odd_blocks(divide(grads, placement.mesh, specs), placement)
    assert helpers.worst(got, want) <= 1e-12


# ---- C18: however the step is called

LAID = {
    "rows": P("x"),
    "columns": P(None, "x"),
    "whole": P(),
    "both": P("x", "y"),
    "joint": P(("x", "y")),
}
SQUARES = dict.fromkeys((*LAID, "loose"), (8, 8))  # the last one is not committed


SIGNS = dict(b1=0.9, scale="l1")
CALLED = {  # the kind of the mesh, whether shardings are declared, what is called
    "found out": ("Auto", False, functools.partial(so.scale_by_sign_descent, **SIGNS)),
    "declared": ("Auto", True, functools.partial(so.scale_by_sign_descent, **SIGNS)),
    "typed": ("Explicit", False, functools.partial(so.scale_by_shampoo, **UNGRAFTED)),
}


def donating(update):
    return quick_jit(update, donate_argnums=1)


@pytest.mark.parametrize("called", CALLED)
def test_every_sharding_on_both_kinds_of_mesh(called):
    """Plain, jitted with donated state, and under `jax.set_mesh`."""
    kind, declared, make = CALLED[called]
    steps = helpers.normal_steps(SQUARES, 10)
    want, _ = helpers.scanned(make(), steps)
    mesh = mesh_of(4, 2, kind=kind)
    specs = rules(LAID) if declared else None
    tx = make(placement=so.Placement(mesh, specs=specs))
    laid = [divide({name: step[name] for name in LAID}, mesh, LAID) for step in steps]
    loose = [{"loose": step["loose"]} for step in steps]
    steps = [one | other for one, other in zip(laid, loose, strict=True)]
    runs = [
        use(tx, steps[0], steps),
        use(tx, steps[0], steps, donating, quick_jit(tx.init)),
    ]
    with set_mesh(mesh):
        runs.append(use(tx, steps[0], steps, quick_jit))
    for got, state in runs:
        assert error(jax.device_get(got), want) <= 1e-6
        for name in LAID:
            assert same_sharding(got[-1][name], steps[-1][name]), name
        divided = NamedSharding(mesh, P(("x", "y")))
        for leaf in jax.tree.leaves(state):
            assert not leaf.ndim or leaf.sharding.is_equivalent_to(divided, leaf.ndim)


def test_every_parameter_counts_for_its_own_update():
    """Two models of equal paths and shapes in one step; axes of two types."""
    mesh = mesh_of(4, 2)
    specs = P("x"), P(None, "y"), P(("y", "x"))
    models = [divide({"w": jnp.ones((8, 8))}, mesh, {"w": spec}) for spec in specs]
    tx = so.scale_by_sign_descent(placement=so.Placement(mesh))

    @quick_jit
    def step(models, states):
        return [
            tx.update(model, state, model)[0]
            for model, state in zip(models, states, strict=True)
        ]

    updates = step(models, list(map(tx.init, models)))
    kinds = (AxisType.Explicit, AxisType.Auto)
    mixed = Mesh(mesh.devices, ("x", "y"), axis_types=kinds)
    tx = so.scale_by_sign_descent(placement=so.Placement(mixed))
    model = divide({"w": jnp.ones((8, 8))}, mixed, {"w": P("y", "x")})
    update, _ = quick_jit(tx.update)(model, tx.init(model), model)
    for got, wanted in zip((*updates, update), (*models, model), strict=True):
        assert same_sharding(got["w"], wanted["w"])


# ---- the dtype in which directions travel

NARROW = {"w": P("x"), "v": P(None, "x"), "u": P()}


@pytest.mark.parametrize("wire, digits", [("bfloat16", 8), ("float16", 11)])
def test_narrow_wires(wire, digits):
    """Directions, here the gradients, are rounded once; what factors see is not."""
    mesh = mesh_of(8)
    shapes = {"w": (16, 8), "v": (8, 16), "u": (8, 4)}
    scale = 1e9 if wire == "float16" else 1.0
    (grads,) = helpers.normal_steps(shapes, 1, scale=scale)
    placement = so.Placement(mesh, dtype=wire, specs=rules(NARROW))
    kwargs = dict(b1=0.0, b2=1.0, graft="sgd", blocking=so.Blocking(8))
    tx = so.scale_by_shampoo(**kwargs, placement=placement)
    params = divide(grads, mesh, NARROW)
    got, state = quick_jit(tx.update)(params, tx.init(params), params)
    assert 2.0 ** -(digits + 3) < helpers.worst(got, grads) <= 2.0**-digits
    held = so.to_portable(tx, state, params)
    for name, block in {"w": (2, 8, 8), "v": (8, 2, 8), "u": (8, 4)}.items():
        blocks = np.asarray(grads[name], np.float64).reshape(block)
        if name == "v":
            blocks = blocks.swapaxes(0, 1)
        blocks = blocks.reshape(-1, *blocks.shape[-2:])
        want = blocks @ blocks.swapaxes(1, 2)
        assert helpers.worst(held[f".factors/['{name}']/0,0/0"], want) <= 1e-6


# ---- calls that are discarded, and gradients in other dtypes


def test_discarded_calls_and_bfloat16_gradients():
    """Beside float32: a call that is discarded gives zeros, and the state as it was."""
    mesh = mesh_of(8)
    specs = {"w": P("x"), "v": P(None, "x")}
    grads = helpers.normal_steps({"w": (16, 8), "v": (8, 8)}, 10)
    grads = [tree | {"v": tree["v"].astype(jnp.bfloat16)} for tree in grads]
    placement = so.Placement(mesh, specs=rules(specs))
    tx, alone = (
        so.scale_by_shampoo(**UNGRAFTED, blocking=BLOCKING, placement=each)
        for each in (placement, None)
    )
    placed = [divide(tree, mesh, specs) for tree in grads]
    single = quick_jit(lambda g, s: alone.update(g, s, g))
    state, other = tx.init(placed[0]), alone.init(grads[0])
    update = quick_jit(lambda g, s, flag: tx.update(g, s, g, discard=flag))
    update = update.lower(placed[0], state, np.bool_(True)).compile()
    text = update.as_text()
    found = {where for where, *_ in collectives(text)}
    assert found and not found & inside_conditionals(text)
    for tree, divided in zip(grads, placed, strict=True):
        none, same = update(divided, state, np.bool_(True))
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(none))
        helpers.assert_equal(same, state)
        got, state = update(divided, state, np.bool_(False))
        want, other = single(tree, other)
        assert helpers.worst(got["w"], want["w"]) <= 1e-6
        assert got["v"].dtype == jnp.bfloat16
        assert helpers.worst(got["v"], want["v"]) <= 2.0**-7
        assert same_sharding(got["v"], divided["v"])


# ---- C12: one compilation

TRAINED = {
    "declared": dict(specs=rules(LAID)),
    "found out": {},
    "local": dict(specs=rules(LAID), mode="local"),
    "typed": dict(kind="Explicit"),
}


@pytest.mark.parametrize("how", TRAINED)
def test_training_compiles_once(how):
    """Parameters, momentum and state lie after a step as they did before it."""
    kwargs = dict(TRAINED[how])
    mesh = mesh_of(4, 2, kind=kwargs.pop("kind", "Auto"))
    tx = optax.chain(
        so.scale_by_sign_descent(placement=so.Placement(mesh, **kwargs)),
        optax.trace(0.9),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(lambda count: 0.1 / (1 + count)),
    )
    params = divide({name: jnp.ones(SQUARES[name]) for name in LAID}, mesh, LAID)
    before = jax.tree.map(lambda leaf: leaf.sharding, params)
    state = quick_jit(tx.init, out_shardings=so.state_shardings(tx, params))(params)

    @functools.partial(quick_jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    counts = []
    for _ in range(3):
        given = params, state
        with helpers.compilations() as found:
            params, state = jax.block_until_ready(step(*given))
        counts += found
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert counts == [1, 0, 0]
    for name in LAID:
        assert params[name].sharding.is_equivalent_to(before[name], 2)
