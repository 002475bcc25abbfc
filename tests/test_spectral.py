"""Spectral and sign descent against NumPy in float64, reference matrices and Muon."""

import functools
import json

import golden
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so

spectral, sign = so.scale_by_spectral_descent, so.scale_by_sign_descent
QUINTIC = (3.4445, -4.775, 2.0315)
WHOLE = so.Blocking(block_size=None, merge_to=None)


def width(rows, columns):
    return jnp.sqrt(jnp.maximum(1, columns / rows))


def array(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def first_direction(gradient, method, **kwargs):
    """The direction of one gradient as it is, in float64."""
    tx = spectral(0.0, method=method, **kwargs)
    update, state = jax.jit(tx.update)(gradient, tx.init(gradient))
    assert helpers.total(state.skipped) == 0 and update.dtype == gradient.dtype
    return np.asarray(update, np.float64)


# ---- the reference

with np.load(golden.DATA / "matrix-functions.npz") as data:
    MATRICES = dict(data)
ENTRIES = [
    entry
    for entry in json.loads(str(MATRICES["meta_json"]))["entries"]
    if entry["op"] == "matrix_orthogonalization"
]


def test_every_orthogonalization_of_the_reference_is_there():
    kinds = [entry["config"]["type"] for entry in ENTRIES]
    assert (kinds.count("NewtonSchulz"), kinds.count("SVD")) == (16, 6)
    assert len(kinds) == 22


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"c{entry['id']}")
def test_polar_factor_follows_the_reference(entry, x64):
    matrix, expected = (MATRICES[f"c{entry['id']}_{name}"] for name in "AX")
    method = golden.polar_of(entry["config"])
    got = first_direction(jnp.asarray(matrix), method, blocking=WHOLE)
    tolerance = max(1000 * entry["sensitivity"], 1e-9) * np.max(np.abs(expected))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


# ---- the oracle

SHAPES = [(6, 4), (4, 9), (5, 5), (1, 3)]
POLYNOMIALS = {
    "quintic": (QUINTIC, 5),
    "cubic": ((1.5, -0.5), 12),
    "of degree 7": ((2.1875, -2.1875, 1.3125, -0.3125), 8),
    "two, the last repeated": (((1.5, -0.5, 0.0), (1.875, -1.25, 0.375)), 6),
}


def polynomials(coefficients, steps):
    given = np.atleast_2d(coefficients)
    return [given[min(step, len(given) - 1)] for step in range(steps)]


