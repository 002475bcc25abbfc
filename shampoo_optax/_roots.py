"""Inverse p-th roots of factors, batched over equal sides, and their refresh."""

import dataclasses
from collections.abc import Hashable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._config import Options, Root
from shampoo_optax._eigen import checked_eigh, sure_eigenbases
from shampoo_optax._eigen_methods import Eigendecomposed, Eigh, PseudoInverse
from shampoo_optax._newton import iterate_roots, largest_eigenvalue
from shampoo_optax._newton_methods import CoupledNewton, HigherOrderNewton, Iteration
from shampoo_optax._powers import (
    added_before,
    condition_numbers,
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
    add_to_diagonal,
    contract,
    largest_row_sum,
    per_slot,
    scale_to_one,
    traces,
)
from shampoo_optax._storage import is_diagonal
from shampoo_optax._turns import Turns

# In the estimate of a condition number.
_POWER_ITERATIONS = 20


def inverse_roots(
    factors: jax.Array,
    exponents: np.ndarray,
    root: Eigh | PseudoInverse | Iteration,
    eps: ArrayLike,
    relative_eps: ArrayLike,
    padding: jax.Array | None = None,
    previous: jax.Array | None = None,
    measured: bool = False,
) -> tuple[jax.Array, ...]:
    r"""Computes :math:`(L + \rho I)^{-e}` for a batch of factors of one side.

    Slots that fail from a warm start, or at a lower precision, are computed again from
    the identity at the highest. Where 64-bit arrays are enabled, float32 slots that
    fail then are computed once more in float64.

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
      measured: whether condition numbers are found, of L; an iteration estimates
        those of :math:`L + \rho I`, from below.

    Returns:
      the roots `[n, d, d]`, the condition numbers `[n]` if they are asked for, the
      residuals `[n]`, NaN where the method failed, and the turns of an iteration, those
      of the last attempt alone, int32 `[n]`, 0 for a decomposition.
    """
    ridges, dtype = (eps, relative_eps), factors.dtype
    if not isinstance(root, Iteration):

        def compute(batch):
            return _decomposed(
                batch, exponents, root, ridges, padding, measured, jnp.finfo(dtype).eps
            )

        return widened(compute, dtype, root.max_residual)(factors)

    def iterate(batch, root, previous=None):
        exponent = float(exponents[0])
        return _iterated(batch, exponent, root, ridges, padding, measured, previous)

    exact = dataclasses.replace(root, precision="highest")
    start = previous if is_warm(root, exponents) else None
    sure = widened(partial(iterate, root=exact), dtype, root.max_residual)
    if start is None and root == exact:
        return sure(factors)
    fast = partial(iterate, root=root, previous=start)
    return retried(fast, sure, root.max_residual)(factors)


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
    measured: bool,
    previous: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    scaled, scale, eps, relative_eps = _prepared(factors, ridges)
    ridge = jnp.maximum(eps, relative_eps * largest_row_sum(scaled))
    ridge = jnp.broadcast_to(ridge[:, None], scaled.shape[:2])
    if padding is not None:
        ridge = jnp.where(padding, _mean_eigenvalue(scaled, padding), ridge)
    undo = per_slot(scale**-exponent, scaled)
    if previous is not None:
        previous = previous.astype(scaled.dtype) / undo
    matrices = add_to_diagonal(scaled, ridge)
    roots, *about = iterate_roots(matrices, exponent, root, padding, previous)
    if measured:
        about.insert(0, _estimated_conditions(matrices, roots, exponent, padding))
    return undo * roots, *about


def _estimated_conditions(
    factors: jax.Array, roots: jax.Array, exponent: float, padding: jax.Array | None
) -> jax.Array:
    """The condition numbers of factors with their ridge, by power iterations, `[n]`."""
    largest, inverse = (
        largest_eigenvalue(matrices, padding, _POWER_ITERATIONS)
        for matrices in (factors, roots)
    )
    limit = 1 / jnp.finfo(factors.dtype).eps
    ratio = jnp.nan_to_num((largest**exponent * inverse) ** (1 / exponent), nan=1)
    return jnp.clip(ratio, 1, limit)


def _decomposed(
    factors: jax.Array,
    exponents: np.ndarray,
    root: Eigh | PseudoInverse,
    ridges: tuple[ArrayLike, ArrayLike],
    padding: jax.Array | None,
    measured: bool,
    precision: float,
) -> tuple[jax.Array, ...]:
    scaled, scale, eps, relative_eps = _prepared(factors, ridges)
    before = isinstance(root, Eigh) and root.ridge == "before"
    added = eps if before else 0.0
    values, vectors, residuals = checked_eigh(
        add_to_diagonal(scaled, eps) if before else scaled
    )
    weights = eigenvalue_powers(
        values,
        exponents,
        root,
        eps,
        relative_eps,
        added=added,
        sides=side_lengths(scaled, padding),
        scale=scale,
        precision=precision,
    )
    undo = scale ** -jnp.asarray(exponents, scaled.dtype)
    half = vectors * jnp.sqrt(undo[:, None] * weights)[:, None, :]
    roots = contract(half, half, "nij,nkj->nik")
    about = [residuals, jnp.zeros(len(factors), jnp.int32)]
    if measured:
        # Padding, which is 0 but for the ridge, has the smallest ones.
        rank = jnp.arange(values.shape[1])[None]
        first = None if padding is None else rank < jnp.sum(padding, axis=1)[:, None]
        about.insert(0, condition_numbers(values, added, first, precision))
    return roots, *about


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
    turns: Turns | None = None,
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
      turns: whose turn it is. Default `None`: that of all.

    Returns:
      the new ones, and the new report, as :func:`refresh` says.
    """
    root = options.root

    def compute(batch: Batch) -> Fresh:
        matrices = rescaled(batch.factors, correction, options)
        if isinstance(root, Eigendecomposed):
            return _bases(matrices, batch, options)
        powers = batch.per_factor(lambda name, axis: exponents[name][axis])
        measured = "conditions" in batch.derived
        if is_diagonal(matrices):
            roots = diagonal_powers(matrices, powers, batch.padding, options)
            found = {"roots": roots}
            if measured:
                found["conditions"] = condition_numbers(matrices, 0.0, batch.padding)
            return Fresh(found, *_at_once(matrices))
        roots, *conditions, residuals, turns = inverse_roots(
            matrices,
            powers,
            root,
            options.eps,
            relative_ridge(options),
            batch.padding,
            batch.derived["roots"],
            measured,
        )
        found = {"roots": roots} | dict(zip(["conditions"], conditions, strict=False))
        return Fresh(found, residuals, turns)

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
        turns=turns,
    )


def _bases(matrices: jax.Array, batch: Batch, options: Options) -> Fresh:
    """Bases and eigenvalues, with the ridge where it is added before."""
    root = options.root
    eps = unpadded_ridge(added_before(options), matrices, batch.padding)
    if is_diagonal(matrices):
        found, about = {"eigenvalues": matrices + eps}, _at_once(matrices)
        numbers = matrices, 0.0, batch.padding
    else:
        bases, values, *about = sure_eigenbases(
            add_to_diagonal(matrices, eps),
            batch.derived["bases"],
            root.basis,
            batch.padding,
            root.max_residual,
        )
        found = {"bases": bases, "eigenvalues": values}
        numbers = values, added_before(options)
    if "conditions" in batch.derived:
        found["conditions"] = condition_numbers(*numbers)
    return Fresh(found, *about)


def _at_once(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The residuals and iterations of what needs none."""
    size = len(matrices)
    return jnp.zeros(size, matrices.dtype), jnp.zeros(size, jnp.int32)
