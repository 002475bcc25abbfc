"""Root-free RMSProp and inverse-free Shampoo against dense NumPy in float64.

The direction of a root-free method is not the same at every scale of the gradient: it
is in units of the inverse gradient. In the place of that stands an exact law.
"""

import functools
import math
from pydoc_data.topics import topics

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import shampoo_optax as so
from shampoo_optax._cutting import unpadded_sides

rms, inverse_free = so.scale_by_root_free_rms, so.scale_by_inverse_free_shampoo
trace = functools.partial(helpers.trace, jit=helpers.quick_jit)
BOTH = {
    "rms": rms,
    "dense": inverse_free,
    "diagonal": functools.partial(inverse_free, structure="diagonal"),
}
both = pytest.mark.parametrize("name", BOTH)
structures = pytest.mark.parametrize("structure", ["dense", "diagonal"])

# ---- the oracle


def filtered(gradients, b1, b3):
    """The gradients that are preconditioned, one a step."""
    b3, average = b1 if b3 is None else b3, 0.0
    for t, gradient in enumerate(gradients):
        if b1 == 0:
            yield gradient
            continue
        yield (b3 * average + (1 - b3) * gradient) / (1 - b3 * b1**t)
        average = b1 * average + (1 - b1) * gradient


def reduced(matrix, sides, axis):
    """A matrix over all entries of a block, all axes but one traced out."""
    order = len(sides)
    names = list(range(2 * order))
    for other in set(range(order)) - {axis}:
        names[order + other] = other
    return np.einsum(matrix.reshape(*sides, *sides), names, [axis, order + axis])


def inverse_free_block(gradients, used, *, b2, eps, root_momentum, batch_size,
                       structure, every):  # fmt: skip
    """Directions of one block, from the whole curvature of all its entries."""
    sides = gradients[0].shape
    roots, momenta = [np.eye(d) for d in sides], [np.zeros((d, d)) for d in sides]
    for t, gradient in enumerate(gradients):
        if t % every == 0:
            flat = gradient.reshape(-1)
            curvature = batch_size * np.outer(flat, flat) + eps * np.eye(flat.size)
            whole = functools.reduce(np.kron, roots)
            seen = whole.T @ curvature @ whole
            for k, side in enumerate(sides):
                excess = reduced(seen, sides, k) * side / flat.size - np.eye(side)
                if structure == "diagonal":
                    excess = np.diag(np.diag(excess))
                a = root_momentum
                momenta[k] = a * momenta[k] + (1 - a) * excess / 2
                shrink = max(1, np.sqrt(np.trace(momenta[k].T @ momenta[k])))
                roots[k] = roots[k] - (1 - b2) / shrink * roots[k] @ momenta[k]
        whole = functools.reduce(np.kron, roots)
        yield (whole @ whole.T @ used[t].reshape(-1)).reshape(sides)


def by_blocks(method, gradients, size, b1, b3):
    """Directions of a parameter that is cut, not merged."""
    directions = [np.zeros(g.shape) for g in gradients]
    for index in oracle.blocks(gradients[0].shape, size):
        own = [g[index] for g in gradients]
        used = list(filtered(own, b1, b3))
        for whole, direction in zip(directions, method(own, used), strict=True):
            whole[index] = direction
    return directions


def rms_block(gradients, used, *, b2, eps, batch_size):
    moment = np.ones(gradients[0].shape)
    for gradient, now in zip(gradients, used, strict=True):
        new = 1 if b2 == 1 else 1 - b2
        moment = b2 * moment + new * batch_size * gradient**2
        yield now / (moment + eps)


SHAPES = {"matrix": (6, 4), "vector": (5,), "tensor": (2, 3, 2)}
CUT = so.Blocking(block_size=4, merge_to=None)