def newton_schulz(matrix, coefficients, steps):
    """The iteration on singular values alone."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt(np.sum(values**2))
    for polynomial in polynomials(coefficients, steps):
        values = sum(a * values ** (2 * k + 1) for k, a in enumerate(polynomial))
    return (left * values) @ right


def polar(matrix, rank=None):
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] @ right[:rank]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_newton_schulz_is_its_polynomial_on_singular_values(name, shape, x64):
    coefficients, steps = POLYNOMIALS[name]
    matrix = array(1, *shape)
    method = so.NewtonSchulz(coefficients, steps)
    got = first_direction(jnp.asarray(matrix), method, blocking=WHOLE)
    expected = newton_schulz(matrix, coefficients, steps)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "dtype, tolerance", [("bfloat16", 2**-8), ("float32", 3e-6), ("float64", 3e-14)]
)
@pytest.mark.parametrize("method", [so.NewtonSchulz(), so.Svd()], ids=repr)
def test_directions_are_as_exact_as_their_dtype(method, dtype, tolerance, x64):
    gradient = jnp.asarray(array(2, 12, 7), dtype)
    matrix = np.asarray(gradient, np.float64)
    newton = isinstance(method, so.NewtonSchulz)
    expected = newton_schulz(matrix, QUINTIC, 5) if newton else polar(matrix)
    error = np.max(np.abs(first_direction(gradient, method) - expected))
    assert error <= tolerance


@pytest.mark.parametrize("shape", [(8, 6), (6, 8)], ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_svd_makes_up_no_direction(rank, shape):
    rows, columns = shape
    matrix = array(3, rows, rank) @ array(4, rank, columns)
    got = first_direction(jnp.asarray(matrix, jnp.float32), so.Svd())
    np.testing.assert_allclose(got, polar(matrix, rank), rtol=0, atol=1e-5)


def test_nuclear_scaling_multiplies_by_the_sum_of_singular_values():
    matrix = array(5, 7, 4)
    nuclear = np.sum(np.linalg.svd(matrix, compute_uv=False))
    method = so.Svd(nuclear_scaling=True)
    got = first_direction(jnp.asarray(matrix, jnp.float32), method)
    np.testing.assert_allclose(got, nuclear * polar(matrix), rtol=0, atol=1e-4)


def test_scale_is_a_function_of_the_rows_and_columns_of_each_block():
    gradient = jnp.asarray(array(6, 5, 7), jnp.float32)
    plain = first_direction(gradient, so.Svd(), blocking=so.Blocking(4))
    method = so.Svd(scale=lambda rows, columns: 10 * rows + columns)
    scaled = first_direction(gradient, method, blocking=so.Blocking(4))
    factors = np.repeat([[44, 43], [14, 13]], [4, 3], axis=1)
    factors = np.repeat(factors, [4, 1], axis=0)
    np.testing.assert_allclose(scaled, factors * plain, rtol=1e-6)


def test_blocks_are_orthogonalized_each_on_its_own():
    matrix = array(7, 6, 8)
    gradient = jnp.asarray(matrix, jnp.float32)
    cut = first_direction(gradient, so.Svd(), blocking=so.Blocking(4))
    whole = first_direction(gradient, so.Svd(), blocking=so.Blocking(None))
    expected = np.block(
        [[polar(matrix[:4, :4]), polar(matrix[:4, 4:])],
         [polar(matrix[4:, :4]), polar(matrix[4:, 4:])]]
    )  # fmt: skip
    np.testing.assert_allclose(cut, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(whole, polar(matrix), rtol=0, atol=1e-5)


def test_convolution_kernels_are_merged_to_matrices():
    kernel = array(8, 3, 2, 4, 5)
    got = first_direction(jnp.asarray(kernel, jnp.float32), so.Svd())
    expected = polar(kernel.reshape(24, 5)).reshape(kernel.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e-15, 1e6, 1e15])
@pytest.mark.parametrize("method", [so.NewtonSchulz(), so.Svd()], ids=repr)
def test_directions_do_not_depend_on_the_size_of_gradients(method, size):
    matrix = array(9, 16, 24)
    plain = first_direction(jnp.asarray(matrix, jnp.float32), method)
    scaled = first_direction(jnp.asarray(size * matrix, jnp.float32), method)
    np.testing.assert_allclose(scaled, plain, rtol=0, atol=1e-4)


def test_gradients_below_eps_move_less():
    matrix = array(10, 4, 3)
    matrix *= 0.25 / np.linalg.norm(matrix)
    # From a norm of a quarter of eps on, singular values start at a quarter.
    values = np.linalg.svd(matrix, compute_uv=False)
    for a, b, c in polynomials(QUINTIC, 5):
        values = a * values + b * values**3 + c * values**5
    method = so.NewtonSchulz(eps=1e-3)
    got = first_direction(jnp.asarray(1e-3 * matrix, jnp.float32), method)
    found = np.linalg.svd(got, compute_uv=False)
    np.testing.assert_allclose(np.sort(found), np.sort(values), rtol=0, atol=1e-4)


# ---- signs

SCALES = {
    "none": (None, lambda block: 1.0),
    "l1": ("l1", lambda block: np.sum(np.abs(block))),
    "mean": ("mean", lambda block: np.mean(np.abs(block))),
    "function": (
        lambda block: jnp.max(jnp.abs(block)),
        lambda block: np.max(np.abs(block)),
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_signs_are_scaled_by_block(name):
    scale, expected = SCALES[name]
    tree = {"m": array(11, 6, 3), "t": array(12, 2, 3, 4), "s": array(13)}
    tree["m"][1, 2] = 0
    tx = sign(0.0, scale=scale, blocking=so.Blocking(4, merge_to=None))
    gradients = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    updates, _ = tx.update(gradients, tx.init(gradients))
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


def traced_muon(steps, rate, nesterov):
    tx = optax.contrib.muon(rate, nesterov=nesterov)
    return helpers.trace(tx, steps[0], steps)[0]


REFERENCES = {"numpy": expected_muon}
if hasattr(optax.contrib, "muon"):  # newer than the oldest optax
    REFERENCES["optax"] = traced_muon


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


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_a_chain(nesterov, reference):
    steps = helpers.normal_steps(MUON_SHAPES, 20)
    tx = nesterov_muon(0.02) if nesterov else muon(0.02)
    got, _ = helpers.trace(tx, steps[0], steps)
    assert worst_of_steps(got, REFERENCES[reference](steps, 0.02, nesterov)) <= 1e-5


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


@pytest.mark.parametrize("name", MESHED)
def test_padded_blocks_on_a_mesh_move_as_on_one_device(name):
    transform, kwargs = MESHED[name]
    shapes = {"a": (12, 7), "b": (6, 10), "c": (9, 9), "d": (4, 8), "e": (8, 3)}
    steps = helpers.normal_steps(shapes, 4)
    mesh = helpers.mesh_of(8)
    alone = transform(**kwargs)
    divided = transform(**kwargs, placement=so.Placement(mesh))
    want, states = helpers.trace(alone, steps[0], steps)
    got, divided_states = helpers.trace(divided, steps[0], steps)
    state = divided_states[-1]
    assert len(state.filtered) < len(states[-1].filtered)  # joined, so padded
    assert all(len(x.sharding.device_set) == 8 for x in state.filtered.values())
    assert worst_of_steps(got, want) <= 1e-5
    portable = so.to_portable(divided, state, steps[0])
    restored = so.from_portable(alone, portable, steps[0])
    assert helpers.worst(restored, states[-1]) <= 1e-5


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
    _, state = tx.update(first, tx.init(first), first)
    update, after = tx.update(dict(second, w=None), state, first)
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


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)], ids=str)
def test_newton_schulz_squares_the_shorter_side(shape):
    found = helpers.update_equations(spectral(), {"w": jnp.ones(shape)})
    dots = [eqn for eqn, _ in found if eqn.primitive.name == "dot_general"]
    sizes = sorted(eqn.outvars[0].aval.size for eqn in dots)
    assert sizes == [9, 9, 21]


def test_sign_descent_takes_any_tree():
    tree = {
        "scalar": jnp.float32(2.0),
        "empty": jnp.ones((0, 3)),
        "one": jnp.ones((1,)),
        "kernel": helpers.normals(0, 3, 3, 4, 5),
        "half": helpers.normals(1, 7).astype(jnp.bfloat16),
    }
    updates, states = helpers.trace(sign(), tree, [tree] * 5)
    helpers.assert_equal(updates[-1], jax.tree.map(jnp.sign, tree))
    helpers.assert_finite(states)


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


NO_SCALE = "`scale` must be a function"
BAD = {
    "method, a name": (lambda: spectral(method="svd"), "`method` .* got 'svd'"),
    "method, a root": (lambda: spectral(method=so.Eigh()), "`method` .* got Eigh"),
    "steps": (lambda: so.NewtonSchulz(steps=0), "`steps` .* got 0"),
    "eps": (lambda: so.NewtonSchulz(eps=-1.0), "`eps` .* got -1.0"),
    "one coefficient": (lambda: so.NewtonSchulz((1.0,)), r"`coeff.* got \(1.0,\)"),
    "no coefficients": (lambda: so.NewtonSchulz(()), r"`coefficients` .* got \(\)"),
    "a number": (lambda: so.NewtonSchulz(1.5), "`coefficients` .* got 1.5"),
    "a name": (lambda: so.NewtonSchulz("dion"), "`coefficients` .* got 'dion'"),
    "not finite": (
        lambda: so.NewtonSchulz((1.5, np.nan)),
        r"`coefficients` must be two or more finite .* got \(1.5, nan\)",
    ),
    "two lengths": (
        lambda: so.NewtonSchulz(((1.5, -0.5), QUINTIC)),
        "`coefficients` must be two or more .* of one length",
    ),
    "too many polynomials": (
        lambda: so.NewtonSchulz((QUINTIC,) * 3, steps=2),
        "`steps` must be at least the number of polynomials, 3, got 2",
    ),
    "shrinks": (
        lambda: so.NewtonSchulz((0.5, 0.5)),
        r"`coefficients` must bring .* got \(0.5, 0.5\)",
    ),
    "grows": (lambda: so.NewtonSchulz((3.4, 1.0)), "`coefficients` must bring"),
    "stops elsewhere": (lambda: so.NewtonSchulz((1.2, -0.01)), "to 4.47 … 4.47"),
    "scale, a number": (lambda: so.NewtonSchulz(scale=0.2), f"{NO_SCALE}.* got 0.2"),
    "scale, one argument": (lambda: so.Svd(scale=lambda rows: rows), NO_SCALE),
    "scale by numpy": (lambda: so.Svd(scale=lambda m, n: np.sqrt(m / n)), NO_SCALE),
    "scale, a pair": (lambda: so.Svd(scale=lambda m, n: (m, n)), NO_SCALE),
    "nuclear": (lambda: so.Svd(nuclear_scaling=2), "`nuclear_scaling` .* got 2"),
    "sign's scale": (lambda: sign(scale="l2"), "`scale` .* got 'l2'"),
    "sign's function": (lambda: sign(scale=jnp.abs), NO_SCALE),
    "b1": (lambda: spectral(1.0), "`b1` must be below 1, got 1.0"),
    "start": (lambda: sign(start=0), "`start` .* got 0"),
    "graft": (lambda: spectral(graft="lion"), "`graft` .* got 'lion'"),
    "graft_b2": (
        lambda: sign(graft="adam", graft_b2=1.0),
        "`graft_b2` must be below 1",
    ),
    "blocking": (lambda: spectral(blocking=8), "`blocking` .* got 8"),
    "placement": (lambda: sign(placement=8), "`placement` .* got 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_shown(name):
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()
