"""Inverse roots by coupled matrix iterations: products alone, no decomposition."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shampoo_optax._checks import Precision
from shampoo_optax._newton_methods import (
    CoupledNewton,
    HigherOrderNewton,
    Iteration,
    NewtonDB,
    fraction_of,
)
from shampoo_optax._stacks import (
    contract,
    eye_of,
    traces,
)

_GROWTH = 1.2  # an error that grows by more than this has passed its minimum
_STALLED = 1e-3  # an error that stands still below this is at its minimum
_NOISY = 0.1  # below this, one that does not fall at a lower precision is noise
_PROBES = 4  # vectors of a power iteration, of which some may miss what is sought

State = tuple[jax.Array, ...]  # the last matrix goes to the identity


def iterate_roots(
    matrices: jax.Array,
    exponent: float,
    root: Iteration,
    padding: jax.Array | None = None,
    previous: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Inverse roots :math:`A^{-q/p}` by an iteration.

    Args:
      matrices: `[n, d, d]`, symmetric, positive, of about norm 1.
      exponent: q/p, the same for all.
      root: the iteration and when to stop.
      padding: bool `[n, d]`, which rows and columns are padding; `None`: none are.
      previous: `[n, d, d]`, inverses from which to start, for q/p = 1 alone; `None`:
        the start is a multiple of the identity.

    Returns:
      the roots `[n, d, d]`, the residuals `[n]`, which are the largest entry of
      |A X^p - I|, and the turns that each slot took, int32 `[n]`.
    """
    ratio = 1 / fraction_of(exponent)  # p / q
    power = ratio.numerator
    if isinstance(root, NewtonDB):
        roots, turns = _halved_roots(matrices, power, root, padding)
    else:
        roots, turns = _coupled_roots(matrices, power, root, previous)
    if root.precision != "highest":  # rounded factors do not commute
        roots = (roots + roots.mT) / 2
    residual = _largest_entry(_product(matrices, _power(roots, power)))
    return _power(roots, ratio.denominator), residual, turns