def agree(tx, reference, b1, b3):
    """Compares six steps with the reference, in float64."""
    steps = helpers.normal_steps(SHAPES, 6, seed=3, scale=0.7)
    steps = jax.tree.map(lambda x: x.astype(jnp.float64), steps)
    got, states = trace(tx, steps[0], steps)
    for name in SHAPES:
        gradients = [np.atleast_1d(np.asarray(step[name])) for step in steps]
        want = by_blocks(reference, gradients, 4, b1, b3)
        for update, expected in zip(got, want, strict=True):
            expected = expected.reshape(SHAPES[name])
            np.testing.assert_allclose(update[name], expected, rtol=1e-9, atol=1e-12)
    assert helpers.total(states[-1].skipped) == 0


@structures
@pytest.mark.parametrize(
    "settings",
    [
        dict(b1=0.0, b3=None, b2=0.8, root_momentum=0.5, batch_size=3.0, every=1),
        dict(b1=0.9, b3=None, b2=0.3, root_momentum=0.0, batch_size=1.0, every=2),
        dict(b1=0.8, b3=0.64, b2=0.95, root_momentum=0.9, batch_size=40.0, every=3),
    ],
    ids=["plain", "without momentum", "looking ahead"],
)
def test_inverse_free_follows_the_whole_curvature(structure, settings, x64):
    rest = dict(settings, eps=0.05, structure=structure)
    b1, b3, every = (rest.pop(name) for name in ("b1", "b3", "every"))
    tx = inverse_free(b1, b3=b3, refresh_every=every, blocking=CUT, **rest)
    block = functools.partial(inverse_free_block, every=every, **rest)
    agree(tx, block, b1, b3)


@pytest.mark.parametrize(
    "b1, b3, b2, eps",
    [(0.0, None, 0.9, 0.0), (0.9, None, 0.5, 0.1), (0.8, 0.64, 1.0, 1e-3)],
)
def test_root_free_rms_follows_its_formula(b1, b3, b2, eps, x64):
    rest = dict(b2=b2, eps=eps, batch_size=5.0)
    agree(rms(b1, b3=b3, **rest), functools.partial(rms_block, **rest), b1, b3)


def test_roots_settle_at_the_inverse_curvature():
    """Of one gradient again and again: a vector's, and a scalar's."""
    vector, eps, batch = np.array([0.3, -0.2, 0.5]), 0.02, 4.0
    params = {"vector": jnp.asarray(vector, jnp.float32), "scalar": jnp.float32(0.1)}
    tx = inverse_free(b2=0.9, eps=eps, batch_size=batch)

    @jax.jit
    def run(state):
        def step(state, _):
            updates, state = tx.update(params, state)
            return state, updates

        return jax.lax.scan(step, state, length=800)

    state, updates = run(tx.init(params))
    root = np.asarray(state.roots["3"]["0"][0], np.float64)
    curvature = batch * np.outer(vector, vector) + eps * np.eye(3)
    np.testing.assert_allclose(root @ root.T @ curvature, np.eye(3), atol=2e-4)
    last = jax.tree.map(lambda x: x[-1], updates)
    scale = batch * vector @ vector + eps
    np.testing.assert_allclose(last["vector"], vector / scale, rtol=1e-4)
    np.testing.assert_allclose(last["scalar"], 0.1 / (batch * 0.01 + eps), rtol=1e-4)


# ---- acceptance cases


@both
def test_zero_gradients_first(name):
    shapes = {"a": (4, 3), "b": (5,)}
    steps = [helpers.zeros_like(helpers.normal_steps(shapes, 1)[0])] * 3
    steps = steps + helpers.normal_steps(shapes, 1)
    updates, states = trace(BOTH[name](), steps[0], steps)
    for update, state in zip(updates[:3], states[:3], strict=True):
        helpers.assert_equal(update, steps[0])
        helpers.assert_finite(state)
    helpers.assert_finite((updates[3], states[3]))
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(updates[3]))


