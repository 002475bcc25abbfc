"""Merging dimensions, cutting parameters into stacks of blocks, and pasting back.

Everything here but `cut` and `paste` is static: a pure function of shapes, dtypes
and the `Blocking` record, evaluated while tracing.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._blocking import Blocking
from shampoo_optax._division import UNDIVIDED, Division, deal
from shampoo_optax._stacks import Piece, Plan, Region, Stack, Stacks, View, whole_view
from shampoo_optax._trees import narrow, wide_dtype


def merge_shape(shape: Sequence[int], blocking: Blocking) -> tuple[int, ...]:
    """Merges neighbouring dimensions as the `Blocking` record says.

    With a block size of 20 and `merge_to=1`, `[3, 4, 5]` becomes `[12, 5]` from
    the leading side and `[3, 20]` from the trailing one.

    >>> merge_shape((3, 4, 5), Blocking(20, merge_to=1))
    (12, 5)
    >>> merge_shape((3, 4, 5), Blocking(20, merge_to=1, merge_from="trailing"))
    (3, 20)
    """
    if 0 in shape:
        return (0,)
    if blocking.merge_to is None:
        return tuple(shape)
    limit = math.inf if blocking.block_size is None else blocking.block_size
    sides = [side for side in shape if side != 1] or [1]
    if blocking.merge_from == "trailing":
        sides.reverse()
    merged = sides[:1]
    for index, side in enumerate(sides[1:], start=1):
        remaining = len(merged) + len(sides) - index
        if merged[-1] * side <= limit and remaining > blocking.merge_to:
            merged[-1] *= side
        else:
            merged.append(side)
    if blocking.merge_from == "trailing":
        merged.reverse()
    return tuple(merged)


def _merged_slice(view: View, blocking: Blocking) -> tuple[int, ...]:
    return merge_shape(view.rest if view.slices else (0,), blocking)


def _length(side: int, limits: Sequence[int]) -> int:
    """How many of the limits a side is above; 0 for what may be cut."""
    return sum(side > limit for limit in limits)


def _pieces(
    side: int, block_size: int | None, limits: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The (start, count, size) of the full pieces of a side and of its remainder."""
    whole = block_size is None or _length(side, limits)
    size = side if whole else min(side, block_size)
    count, rest = divmod(side, size)
    pieces = [(0, count, size)]
    return [*pieces, (count * size, 1, rest)] if rest else pieces


def _boxes(merged: Sequence[int], blocking: Blocking, limits: Sequence[int]):
    """The (start, grid, block) of the at most 2^order regions, row-major."""
    if 0 in merged:
        return
    along = (_pieces(side, blocking.block_size, limits) for side in merged)
    for pieces in itertools.product(*along):
        yield tuple(zip(*pieces, strict=True)) or ((), (), ())


def stack_name(block: Sequence[int], dtype: np.dtype, owners: int = 1) -> str:
    """The key of a stack: its block's shape, and what is not as usual.

    That is a dtype other than float32, and a number of owners other than one: slots
    that are dealt to other numbers of owners are never taken for each other.
    """
    shape = "x".join(map(str, block)) or "scalar"
    kind = "" if dtype == np.float32 else f"_{dtype}"
    return f"{shape}{kind}" if owners == 1 else f"{shape}{kind}@{owners}"


def plan_of(
    leaves: Sequence[Any],
    blocking: Blocking,
    division: Division = UNDIVIDED,
    limits: Sequence[int] = (),
    views: Sequence[View] | None = None,
) -> Plan:
    """Deals the blocks of all parameters into stacks, in order of appearance.

    Args:
      leaves: arrays or `ShapeDtypeStruct`s; only shapes and dtypes are read.
      blocking: how to merge and cut them.
      division: how to deal the blocks to owners.
      limits: sides that are above one are not cut, and share a stack with those
        that are above the same ones alone.
      views: the leaves as slices. Default `None`: each is one.
    """
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    views = tuple(map(whole_view, shapes) if views is None else views)
    merged = tuple(_merged_slice(view, blocking) for view in views)
    regions = [
        Region(index, view.slices, start, grid, block, division.axes(block), ())
        for index, view in enumerate(views)
        for start, grid, block in _boxes(merged[index], blocking, limits)
    ]
    dtypes = [wide_dtype(leaves[region.leaf].dtype) for region in regions]
    kinds = [
        (dtype, *(_length(side, limits) for side in region.stacked if limits))
        for region, dtype in zip(regions, dtypes, strict=True)
    ]
    stacks, free = {}, {}
    for kind in dict.fromkeys(kinds):
        counts = Counter()
        for region, own in zip(regions, kinds, strict=True):
            counts[region.stacked] += region.size * (own == kind)
        _open_stacks(+counts, kind[0], division, stacks, free)
    placed = tuple(
        region._replace(pieces=tuple(_take(free[region.stacked, dtype], region.size)))
        for region, dtype in zip(regions, dtypes, strict=True)
    )
    return Plan(shapes, views, merged, placed, stacks, division.owners)


