"""Inverse p-th roots of factors, batched over equal sides, and their refresh."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._config import Options
from shampoo_optax._eigen import checked_eigh, eigenbases, scale_to_one
from shampoo_optax._methods import Eigendecomposed, Eigh, Iteration, Root
from shampoo_optax._newton import add_to_diagonal, iterate_roots, largest_row_sum
from shampoo_optax._powers import (
    added_before,
    diagonal_powers,
    eigenvalue_powers,
    relative_ridge,
    rescaled,
    side_lengths,
)
from shampoo_optax._refresh import Batch, Derived, Fresh, Report, refresh
from shampoo_optax._stacks import AxisStacks, contract, per_slot, traces
from shampoo_optax._storage import is_diagonal


def inverse_roots(
    factors: jax.Array,
    exponents: np.ndarray,
    root: Root,
    eps: ArrayLike,
    relative_eps: ArrayLike,
    padding: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Computes :math:`(L + \rho I)^{-e}` for a batch of factors of one side.

    Args:
      factors: `[n, d, d]`, symmetric, float32 or float64.
      exponents: `[n]`, static, the e > 0 of each root; all equal for an iteration.
      root: the method.
      eps: absolute ridge.
      relative_eps: ridge relative to the largest eigenvalue, or to the largest row
        sum where the method knows no eigenvalues.
      padding: bool `[n, d]`, which rows and columns are padding; `None`: none are.

    Returns:
      the roots `[n, d, d]`, their residuals `[n]`, NaN where the method failed, and
      the iterations `[n]`.
    """
    eps = jnp.asarray(eps, factors.dtype)
    scaled, scale = scale_to_one(factors, eps)
    eps = eps / scale
    relative_eps = jnp.asarray(relative_eps, factors.dtype)
    undo = scale ** -jnp.asarray(exponents, factors.dtype)
    if isinstance(root, Iteration):
        ridge = jnp.maximum(eps, relative_eps * largest_row_sum(scaled))
        ridge = jnp.broadcast_to(ridge[:, None], scaled.shape[:2])
        if padding is not None:
            ridge = jnp.where(padding, _mean_eigenvalue(scaled, padding), ridge)
        roots, residual = iterate_roots(
            add_to_diagonal(scaled, ridge), float(exponents[0]), root
        )
        turns = jnp.zeros(len(residual), jnp.int32)
        return per_slot(undo, roots) * roots, residual, turns
    before = isinstance(root, Eigh) and root.ridge == "before"
    values, vectors, residual = checked_eigh(
        add_to_diagonal(scaled, eps) if before else scaled
    )
    sides = side_lengths(scaled, padding)
    added = eps if before else 0.0
    weights = eigenvalue_powers(
        values, exponents, root, eps, relative_eps, added, sides, scale
    )
    half = vectors * jnp.sqrt(undo[:, None] * weights)[:, None, :]
    turns = jnp.zeros(len(residual), jnp.int32)
    return contract(half, half, "nij,nkj->nik"), residual, turns


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
            return _decomposed(matrices, batch, options)
        powers = batch.per_factor(lambda name, axis: exponents[name][axis])
        if is_diagonal(matrices):
            roots = diagonal_powers(matrices, powers, batch.padding, options)
            return Fresh({"roots": roots}, *_at_once(matrices))
        ridges = options.eps, relative_ridge(options)
        roots, *about = inverse_roots(matrices, powers, root, *ridges, batch.padding)
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


def _decomposed(matrices: jax.Array, batch: Batch, options: Options) -> Fresh:
    """Bases and eigenvalues, with the ridge where it is added before."""
    eps = jnp.full(len(matrices), added_before(options), matrices.dtype)
    if is_diagonal(matrices):
        values = matrices + eps[:, None]
        return Fresh({"eigenvalues": values}, *_at_once(matrices))
    bases, values, *about = eigenbases(
        add_to_diagonal(matrices, eps),
        batch.derived["bases"],
        options.root.basis,
        batch.padding,
    )
    return Fresh({"bases": bases, "eigenvalues": values}, *about)


def _at_once(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The residuals and iterations of what needs none."""
    size = len(matrices)
    return jnp.zeros(size, matrices.dtype), jnp.zeros(size, jnp.int32)
