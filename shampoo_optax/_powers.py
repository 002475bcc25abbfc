"""Powers of eigenvalues with a ridge, or of those inside a range."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shampoo_optax._checks import is_static
from shampoo_optax._config import Options, Root
from shampoo_optax._eigen_methods import Eigendecomposed, Eigh, PseudoInverse
from shampoo_optax._newton_methods import Iteration
from shampoo_optax._stacks import per_slot, scale_to_one, traces


def rescaled(factors: jax.Array, correction: jax.Array, options: Options) -> jax.Array:
    """The factors of a call, bias-corrected and scaled by their traces.

    Args:
      factors: `[n, d, d]`, or `[n, d]` of diagonal axes.
      correction: scalar, divides the factors.
      options: the transform's arguments.
    """
    factors = factors / correction.astype(factors.dtype)
    if is_static(options.trace_scaling, 0):
        return factors
    dtype = factors.dtype
    trace = jnp.maximum(traces(factors), jnp.asarray(options.eps, dtype))
    trace = jnp.where(trace > 0, trace, 1)
    power = -jnp.asarray(options.trace_scaling, dtype)
    return factors * per_slot(trace**power, factors)


def eigenvalue_root(options: Options) -> Root:
    """What becomes of eigenvalues, also where they are kept."""
    root = options.root
    return root.root if isinstance(root, Eigendecomposed) else root


def relative_ridge(options: Options) -> ArrayLike:
    """The ridge in units of the largest eigenvalue."""
    if options.relative_eps is not None:
        return options.relative_eps
    root = eigenvalue_root(options)
    if isinstance(root, PseudoInverse):
        return 0.0
    if options.storage.factors == "bfloat16":
        return 1e-2
    # Where a factor lacks rank an iteration leaves a residual of about the machine
    # epsilon over the ridge, and KL-Shampoo, whose exponents add up to 1, makes the
    # rounding of a gradient larger by the inverse ridge.
    coarse = isinstance(root, Iteration) or options.default_exponent is not None
    return 1e-5 if coarse else 1e-6


def added_before(options: Options) -> ArrayLike:
    """The ridge that is in the eigenvalues that are kept."""
    root = eigenvalue_root(options)
    return options.eps if isinstance(root, Eigh) and root.ridge == "before" else 0.0


def unpadded_ridge(
    eps: ArrayLike, factors: jax.Array, padding: jax.Array | None
) -> jax.Array:
    """The ridge of every row that is not padding, `[n, d]`."""
    ridge = jnp.full(factors.shape[:2], eps, factors.dtype)
    return ridge if padding is None else jnp.where(padding, 0, ridge)


def side_lengths(values: jax.Array, padding: jax.Array | None) -> ArrayLike:
    """The sides of factors before padding, a number or `[n]`."""
    return values.shape[-1] if padding is None else jnp.sum(~padding, axis=1)


def eigenvalue_powers(
    values: jax.Array,
    exponents: ArrayLike,
    root: Root,
    eps: ArrayLike,
    relative_eps: ArrayLike,
    added: ArrayLike,
    sides: ArrayLike,
    scale: ArrayLike = 1.0,
    precision: float | None = None,
) -> jax.Array:
    """The eigenvalues of roots from those of factors, in any order, `[n, d]`.

    With a ridge, a negative smallest one, which rounding makes, is shifted to 0
    first.

    Args:
      values: `[n, d]`.
      exponents: the e > 0 of each root, a number or `[n]`.
      root: a :class:`PseudoInverse`, or any other for a ridge.
      eps: absolute ridge, a number or `[n]`.
      relative_eps: ridge in units of the largest eigenvalue.
      added: what is in the values already, a number or `[n]`.
      sides: the sides before padding, a number or `[n]`.
      scale: what factors were divided by, a number or `[n]`. Default 1.
      precision: the machine epsilon of the factors. Default `None`: that of `values`.
    """
    dtype = values.dtype
    powers = -jnp.broadcast_to(jnp.asarray(exponents, dtype), len(values))[:, None]
    smallest, largest = jnp.min(values, axis=1), jnp.max(values, axis=1)
    if isinstance(root, PseudoInverse):
        rtol = jnp.asarray(sides, dtype) * (precision or jnp.finfo(dtype).eps)
        rtol = rtol if root.rtol is None else root.rtol
        cutoff = jnp.maximum(rtol * jnp.maximum(largest, 0), root.atol / scale)
        inside = values > cutoff[:, None]
        return jnp.where(inside, jnp.where(inside, values, 1) ** powers, 0)
    eps, relative_eps, added = (
        jnp.asarray(x, dtype) for x in (eps, relative_eps, added)
    )
    ridge = jnp.maximum(eps, relative_eps * (largest - added))
    lift = ridge - added - jnp.minimum(smallest - added, 0)
    return (values + lift[:, None]) ** powers


def condition_numbers(
    values: jax.Array,
    added: ArrayLike = 0.0,
    padding: jax.Array | None = None,
    precision: float | None = None,
) -> jax.Array:
    """The largest eigenvalue over the smallest, from 1 to 1 / machine epsilon, `[n]`.

    Above that, where the smallest is rounding or negative, nothing can be told.

    Args:
      values: `[n, d]`, in any order.
      added: a ridge that is in the values, a number or `[n]`. Default 0.
      padding: bool `[n, d]`, which values are left out; `None`: none are.
      precision: the machine epsilon. Default `None`: that of `values`.
    """
    added = jnp.broadcast_to(jnp.asarray(added, values.dtype), len(values))
    values = values - added[:, None]
    limit = 1 / float(precision or jnp.finfo(values.dtype).eps)
    own = values if padding is None else jnp.where(padding, jnp.inf, values)
    smallest, largest = jnp.min(own, axis=1), jnp.max(values, axis=1)
    divisor = jnp.maximum(smallest, largest / limit)
    ratio = jnp.where(largest > 0, largest / jnp.where(largest > 0, divisor, 1), 1)
    return jnp.clip(ratio, 1, limit)


def diagonal_powers(
    values: jax.Array,
    exponents: ArrayLike,
    padding: jax.Array | None,
    options: Options,
    added: ArrayLike = 0.0,
) -> jax.Array:
    """Those of diagonal factors, or of eigenvalues that are kept, `[n, d]`.

    Args:
      values: `[n, d]`; those on padding have no effect.
      exponents: the e > 0 of each root, a number or `[n]`.
      padding: bool `[n, d]`, or `None`.
      options: the transform's arguments.
      added: what is in the values already. Default 0.
    """
    if padding is not None:
        values = jnp.where(padding, 0, values)
    values, scale = scale_to_one(values, options.eps)
    if padding is not None:
        values = jnp.where(padding, values[:, :1], values)
    undo = scale ** -jnp.asarray(exponents, values.dtype)
    eps, added = (jnp.asarray(x, values.dtype) / scale for x in (options.eps, added))
    return undo[:, None] * eigenvalue_powers(
        values,
        exponents,
        eigenvalue_root(options),
        eps,
        relative_ridge(options),
        added,
        side_lengths(values, padding),
        scale,
    )