@pytest.mark.parametrize("side", [2, 33, 128])
def test_rank_one_gradients_keep_their_direction(side):
    left, right = helpers.normals(side, side), helpers.normals(side + 1, side)
    gradient = left[:, None] * right[None, :]
    got = np.asarray(trace(inverse_free(), gradient, [gradient] * 5)[0][-1], np.float64)
    want = np.asarray(gradient, np.float64)
    cosine = np.sum(got * want) / np.linalg.norm(got) / np.linalg.norm(want)
    assert cosine >= 0.9999 and np.linalg.norm(got) < 0.5 * np.linalg.norm(want)


@both
def test_scale_of_the_gradient_against_the_batch_size(name):
    """A gradient c times as large from 1 / c^2 as many examples: P is c times it."""
    steps = helpers.normal_steps({"w": (6, 4), "b": (5,)}, 4)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)

    @helpers.quick_jit
    def run(scale):
        tx = BOTH[name](batch_size=16 / scale**2)

        def step(state, grads):
            updates, state = tx.update(jax.tree.map(lambda x: x * scale, grads), state)
            return state, jax.tree.map(lambda x: x / scale, updates)

        return jax.lax.scan(step, tx.init(steps[0]), stacked)[1]

    plain = run(jnp.float32(1))
    for power in (-40, -9, 7, 40):
        assert helpers.worst(run(jnp.float32(2.0**power)), plain) <= 1e-5


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_gradients_leave_their_block_as_it_is(name, bad):
    shapes = {"good": (6, 4), "bad": (3, 5)}
    steps = helpers.normal_steps(shapes, 5)
    spoilt = [dict(step) for step in steps]
    spoilt[2]["bad"] = spoilt[2]["bad"].at[1, 2].set(bad)
    # One compiled step for both runs; momentum, where there is any, is kept too.
    tx = BOTH[name](b1=0.9, graft="adam")
    update = helpers.quick_jit(tx.update)
    run = functools.partial(helpers.trace, tx, steps[0], jit=lambda _: update)
    (plain, _), (updates, states) = run(steps), run(spoilt)
    for got, want in zip(updates, plain, strict=True):
        helpers.assert_equal(got["good"], want["good"])
    assert not np.any(updates[2]["bad"]) and np.all(updates[3]["bad"])
    held, before = (
        [x["3x5"] for x in state[1:] if "3x5" in x and x is not state.skipped]
        for state in (states[2], states[1])
    )
    helpers.assert_equal(held, before)
    assert states[-1].skipped["3x5"] == 1 and states[-1].skipped["6x4"] == 0
    helpers.assert_finite((updates, states))


def test_roots_that_would_overflow_are_refused():
    gradients = {"huge": jnp.full((4, 3), 1e18), "good": helpers.normals(1, 5, 3)}
    tx = inverse_free(batch_size=1e4)
    (update,), (state,) = trace(tx, gradients, [gradients])
    first = tx.init(gradients)
    helpers.assert_equal(state.roots["4x3"], first.roots["4x3"])
    helpers.assert_equal(state.momenta["4x3"], first.momenta["4x3"])
    assert state.failures["4x3"] == 1 and state.failures["5x3"] == 0
    assert np.any(state.roots["5x3"]["0"] != first.roots["5x3"]["0"])
    np.testing.assert_array_equal(update["huge"], gradients["huge"])


def test_roots_move_when_they_are_due():
    steps = helpers.normal_steps({"w": (4, 3)}, 8)
    tx = inverse_free(refresh_every=3)
    updates, states = trace(tx, steps[0], steps)
    assert np.any(updates[0]["w"] != steps[0]["w"])  # the first step moves them
    roots = [tx.init(steps[0]).roots, *(state.roots for state in states)]
    pairs = zip(roots[:-1], roots[1:], strict=True)
    moved = [
        helpers.worst(after["4x3"], before["4x3"]) > 1e-3 for before, after in pairs
    ]
    assert [t for t, yes in enumerate(moved, 1) if yes] == [1, 4, 7]


