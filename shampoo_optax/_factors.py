"""Kronecker factors: the statistics of each axis of each block, and their use."""

import string
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.typing import ArrayLike

from shampoo_optax._config import Options, Storage
from shampoo_optax._division import memory
from shampoo_optax._stacks import (
    AxisStacks,
    Stack,
    Stacks,
    blocks_of,
    contract,
    join,
    per_slot,
    split,
)
from shampoo_optax._storage import (
    empty_matrices,
    identities,
    is_diagonal,
    is_packed,
    load,
    pack,
    stored_traces,
)

Whiten = Callable[[str, jax.Array, str], jax.Array]


def factored_axes(
    blocks: Mapping[str, tuple[int, ...]], options: Options
) -> dict[str, dict[str, float]]:
    """The exponents of the axes that have a factor: `{stack: {axis: e}}`."""
    axes = {name: options.factored_axes(block) for name, block in blocks.items()}
    return {name: exponents for name, exponents in axes.items() if exponents}


def factored_memory(options: Options, block: tuple[int, ...]) -> float:
    """The numbers kept for a block, its factors and roots included."""
    sides = (block[int(axis)] for axis in options.factored_axes(block))
    return memory(block, [side for side in sides if not options.is_diagonal(side)])


def stored_axes(
    stacks: dict[str, Stack],
    options: Options,
    whole: Callable[[Stack, int], jax.Array],
    diagonal: Callable[[Stack, int], jax.Array] | None = None,
) -> AxisStacks:
    """An array for each factored axis, `{stack: {axis: whole(stack, side)}}`.

    Diagonal axes have `diagonal(stack, side)`, or nothing.
    """
    arrays = {}
    for name, axes in factored_axes(blocks_of(stacks), options).items():
        sides = {axis: stacks[name].block[int(axis)] for axis in axes}
        made = {
            axis: (diagonal if options.is_diagonal(side) else whole)(stacks[name], side)
            for axis, side in sides.items()
            if diagonal is not None or not options.is_diagonal(side)
        }
        if made:
            arrays[name] = made
    return arrays


def asked_dtype(storage: Storage, field: str) -> str | None:
    """The dtype that is asked for, which must be one that arrays can have now."""
    dtype = getattr(storage, field)
    if dtype is not None and dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"`{field}` of `storage` must be at most 'float32' unless 64-bit arrays "
            f"are enabled (`jax_enable_x64`), got {dtype!r}."
        )
    return dtype


def zero_factors(stacks: dict[str, Stack], options: Options) -> AxisStacks:
    """The factors before the first step, in their stored form."""
    dtype = asked_dtype(options.storage, "factors")
    packed = options.storage.packed
    return stored_axes(
        stacks,
        options,
        lambda stack, side: empty_matrices(stack, side, dtype, packed),
        lambda stack, side: jnp.zeros((stack.size, side), dtype or stack.dtype),
    )


def identity_roots(stacks: dict[str, Stack], options: Options) -> AxisStacks:
    """The roots before the first refresh, in their stored form."""
    dtype = asked_dtype(options.storage, "roots")
    packed = options.storage.packed
    return stored_axes(
        stacks,
        options,
        lambda stack, side: identities(stack, side, dtype, packed),
        lambda stack, side: jnp.ones((stack.size, side), dtype or stack.dtype),
    )


def identity_bases(stacks: dict[str, Stack], options: Options) -> AxisStacks:
    """The bases before the first refresh; diagonal axes have none."""
    dtype = asked_dtype(options.storage, "roots")
    return stored_axes(
        stacks, options, lambda stack, side: identities(stack, side, dtype, False)
    )


def unit_eigenvalues(stacks: dict[str, Stack], options: Options) -> AxisStacks:
    """The eigenvalues before the first refresh."""

    def ones(stack: Stack, side: int) -> jax.Array:
        return jnp.ones((stack.size, side), stack.dtype)

    return stored_axes(stacks, options, ones, ones)


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


def squares_along(blocks: jax.Array, axis: int) -> jax.Array:
    """The diagonal of the Gram matrix of one axis, `[n, d]`."""
    others = tuple(k for k in range(1, blocks.ndim) if k != axis + 1)
    return jnp.sum(jnp.square(blocks), axis=others)


