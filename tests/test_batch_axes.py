"""Batch axes: slices of a parameter are trained as parameters of their own."""

import math
import re
from operator import itemgetter

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import normals, placement_of, plan_of, quick_jit
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import shampoo_optax as so
from shampoo_optax import _blocking, _cutting

# {parameter: (shape, what is declared, its slices by hand)}
FORMS = {
    "first": ((6, 12, 8), 0, lambda x: [x[i] for i in range(6)]),
    "experts": (
        (2, 3, 12, 8),
        (1, 0),
        lambda x: [x[i, j] for i in range(2) for j in range(3)],
    ),
    "middle": ((12, 3, 8), 1, lambda x: [x[:, i] for i in range(3)]),
    "last": ((12, 8, 2), -1, lambda x: [x[..., i] for i in range(2)]),
    "fused": (
        (12, 24),
        so.Batch(split={1: 3}),
        lambda x: [x[:, :8], x[:, 8:16], x[:, 16:]],
    ),
    "layers of heads": (
        (2, 24, 8),
        so.Batch(0, {-2: 2}),
        lambda x: [x[0, :12], x[0, 12:], x[1, :12], x[1, 12:]],
    ),
    "bias": ((6, 8), 0, lambda x: [x[i] for i in range(6)]),
}
MATRICES = [name for name in FORMS if name != "bias"]


def rules_of(names):
    return {rf"^stacked/{name}$": FORMS[name][1] for name in names}


def apart(tree):
    """The slices of all parameters, as parameters of their own."""
    slices = {name: FORMS[name][2](np.asarray(x)) for name, x in tree.items()}
    return {f"{n} {i}": x for n, found in slices.items() for i, x in enumerate(found)}


def gradients(names, steps, seed=0):
    shapes = {name: FORMS[name][0] for name in names}
    return helpers.normal_steps(shapes, steps, seed)


PERIOD = dict(refresh_every=3)
RMS = so.NewtonSchulz(scale=lambda rows, columns: rows + 0.1 * columns)
# {name: (transform, its arguments, block size, parameters)}; Shampoo cuts each slice.
SOME = ("experts", "last", "layers of heads", "bias")
METHODS = {
    "shampoo": (so.scale_by_shampoo, dict(b2=0.9, graft="adam", **PERIOD), 8, SOME),
    "soap": (so.scale_by_soap, PERIOD, 1024, ("experts", "fused")),
    "kl": (so.scale_by_kl_shampoo, PERIOD, 1024, ("first", "middle")),
    "spectral": (so.scale_by_spectral_descent, dict(method=RMS), None, MATRICES),
    "sign": (so.scale_by_sign_descent, dict(scale="l1"), 1024, ("last", "bias")),
}


def method(name, **more):
    """A transform with the batch axes of the parameters of `stacked`."""
    make, kwargs, size, names = METHODS[name]
    blocking = so.Blocking(size, batch=rules_of(names))
    return make(**kwargs | more, blocking=blocking)


@pytest.mark.parametrize("name", METHODS)
def test_slices_are_trained_as_parameters(name):
    """C14: stacked parameters, and beside them the slices of the same gradients."""
    stacked = gradients(METHODS[name][-1], 12)
    steps = [{"stacked": tree, "apart": apart(tree)} for tree in stacked]
    updates, _ = helpers.scanned(method(name), steps)
    got = [apart(update["stacked"]) for update in updates]
    want = [update["apart"] for update in updates]
    assert helpers.worst_of_steps(got, want) <= 1e-6