def on_each(plan: Plan, devices: int) -> Plan:
    """The plan of one device's shards as that of all: each has such slots.

    The slots of regions are those of one device.
    """
    names = {name: f"{name}@{devices}local" for name in plan.stacks}
    regions = tuple(
        region._replace(
            pieces=tuple(p._replace(stack=names[p.stack]) for p in region.pieces)
        )
        for region in plan.regions
    )
    stacks = {
        names[name]: stack._replace(size=stack.size * devices)
        for name, stack in plan.stacks.items()
    }
    return plan._replace(regions=regions, stacks=stacks, owners=devices)


def _open_stacks(
    counts: Counter,
    dtype: np.dtype,
    division: Division,
    stacks: dict[str, Stack],
    free: dict[tuple, deque[Piece]],
) -> None:
    """Adds the stacks for so many blocks of each shape, and their free slots."""
    for block, members in deal(counts, division).items():
        name = stack_name(block, dtype, division.owners)
        size = -(-members.total() // division.owners) * division.owners
        stacks[name] = Stack(block, dtype, size)
        filled = 0
        for shape, n in members.items():
            free.setdefault((shape, dtype), deque()).append(Piece(name, filled, n))
            filled += n


def _take(free: deque[Piece], wanted: int) -> Iterator[Piece]:
    """Takes so many slots off the free ones."""
    while wanted:
        piece = free.popleft()
        size = min(wanted, piece.size)
        yield piece._replace(size=size)
        wanted -= size
        if size < piece.size:
            free.appendleft(Piece(piece.stack, piece.slot + size, piece.size - size))


def _slices_of(leaf: jax.Array, view: View) -> jax.Array:
    """The slices of a parameter, `[*batch, *rest]`."""
    return leaf.reshape(view.shape).transpose(view.order)


def _from_slices(slices: jax.Array, view: View, shape: Sequence[int]) -> jax.Array:
    """The parameter that has these slices, in whatever shape they are."""
    back = tuple(map(int, np.argsort(view.order)))
    return slices.reshape(view.moved).transpose(back).reshape(shape)


def cut_region(leaf: jax.Array, region: Region) -> jax.Array:
    """One box of merged slices as a stack: `[1, 4, 6]` in `[2, 3]` is `[4, 2, 3]`."""
    order = len(region.block)
    box = jax.lax.slice(leaf, (0, *region.start), (region.slices, *region.limit))
    tiled = itertools.chain(*zip(region.grid, region.block, strict=True))
    box = box.reshape((region.slices, *tiled))  # [slices, g0, b0, g1, b1, ...]
    grid, axes = range(1, 2 * order, 2), (2 * axis + 2 for axis in region.axes)
    box = box.transpose((0, *grid, *axes))
    return box.reshape(region.size, *region.stacked)


def pad(blocks: jax.Array, size: int, block: Sequence[int]) -> jax.Array:
    """Adds zeros behind: `[m, *smaller]` becomes `[size, *block]`."""
    widths = [(0, n - m) for m, n in zip(blocks.shape, (size, *block), strict=True)]
    return jnp.pad(blocks, widths) if any(after for _, after in widths) else blocks


def cut(plan: Plan, leaves: Sequence[jax.Array | None]) -> Stacks:
    """Cuts leaves into stacks of blocks in the stacks' dtypes; `None` gives zeros."""

    def blocks_of(region: Region) -> jax.Array:
        leaf = leaves[region.leaf]
        if leaf is None:
            return jnp.zeros((region.size, *region.stacked))
        slices = _slices_of(leaf, plan.views[region.leaf])
        merged = (region.slices, *plan.merged[region.leaf])
        return cut_region(slices.reshape(merged), region)

    def in_dtype(region: Region, stack: str, blocks: jax.Array) -> jax.Array:
        return blocks.astype(plan.stacks[stack].dtype)

    return fill(plan.stacks, plan.regions, blocks_of, in_dtype)


def fill(
    stacks: dict[str, Stack],
    regions: Iterable[Region],
    blocks_of: Callable[[Region], jax.Array],
    shaped: Callable[[Region, str, jax.Array], jax.Array],
) -> Stacks:
    """Fills stacks with the blocks of regions.

    Args:
      stacks: the stacks, padded with zeros where there is no block.
      regions: the regions.
      blocks_of: gives the blocks of a region, in their order.
      shaped: maps some of them to what a stack, the second argument, has of them.
    """
    parts = {name: {} for name in stacks}  # {stack: {slot: blocks}}
    for region in regions:
        blocks, start = blocks_of(region), 0
        for piece in region.pieces:
            part = blocks[start : start + piece.size]
            parts[piece.stack][piece.slot] = shaped(region, piece.stack, part)
            start += piece.size
    return {
        name: _fill([part[slot] for slot in sorted(part)], stacks[name])
        for name, part in parts.items()
    }


def _fill(parts: list[jax.Array], stack: Stack) -> jax.Array:
    """Joins blocks, in the order of their slots, and pads them to a whole stack."""
    runs = itertools.groupby(parts, key=lambda part: part.shape[1:])
    runs = [_concatenate(list(run)) for _, run in runs]
    blocks = _concatenate([pad(run, len(run), stack.block) for run in runs])
    return pad(blocks, stack.size, stack.block)


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def present_slots(plan: Plan, leaves: Sequence[jax.Array | None]) -> dict:
    """Which slots hold a block of a leaf that is not `None`: `{stack: bool [n]}`."""
    present = {name: np.zeros(stack.size, bool) for name, stack in plan.stacks.items()}
    for region in plan.regions:
        for piece in region.pieces:
            present[piece.stack][piece.slots] = leaves[region.leaf] is not None
    return present


def unpadded_sides(plan: Plan) -> dict:
    """The sides of the blocks in padded stacks: `{stack: {axis: int32 [n]}}`."""
    sides = {}
    for region in plan.regions:
        for piece in region.pieces:
            stack = plan.stacks[piece.stack]
            table = sides.setdefault(
                piece.stack, np.tile(np.int32(stack.block), (stack.size, 1))
            )
            table[piece.slots] = region.stacked
    return {
        name: {str(axis): column for axis, column in enumerate(table.T)}
        for name, table in sides.items()
        if (table != plan.stacks[name].block).any()
    }


def _tile(blocks: jax.Array, region: Region) -> jax.Array:
    """The box of slices that a region's blocks are."""
    order = len(region.block)
    # [slices, g0, g1, ..., b0, b1, ...]
    box = blocks.reshape(region.slices, *region.grid, *region.stacked)
    places = [(1 + axis, 1 + order + region.axes.index(axis)) for axis in range(order)]
    # [slices, g0, b0, g1, b1, ...]
    box = box.transpose((0, *itertools.chain(*places)))
    sides = (g * b for g, b in zip(region.grid, region.block, strict=True))
    return box.reshape((region.slices, *sides))


def _join(boxes: list[jax.Array], counts: Sequence[int]) -> jax.Array:
    """Concatenates boxes of slices, row-major over `counts` boxes along each axis."""
    for axis in reversed(range(len(counts))):
        step = counts[axis]
        if step > 1:
            boxes = [
                jnp.concatenate(boxes[i : i + step], 1 + axis)
                for i in range(0, len(boxes), step)
            ]
    (whole,) = boxes
    return whole


def assemble(
    regions: Iterable[Region], part_of: Callable[[Region, Piece], jax.Array]
) -> dict[int, jax.Array]:
    """The merged slices of parameters from their blocks, `{leaf: [slices, *merged]}`.

    Args:
      regions: of these parameters.
      part_of: gives the blocks of a piece of a region, without padding.
    """
    boxes, starts = {}, {}
    for region in regions:
        blocks = _concatenate([part_of(region, piece) for piece in region.pieces])
        boxes.setdefault(region.leaf, []).append(_tile(blocks, region))
        starts.setdefault(region.leaf, []).append(region.start)
    counts = {
        leaf: [len(set(along)) for along in zip(*origins, strict=True)]
        for leaf, origins in starts.items()
    }
    return {leaf: _join(parts, counts[leaf]) for leaf, parts in boxes.items()}


def paste(plan: Plan, stacks: Stacks, like: Sequence[jax.Array | None]) -> list:
    """Puts blocks back into leaves with the shapes and dtypes of `like`.

    Numbers beyond the range of a dtype become its largest. A leaf that is `None` in
    `like` comes back as `None`, one without elements as it was.
    """

    def part_of(region: Region, piece: Piece) -> jax.Array:
        return stacks[piece.stack][piece.slots, *map(slice, region.stacked)]

    present = [region for region in plan.regions if like[region.leaf] is not None]
    merged = assemble(present, part_of)
    leaves = list(like)
    for leaf, slices in merged.items():
        whole = _from_slices(slices, plan.views[leaf], plan.shapes[leaf])
        leaves[leaf] = narrow(whole, like[leaf].dtype)
    return leaves
