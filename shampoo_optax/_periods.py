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
    """The step from which on roots or bases count, [], int32; it has had statistics.

    Args:
      options: the transform's arguments.
      every: the period at this step.
    """
    start = every
    if options.start is not None:
        start = jnp.asarray(options.start, jnp.int32)
    elif callable(options.refresh_every):
        start = period_at(options, jnp.ones((), jnp.int32))
    if takes_all_statistics(options):
        return start
    first = jnp.asarray(options.statistics_every, jnp.int32)
    if options.stagger and options.start is None:
        return start + first - 1
    return jnp.maximum(start, first)


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
