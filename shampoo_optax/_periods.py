"""When statistics are taken, and when roots or bases are refreshed."""

import jax
import jax.numpy as jnp

from shampoo_optax._checks import is_static
from shampoo_optax._config import Options


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


def statistics_count(options: Options, count: jax.Array) -> jax.Array:
    """How many of the steps up to `count` had statistics, but at least 1, [], int32."""
    if takes_all_statistics(options):
        return count
    return jnp.maximum(count // jnp.asarray(options.statistics_every, count.dtype), 1)