@pytest.mark.parametrize("kind", [None, "Auto", "Explicit"])
def test_guards_are_those_of_slices(kind):
    """One slice has a gradient of NaN, one a factor on which the iteration fails."""
    sound = np.random.default_rng(0).standard_normal((6, 4, 6, 5)).astype(np.float32)
    spoilt = sound.copy()
    spoilt[4, 1, 2, 3] = np.nan  # at the fifth step, of the second slice
    spoilt[:, 2] = np.outer(np.arange(1, 7), np.arange(1, 6))  # of rank one
    tx = so.scale_by_shampoo(
        b2=0.99,
        graft="adam",
        refresh_every=3,
        start=3,
        relative_eps=1e-6,
        root=so.CoupledNewton(max_iterations=10),
        blocking=so.Blocking(batch=0),
        placement=kind and placement_of(4, 2, kind=kind),
    )

    @quick_jit
    def run(gradients):
        def step(state, gradient):
            update, state = tx.update(gradient, state, gradient)
            return state, update

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)

    mesh = kind and helpers.mesh_of(4, 2, kind=kind)
    (state, updates), (plain_state, plain) = (
        jax.device_get(run(helpers.replicate(jnp.asarray(given), mesh)))
        for given in (spoilt, sound)
    )
    (region,) = plan_of(tx, sound[0]).regions
    (stack,) = state.skipped
    (slots,) = (piece.slots for piece in region.pieces)
    np.testing.assert_array_equal(state.skipped[stack][slots], [0, 1, 0, 0])
    np.testing.assert_array_equal(state.failures[stack][slots], [0, 0, 2, 0])
    assert helpers.total((state.skipped, state.failures)) == 3
    assert helpers.total((plain_state.skipped, plain_state.failures)) == 0
    helpers.assert_finite(updates)
    np.testing.assert_array_equal(updates[4, 1], 0)
    for index in (0, 3):
        np.testing.assert_array_equal(updates[:, index], plain[:, index])
    np.testing.assert_array_equal(updates[:4, 1], plain[:4, 1])
    assert np.any(updates[5, 2] != plain[5, 2])


def test_an_absent_gradient_leaves_all_slices_as_they_were():
    tx = so.scale_by_shampoo(b1=0.5, b2=0.9, blocking=so.Blocking(batch={"w": 0}))
    params = {"v": normals(0, 4, 3), "w": normals(1, 2, 4, 3)}
    gradients = params | {"w": None}
    update, after = quick_jit(lambda: tx.update(gradients, tx.init(params), params))()
    assert update["w"] is None and np.all(update["v"] != 0)
    for name in ("filtered", "factors"):
        for leaf in jax.tree.leaves(getattr(after, name)):
            assert np.any(leaf[0]) and not np.any(leaf[1:])


# ---- the program


@pytest.mark.parametrize("kind", [None, "Auto", "Explicit"])
def test_programs_do_not_grow_with_slices(kind):
    """And what is decomposed, is decomposed within the branch of a refresh."""

    def program(slices):
        params = helpers.structs({"w": (slices, 8, 6), "b": (slices, 6)})
        tx = so.scale_by_shampoo(
            refresh_every=3,
            blocking=so.Blocking(batch=0),
            placement=kind and placement_of(8, kind=kind),
        )
        state = jax.eval_shape(tx.init, params)
        text = jax.jit(tx.update).lower(params, state, params).as_text()
        return helpers.update_equations(tx, params), len(text.splitlines())

    (few, few_lines), (many, many_lines) = program(16), program(40)
    assert len(few) == len(many) and few_lines == many_lines
    inside = [around for eqn, around in many if eqn.primitive.name == "eigh"]
    assert len(inside) == 2  # of sides 8 and 6: those of `w` and `b` are joined
    assert all(any(one.startswith("cond[") for one in around) for around in inside)


# ---- on a mesh

# {parameter: its spec on the mesh (4, 2)}
DIVIDED = {"first": (None, "x", "y"), "experts": ("y", None, ("x",))}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["shampoo", "soap", "kl"])
def test_slices_are_trained_as_parameters_on_a_mesh(name, kind):
    """C14, C18: stacked parameters are divided along several axes."""
    make, kwargs, *_ = METHODS[name]
    mesh = helpers.mesh_of(4, 2, kind=kind)
    specs = {name: PartitionSpec(*spec) for name, spec in DIVIDED.items()}
    rules = {f"^stacked/{name}$": spec for name, spec in specs.items()}
    placement = so.Placement(mesh, specs=rules if kind == "Auto" else None)
    tx = make(
        **kwargs,
        blocking=so.Blocking(batch=rules_of(DIVIDED)),
        placement=placement,
    )
    steps = [
        {
            "stacked": helpers.divide(tree, mesh, specs),
            "apart": helpers.replicate(apart(tree), mesh),
        }
        for tree in gradients(DIVIDED, 12)
    ]
    updates = jax.device_get(helpers.trace(tx, steps[0], steps, jit=quick_jit)[0])
    got = [apart(update["stacked"]) for update in updates]
    want = [update["apart"] for update in updates]
    assert helpers.worst_of_steps(got, want) <= 1e-6