def apply_along(matrices: jax.Array, blocks: jax.Array, axis: int) -> jax.Array:
    """Multiplies one axis of each block by its matrix.

    Args:
      matrices: `[n, d, d]`, entry `[r, c]` takes coordinate c to coordinate r; or
        diagonals `[n, d]`.
      blocks: `[n, *block]` with side d along `axis`.
      axis: an axis of the block.

    Returns:
      `[n, *block]`.
    """
    if is_diagonal(matrices):
        shape = [len(blocks), *(1 for _ in blocks.shape[1:])]
        shape[axis + 1] = -1
        return matrices.reshape(shape) * blocks
    letters = string.ascii_lowercase[: blocks.ndim]
    column = letters[axis + 1]
    result = letters.replace(column, "Z")
    return contract(matrices, blocks, f"{letters[0]}Z{column},{letters}->{result}")


def apply_axes(
    matrices: AxisStacks,
    blocks: Stacks,
    transpose: bool = False,
    left_out: str | None = None,
) -> Stacks:
    """Multiplies the axes of every stack by their stored matrices (or transposes).

    Args:
      matrices: `{stack: {axis: stored matrices}}`; axes without any are left alone.
      blocks: `{stack: [n, *block]}`.
      transpose: whether by the transposes.
      left_out: an axis that is left alone. Default `None`: none.
    """

    def apply_to(name: str, block: jax.Array) -> jax.Array:
        for axis, stored in matrices.get(name, {}).items():
            if axis != left_out:
                matrix = load(stored)
                flipped = transpose and not is_diagonal(matrix)
                matrix = matrix.mT if flipped else matrix
                block = apply_along(matrix.astype(block.dtype), block, int(axis))
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
        for factor in factors.get(name, {}).values():
            return total + stored_traces(factor).astype(total.dtype)
        return total

    totals = {name: new_trace(name, block) for name, block in blocks.items()}
    usable = join(jax.tree.map(jnp.asarray, present), groups)
    for key, total in join(totals, groups).items():
        usable[key] &= total < jnp.finfo(total.dtype).max / 4
    return split(usable, groups, totals)


def update_factors(
    factors: AxisStacks,
    blocks: Stacks,
    usable: dict,
    options: Options,
    whiten: Whiten | None = None,
) -> AxisStacks:
    r"""Accumulates :math:`L \leftarrow b_2 L + w\, G_{(k)} G_{(k)}^\top` per axis.

    Args:
      factors: as stored.
      blocks: the gradient, zero in unusable slots.
      usable: `{stack: bool [n]}`; the factors of other slots stay as they are.
      options: the transform's arguments.
      whiten: maps a stack's name, its blocks and an axis to what takes the place of
        the blocks for that axis. Default `None`: the blocks themselves.
    """

    def update(stored: jax.Array, name: str, axis: str) -> jax.Array:
        wide = np.promote_types(stored.dtype, blocks[name].dtype)
        block, accepted = blocks[name].astype(wide), usable[name]
        if whiten is not None:
            block, accepted = _whitened(whiten, name, block, axis, stored, accepted)
        make = squares_along if is_diagonal(stored) else gram
        product = make(block, int(axis))
        product = pack(product) if is_packed(stored) else product
        decay = jnp.where(accepted, jnp.asarray(options.b2, wide), 1)
        weight = jnp.asarray(statistics_weight(options), wide)
        total = per_slot(decay, stored) * stored.astype(wide) + weight * product
        return total.astype(stored.dtype)

    return {
        name: {axis: update(factor, name, axis) for axis, factor in axes.items()}
        for name, axes in factors.items()
    }


def _whitened(
    whiten: Whiten,
    name: str,
    block: jax.Array,
    axis: str,
    stored: jax.Array,
    usable: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The whitened blocks, and in which slots the factor can take them up."""
    block = whiten(name, block, axis)
    trace = jnp.sum(jnp.square(block), axis=tuple(range(1, block.ndim)))
    trace += stored_traces(stored).astype(trace.dtype)
    usable &= trace < jnp.finfo(trace.dtype).max / 4
    return jnp.where(per_slot(usable, block), block, 0), usable
