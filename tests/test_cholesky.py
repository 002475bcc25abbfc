"""Triangular operations in halves, and bases that are followed by means of them."""

from functools import partial

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from test_eigen import dtypes, off_diagonal, run

import shampoo_optax as so
from shampoo_optax import _eigen
from shampoo_optax._cholesky import cholesky, divide_by_transpose, gram_of_lower
from shampoo_optax._eigen import eigenbases, sure_eigenbases
from shampoo_optax._orthogonal import align

# Up to a leaf, above it, and with halves that are halved again, one of them odd.
sides = pytest.mark.parametrize("side", [1, 5, 256, 257, 515])


def positive(side, size=2, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((size, side, 2 * side + 3))
    return np.einsum("nij,nkj->nik", blocks, blocks) / blocks.shape[-1]


@sides
@dtypes
def test_decomposition_is_that_of_numpy(side, dtype, x64):
    matrices = positive(side)
    below = np.tril(matrices) + np.triu(np.full((side, side), np.nan), 1)
    got = np.asarray(helpers.quick_jit(cholesky)(jnp.asarray(below, dtype)))
    bound = 4 * np.finfo(dtype).eps * np.sqrt(side)
    np.testing.assert_allclose(got, np.linalg.cholesky(matrices), rtol=0, atol=bound)
    np.testing.assert_array_equal(got, np.tril(got))
    one = cholesky(jnp.asarray(below[1], dtype))
    np.testing.assert_allclose(one, got[1], rtol=0, atol=bound)


@sides
def test_grams_of_triangular_matrices_are_those_of_numpy(side, x64):
    lower = np.linalg.cholesky(positive(side))
    got = np.tril(helpers.quick_jit(gram_of_lower)(jnp.asarray(lower)))
    want = np.tril(lower.swapaxes(1, 2) @ lower)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@sides
@dtypes
def test_triangular_systems_are_those_of_numpy(side, dtype, x64):
    lower = np.linalg.cholesky(positive(side))
    given = np.random.default_rng(1).standard_normal((2, 7, side))
    arrays = (jnp.asarray(x, dtype) for x in (given, lower))
    got = np.asarray(helpers.quick_jit(divide_by_transpose)(*arrays))
    want = np.linalg.solve(lower, given.swapaxes(1, 2)).swapaxes(1, 2)
    bound = 20 * np.finfo(dtype).eps * np.sqrt(side)
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def test_indefinite_matrices_give_no_number():
    assert np.any(np.isnan(cholesky(jnp.diag(jnp.array([1.0, -1.0])))))


# ---- bases


def drifting(side, steps, power, period=10):
    """Averages of gradients whose eigenvectors turn slowly, one at each refresh."""
    rng = np.random.default_rng(0)
    scales = np.arange(1, side + 1.0) ** (-power / 2)
    skew = rng.standard_normal((side, side)) * 0.002 / np.sqrt(side)
    turn, _ = np.linalg.qr(np.eye(side) + skew - skew.T)
    vectors, _ = np.linalg.qr(rng.standard_normal((side, side)))
    factor = np.zeros((side, side))
    for _ in range(steps):
        for _ in range(period):
            gradient = vectors @ (
                scales[:, None] * rng.standard_normal((side, 2 * side))
            )
            factor = 0.99 * factor + 0.01 * gradient @ gradient.T / (2 * side)
            vectors = turn @ vectors
        yield factor


def followed(basis, factors):
    """The share off the diagonal in each basis, from the eigenvectors of the first."""
    bases = np.linalg.eigh(factors[0])[1][None]
    for factor in factors[1:]:
        new, values, residuals, iterations = map(
            jnp.asarray, run(factor[None], bases, basis, dtype=np.float32)
        )
        if isinstance(basis, so.QRBasis):  # as at a refresh
            new, _ = align(jnp.asarray(bases, jnp.float32), new, values, 0.71)
        bases = np.asarray(new)
        rotated = bases[0].astype(float).T @ factor @ bases[0]
        assert residuals <= 1e-5 and iterations == 1
        yield off_diagonal(rotated)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_one_iteration_at_a_refresh_settles_in_descending_order_alone(power):
    factors = list(drifting(48, 16, power))
    descending = list(followed(so.CholeskyBasis(), factors))[5:]
    ascending = list(followed(so.QRBasis(1, 0.0), factors))[5:]
    assert np.max(descending) <= 0.08
    assert np.mean(ascending) >= 2 * np.max(descending)


def follow_marked(monkeypatch, matrices, old):
    """A step with -1 in the place of all vectors that an eigendecomposition gives."""

    def marked(arrays):
        return jnp.diagonal(arrays[0]), jnp.full_like(arrays[1], -1)

    monkeypatch.setattr(_eigen, "_decomposed_in_place", marked)

    def build(basis):
        return partial(eigenbases, basis=basis)

    return run(matrices, old, so.CholeskyBasis(), dtype=np.float32, build=build)


def test_what_has_no_old_basis_or_no_cholesky_decomposition_is_decomposed(monkeypatch):
    rng = np.random.default_rng(0)
    near, _ = np.linalg.qr(np.eye(6) + 0.1 * rng.standard_normal((6, 6)))
    good, indefinite = positive(6, 1)[0], np.diag([1.0, 1, 1, 1, 1, -1])
    zero, diagonal = np.zeros((6, 6)), np.diag(np.arange(1, 7.0))
    matrices = np.stack([good, good, indefinite, zero, zero, diagonal])
    old = np.stack([np.eye(6), near, near, near, np.eye(6), np.eye(6)])
    bases, *_ = follow_marked(monkeypatch, matrices, old)
    decomposed = [np.all(basis == -1) for basis in bases]
    assert decomposed == [True, False, True, False, False, False]
    np.testing.assert_allclose(bases[3:], old[3:], rtol=0, atol=5e-7)


def test_turns_of_what_is_decomposed_are_one():
    good, indefinite = positive(6, 1)[0], np.diag([1.0, 1, 1, 1, 1, -1])
    turned, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))
    arrays = np.stack([good, indefinite, good]), np.stack([np.eye(6), turned, turned])
    *_, iterations = run(*arrays, so.CholeskyBasis(3), dtype=np.float32)
    np.testing.assert_array_equal(iterations, [1, 1, 3])


