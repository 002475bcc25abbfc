"""Inverse p-th roots of factors, batched over equal sides, and their refresh."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._config import Options
from shampoo_optax._eigen import checked_eigh, scale_to_one
from shampoo_optax._methods import (
    CoupledNewton,
    Eigh,
    HigherOrderNewton,
    Iteration,
    PseudoInverse,
    Root,
)
from shampoo_optax._newton import add_to_diagonal, iterate_roots, largest_row_sum
from shampoo_optax._refresh import refresh
from shampoo_optax._retry import retried, widened
from shampoo_optax._stacks import AxisStacks, contract, per_slot, traces


def inverse_roots(
    factors: jax.Array,
    exponents: np.ndarray,
    root: Eigh | PseudoInverse | Iteration,
    eps: ArrayLike,
    relative_eps: ArrayLike,
    padding: jax.Array | None = None,
    previous: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Computes :math:`(L + \rho I)^{-e}` for a batch of factors of one side.

    Where 64-bit arrays are enabled, float32 slots that fail are computed once more in
    float64.

    Args:
      factors: `[n, d, d]`, symmetric, float32 or float64.
      exponents: `[n]`, static, the e > 0 of each root; all equal for an iteration.
      root: the method.
      eps: absolute ridge.
      relative_eps: ridge relative to the largest eigenvalue, or to the largest row
        sum where the method knows no eigenvalues.
      padding: bool `[n, d]`, which rows and columns are padding; `None`: none are.
      previous: `[n, d, d]`, the previous roots, for a warm start; `None`: there are
        none.

    Returns:
      the roots `[n, d, d]`, their residuals `[n]`, NaN where the method failed, and
      the turns of an iteration, int32 `[n]`, 0 for a decomposition.
    """
    ridges, precision = (eps, relative_eps), jnp.finfo(factors.dtype).eps
    if isinstance(root, Iteration):
        exponent = float(exponents[0])

        def compute(batch):
            return _iterated(batch, exponent, root, ridges, padding)

        def from_previous(batch):
            return _iterated(batch, exponent, root, ridges, padding, previous)

    else:

        def compute(batch):
            return _decomposed(batch, exponents, root, ridges, padding, precision)

    sure = widened(compute, factors.dtype, root.max_residual)
    if previous is None or not is_warm(root, exponents):
        return sure(factors)
    return retried(from_previous, sure, root.max_residual)(factors)


def is_warm(root: Root, exponents: np.ndarray) -> bool:
    """Whether the previous roots are used."""
    coupled = isinstance(root, CoupledNewton | HigherOrderNewton)
    return coupled and root.warm_start and exponents[0] == 1