def test_divided_over_devices():
    """Steps, what `describe` says, and a run that goes on on one device.

    Sums, and a refresh once they have full rank.
    """
    names = ("experts", "last", "bias")
    kwargs = dict(b2=1.0, graft="sgd", start=12, relative_eps=0.1)
    steps = [{"stacked": tree} for tree in gradients(names, 14)]
    single, divided = (
        method("shampoo", **kwargs, placement=placement)
        for placement in (None, placement_of(8))
    )
    mesh = helpers.mesh_of(8)
    plan = plan_of(divided, steps[0])
    assert len(plan.stacks) > 1 and plan.owners == 8
    want, _ = helpers.trace(single, steps[0], steps, jit=quick_jit)
    params = helpers.replicate(steps[0], mesh)
    placed = helpers.replicate(steps, mesh)
    got, states = helpers.trace(divided, params, placed, jit=quick_jit)
    assert helpers.worst_of_steps(got, want) <= 1e-6
    portable = so.to_portable(divided, states[9], params)
    assert portable[".factors/['stacked']['experts']/0,0/0"].shape == (6, 8, 8)
    state, update = (
        so.from_portable(single, portable, steps[0]),
        quick_jit(single.update),
    )
    for grads, wanted in zip(steps[10:], want[10:], strict=True):
        found, state = update(grads, state, steps[0])
        assert helpers.worst(found, wanted) <= 1e-6
    (part,) = so.describe(params, divided).parts
    for field, held in states[-1]._asdict().items():
        leaves = jax.tree.leaves(held)
        own = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert part.bytes[field] == (own, sum(leaf.nbytes for leaf in leaves))
    assert sum(stack.blocks for stack in part.stacks.values()) == 2 * 6 + 2 * 2 + 6


# ---- what is declared


def plans(batch, params):
    return plan_of(so.scale_by_shampoo(blocking=so.Blocking(batch=batch)), params)


def test_forms_of_a_declaration_agree():
    params = helpers.structs({"Layers": {"w": (6, 4, 3), "b": (6, 3)}, "head": (3, 2)})
    want = plans({"layers/": so.Batch(axes=(0,))}, params)
    assert [view.slices for view in want.views] == [6, 6, 1]
    forms = [
        {"LAYERS": 0},
        {"b$": (0,), "w": -3},
        {"head": None, "": 0},
        (("^layers/", (-0,)),),
        lambda path, leaf: 0 if path.startswith("Layers/") else None,
        lambda path, leaf: so.Batch(0) if leaf.shape[0] == 6 else (),
    ]
    for batch in forms:
        assert plans(batch, params) == want
    again = plans(so.Batch(0), params)
    assert [view.slices for view in again.views] == [6, 6, 3]
    assert plans(0, params) == plans((0,), params) == again


def test_records_stay_usable_as_keys():
    blocking = so.Blocking(batch={"w": {}.get("", 0), "v": so.Batch((1, 2), {0: 2})})
    assert hash(blocking) == hash(so.Blocking(batch=blocking.batch))
    assert so.Batch(-1, {0: 2}) == so.Batch((-1,), ((0, 2),))
    assert repr(so.Batch([1], {0: 2})) == "Batch(axes=(1,), split=((0, 2),))"


def test_a_function_is_asked_once_for_each_parameter():
    asked = []

    def batch(path, leaf):
        asked.append((path, leaf.shape, leaf.dtype.name, type(leaf).__name__))
        return 0 if len(leaf.shape) > 2 else None

    tx = so.scale_by_sign_descent(blocking=so.Blocking(batch=batch))
    params = {"a": [jnp.ones((2, 4, 3)), None], "b": jnp.ones(3, jnp.bfloat16)}
    kind = "ShapeDtypeStruct"
    want = [("a/0", (2, 4, 3), "float32", kind), ("b", (3,), "bfloat16", kind)]
    state = jax.eval_shape(tx.init, params)
    assert asked == want
    jax.eval_shape(tx.update, params, state, params)
    assert asked == 2 * want
    del asked[:]
    jax.eval_shape(optax.flatten(tx).init, {"a": jnp.ones((2, 3)), "b": jnp.ones(3)})
    assert asked == [("", (9,), "float32", kind)]