DECOMPOSITIONS = {
    "cholesky", "custom_linear_solve", "eig", "eigh", "geqrf", "hessenberg",
    "householder_product", "lu", "qr", "schur", "svd", "triangular_solve",
    "tridiagonal", "tridiagonal_solve",
}  # fmt: skip


def decompositions(found):
    return DECOMPOSITIONS & {eqn.primitive.name for eqn, _ in found}


def test_decompositions_are_seen_where_there_are_some():
    found = helpers.update_equations(so.scale_by_shampoo(), {"w": jnp.zeros((6, 4))})
    assert decompositions(found) == {"eigh"}


@structures
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_products_and_all_of_them_in_the_dtype(structure, dtype):
    params = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(5), "t": jnp.zeros((2, 3, 4))}
    tx = so.inverse_free_shampoo(
        1e-3, 0.9, structure=structure, dtype=dtype, refresh_every=2, graft="adam",
        blocking=so.Blocking(merge_to=None), weight_decay=0.1,
    )  # fmt: skip
    found = helpers.update_equations(tx, params)
    assert not decompositions(found)
    products = [eqn for eqn, _ in found if eqn.primitive.name == "dot_general"]
    assert bool(products) == (structure == "dense")
    for eqn in products:
        assert {str(x.aval.dtype) for x in eqn.invars} == {dtype}
        assert set(eqn.params["precision"]) == {jax.lax.Precision.HIGHEST}
    state = jax.eval_shape(tx.init, params)[0]
    kept = jax.tree.leaves((state.roots, state.momenta, state.filtered))
    assert kept and {str(x.dtype) for x in kept} == {dtype}


def test_equal_matrices_share_their_products():
    def products(count):
        params = {str(i): jnp.zeros((6, 4)) for i in range(count)}
        found = helpers.update_equations(inverse_free(), params)
        return sum(eqn.primitive.name == "dot_general" for eqn, _ in found)

    assert products(8) == products(64) > 0


@pytest.mark.parametrize("name", ["rms", "dense"])
def test_eager_jit_and_scan_agree(name):
    steps = helpers.normal_steps({"w": (4, 3)}, 4)  # eager code compiles each shape
    tx = BOTH[name](0.9)
    jitted, _ = trace(tx, steps[0], steps)
    eager, _ = helpers.trace(tx, steps[0], steps, jit=lambda update: update)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)

    def body(state, grads):
        updates, state = tx.update(grads, state)
        return state, updates

    scan = helpers.quick_jit(functools.partial(jax.lax.scan, body))
    _, scanned = scan(tx.init(steps[0]), stacked)
    scanned = [jax.tree.map(lambda x, i=i: x[i], scanned) for i in range(len(steps))]
    assert helpers.worst_of_steps(eager, jitted) <= 1e-5
    assert helpers.worst_of_steps(scanned, jitted) <= 1e-5


@both
def test_injected_hyperparameters(name):
    alias = so.root_free_rmsprop if name == "rms" else so.inverse_free_shampoo
    options = {} if name == "rms" else dict(structure=name)
    steps = helpers.normal_steps({"w": (6, 4), "b": (5,)}, 4)
    schedule = optax.linear_schedule(0.1, 0.01, 4)
    plain, _ = trace(alias(schedule, **options), steps[0], steps)
    injected = optax.inject_hyperparams(alias)(schedule, **options)
    got, states = trace(injected, steps[0], steps)
    assert {"b2", "eps", "batch_size"} <= set(states[-1].hyperparams)
    assert helpers.worst_of_steps(got, plain) <= 1e-5


# ---- meshes

# On 8 devices there is one padded stack of each order but 0.
MIXED = {
    "a": (5,), "b": (4,), "c": (6, 4), "d": (4, 5), "f": (2, 3, 4), "g": (4, 3, 3),
    "s": (),
}  # fmt: skip
WHOLE = so.Blocking(merge_to=None)


