"""Inverse roots by coupled matrix iterations: products alone, no decomposition."""

from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp

from shampoo_optax._methods import CoupledNewton, HigherOrderNewton
from shampoo_optax._stacks import contract, traces

_GROWTH = 1.2  # an error that grows by more than this has passed its minimum
_STALLED = 1e-3  # an error that stands still below this is at its minimum


def add_to_diagonal(matrices: jax.Array, values: jax.Array) -> jax.Array:
    """Adds `[n]` or `[n, d]` to the diagonals of `[n, d, d]`."""
    return matrices + values.reshape(len(values), -1, 1) * _eye(matrices)


def largest_row_sum(matrices: jax.Array) -> jax.Array:
    """The norm that bounds the largest eigenvalue from above, `[n]`."""
    return jnp.max(jnp.sum(jnp.abs(matrices), axis=2), axis=1)


def iterate_roots(
    matrices: jax.Array, exponent: float, root: CoupledNewton | HigherOrderNewton
) -> tuple[jax.Array, jax.Array]:
    r"""Inverse roots :math:`A^{-q/p}` by the iteration that keeps X^p A = z^-1 M.

    Each step multiplies X by S(M) and M by S(M)^p, where S(M) is the start of the
    power series of :math:`M^{-1/p}` about the identity, to which M goes.

    Args:
      matrices: `[n, d, d]`, symmetric, positive, of about norm 1.
      exponent: q/p, the same for all.
      root: the series and when to stop.

    Returns:
      the roots `[n, d, d]`, and the residuals `[n]`: the largest entry of
      |A X^p - I|.
    """
    ratio = Fraction(1 / exponent).limit_denominator(64)  # p / q
    power, eye = ratio.numerator, _eye(matrices)
    scale = _scale(matrices, power, root)[:, None, None]
    order = root.order if isinstance(root, HigherOrderNewton) else 2
    series = _series(power, order)

    def step(products: jax.Array, first: jax.Array) -> jax.Array:
        newton = _horner(eye - products, series[:2])
        if order == 2:
            return newton
        return jnp.where(first, newton, _horner(eye - products, series))

    start = scale ** (1 / power) * eye
    roots = _iterate(step, start, scale * matrices, power, root)
    residual = _distance(_product(matrices, _power(roots, power)))
    return _power(roots, ratio.denominator), residual


def _scale(matrices, power: int, root: CoupledNewton | HigherOrderNewton) -> jax.Array:
    """The z with which the eigenvalues of zA are where the iteration converges."""
    if isinstance(root, HigherOrderNewton):
        return 1 / traces(matrices)
    return (power + 1) / (2 * jnp.sqrt(jnp.sum(jnp.square(matrices), axis=(1, 2))))


def _series(power: int, order: int) -> list[float]:
    """The first coefficients of (1 - x)^(-1/p) in powers of x."""
    series = [1.0]
    for j in range(1, order):
        series.append(series[-1] * (1 + (j - 1) * power) / (j * power))
    return series


def _horner(matrices: jax.Array, coefficients: list[float]) -> jax.Array:
    """The polynomial with these coefficients, the constant first."""
    eye = _eye(matrices)
    value = coefficients[-1] * matrices + coefficients[-2] * eye
    for coefficient in coefficients[-3::-1]:
        value = _product(value, matrices) + coefficient * eye
    return value


def _iterate(
    step: Callable[[jax.Array, jax.Array], jax.Array],
    roots: jax.Array,
    products: jax.Array,
    power: int,
    root: CoupledNewton | HigherOrderNewton,
) -> jax.Array:
    """Multiplies every X by S(M) and M by S(M)^p until it is done by itself."""
    errors = _distance(products)

    def unfinished(carry):
        *_, running, done = carry
        return jnp.any(running) & (done < root.max_iterations)

    def advance(carry):
        roots, products, errors, running, done = carry
        factor = step(products, done == 0)
        moving = running[:, None, None]
        roots = jnp.where(moving, _product(roots, factor), roots)
        products = jnp.where(
            moving, _product(_power(factor, power), products), products
        )
        fresh = _distance(products)
        stuck = (fresh == errors) & (fresh < _STALLED)
        running &= (done == 0) | ~((fresh > _GROWTH * errors) | stuck)
        return roots, products, fresh, running & (fresh > root.tolerance), done + 1

    start = (roots, products, errors, errors > root.tolerance, jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, start)[0]


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return contract(left, right, "nij,njk->nik")


def _power(matrices: jax.Array, exponent: int) -> jax.Array:
    """The matrix power by repeated squaring, exponent >= 1."""
    half = matrices if exponent < 4 else _power(matrices, exponent // 2)
    if exponent == 1:
        return matrices
    result = _product(half, half)
    return _product(result, matrices) if exponent % 2 else result


def _eye(matrices: jax.Array) -> jax.Array:
    return jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None]


def _distance(matrices: jax.Array) -> jax.Array:
    """The largest entry of |M - I|, `[n]`."""
    return jnp.max(jnp.abs(matrices - _eye(matrices)), axis=(1, 2))