def test_paths_are_the_same_behind_masks_and_partitions():
    params = helpers.structs({"a": {"w": (2, 4, 3)}, "b": (2, 3)})
    tx = so.scale_by_shampoo(blocking=so.Blocking(batch={"^a/w$": 0, "^b$": 0}))
    labels = {"a": {"w": "ours"}, "b": "theirs"}
    split = helpers.partition({"ours": tx, "theirs": optax.adam(1e-3)}, labels)
    masked = optax.masked(tx, {"a": {"w": True}, "b": False})
    for each in (split, masked):
        (part,) = so.describe(params, each).parts
        assert part.slots == {"['a']['w']": (("4x3", 0, 2),)}


def test_slices_without_axes_and_without_entries():
    params = helpers.structs({"all": (2, 3), "none": (0, 3), "w": (2, 4, 3)})
    batch = {"all": (0, 1), "none|w": 0}
    plan = plans(batch, params)
    held = {name: stack.size for name, stack in plan.stacks.items()}
    assert held == {"1": 6, "4x3": 2}
    tx = so.scale_by_sign_descent(b1=0.0, blocking=so.Blocking(batch=batch))
    params = jax.tree.map(lambda x: normals(0, *x.shape), params)
    updates, _ = quick_jit(tx.update)(params, tx.init(params), params)
    helpers.assert_equal(updates, jax.tree.map(jnp.sign, params))


WRONG = [
    (so.Batch(3), "name axes of the parameter", "axes=(3,)"),
    (so.Batch(-4), "name axes of the parameter", "axes=(-4,)"),
    (so.Batch(split={3: 2}), "name axes of the parameter", "((3, 2),)"),
    (so.Batch((0, -3)), "name no axis twice", "axes=(0, -3)"),
    (so.Batch(0, {0: 2}), "name no axis twice", "split=((0, 2),)"),
    (so.Batch(split={1: 2, -2: 2}), "name no axis twice", "((1, 2), (-2, 2))"),
    (so.Batch(split={1: 5}), "split axes into equal parts", "((1, 5),)"),
    (lambda path, leaf: "first", "return axes, a Batch or None", "'first'"),
]


@pytest.mark.parametrize("batch, rule, value", WRONG)
def test_what_does_not_fit_is_refused(batch, rule, value):
    """With the path, the shape and the value."""
    tx = so.scale_by_shampoo(blocking=so.Blocking(batch=batch))
    shown = (
        rf"`batch` must {rule}, got .*{re.escape(value)}.* for \[6, 12, 8\] at 'a/w'"
    )
    with pytest.raises(ValueError, match=shown):
        tx.init({"a": {"w": jnp.ones((6, 12, 8))}})


