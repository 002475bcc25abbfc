"""Iterations: turns, padding, scaling, warm starts, and the second attempt."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shampoo_optax as so
from shampoo_optax._newton import iterate_roots, largest_eigenvalue
from shampoo_optax._retry import retried
from shampoo_optax._roots import inverse_roots

ROOTS = {
    "CoupledNewton": so.CoupledNewton(),
    "order 3": so.HigherOrderNewton(),
    "NewtonDB": so.NewtonDB(),
}
methods = pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)


def matrices_of(spectra, seed=0):
    """Symmetric matrices `[n, d, d]` with these eigenvalues `[n, d]`, float64."""
    spectra = np.array(spectra)
    rng = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(rng.standard_normal((*spectra.shape, spectra.shape[1])))
    half = vectors * np.sqrt(spectra)[:, None]
    return half @ half.transpose(0, 2, 1)


def geometric(side, condition):
    return condition ** -np.linspace(0, 1, side)


def exact_roots(matrices, exponent):
    values, vectors = np.linalg.eigh(matrices)
    return (vectors * values[:, None] ** -exponent) @ vectors.transpose(0, 2, 1)


def compute(matrices, exponent, root, *, ridge=0.0, **kwargs):
    """Roots, residuals and turns as NumPy arrays."""
    powers = np.full(len(matrices), exponent)

    def call(batch, kwargs):
        return inverse_roots(batch, powers, root, ridge, 0.0, **kwargs)

    return jax.tree.map(np.asarray, helpers.quick_jit(call)(matrices, kwargs))


def traced(call, *args):
    return list(helpers.equations(jax.make_jaxpr(call)(*args).jaxpr))


@methods
def test_every_slot_stops_by_itself(root, x64):
    """A slot takes the turns, and has the root, that it has alone."""
    spectra = [np.ones(6), geometric(6, 1e2), geometric(6, 1e5)]
    matrices = matrices_of(spectra)
    roots, residuals, turns = compute(matrices, 1 / 4, root)
    assert turns.dtype == np.int32 and turns[0] < turns[1] < turns[2]
    for slot in range(3):
        alone = compute(matrices[slot][None], 1 / 4, root)
        assert alone[2] == turns[slot]
        np.testing.assert_allclose(roots[slot], alone[0][0], rtol=0, atol=1e-11)
    np.testing.assert_allclose(roots, exact_roots(matrices, 1 / 4), atol=1e-5)
    assert np.all(residuals <= 1e-4)


@methods
def test_the_residual_is_that_of_the_root(root, x64):
    matrices = matrices_of([geometric(6, 1e2), geometric(6, 1e5)])
    early = root.__class__(max_iterations=3)
    scaled = matrices / np.trace(matrices, axis1=1, axis2=2)[:, None, None]
    roots, residuals, turns = (
        np.asarray(x) for x in iterate_roots(jnp.asarray(scaled), 1 / 4, early)
    )
    errors = np.abs(scaled @ np.linalg.matrix_power(roots, 4) - np.eye(6))
    np.testing.assert_allclose(residuals, errors.max((1, 2)), rtol=1e-9)
    assert np.all(residuals > 1e-3)
    np.testing.assert_array_equal(turns, 6 if isinstance(root, so.NewtonDB) else 3)


@methods
def test_padding_changes_no_root(root, x64):
    values = [geometric(5, 1e3), geometric(5, 10)]
    matrices = matrices_of(values)
    padded = np.zeros((2, 9, 9))
    padded[:, :5, :5] = matrices
    padding = np.tile(np.arange(9) >= 5, (2, 1))
    roots, residuals, _ = compute(padded, 1 / 2, root, padding=padding)
    want = exact_roots(matrices, 1 / 2)
    error = np.max(np.abs(roots[:, :5, :5] - want), axis=(1, 2))
    assert np.all(error <= 1e-6 * np.max(np.abs(want), axis=(1, 2)))
    assert np.all(residuals <= 1e-5)
    np.testing.assert_array_equal(roots[:, :5, 5:], 0)
    np.testing.assert_array_equal(roots[:, 5:, :5], 0)


def test_padding_takes_no_turn_of_newton_db(x64):
    """Neither the estimate of the largest eigenvalue nor the error sees it."""
    matrices = matrices_of([geometric(5, 1e3)])
    padded = np.zeros((1, 64, 64))
    padded[:, :5, :5] = matrices
    padding = (np.arange(64) >= 5)[None]
    *_, turns = compute(padded, 1 / 4, so.NewtonDB(), padding=padding)
    *_, alone = compute(matrices, 1 / 4, so.NewtonDB())
    assert abs(turns - alone) <= 1


@pytest.mark.parametrize("side", [1, 2, 33])
def test_thelargest_eigenvalue_is_estimated_from_below(side, x64):
    spectra = [np.ones(side), geometric(side, 1e4), geometric(side, 1.5)]
    matrices = matrices_of(spectra)
    largest = largest_eigenvalue(jnp.asarray(matrices), None, 10)
    assert np.all(largest <= 1 + 1e-12) and np.all(largest >= 1 / 1.4)
    padded = jnp.pad(matrices, ((0, 0), (0, 7), (0, 7)))
    padded += jnp.diag(jnp.r_[jnp.zeros(side), jnp.full(7, 0.9)])[None]
    padding = jnp.tile(jnp.arange(side + 7) >= side, (3, 1))
    again = largest_eigenvalue(padded, padding, 10)
    np.testing.assert_allclose(again, largest, rtol=1e-12)


def test_thelargest_eigenvalue_is_found_where_the_first_vector_misses_it(x64):
    probe = np.cos(np.arange(1, 17))
    top = np.random.default_rng(0).standard_normal(16)
    top -= probe * (top @ probe) / (probe @ probe)
    top /= np.linalg.norm(top)
    matrix = 0.01 * np.eye(16) + np.outer(top, top)
    largest = largest_eigenvalue(jnp.asarray(matrix)[None], None, 10)
    np.testing.assert_allclose(largest, 1.01, rtol=1e-9)


@pytest.mark.parametrize("order, exponent", [(1, 1 / 2), (2, 1 / 4)])
def test_a_direction_by_newton_db_is_that_of_the_formula(order, exponent):
    gradient = helpers.normals(0, *(6, 4)[:order])
    tx = so.scale_by_shampoo(**helpers.BARE, eps=1e-2, root=so.NewtonDB())
    (update,), (state,) = helpers.trace(tx, gradient, [gradient], jit=helpers.quick_jit)
    matrix = np.asarray(gradient, np.float64).reshape(6, -1)
    factors = [matrix @ matrix.T, matrix.T @ matrix][:order]
    left, *right = (
        exact_roots((factor + 1e-2 * np.eye(len(factor)))[None], exponent)[0]
        for factor in factors
    )
    want = left @ matrix @ right[0] if right else left @ matrix
    np.testing.assert_allclose(update, want.reshape(gradient.shape), atol=1e-4)
    assert helpers.total(state.failures) == 0


@pytest.mark.parametrize(
    "root, exponent",
    [
        *((root, 1 / 4) for root in ROOTS.values()),
        (so.CoupledNewton(warm_start=True), 1),
    ],
    ids=[*ROOTS, "warm start"],
)
def test_every_product_asks_for_the_highest_precision(root, exponent):
    def call(batch, previous):
        return inverse_roots(batch, [exponent], root, 0.0, 0.0, previous=previous)

    with jax.default_matmul_precision("bfloat16"):
        found = traced(call, jnp.eye(3)[None], jnp.eye(3)[None])
    highest = (jax.lax.Precision.HIGHEST,) * 2
    precisions = [
        e.params["precision"] for e, _ in found if e.primitive.name == "dot_general"
    ]
    assert len(precisions) >= 4 and set(precisions) == {highest}


# ---- warm start


def followed(side=32, steps=10):
    """A moving average, of condition 1e4 or more, before and after some steps."""
    rng = np.random.default_rng(side)
    scale = 1e-2 ** np.linspace(0, 1, side)[:, None]

    def move(factor):
        gradient = scale * rng.standard_normal((side, side))
        return 0.99 * factor + 0.01 * gradient @ gradient.T

    factor = np.zeros((side, side))
    for _ in range(200):
        factor = move(factor)
    before = factor
    for _ in range(steps):
        factor = move(factor)
    return before, factor


WARM = [so.CoupledNewton(warm_start=True), so.HigherOrderNewton(warm_start=True)]
warm = pytest.mark.parametrize("root", WARM, ids=lambda root: type(root).__name__)


@warm
def test_a_warm_start_saves_turns_of_an_inverse(root, x64):
    before, factor = followed()
    previous = np.linalg.inv(before)
    batch, exact = np.stack([factor, 1e6 * factor]), np.linalg.inv(factor)
    starts = np.stack([previous, 1e-5 * previous])  # the second ten times too large
    roots, _, turns = compute(batch, 1.0, root, previous=starts)
    *_, cold = compute(batch, 1.0, root)
    assert np.all(cold >= 12) and np.all(turns <= 6)
    for got, scale in zip(roots, (1, 1e6), strict=True):
        np.testing.assert_allclose(scale * got, exact, atol=1e-6 * np.max(exact))


@warm
def test_a_bad_start_does_no_harm(root, x64):
    _, factor = followed()
    exact = np.linalg.inv(factor)
    noise = np.random.default_rng(0).standard_normal(factor.shape)
    starts = [np.full_like(exact, np.nan), np.zeros_like(exact), -exact, noise]
    batch = np.stack(len(starts) * [factor])
    roots, residuals, _ = compute(batch, 1.0, root, previous=np.stack(starts))
    for got in roots:
        np.testing.assert_allclose(got, exact, atol=1e-6 * np.max(exact))
    assert np.all(residuals <= 1e-4)
    # Nor is a second attempt needed: such a slot starts from the identity.
    once = iterate_roots(jnp.asarray(batch), 1.0, root, None, jnp.stack(starts))
    *_, cold = iterate_roots(jnp.asarray(batch), 1.0, root)
    assert np.all(once[1] <= 1e-4)
    np.testing.assert_array_equal(once[2], cold)


@pytest.mark.parametrize(
    "root, exponent",
    [(WARM[0], 1 / 2), (WARM[1], 1 / 4), (so.CoupledNewton(), 1.0)],
    ids=["1/2", "1/4", "not asked for"],
)
def test_other_roots_start_from_the_identity(root, exponent, x64):
    _, factor = followed(8)
    previous = np.full((1, 8, 8), np.nan)  # would spoil whatever it touched

    def call(batch):
        return inverse_roots(
            batch, np.array([exponent]), root, 0.0, 0.0, previous=previous
        )

    assert "cond" not in {e.primitive.name for e, _ in traced(call, factor[None])}
    roots, *_ = helpers.quick_jit(call)(factor[None])
    want = exact_roots(factor[None], exponent)
    np.testing.assert_allclose(roots, want, atol=1e-5 * np.max(want))


# ---- the second attempt


@pytest.mark.parametrize("root", [so.CoupledNewton(), so.NewtonDB()], ids=repr)
def test_what_fails_in_float32_is_computed_in_float64(root):
    matrices = matrices_of([geometric(8, 1e10), geometric(8, 10)]).astype(np.float32)
    ridge = 1e-9  # float32 rounds eigenvalues of a size of 1e-7
    narrow, residuals, _ = compute(matrices, 1 / 2, root, ridge=ridge)
    assert residuals[0] > root.max_residual or np.isnan(residuals[0])
    assert residuals[1] <= 1e-3
    with helpers.enable_x64():
        roots, residuals, _ = compute(matrices, 1 / 2, root, ridge=ridge)
    assert roots.dtype == residuals.dtype == np.float32
    assert np.all(residuals <= root.max_residual)
    lifted = matrices.astype(np.float64) + ridge * np.eye(8)
    want = exact_roots(lifted, 1 / 2)
    error = np.max(np.abs(roots - want), axis=(1, 2)) / np.max(np.abs(want), (1, 2))
    assert np.all(error <= [1e-4, 1e-5])
    np.testing.assert_array_equal(roots[1], narrow[1])  # it has not failed


def test_a_second_attempt_is_traced_only_where_it_is_possible():
    batch = np.stack(2 * [np.eye(4)])

    def call(batch):
        return inverse_roots(batch, np.full(2, 1 / 4), so.Eigh(), 1e-6, 0.0)

    def kinds(dtype):
        found = traced(call, jnp.asarray(batch, dtype))
        wide = {"cond[1]" in path for e, path in found if e.primitive.name == "eigh"}
        return wide, {str(v.aval.dtype) for e, _ in found for v in e.outvars}

    assert kinds("float32")[0] == {False} and "float64" not in kinds("float32")[1]
    with helpers.enable_x64():
        assert kinds("float64")[0] == {False}
        where, dtypes = kinds("float32")
        assert where == {False, True} and {"float32", "float64"} <= dtypes


def test_only_failed_slots_are_computed_again():
    eye = jnp.eye(2)
    batch = jnp.stack([eye, 2 * eye, 0 * eye, jnp.nan * eye, 5 * eye])
    residuals = jnp.array([0.0, 0.2, 0.2, 0.2, jnp.nan])

    def first(batch):
        matrices = batch.at[0].set(jnp.where(batch[0] == 3, jnp.inf, batch[0]))
        return matrices, residuals, jnp.zeros(5, jnp.int32)

    def again(batch):
        return batch - 1, jnp.full(5, 0.05), jnp.full(5, 7)

    matrices, _, turns = retried(first, again, 0.1)(batch)
    np.testing.assert_array_equal(turns, [0, 7, 0, 0, 7])
    np.testing.assert_array_equal(matrices[1], batch[1] - 1)
    for slot in (0, 2, 3):
        np.testing.assert_array_equal(matrices[slot], batch[slot])
    *_, turns = retried(first, again, 0.1)(batch.at[0, 0, 0].set(3))
    np.testing.assert_array_equal(turns, [7, 7, 0, 0, 7])  # one entry is infinite


# ---- exponents


@pytest.mark.parametrize(
    "root, exponents, shown",
    [
        (so.NewtonDB(), {2: 1 / 3}, "0.333"),
        (so.NewtonDB(), {2: {0: 1 / 4, 1: 0.75}}, "0.75"),
        (so.NewtonDB(), {1: 2}, "2 for order 1"),
        (so.CoupledNewton(), {2: 0.7071067811865476}, "0.7071067811865476"),
        (so.HigherOrderNewton(), {2: 0.333}, "0.333"),
        (so.HigherOrderNewton(), {2: 1000}, "1000"),
    ],
)
def test_an_exponent_that_an_iteration_cannot_do(root, exponents, shown):
    with pytest.raises(
        ValueError, match="`exponents`, or their default, must be"
    ) as error:
        so.scale_by_shampoo(root=root, exponents=exponents)
    assert shown in str(error.value) and type(root).__name__ in str(error.value)


def test_an_exponent_that_follows_from_the_order_of_a_block():
    params = {"w": jnp.ones((2, 3, 4))}
    blocking = so.Blocking(merge_to=3)
    tx = so.scale_by_shampoo(root=so.NewtonDB(), blocking=blocking)
    with pytest.raises(ValueError, match="`exponents`.*0.1666.* for order 3"):
        tx.init(params)
    so.scale_by_shampoo(root=so.CoupledNewton(), blocking=blocking).init(params)


def test_a_warm_start_where_it_would_do_nothing():
    tx = so.scale_by_shampoo(root=so.CoupledNewton(warm_start=True))
    with pytest.raises(ValueError, match="`exponents`.*1 with `warm_start`.*got 0.25"):
        tx.init({"w": jnp.ones((2, 3))})


def test_exponents_that_iterations_can_do():
    so.scale_by_shampoo(root=so.NewtonDB(), exponents={1: 1, 2: {0: 1 / 8, 1: 0}})
    for exponent in (1 / 3, 0.3, 2 / 3, 3, 1e-3):
        so.scale_by_shampoo(root=so.CoupledNewton(), exponents={2: exponent})