def _iterated(
    factors: jax.Array,
    exponent: float,
    root: Iteration,
    ridges: tuple[ArrayLike, ArrayLike],
    padding: jax.Array | None,
    previous: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    scaled, scale, eps, relative_eps = _prepared(factors, ridges)
    ridge = jnp.maximum(eps, relative_eps * largest_row_sum(scaled))
    ridge = jnp.broadcast_to(ridge[:, None], scaled.shape[:2])
    if padding is not None:
        ridge = jnp.where(padding, _mean_eigenvalue(scaled, padding), ridge)
    undo = per_slot(scale**-exponent, scaled)
    if previous is not None:
        previous = previous.astype(scaled.dtype) / undo
    roots, residuals, turns = iterate_roots(
        add_to_diagonal(scaled, ridge), exponent, root, padding, previous
    )
    return undo * roots, residuals, turns


def _decomposed(
    factors: jax.Array,
    exponents: np.ndarray,
    root: Eigh | PseudoInverse,
    ridges: tuple[ArrayLike, ArrayLike],
    padding: jax.Array | None,
    precision: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    scaled, scale, eps, relative_eps = _prepared(factors, ridges)
    before = isinstance(root, Eigh) and root.ridge == "before"
    values, vectors, residuals = checked_eigh(
        add_to_diagonal(scaled, eps) if before else scaled
    )
    exponents = jnp.asarray(exponents, scaled.dtype)
    powers = -exponents[:, None]
    if isinstance(root, PseudoInverse):
        inside = values > _rank_cutoff(values, root, scale, padding, precision)
        weights = jnp.where(inside, jnp.where(inside, values, 1) ** powers, 0)
    else:
        added = eps if before else jnp.zeros_like(eps)
        weights = _lifted(values, added, eps, relative_eps) ** powers
    half = vectors * jnp.sqrt(scale[:, None] ** powers * weights)[:, None, :]
    roots = contract(half, half, "nij,nkj->nik")
    return roots, residuals, jnp.zeros(len(factors), jnp.int32)


def _prepared(factors: jax.Array, ridges: tuple[ArrayLike, ArrayLike]) -> tuple:
    """The factors at norm 1, what they were divided by, and the ridges for them."""
    eps, relative_eps = (jnp.asarray(ridge, factors.dtype) for ridge in ridges)
    scaled, scale = scale_to_one(factors, eps)
    return scaled, scale, eps / scale, relative_eps


def _lifted(
    values: jax.Array, added: jax.Array, eps: jax.Array, relative_eps: jax.Array
) -> jax.Array:
    """The eigenvalues with the whole ridge, of which `added` is in them already.

    A negative smallest one, which rounding makes, is shifted to 0 first.
    """
    ridge = jnp.maximum(eps, relative_eps * (values[:, -1] - added))
    lift = ridge - added - jnp.minimum(values[:, 0] - added, 0)
    return values + lift[:, None]


def _mean_eigenvalue(matrices: jax.Array, padding: jax.Array) -> jax.Array:
    """The mean eigenvalue before padding, `[n, 1]`."""
    trace = traces(matrices)
    return (trace / jnp.sum(~padding, axis=1))[:, None]


def _rank_cutoff(
    values: jax.Array,
    root: PseudoInverse,
    scale: jax.Array,
    padding: jax.Array | None,
    precision: float,
) -> jax.Array:
    """The eigenvalue at and below which a direction is outside the range, `[n, 1]`."""
    rtol = root.rtol
    if rtol is None:
        side = values.shape[-1] if padding is None else jnp.sum(~padding, axis=1)
        rtol = side * precision  # of the factors, whatever they are computed in
    atol = jnp.asarray(root.atol, values.dtype) / scale
    return jnp.maximum(rtol * jnp.maximum(values[:, -1], 0), atol)[:, None]


def refresh_roots(
    factors: AxisStacks,
    roots: AxisStacks,
    usable: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
    exponents: dict[str, dict[str, float]],
    correction: jax.Array,
    options: Options,
) -> tuple[AxisStacks, dict[str, jax.Array]]:
    """Recomputes the roots of all usable slots from `factors / correction`.

    Args:
      factors: `{stack: {axis: [n, d, d]}}`.
      roots: like `factors`, the previous roots.
      usable: `{stack: [n]}`, bool.
      sides: `{stack: {axis: [n]}}`, before padding, where there is any.
      exponents: `{stack: {axis: e}}`.
      correction: scalar, divides the factors.
      options: the transform's arguments.

    Returns:
      the new roots and which blocks have failed, as :func:`refresh` says.
    """
    root, relative_eps = options.root, options.relative_eps
    if relative_eps is None:
        relative_eps = 0.0 if isinstance(root, PseudoInverse) else 1e-6

    def compute(batch, padding, members):
        powers = np.concatenate(
            [np.full(slots, exponents[name][axis]) for name, axis, slots in members]
        )
        batch = batch / correction.astype(batch.dtype)
        roots, residuals, _ = inverse_roots(
            batch, powers, root, options.eps, relative_eps, padding
        )
        return roots, residuals

    def kind(name: str, axis: str) -> Hashable:
        return exponents[name][axis] if isinstance(root, Iteration) else None

    return refresh(
        factors,
        roots,
        usable,
        sides,
        compute,
        max_residual=root.max_residual,
        ridge=options.eps,
        kind=kind,
    )