@functools.lru_cache
def on(name, *mesh):
    """Five steps, and what more there is to know of their run."""
    placement = helpers.placement_of(*mesh)
    tx = BOTH[name](0.5, batch_size=2.0, blocking=WHOLE, placement=placement)
    steps = helpers.normal_steps(MIXED, 5)
    steps = helpers.replicate(steps, helpers.mesh_of(*mesh))
    update = helpers.quick_jit(tx.update)
    updates, states = helpers.trace(tx, steps[0], steps, jit=lambda _: update)
    return tx, steps, update, jax.device_get(updates), states


@both
def test_padding_and_owners_change_nothing(name):
    _, _, _, want, single = on(name)
    tx, steps, _, got, states = on(name, 8)
    padded = unpadded_sides(helpers.plan_of(tx, steps[0]))
    assert {len(axes) for axes in padded.values()} == {1, 2, 3}
    assert helpers.worst_of_steps(got, want) <= 1e-5
    assert helpers.total(states[-1].skipped) == helpers.total(single[-1].skipped) == 0


@pytest.mark.parametrize("name", ["rms", "dense"])
def test_portable_states_go_on_on_another_mesh(name):
    alone, plain, _, _, single = on(name)
    tx, steps, update, got, states = on(name, 8)
    saved = so.to_portable(alone, single[2], plain[0])
    state = so.from_portable(tx, saved, steps[0])
    helpers.assert_equal(so.to_portable(tx, state, steps[0]), saved)
    assert helpers.worst(so.to_portable(tx, states[2], steps[0]), saved) <= 1e-5
    for grads, want in zip(steps[3:], got[3:], strict=True):
        updates, state = update(grads, state, steps[0])
        assert helpers.worst(jax.device_get(updates), want) <= 1e-5


def test_portable_states_in_bfloat16():
    steps = helpers.normal_steps({"w": (6, 4), "b": (5,)}, 1)
    tx = inverse_free(0.9, dtype="bfloat16")
    _, (state,) = trace(tx, steps[0], steps)
    saved = so.to_portable(tx, state, steps[0])
    assert saved[".roots/['w']/0,0/1"].dtype == jnp.bfloat16
    helpers.assert_equal(so.from_portable(tx, saved, steps[0]), state)


def test_description_counts_products_and_halved_memory():
    params = helpers.structs({"w": (6, 4), "b": (5,)})
    wide, half = (
        so.describe(params, inverse_free(dtype=dtype)).parts[0]
        for dtype in ("float32", "bfloat16")
    )
    assert wide.bytes["roots"].total == 4 * (36 + 16 + 25)
    assert half.bytes["momenta"].total == 2 * (36 + 16 + 25)
    assert half.flops["decompositions"] == half.flops["refresh"] == 0
    # Of a matrix: rotation and Gram products on each side, root products, application.
    matrix = 2 * 24 * 10 * 2 + 2 * 2 * (6**3 + 4**3) + 2 * 2 * 24 * 10
    vector = 2 * 25 * 2 + 2 * 2 * 5**3 + 2 * 2 * 25
    assert wide.flops["application"] == half.flops["application"] == matrix + vector


# ---- training


CONTEXT = 4  # bytes that the network reads


def losses(tx, steps=150, batch=64, width=32):
    """The losses of a small network that names the next byte of Python's manual."""
    text = np.frombuffer("".join(topics.values()).encode(), np.uint8)
    symbols, text = np.unique(text, return_inverse=True)
    starts = np.random.default_rng(1).integers(0, len(text) - CONTEXT, (steps, batch))
    windows = jnp.asarray(text[starts[..., None] + np.arange(CONTEXT + 1)])
    params = {
        "embed": 0.5 * helpers.normals(2, len(symbols), 8),
        "up": 0.2 * helpers.normals(3, 8 * CONTEXT, width),
        "bias": jnp.zeros((1, width)),
        "down": 0.1 * helpers.normals(4, width, len(symbols)),
    }

    def loss(params, window):
        seen = params["embed"][window[:, :-1]].reshape(batch, -1)
        hidden = jnp.tanh(seen @ params["up"] + params["bias"])
        logits = hidden @ params["down"]
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(logits, window[:, -1])
        )

    def step(carry, window):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, window)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    @helpers.quick_jit
    def run(windows):
        return jax.lax.scan(step, (params, tx.init(params)), windows)[1]

    return np.asarray(run(windows), np.float64)


