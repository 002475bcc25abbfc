"""A second attempt at what has failed, in the slots where it has."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shampoo_optax._stacks import per_slot, traces

# Maps `[n, d, d]` to (matrices, ..., residuals [n], iterations [n]).
Compute = Callable[[jax.Array], tuple[jax.Array, ...]]


def retried(compute: Compute, again: Compute, max_residual: float) -> Compute:
    """Computes once more, in another way, the slots that have failed.

    A slot has failed where a result is not finite or the residual is too large. Where
    no slot has, nothing is computed again. A matrix of zeros, or one that is not
    finite, is not tried again.
    """

    def compute_twice(batch: jax.Array) -> tuple[jax.Array, ...]:
        results = compute(batch)
        trace = traces(batch)
        failed = ~_sound(results, max_residual) & jnp.isfinite(trace) & (trace > 0)

        @jax.jit  # by its name operations that are seldom done are not counted
        def retry(results):
            return tuple(
                jnp.where(per_slot(failed, old), new, old)
                for new, old in zip(again(batch), results, strict=True)
            )

        return jax.lax.cond(jnp.any(failed), retry, tuple, results)

    return compute_twice


def _sound(results: tuple[jax.Array, ...], max_residual: float) -> jax.Array:
    """Where all results are finite and the residual is small, `[n]`."""
    sound = results[-2] <= max_residual
    for result in results[:-2]:
        sound &= jnp.all(jnp.isfinite(result), axis=tuple(range(1, result.ndim)))
    return sound


def widened(compute: Compute, dtype: jnp.dtype, max_residual: float) -> Compute:
    """Computes failed slots once more in float64 where that is wider and allowed."""
    if dtype != jnp.float32 or not jax.config.jax_enable_x64:
        return compute

    def in_float64(batch: jax.Array) -> tuple[jax.Array, ...]:
        *results, iterations = compute(batch.astype(jnp.float64))
        return (*(result.astype(dtype) for result in results), iterations)

    return retried(compute, in_float64, max_residual)