@pytest.mark.parametrize(
    "make, name, value",
    [
        (lambda: so.Batch("0"), "axes", "'0'"),
        (lambda: so.Batch((0, True)), "axes", "True"),
        (lambda: so.Batch((1, 1)), "axes", "(1, 1)"),
        (lambda: so.Batch(split={0: 0}), "split", "{0: 0}"),
        (lambda: so.Batch(split=3), "split", "3"),
        (lambda: so.Batch(split={0: 1.5}), "split", "1.5"),
        (lambda: so.Blocking(batch="layers"), "batch", "'layers'"),
        (lambda: so.Blocking(batch=1.5), "batch", "1.5"),
        (lambda: so.Blocking(batch={"(": 0}), "batch", "'('"),
        (lambda: so.Blocking(batch={0: 1}), "batch", "{0: 1}"),
        (lambda: so.Blocking(batch={"w": 0.5}), "batch", "0.5"),
    ],
)
def test_a_wrong_record_is_refused(make, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` .*got .*{re.escape(value)}"):
        make()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_slices_are_cut_and_put_back(data):
    """Against NumPy: axes that are split come apart, batch axes come first."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    roles = [data.draw(st.sampled_from(["batch", "split", "own"])) for _ in shape]
    axes = tuple(a for a, role in enumerate(roles) if role == "batch")
    split = {
        axis: data.draw(st.sampled_from([n for n in (1, 2, 4) if side % n == 0]))
        for axis, side in enumerate(shape)
        if roles[axis] == "split"
    }
    leaf = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    blocking = so.Blocking(None, None, batch=so.Batch(axes, split))
    views = _blocking.views_of(blocking.batch, [()], [leaf])
    plan = _cutting.plan_of([leaf], blocking, views=views)
    (blocks,) = _cutting.cut(plan, [jnp.asarray(leaf)]).values()
    parts = [
        side if role == "batch" else split.get(axis, 1)
        for axis, (side, role) in enumerate(zip(shape, roles, strict=True))
    ]
    wanted = []
    for index in np.ndindex(*parts):
        where = tuple(
            i if role == "batch" else slice(i * side // n, (i + 1) * side // n)
            for i, n, side, role in zip(index, parts, shape, roles, strict=True)
        )
        wanted.append(leaf[where])
    np.testing.assert_array_equal(blocks, np.stack(wanted))
    (back,) = _cutting.paste(plan, {next(iter(plan.stacks)): blocks}, [leaf])
    np.testing.assert_array_equal(back, leaf)


def test_norms_of_slices_are_grafted():
    blocking = so.Blocking(batch={"^w$": 1})
    tx = so.graft(so.scale_by_sign_descent(b1=0.0), optax.identity(), blocking=blocking)
    grads = {"v": normals(0, 4, 3), "w": normals(1, 4, 2, 3)}
    updates, _ = quick_jit(tx.update)(grads, tx.init(grads), grads)
    for got, grad in [
        (updates["v"], grads["v"]),
        *((updates["w"][:, i], grads["w"][:, i]) for i in range(2)),
    ]:
        size = np.linalg.norm(np.asarray(grad, np.float64)) / np.sqrt(12)
        np.testing.assert_allclose(got, size * np.sign(grad), rtol=1e-6)


# ---- a model


class Layer(nn.Module):
    @nn.compact
    def __call__(self, hidden, _=None):
        dense = nn.Dense(6, param_dtype=jnp.float64)
        return hidden + dense(nn.tanh(hidden)), None


class Model(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, hidden):
        if self.scanned:
            options = dict(variable_axes={"params": 0}, split_rngs={"params": True})
            hidden, _ = nn.scan(Layer, **options, length=3)(name="layers")(hidden)
        else:
            for index in range(3):
                hidden, _ = Layer(name=f"layer_{index}")(hidden)
        return nn.Dense(2, use_bias=False, param_dtype=jnp.float64)(hidden)


def unrolled(params):
    layers = params["layers"]
    rest = {name: tree for name, tree in params.items() if name != "layers"}
    one = (jax.tree.map(lambda x, i=i: x[i], layers) for i in range(3))
    return rest | {f"layer_{index}": tree for index, tree in enumerate(one)}


def test_a_scanned_model_is_trained_as_the_unrolled_one(x64):
    """In float64: a scan and its layers one by one round differently."""
    inputs, targets = (normals(n, 64, n, dtype=jnp.float64) for n in (6, 2))
    blocking = so.Blocking(batch={"^layers/": 0})
    tx = so.shampoo(0.05, b2=0.9, refresh_every=2, relative_eps=1e-3, blocking=blocking)

    def train(model, params):
        def step(carry, _):
            def loss(params):
                outputs = model.apply({"params": params}, inputs)
                return jnp.mean(jnp.square(outputs - targets))

            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), updates

        return jax.lax.scan(step, (params, tx.init(params)), length=3)[1]

    params = quick_jit(Model(True).init)(jax.random.key(0), inputs)["params"]
    updates = quick_jit(lambda params: train(Model(True), params))(params)
    want = quick_jit(lambda params: train(Model(False), params))(unrolled(params))
    got, wanted = (
        [jax.tree.map(itemgetter(index), tree) for index in range(3)]
        for tree in (updates, want)
    )
    assert helpers.worst_of_steps(list(map(unrolled, got)), wanted) <= 1e-9
