"""Inverse p-th roots of factors, batched over equal sides, and their refresh."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._config import Options
from shampoo_optax._eigen import checked_eigh, sure_eigenbases
from shampoo_optax._methods import (
    CoupledNewton,
    Eigendecomposed,
    Eigh,
    HigherOrderNewton,
    Iteration,
    PseudoInverse,
    Root,
)
from shampoo_optax._newton import add_to_diagonal, iterate_roots, largest_row_sum
from shampoo_optax._powers import (
    added_before,
    diagonal_powers,
    eigenvalue_powers,
    relative_ridge,
    rescaled,
    side_lengths,
    unpadded_ridge,
)
from shampoo_optax._refresh import Batch, Derived, Fresh, Report, refresh
from shampoo_optax._retry import retried, widened
from shampoo_optax._stacks import (
    AxisStacks,
    contract,
    per_slot,
    scale_to_one,
    traces,
)
from shampoo_optax._storage import is_diagonal


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
    weights = eigenvalue_powers(
        values,
        exponents,
        root,
        eps,
        relative_eps,
        added=eps if before else 0.0,
        sides=side_lengths(scaled, padding),
        scale=scale,
        precision=precision,
    )
    undo = scale ** -jnp.asarray(exponents, scaled.dtype)
    half = vectors * jnp.sqrt(undo[:, None] * weights)[:, None, :]
    roots = contract(half, half, "nij,nkj->nik")
    return roots, residuals, jnp.zeros(len(factors), jnp.int32)


def _prepared(factors: jax.Array, ridges: tuple[ArrayLike, ArrayLike]) -> tuple:
    """The factors at norm 1, what they were divided by, and the ridges for them."""
    eps, relative_eps = (jnp.asarray(ridge, factors.dtype) for ridge in ridges)
    scaled, scale = scale_to_one(factors, eps)
    return scaled, scale, eps / scale, relative_eps


def _mean_eigenvalue(matrices: jax.Array, padding: jax.Array) -> jax.Array:
    """The mean eigenvalue before padding, `[n, 1]`."""
    trace = traces(matrices)
    return (trace / jnp.sum(~padding, axis=1))[:, None]


def refresh_roots(
    factors: AxisStacks,
    derived: Derived,
    report: Report,
    *,
    usable: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
    exponents: dict[str, dict[str, float]],
    correction: jax.Array,
    options: Options,
) -> tuple[Derived, Report]:
    """Recomputes the roots of all usable slots from `factors / correction`.

    Args:
      factors: `{stack: {axis: stored factors}}`.
      derived: the previous `roots`, or `bases` and `eigenvalues`.
      report: what was said at the last refresh.
      usable: `{stack: [n]}`, bool.
      sides: `{stack: {axis: [n]}}`, before padding, where there is any.
      exponents: `{stack: {axis: e}}`.
      correction: scalar, divides the factors.
      options: the transform's arguments.

    Returns:
      the new ones, and the new report, as :func:`refresh` says.
    """
    root = options.root

    def compute(batch: Batch) -> Fresh:
        matrices = rescaled(batch.factors, correction, options)
        if isinstance(root, Eigendecomposed):
            return _bases(matrices, batch, options)
        powers = batch.per_factor(lambda name, axis: exponents[name][axis])
        if is_diagonal(matrices):
            roots = diagonal_powers(matrices, powers, batch.padding, options)
            return Fresh({"roots": roots}, *_at_once(matrices))
        ridges = options.eps, relative_ridge(options)
        roots, *about = inverse_roots(
            matrices, powers, root, *ridges, batch.padding, batch.derived["roots"]
        )
        return Fresh({"roots": roots}, *about)

    def kind(name: str, axis: str) -> Hashable:
        return exponents[name][axis] if isinstance(root, Iteration) else None

    return refresh(
        factors,
        derived,
        report,
        usable,
        sides,
        compute,
        max_residual=root.max_residual,
        ridge=options.eps,
        kind=kind,
    )


def _bases(matrices: jax.Array, batch: Batch, options: Options) -> Fresh:
    """Bases and eigenvalues, with the ridge where it is added before."""
    root = options.root
    eps = unpadded_ridge(added_before(options), matrices, batch.padding)
    if is_diagonal(matrices):
        values = matrices + eps
        return Fresh({"eigenvalues": values}, *_at_once(matrices))
    bases, values, *about = sure_eigenbases(
        add_to_diagonal(matrices, eps),
        batch.derived["bases"],
        root.basis,
        batch.padding,
        root.max_residual,
    )
    return Fresh({"bases": bases, "eigenvalues": values}, *about)


def _at_once(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The residuals and iterations of what needs none."""
    size = len(matrices)
    return jnp.zeros(size, matrices.dtype), jnp.zeros(size, jnp.int32)
