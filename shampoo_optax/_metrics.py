"""What a state says of the health of its blocks, where that is asked for."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from shampoo_optax._stacks import AxisStacks, Stacks, norms, per_slot

# {metric: {stack: [n]}}, and for "conditions" {stack: {axis: [n]}}; empty where there
# are none.
Metrics = dict[str, dict[str, Any]]


def refresh_metrics(
    held: Metrics,
    derived: dict[str, AxisStacks],
    renewed: dict[str, jax.Array],
    count: jax.Array,
) -> Metrics:
    """The metrics that a refresh changes.

    Args:
      held: all metrics of the last step.
      derived: what a refresh gives, `conditions` among it.
      renewed: `{stack: bool [n]}`, the blocks of which all roots or bases are new.
      count: the number of this step.
    """
    if not held:
        return {}
    refreshed = {
        name: jnp.where(renewed[name], count, last)
        for name, last in held["refreshed"].items()
    }
    return dict(conditions=derived["conditions"], refreshed=refreshed)


def step_metrics(
    direction: Stacks,
    gradient: Stacks,
    moving: dict[str, jax.Array],
    ratios: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
) -> Metrics:
    """The metrics of one step, 0 in slots that it leaves where they are.

    Args:
      direction: `{stack: [n, *block]}`, as it is returned.
      gradient: like it, 0 in unusable slots.
      moving: `{stack: bool [n]}`, the slots whose direction is finite.
      ratios: `{stack: [n]}`, the grafted norms over those of the directions; empty
        without grafting.
      sides: `{stack: {axis: [n]}}`, before padding, where there is any.
    """
    found = dict(rms={}, cosines={}) | ({"grafting": ratios} if ratios else {})
    for name, block in direction.items():
        size = norms(block)
        found["rms"][name] = size / jnp.sqrt(_entries(block, sides.get(name, {})))
        found["cosines"][name] = _cosines(block, size, gradient[name])
    return {
        metric: {name: _settled(value, moving[name]) for name, value in stacks.items()}
        for metric, stacks in found.items()
    }


def _entries(blocks: jax.Array, sides: dict[str, jax.Array]) -> jax.Array:
    """How many entries of each block are no padding, at least 1, `[n]` or `[]`."""
    if not sides:
        return jnp.asarray(max(1, math.prod(blocks.shape[1:])), blocks.dtype)
    own = [jnp.asarray(side, blocks.dtype) for side in sides.values()]
    return jnp.maximum(math.prod(own), 1)


def _cosines(blocks: jax.Array, size: jax.Array, others: jax.Array) -> jax.Array:
    """The cosine between blocks of these norms and others, `[n]`; 0 where one is 0."""
    unit, other = (
        block / per_slot(jnp.where(norm > 0, norm, 1), block)
        for block, norm in ((blocks, size), (others, norms(others)))
    )
    return jnp.sum(unit * other, axis=tuple(range(1, blocks.ndim)))


def _settled(values: jax.Array, moving: jax.Array) -> jax.Array:
    found = jnp.where(moving & jnp.isfinite(values), values, 0)
    return found.astype(jnp.float32)