RATE = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, 150)


@structures
def test_training_in_bfloat16_is_as_good_as_in_float32(structure):
    make = functools.partial(
        so.inverse_free_shampoo, RATE, batch_size=64, structure=structure
    )
    wide, half = losses(make()), losses(make(dtype="bfloat16"))
    assert not np.array_equal(wide, half)
    assert wide[-30:].mean() < 0.7 * wide[0]
    assert abs(half[-30:].mean() / wide[-30:].mean() - 1) <= 0.02


def test_root_free_rmsprop_trains():
    got = losses(so.root_free_rmsprop(RATE, batch_size=64))
    assert got[-30:].mean() < 0.7 * got[0]


# ---- bad input

SHARED = [
    (dict(b1=1.0), "b1", "1.0"),
    (dict(b1=-0.1), "b1", "-0.1"),
    (dict(b2=1.5), "b2", "1.5"),
    (dict(b3=2.0), "b3", "2.0"),
    (dict(eps=-1.0), "eps", "-1.0"),
    (dict(eps=math.nan), "eps", "nan"),
    (dict(batch_size=0), "batch_size", "0"),
    (dict(batch_size=-3), "batch_size", "-3"),
    (dict(batch_size="128"), "batch_size", "'128'"),
    (dict(graft="lion"), "graft", "'lion'"),
    (dict(graft="adam", graft_b2=1.0), "graft_b2", "1.0"),
    (dict(bias_correction=2), "bias_correction", "2"),
    (dict(blocking=1024), "blocking", "1024"),
    (dict(placement="cpu"), "placement", "'cpu'"),
]
INVERSE_FREE = [
    (dict(b2=0.0), "b2", "0.0"),
    (dict(eps=0.0), "eps", "0.0"),
    (dict(root_momentum=1.0), "root_momentum", "1.0"),
    (dict(root_momentum=-0.5), "root_momentum", "-0.5"),
    (dict(refresh_every=0), "refresh_every", "0"),
    (dict(refresh_every=1.5), "refresh_every", "1.5"),
    (dict(structure="tril"), "structure", "'tril'"),
    (dict(structure=None), "structure", "None"),
    (dict(dtype="float16"), "dtype", "'float16'"),
    (dict(dtype="float64"), "dtype", "'float64'"),
]
ALIAS = [
    (dict(learning_rate=-1.0), "learning_rate", "-1.0"),
    (dict(momentum=1.5), "momentum", "1.5"),
    (dict(weight_decay=-0.1), "weight_decay", "-0.1"),
    (dict(decay="l1"), "decay", "'l1'"),
]


@pytest.mark.parametrize(
    "make, cases",
    [
        (rms, SHARED),
        (inverse_free, SHARED + INVERSE_FREE),
        (so.root_free_rmsprop, SHARED + ALIAS),
        (so.inverse_free_shampoo, SHARED + INVERSE_FREE + ALIAS),
    ],
    ids=["rms", "inverse-free", "rmsprop", "shampoo"],
)
def test_bad_arguments(make, cases):
    first = {"learning_rate": 0.1} if cases[-1] is ALIAS[-1] else {}
    make(**first)
    for wrong, name, value in cases:
        with pytest.raises(ValueError) as error:
            make(**{**first, **wrong})
        assert f"`{name}`" in str(error.value), wrong
        assert f"got {value}" in str(error.value), wrong
