"""When statistics are taken, and when roots or bases are refreshed."""

import jax
import jax.numpy as jnp

from shampoo_optax._checks import is_static
from shampoo_optax._config import Options
from shampoo_optax._factors import statistics_correction


def period_at(options: Options, count: jax.Array) -> jax.Array:
    """The steps from one refresh to the next at step `count`, [], int32."""
    every = options.refresh_every
    if callable(every):
        every = jnp.maximum(jnp.round(jnp.asarray(every(count - 1))), 1)
    return jnp.asarray(every, jnp.int32)


def first_refresh(options: Options, every: jax.Array) -> jax.Array:
    """The step from which on roots or bases count, [], int32.

    Args:
      options: the transform's arguments.
      every: the period at this step.
    """
    if options.start is not None:
        return jnp.asarray(options.start, jnp.int32)
    if callable(options.refresh_every):
        return period_at(options, jnp.ones((), jnp.int32))
    if options.stagger and not takes_all_statistics(options):
        return every + jnp.asarray(options.statistics_every, jnp.int32) - 1
    return every


def takes_all_statistics(options: Options) -> bool:
    """Whether it is known that every step has statistics."""
    return is_static(options.statistics_every, 1)


def statistics_due(options: Options, count: jax.Array) -> jax.Array:
    """Whether step `count` has statistics, [], bool."""
    return count % jnp.asarray(options.statistics_every, count.dtype) == 0


def factor_correction(options: Options, count: jax.Array) -> jax.Array:
    """What factors are divided by: as many powers of b2 as they had statistics."""
    if not takes_all_statistics(options):
        every = jnp.asarray(options.statistics_every, count.dtype)
        count = jnp.maximum(count // every, 1)
    return statistics_correction(options, count)