def test_what_the_smaller_threshold_would_refuse_is_decomposed():
    """A basis that is off by more than a root allows, and less than it does itself."""
    matrix = positive(6, 1).astype(np.float32)
    rng = np.random.default_rng(2)
    vectors, _ = np.linalg.qr(np.eye(6) + 1e-3 * rng.standard_normal((6, 6)))
    bent = (vectors * (1 + 4e-6)).astype(np.float32)[None]
    residuals = {}
    for limit in (1e-2, 2e-6):
        arrays = jnp.asarray(matrix), jnp.asarray(bent), so.CholeskyBasis(), None
        vectors, values, residuals[limit], _ = sure_eigenbases(*arrays, limit)
    assert 2e-6 < residuals[1e-2] < 1.2e-5  # not straightened
    assert residuals[2e-6] < 2e-6


@pytest.mark.parametrize("rank", [1, 5, 40])
def test_factors_that_lack_rank_are_followed(rank, monkeypatch):
    rng = np.random.default_rng(rank)
    blocks = rng.standard_normal((48, rank))
    matrix = blocks @ blocks.T
    values, exact = np.linalg.eigh(matrix)
    near, _ = np.linalg.qr(exact + 1e-3 * rng.standard_normal((48, 48)))
    found = follow_marked(monkeypatch, matrix[None], near[None])
    (basis,), (estimates,), residuals, iterations = found
    assert iterations == 1 and residuals <= 1e-5
    np.testing.assert_allclose(basis.T @ basis, np.eye(48), atol=5e-6)
    assert off_diagonal(basis.astype(float).T @ matrix @ basis) <= 2e-3
    np.testing.assert_allclose(estimates, values, rtol=0, atol=1e-4 * values[-1])