def _coupled_roots(
    matrices: jax.Array,
    power: int,
    root: CoupledNewton | HigherOrderNewton,
    previous: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Inverse p-th roots by the iteration that keeps M = A X^p.

    Each turn multiplies X by S(M) and M by S(M)^p, where S(M) is the start of the
    power series of M^(-1/p) about the identity, to which M goes.
    """
    precision = root.precision
    eye, scale = eye_of(matrices), _scale(matrices, power, root)[:, None, None]
    order = root.order if isinstance(root, HigherOrderNewton) else 2
    series = _series(power, order)

    def turn(state: State, first: jax.Array) -> State:
        roots, products = state
        factor = _horner(eye - products, series[:2], precision)
        if order > 2:
            series_now = _horner(eye - products, series, precision)
            factor = jnp.where(first, factor, series_now)
        roots = _product(roots, factor, precision)
        powers = _power(factor, power, precision)
        return roots, _product(powers, products, precision)

    def halts(fresh: jax.Array, errors: jax.Array) -> jax.Array:
        if precision == "highest":
            return (fresh == errors) & (fresh < _STALLED)
        return (fresh >= errors) & (errors < _NOISY)

    start = (scale ** (1 / power) * eye, scale * matrices)
    if previous is not None:
        start = _nearer(_from_previous(matrices, previous), start)
    (roots, _), turns = _until_done(turn, start, root, _largest_entry, halts)
    return roots, turns


def _from_previous(matrices: jax.Array, previous: jax.Array) -> State:
    """The state from previous inverses, so scaled that the iteration converges."""
    products = _product(matrices, previous)
    scale = largest_eigenvalue(products, None, 10)[:, None, None]
    return previous / scale, products / scale


def _nearer(state: State, other: State) -> State:
    """In each slot the state whose last matrix is nearer to the identity."""
    first = _frobenius(state[-1]) < _frobenius(other[-1])
    return tuple(
        jnp.where(first[:, None, None], one, two)
        for one, two in zip(state, other, strict=True)
    )


def _halved_roots(
    matrices: jax.Array, power: int, root: NewtonDB, padding: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Inverse p-th roots by square roots of square roots, p = 1, 2, 4 or 8.

    Each turn multiplies Y and Z by (3 I - Z Y) / 2; Z Y goes to the identity. With
    the factors in another order rounding errors grow.
    """
    eye, precision = eye_of(matrices), root.precision

    def turn(state: State, first: jax.Array) -> State:
        square, inverse, products = state
        factor = (3 * eye - products) / 2
        square = _product(square, factor, precision)
        inverse = _product(factor, inverse, precision)
        return square, inverse, _product(inverse, square, precision)

    def halts(fresh: jax.Array, errors: jax.Array) -> jax.Array:
        # Without rounding an error below 1/2 goes to less than its square.
        return (fresh > errors / 2) & (errors < 1 / 2)

    scale = largest_eigenvalue(matrices, padding, root.power_iterations)
    scale = scale[:, None, None]
    square, turns = matrices / scale, jnp.zeros(len(matrices), jnp.int32)
    for _ in range(max(1, power.bit_length() - 1)):
        start = (square, jnp.broadcast_to(eye, square.shape), square)
        state, more = _until_done(turn, start, root, _frobenius, halts)
        square, inverse, _ = state
        turns += more
    inverse = _power(inverse, 2) if power == 1 else inverse
    return scale ** (-1 / power) * inverse, turns


def largest_eigenvalue(
    matrices: jax.Array, padding: jax.Array | None, turns: int
) -> jax.Array:
    """An estimate from below by power iterations from fixed vectors, `[n]`."""
    rows = jnp.arange(1, matrices.shape[-1] + 1, dtype=matrices.dtype)
    columns = jnp.arange(1, _PROBES + 1, dtype=matrices.dtype)
    vectors = jnp.cos(rows[:, None] * columns[None])[None]
    if padding is not None:
        vectors = jnp.where(padding[:, :, None], 0, vectors)
    vectors = jnp.broadcast_to(vectors, (*matrices.shape[:2], _PROBES))

    def turn(_, vectors):
        lengths = jnp.linalg.norm(vectors, axis=1, keepdims=True)
        return _product(matrices, vectors / lengths)

    vectors = jax.lax.fori_loop(0, turns, turn, vectors)
    return jnp.max(jnp.linalg.norm(vectors, axis=1), axis=1)


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


def _horner(
    matrices: jax.Array, coefficients: list[float], precision: Precision
) -> jax.Array:
    """The polynomial with these coefficients, the constant first."""
    eye = eye_of(matrices)
    value = coefficients[-1] * matrices + coefficients[-2] * eye
    for coefficient in coefficients[-3::-1]:
        value = _product(value, matrices, precision) + coefficient * eye
    return value


def _until_done(
    turn: Callable[[State, jax.Array], State],
    start: State,
    root: Iteration,
    error_of: Callable[[jax.Array], jax.Array],
    halts: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[State, jax.Array]:
    """Takes turns in each slot until it is done by itself.

    Args:
      turn: maps a state, and whether the turn is the first, to the next state.
      start: the first state.
      root: when to stop.
      error_of: maps the last matrices of a state to their errors, `[n]`.
      halts: maps new and old errors to where the error is at its minimum.

    Returns:
      the last state, and the turns that each slot took, int32 `[n]`.
    """
    errors = error_of(start[-1])

    def unfinished(carry):
        *_, running, done = carry
        return jnp.any(running) & (done < root.max_iterations)

    def advance(carry):
        state, turns, errors, running, done = carry
        moved = turn(state, done == 0)
        state = tuple(
            jnp.where(running[:, None, None], new, old)
            for new, old in zip(moved, state, strict=True)
        )
        turns += running.astype(turns.dtype)
        fresh = error_of(state[-1])
        worse = (fresh > _GROWTH * errors) | halts(fresh, errors)
        running &= (done == 0) | ~worse
        return state, turns, fresh, running & (fresh > root.tolerance), done + 1

    turns = jnp.zeros(len(errors), jnp.int32)
    carry = (start, turns, errors, errors > root.tolerance, jnp.int32(0))
    state, turns, *_ = jax.lax.while_loop(unfinished, advance, carry)
    return state, turns


def _product(
    left: jax.Array, right: jax.Array, precision: Precision = "highest"
) -> jax.Array:
    return contract(left, right, "nij,njk->nik", precision)


def _power(
    matrices: jax.Array, exponent: int, precision: Precision = "highest"
) -> jax.Array:
    """The matrix power by repeated squaring, exponent >= 1."""
    half = matrices if exponent < 4 else _power(matrices, exponent // 2, precision)
    if exponent == 1:
        return matrices
    result = _product(half, half, precision)
    return _product(result, matrices, precision) if exponent % 2 else result


def _largest_entry(matrices: jax.Array) -> jax.Array:
    """The largest entry of |M - I|, `[n]`."""
    return jnp.max(jnp.abs(matrices - eye_of(matrices)), axis=(1, 2))


def _frobenius(matrices: jax.Array) -> jax.Array:
    """The Frobenius norm of M - I, `[n]`."""
    return jnp.sqrt(jnp.sum(jnp.square(matrices - eye_of(matrices)), axis=(1, 2)))
