"""Kronecker factors: the statistics of each axis of each block, and their use."""

import string
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shampoo_optax._config import Options
from shampoo_optax._stacks import (
    AxisStacks,
    Stack,
    Stacks,
    contract,
    join,
    per_slot,
    split,
    traces,
)


def factored_axes(
    blocks: Mapping[str, tuple[int, ...]], options: Options
) -> dict[str, dict[str, float]]:
    """The exponents of the axes that have a factor: `{stack: {axis: e}}`."""
    axes = {name: options.factored_axes(block) for name, block in blocks.items()}
    return {name: exponents for name, exponents in axes.items() if exponents}


def full_axes(stacks: dict[str, Stack], axes: dict, fill) -> AxisStacks:
    """Builds `{stack: {axis: fill(n, d, dtype)}}` for the given axes."""
    return {
        name: {
            axis: fill(stack.size, stack.block[int(axis)], stack.dtype)
            for axis in axes[name]
        }
        for name, stack in stacks.items()
        if name in axes
    }


def zeros(size: int, side: int, dtype) -> jax.Array:
    """A stack of zero matrices, `[n, d, d]`."""
    return jnp.zeros((size, side, side), dtype)


def identities(size: int, side: int, dtype) -> jax.Array:
    """A stack of identity matrices, `[n, d, d]`."""
    return jnp.broadcast_to(jnp.eye(side, dtype=dtype), (size, side, side)).copy()


def gram(blocks: jax.Array, axis: int) -> jax.Array:
    """The Gram matrix of one axis, all others contracted; exactly symmetric.

    Args:
      blocks: `[n, *block]`.
      axis: an axis of the block.

    Returns:
      `[n, d, d]`.
    """
    letters = string.ascii_lowercase[: blocks.ndim]
    row = letters[axis + 1]
    other = letters.replace(row, "Z")
    product = contract(blocks, blocks, f"{letters},{other}->{letters[0]}{row}Z")
    return (product + product.mT) / 2


def apply_along(matrices: jax.Array, blocks: jax.Array, axis: int) -> jax.Array:
    """Multiplies one axis of each block by its matrix.

    Args:
      matrices: `[n, d, d]`, entry `[r, c]` takes coordinate c to coordinate r.
      blocks: `[n, *block]` with side d along `axis`.
      axis: an axis of the block.

    Returns:
      `[n, *block]`.
    """
    letters = string.ascii_lowercase[: blocks.ndim]
    column = letters[axis + 1]
    result = letters.replace(column, "Z")
    return contract(matrices, blocks, f"{letters[0]}Z{column},{letters}->{result}")


def apply_axes(matrices: AxisStacks, blocks: Stacks, transpose: bool = False) -> Stacks:
    """Multiplies every factored axis of every stack by its matrix (or transpose)."""

    def apply_to(name, block):
        for axis, matrix in matrices.get(name, {}).items():
            block = apply_along(matrix.mT if transpose else matrix, block, int(axis))
        return block

    return {name: apply_to(name, block) for name, block in blocks.items()}


def statistics_weight(options: Options) -> ArrayLike:
    """The weight of the newest statistics: 1 for sums, 1 - b2 for averages."""
    if options.drop_weighting:
        return 1.0
    return jnp.where(options.b2 == 1, 1.0, 1 - options.b2)


def statistics_correction(options: Options, count: jax.Array) -> jax.Array:
    """The c2 by which statistics are divided: 1 - b2^t, or 1 for sums."""
    dtype = jnp.result_type(float)
    if not options.bias_correction or options.drop_weighting:
        return jnp.ones((), dtype)
    b2 = jnp.asarray(options.b2, dtype)
    return jnp.where(b2 == 1, 1, 1 - b2 ** count.astype(dtype))


def usable_slots(
    present: dict, blocks: Stacks, factors: AxisStacks, groups: dict[str, list[str]]
) -> dict[str, jax.Array]:
    """The slots whose gradient may enter the statistics: `{stack: bool [n]}`.

    A gradient is unusable where its block is absent or has a NaN or Inf, or where
    the trace of the factors (an upper bound of every entry) would overflow.
    """

    def new_trace(name, block):
        total = jnp.sum(jnp.square(block), axis=tuple(range(1, block.ndim)))
        factor = next(iter(factors.get(name, {}).values()), None)
        return total if factor is None else total + traces(factor)

    totals = {name: new_trace(name, block) for name, block in blocks.items()}
    usable = join(jax.tree.map(jnp.asarray, present), groups)
    for key, total in join(totals, groups).items():
        usable[key] &= total < jnp.finfo(total.dtype).max / 4
    return split(usable, groups, totals)


def update_factors(
    factors: AxisStacks, blocks: Stacks, usable: dict, options: Options
) -> AxisStacks:
    r"""Accumulates :math:`L \leftarrow b_2 L + w\, G_{(k)} G_{(k)}^\top` per axis."""

    def update(factor, name, axis):
        decay = jnp.where(usable[name], jnp.asarray(options.b2, factor.dtype), 1)
        weight = jnp.asarray(statistics_weight(options), factor.dtype)
        product = gram(blocks[name], int(axis))
        return per_slot(decay, factor) * factor + weight * product

    return {
        name: {axis: update(factor, name, axis) for axis, factor in axes.items()}
        for name, axes in factors.items()
    }
