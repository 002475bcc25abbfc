"""Inverse p-th roots of factors, batched over equal sides, and their refresh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._config import Eigh, Options, PseudoInverse, Root
from shampoo_optax._eigen import scaled_eigh
from shampoo_optax._refresh import refresh
from shampoo_optax._stacks import AxisStacks, contract, per_slot


def inverse_roots(
    factors: jax.Array,
    exponents: jax.Array,
    root: Root,
    eps: ArrayLike,
    relative_eps: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    r"""Computes :math:`(L + \rho I)^{-e}` for a batch of factors of one side.

    Args:
      factors: `[n, d, d]`, symmetric, float32 or float64.
      exponents: `[n]`, the e > 0 of each root.
      root: the method.
      eps: absolute ridge.
      relative_eps: ridge relative to the largest eigenvalue.

    Returns:
      the roots `[n, d, d]` and their residuals `[n]`; both NaN where the
      decomposition failed.
    """
    eps = jnp.asarray(eps, factors.dtype)
    relative_eps = jnp.asarray(relative_eps, factors.dtype)
    match root:
        case Eigh(ridge="before"):
            values, vectors, residual, power = scaled_eigh(factors, eps)
            absolute = jnp.ldexp(eps, -power)
            ridge = jnp.maximum(absolute, relative_eps * (values[:, -1] - absolute))
            values = values + (ridge - absolute)[:, None]
            smallest = values[:, 0]
            lift = jnp.where(smallest < ridge, ridge - smallest, 0)
            weights = _negative_power(values + lift[:, None], exponents)
        case Eigh(ridge="after"):
            values, vectors, residual, power = scaled_eigh(factors, jnp.zeros_like(eps))
            ridge = jnp.maximum(jnp.ldexp(eps, -power), relative_eps * values[:, -1])
            lift = ridge - jnp.minimum(values[:, 0], 0)
            weights = _negative_power(values + lift[:, None], exponents)
        case PseudoInverse(rtol=rtol, atol=atol):
            values, vectors, residual, power = scaled_eigh(factors, jnp.zeros_like(eps))
            if rtol is None:
                rtol = factors.shape[-1] * jnp.finfo(factors.dtype).eps
            atol = jnp.ldexp(jnp.asarray(atol, factors.dtype), -power)
            cutoff = jnp.maximum(rtol * jnp.maximum(values[:, -1], 0), atol)[:, None]
            inside = values > cutoff
            weights = _negative_power(jnp.where(inside, values, 1), exponents)
            weights = jnp.where(inside, weights, 0)
    half = vectors * jnp.sqrt(weights)[:, None, :]
    roots = contract(half, half, "nij,nkj->nik")
    return per_slot(_scale_back(power, exponents), roots) * roots, residual


def _negative_power(values: jax.Array, exponents: jax.Array) -> jax.Array:
    return values ** -exponents[:, None]


def _scale_back(power: jax.Array, exponents: jax.Array) -> jax.Array:
    """The factor 2^(-s e) that undoes the scaling by 2^-s in a root, `[n]`."""
    return jnp.exp2(-power.astype(exponents.dtype) * exponents)


def refresh_roots(
    factors: AxisStacks,
    roots: AxisStacks,
    failures: dict[str, jax.Array],
    usable: dict[str, jax.Array],
    exponents: dict[str, dict[str, float]],
    correction: jax.Array,
    options: Options,
) -> tuple[AxisStacks, dict[str, jax.Array]]:
    """Recomputes the roots of all usable slots from `factors / correction`.

    Args:
      factors: `{stack: {axis: [n, d, d]}}`.
      roots: like `factors`, the previous roots.
      failures: `{stack: [n]}`, int32.
      usable: `{stack: [n]}`, bool.
      exponents: `{stack: {axis: e}}`.
      correction: scalar, divides the factors.
      options: the transform's arguments.

    Returns:
      the new roots and the new counts of failures, as :func:`refresh` says.
    """
    relative_eps = options.relative_eps
    if relative_eps is None:
        relative_eps = 0.0 if isinstance(options.root, PseudoInverse) else 1e-6

    def compute(batch, members):
        powers = np.concatenate(
            [np.full(slots, exponents[name][axis]) for name, axis, slots in members]
        )
        batch = batch / correction.astype(batch.dtype)
        powers = jnp.asarray(powers, batch.dtype)
        return inverse_roots(batch, powers, options.root, options.eps, relative_eps)

    residual = options.root.max_residual
    return refresh(factors, roots, failures, usable, compute, residual)
