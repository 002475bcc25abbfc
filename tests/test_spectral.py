"""Spectral and sign descent: against NumPy in float64, on a mesh, and their guards."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import QUINTIC, newton_schulz

import shampoo_optax as so

spectral, sign = so.scale_by_spectral_descent, so.scale_by_sign_descent


def width(rows, columns):
    return jnp.sqrt(jnp.maximum(1, columns / rows))


def array(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- signs

SCALES = {
    "none": (None, lambda block: 1.0),
    "l1": ("l1", lambda block: np.sum(np.abs(block))),
    "mean": ("mean", lambda block: np.mean(np.abs(block))),
    "function": (
        lambda block: jnp.max(jnp.abs(block)),
        lambda block: np.max(np.abs(block)),
    ),
    "count": (lambda block: jnp.sum(block > 0), lambda block: np.sum(block > 0)),
    "integer": (lambda block: 3, lambda block: 3),
}


@pytest.mark.parametrize("name", SCALES)
def test_signs_are_scaled_by_block(name):
    scale, expected = SCALES[name]
    tree = {"m": array(11, 6, 3), "t": array(12, 2, 3, 4), "s": array(13)}
    tree["m"][1, 2] = 0
    tx = sign(0.0, scale=scale, blocking=so.Blocking(4, merge_to=None))
    gradients = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    updates, _ = helpers.quick_jit(tx.update)(gradients, tx.init(gradients))
    parts = {"m": [tree["m"][:4], tree["m"][4:]], "t": [tree["t"]], "s": [tree["s"]]}
    for key, blocks in parts.items():
        wanted = [np.sign(block) * expected(block) for block in blocks]
        wanted = np.concatenate(wanted) if len(wanted) > 1 else wanted[0]
        np.testing.assert_allclose(updates[key], wanted, rtol=1e-6)


def test_lion_is_sign_descent_that_looks_ahead():
    steps = helpers.normal_steps({"w": (5, 4), "b": (3,)}, 6)
    got, _ = helpers.trace(sign(0.99, b3=0.9), steps[0], steps)
    want, _ = helpers.trace(optax.scale_by_lion(b1=0.9, b2=0.99), steps[0], steps)
    helpers.assert_equal(got, want)


# ---- Muon

MUON_SHAPES = {"tall": (9, 5), "wide": (4, 10), "square": (6, 6)}


def numpy_muon(gradients, rate, nesterov, b=0.95):
    """The updates of `optax.contrib.muon`, as its source says."""
    average, updates = np.zeros_like(gradients[0]), []
    for t, gradient in enumerate(gradients, start=1):
        average = b * average + (1 - b) * gradient
        used = average
        if nesterov:
            used = b * average / (1 - b ** (t + 1)) + (1 - b) * gradient / (1 - b**t)
        rows, columns = gradient.shape
        factor = np.sqrt(max(1, columns / rows))
        updates.append(-rate * factor * newton_schulz(used, QUINTIC, 5))
    return updates


def expected_muon(steps, rate, nesterov):
    columns = {
        name: numpy_muon(
            [np.asarray(s[name], np.float64) for s in steps], rate, nesterov
        )
        for name in MUON_SHAPES
    }
    return [{name: columns[name][t] for name in columns} for t in range(len(steps))]


def muon(rate, **kwargs):
    return optax.chain(
        spectral(
            method=so.NewtonSchulz(scale=width), blocking=so.Blocking(None), **kwargs
        ),
        optax.scale_by_learning_rate(rate),
    )


def nesterov_muon(rate, b=0.95):
    """With the weights that optax gives to the average in its Nesterov momentum."""

    def b3(step):
        ratio = (1 - b ** (step + 2)) / (1 - b ** (step + 1))
        return b * b / (b * b + (1 - b) * (b + ratio))

    transform = optax.inject_hyperparams(spectral)(
        b, b3=b3, method=so.NewtonSchulz(scale=width), blocking=so.Blocking(None)
    )
    return optax.chain(transform, optax.scale_by_learning_rate(rate))


def worst_of_steps(got, want):
    return max(map(helpers.worst, got, want))


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_a_chain(nesterov):
    steps = helpers.normal_steps(MUON_SHAPES, 20)
    tx = nesterov_muon(0.02) if nesterov else muon(0.02)
    got, _ = helpers.trace(tx, steps[0], steps, jit=helpers.quick_jit)
    assert worst_of_steps(got, expected_muon(steps, 0.02, nesterov)) <= 1e-5


def test_looking_ahead_by_b1_squared_is_the_first_momentum_of_muon():
    steps = helpers.normal_steps(MUON_SHAPES, 6)
    got, _ = helpers.trace(muon(0.02, b3=0.95**2), steps[0], steps)
    first = optax.chain(optax.trace(0.95, nesterov=True), muon(0.02, b1=0.0))
    want, _ = helpers.trace(first, steps[0], steps)
    assert worst_of_steps(got, want) <= 1e-5


# ---- what all transforms share

MESHED = {
    "newton-schulz": (spectral, dict(method=so.NewtonSchulz())),
    "newton-schulz, scaled": (
        spectral,
        dict(method=so.NewtonSchulz(scale=lambda rows, columns: rows / columns)),
    ),
    "svd, scaled and grafted": (
        spectral,
        dict(
            method=so.Svd(True, scale=lambda rows, columns: rows / columns),
            graft="adam",
            start=2,
        ),
    ),
    "signs": (sign, dict(scale="mean")),
}
MATRICES = {"a": (12, 7), "b": (6, 10), "c": (9, 9), "d": (4, 8), "e": (8, 3)}


def assert_moves_as_alone(transform, kwargs, steps):
    """On 8 devices with padding, as on one."""
    trace = functools.partial(helpers.trace, jit=helpers.quick_jit)
    alone = transform(**kwargs)
    divided = transform(**kwargs, placement=so.Placement(helpers.mesh_of(8)))
    want, states = trace(alone, steps[0], steps)
    got, divided_states = trace(divided, steps[0], steps)
    state = divided_states[-1]
    assert len(state.skipped) < len(states[-1].skipped)  # joined, so padded
    assert all(len(x.sharding.device_set) == 8 for x in state.skipped.values())
    assert worst_of_steps(got, want) <= 1e-5
    portable = so.to_portable(divided, state, steps[0])
    restored = so.from_portable(alone, portable, steps[0])
    assert helpers.worst(restored, states[-1]) <= 1e-5


@pytest.mark.parametrize("name", MESHED)
def test_padded_blocks_on_a_mesh_move_as_on_one_device(name):
    transform, kwargs = MESHED[name]
    assert_moves_as_alone(transform, kwargs, helpers.normal_steps(MATRICES, 4))


def test_rank_deficient_blocks_are_padded_without_new_directions():
    def low_rank(seed, shape):
        return jnp.asarray(array(seed, shape[0], 2) @ array(seed, 2, shape[1]), "f4")

    names = enumerate(MATRICES)
    steps = [{name: low_rank(seed, MATRICES[name]) for seed, name in names}]
    kwargs = dict(b1=0.0, method=so.Svd(nuclear_scaling=True))
    assert_moves_as_alone(spectral, kwargs, steps)


@pytest.mark.parametrize("scale", ["l1", "mean", lambda x: jnp.max(jnp.abs(x))])
def test_scales_of_padded_blocks_of_order_3(scale):
    shapes = {"a": (4, 3, 5), "b": (2, 6, 3), "c": (3, 3, 3), "d": (5, 2, 2)}
    kwargs = dict(scale=scale, blocking=so.Blocking(merge_to=None))
    assert_moves_as_alone(sign, kwargs, helpers.normal_steps(shapes, 2))


TRANSFORMS = {
    "newton-schulz": spectral,
    "svd": functools.partial(spectral, method=so.Svd()),
    "signs": functools.partial(sign, scale="mean"),
}
names = pytest.mark.parametrize("name", TRANSFORMS)


@names
def test_zero_gradients_give_zero_directions(name):
    steps = helpers.normal_steps({"w": (4, 3)}, 1)
    zero = helpers.zeros_like(steps[0])
    updates, states = helpers.trace(
        TRANSFORMS[name](graft="adam"), zero, [zero, zero, *steps]
    )
    helpers.assert_equal(updates[:2], [zero, zero])
    helpers.assert_finite((updates, states))
    assert np.all(np.abs(updates[2]["w"]) > 0)
    assert helpers.total(states[-1].skipped) == 0


@names
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e25])
def test_a_gradient_that_is_not_finite_stops_its_block_alone(name, bad):
    steps = helpers.normal_steps({"v": (4, 3), "w": (5, 3)}, 4)
    broken = dict(steps[1], w=steps[1]["w"].at[2, 1].set(bad))
    tx = TRANSFORMS[name]()
    whole, _ = helpers.trace(tx, steps[0], steps)
    updates, states = helpers.trace(tx, steps[0], [steps[0], broken, *steps[2:]])
    for got, want in zip(updates, whole, strict=True):
        helpers.assert_equal(got["v"], want["v"])
    np.testing.assert_array_equal(updates[1]["w"], 0)
    helpers.assert_equal(states[1].filtered["5x3"], states[0].filtered["5x3"])
    helpers.assert_finite((updates, states))
    assert {k: int(n[0]) for k, n in states[-1].skipped.items()} == {"4x3": 0, "5x3": 1}


@pytest.mark.parametrize(
    "tx",
    [
        spectral(method=so.Svd(scale=lambda rows, columns: rows / (columns - 3))),
        sign(scale=lambda block: 1 / (jnp.sum(block) - jnp.sum(block))),
    ],
    ids=["spectral", "signs"],
)
def test_a_direction_that_is_not_finite_is_counted_and_zero(tx):
    gradient = {"w": helpers.normals(0, 4, 3)}
    updates, states = helpers.trace(tx, gradient, [gradient] * 2)
    np.testing.assert_array_equal(updates[1]["w"], 0)
    assert helpers.total(states[1].skipped) == 2


@names
def test_absent_gradients_leave_their_state(name):
    first, second = helpers.normal_steps({"v": (4, 3), "w": (5, 3)}, 2)
    tx = TRANSFORMS[name]()
    advance = helpers.quick_jit(tx.update)
    _, state = advance(first, tx.init(first), first)
    update, after = advance(dict(second, w=None), state, first)
    assert update["w"] is None and np.any(update["v"])
    helpers.assert_equal(after.filtered["5x3"], state.filtered["5x3"])
    assert np.any(after.filtered["4x3"] != state.filtered["4x3"])


@names
def test_grafting_gives_every_block_the_grafted_norm(name):
    steps = helpers.normal_steps({"w": (6, 3)}, 2)
    kwargs = dict(b1=0.0, blocking=so.Blocking(4))
    plain, _ = helpers.trace(TRANSFORMS[name](**kwargs), steps[0], steps)
    grafted = TRANSFORMS[name](**kwargs, graft="sgd", start=2)
    updates, _ = helpers.trace(grafted, steps[0], steps)
    helpers.assert_equal(updates[0], steps[0])  # before the start
    for rows in (slice(0, 4), slice(4, 6)):
        direction, gradient = plain[1]["w"][rows], steps[1]["w"][rows]
        ratio = np.linalg.norm(gradient) / np.linalg.norm(direction)
        np.testing.assert_allclose(updates[1]["w"][rows], ratio * direction, rtol=1e-5)


SCALED = {
    "nuclear": functools.partial(spectral, method=so.Svd(nuclear_scaling=True)),
    "sides": functools.partial(
        spectral, method=so.NewtonSchulz(scale=lambda m, n: 1e-20 * m / n)
    ),
    "l1": functools.partial(sign, scale="l1"),
    "mean": functools.partial(sign, scale="mean"),
    "negative": functools.partial(sign, scale=lambda x: -jnp.max(jnp.abs(x))),
}


@pytest.mark.parametrize("name", SCALED)
def test_grafting_holds_for_the_smallest_gradients(name):
    gradient = helpers.normals(14, 6, 4)
    tx = SCALED[name](b1=0.0, graft="sgd")
    advance = helpers.quick_jit(tx.update)
    # Norms of 1e-17 times these are below what grafting adds to a norm.
    for size in (1.0, 1e-18):
        update, _ = advance(size * gradient, tx.init(gradient))
        ratio = np.linalg.norm(update / size) / np.linalg.norm(gradient)
        np.testing.assert_allclose(ratio, 1.0, rtol=1e-4)  # of squares near 1e-38
        alike = np.sum(np.asarray(update / size) * gradient)
        assert alike < 0 if name == "negative" else alike > 0


@names
def test_numbers_may_be_traced(name):
    steps = helpers.normal_steps({"w": (4, 3)}, 3)
    kwargs = dict(b1=0.9, b3=0.8, graft="rmsprop", graft_b2=0.95, start=2)
    plain, _ = helpers.trace(TRANSFORMS[name](**kwargs), steps[0], steps)
    injected = optax.inject_hyperparams(TRANSFORMS[name])(**kwargs)
    traced, _ = helpers.trace(injected, steps[0], steps)
    assert worst_of_steps(traced, plain) <= 1e-6


@names
def test_products_are_precise_and_decompositions_are_batched(name):
    tree = {f"w{index}": jnp.ones((4, 3)) for index in range(8)}
    found = [eqn for eqn, _ in helpers.update_equations(TRANSFORMS[name](), tree)]
    dots = [eqn for eqn in found if eqn.primitive.name == "dot_general"]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert all(eqn.params["precision"] == highest for eqn in dots)
    assert len(dots) == {"newton-schulz": 3, "svd": 1, "signs": 0}[name]
    svds = [eqn for eqn in found if eqn.primitive.name == "svd"]
    assert len(svds) == (name == "svd")


def test_sign_descent_takes_any_tree():
    tree = {
        "scalar": jnp.float32(2.0),
        "empty": jnp.ones((0, 3)),
        "one": jnp.ones((1,)),
        "kernel": helpers.normals(0, 3, 3, 4, 5),
        "half": helpers.normals(1, 7).astype(jnp.bfloat16),
        "float16": helpers.normals(2, 6).astype(jnp.float16),
    }
    updates, states = helpers.trace(sign(), tree, [tree] * 5)
    helpers.assert_equal(updates[-1], jax.tree.map(jnp.sign, tree))
    helpers.assert_finite(states)
    assert {x.dtype for x in states[-1].filtered.values()} == {jnp.dtype("float32")}


def test_half_precision_beside_float32_moves_as_float32():
    steps = helpers.normal_steps({"w": (6, 4)}, 4)
    halves = [jax.tree.map(lambda x: x.astype(jnp.float16), step) for step in steps]
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), step) for step in halves]
    tx = spectral(method=so.Svd(), graft="adam")
    got, states = helpers.trace(tx, halves[0], halves)
    want, _ = helpers.trace(tx, wide[0], wide)
    assert {x["w"].dtype for x in got} == {jnp.dtype("float16")}
    assert states[-1].filtered["6x4"].dtype == jnp.float32
    assert worst_of_steps(got, want) <= 2**-11


@pytest.mark.parametrize(
    "leaf, blocking",
    [
        (jnp.ones(5), so.Blocking()),
        (jnp.ones((1, 5)), so.Blocking()),
        (jnp.float32(1), so.Blocking()),
        (jnp.ones((2, 3, 4)), so.Blocking(merge_to=None)),
    ],
)
def test_spectral_descent_refuses_what_is_no_matrix(leaf, blocking):
    tx = spectral(blocking=blocking)
    with pytest.raises(ValueError, match="`params` must have blocks that are matrices"):
        tx.init({"w": jnp.ones((3, 2)), "b": leaf})


def test_spectral_descent_beside_another_method():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2), "e": jnp.ones((0, 3))}
    labels = {"w": "matrices", "b": "rest", "e": "matrices"}
    tx = helpers.partition({"matrices": spectral(), "rest": optax.scale(2.0)}, labels)
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["b"], 2.0)
    assert updates["e"].shape == (0, 3) and np.all(updates["w"] > 0)


WRONG_SCALE = "`scale` must be 'l1', 'mean', None or a function of a block, got"
NO_NUMBER = "`scale` must be a function.* that maps .* to one real number, but it"
BAD = {
    "method, a name": (lambda: spectral(method="svd"), "`method` .* got 'svd'"),
    "method, a root": (lambda: spectral(method=so.Eigh()), "`method` .* got Eigh"),
    "scale, a name": (lambda: sign(scale="l2"), f"{WRONG_SCALE} 'l2'"),
    "scale, a number": (lambda: sign(scale=0.5), f"{WRONG_SCALE} 0.5"),
    "scale, an array": (lambda: sign(scale=np.ones(2)), rf"{WRONG_SCALE} array\("),
    "scale, a block": (
        lambda: sign(scale=jnp.abs),
        rf"{NO_NUMBER} gives .*\(3, ?2.*, got .*abs",
    ),
    "scale of vectors": (
        lambda: sign(scale=jnp.trace).init(jnp.ones(5)),
        r"`scale` .* maps float32\[5\] to .* raises ValueError.*, got .*trace",
    ),
    "b1": (lambda: spectral(1.0), "`b1` must be below 1, got 1.0"),
    "start": (lambda: sign(start=0), "`start` .* got 0"),
    "no start, matrices": (lambda: spectral(start=None), "`start` .* got None"),
    "no start, signs": (lambda: sign(start=None), "`start` .* got None"),
    "graft": (lambda: spectral(graft="lion"), "`graft` .* got 'lion'"),
    "graft_b2": (
        lambda: sign(graft="adam", graft_b2=1.0),
        "`graft_b2` must be below 1 .* got 1.0",
    ),
    "no graft_b2, matrices": (
        lambda: spectral(graft="adam", graft_b2=None),
        "`graft_b2` .* got None",
    ),
    "no graft_b2, signs": (lambda: sign(graft_b2=None), "`graft_b2` .* got None"),
    "blocking": (lambda: spectral(blocking=8), "`blocking` .* got 8"),
    "placement": (lambda: sign(placement=8), "`placement` .* got 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_shown(name):
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()
