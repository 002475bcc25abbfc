"""Merging dimensions, cutting parameters into stacks of blocks, and pasting back.

Everything here but `cut` and `paste` is static: a pure function of shapes, dtypes
and the `Blocking` record, evaluated while tracing.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._config import Blocking
from shampoo_optax._stacks import Plan, Region, Stack, Stacks
from shampoo_optax._trees import wide_dtype


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


def _pieces(side: int, block_size: int | None) -> list[tuple[int, int, int]]:
    """The (start, count, size) of the full pieces of a side and of its remainder."""
    size = side if block_size is None else min(side, block_size)
    count, rest = divmod(side, size)
    pieces = [(0, count, size)]
    return [*pieces, (count * size, 1, rest)] if rest else pieces


def _boxes(merged: Sequence[int], blocking: Blocking):
    """The (start, grid, block) of the at most 2^order regions, row-major."""
    if 0 in merged:
        return
    for pieces in itertools.product(*(_pieces(s, blocking.block_size) for s in merged)):
        yield tuple(zip(*pieces, strict=True)) or ((), (), ())


def stack_name(block: Sequence[int], dtype: np.dtype) -> str:
    """The key of a stack: its block's shape, and its dtype where not float32."""
    shape = "x".join(map(str, block)) or "scalar"
    return shape if dtype == np.float32 else f"{shape}_{dtype}"


def plan_of(leaves: Sequence[Any], blocking: Blocking) -> Plan:
    """Deals the blocks of all parameters into stacks, in order of appearance.

    Args:
      leaves: arrays or `ShapeDtypeStruct`s; only shapes and dtypes are read.
      blocking: how to merge and cut them.
    """
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    merged = tuple(merge_shape(shape, blocking) for shape in shapes)
    regions, stacks = [], {}
    for index, leaf in enumerate(leaves):
        dtype = wide_dtype(leaf.dtype)
        for start, grid, block in _boxes(merged[index], blocking):
            name = stack_name(block, dtype)
            stack = stacks.get(name, Stack(block, dtype, 0))
            regions.append(Region(index, name, stack.size, start, grid, block))
            stacks[name] = stack._replace(size=stack.size + math.prod(grid))
    return Plan(shapes, merged, tuple(regions), stacks)


def _cut_region(leaf: jax.Array, region: Region) -> jax.Array:
    """One box of a merged parameter as a stack: `[4, 6]` in `[2, 3]` is `[4, 2, 3]`."""
    order = len(region.block)
    box = jax.lax.slice(leaf, region.start, region.limit)
    tiled = itertools.chain(*zip(region.grid, region.block, strict=True))
    box = box.reshape(tuple(tiled))  # [g0, b0, g1, b1, ...]
    box = box.transpose((*range(0, 2 * order, 2), *range(1, 2 * order, 2)))
    return box.reshape(math.prod(region.grid), *region.block)


def cut(plan: Plan, leaves: Sequence[jax.Array | None]) -> Stacks:
    """Cuts leaves into stacks of blocks in the stacks' dtypes; `None` gives zeros."""
    parts = {name: [] for name in plan.stacks}
    for region in plan.regions:
        leaf, dtype = leaves[region.leaf], plan.stacks[region.stack].dtype
        if leaf is None:
            part = jnp.zeros((math.prod(region.grid), *region.block), dtype)
        else:
            merged = leaf.reshape(plan.merged[region.leaf])
            part = _cut_region(merged, region).astype(dtype)
        parts[region.stack].append(part)
    return {
        name: jnp.concatenate(part) if len(part) > 1 else part[0]
        for name, part in parts.items()
    }


def present_slots(plan: Plan, leaves: Sequence[jax.Array | None]) -> dict:
    """Which slots hold a block of a leaf that is not `None`: `{stack: bool [n]}`."""
    present = {name: np.ones(stack.size, bool) for name, stack in plan.stacks.items()}
    for region in plan.regions:
        present[region.stack][region.slots] = leaves[region.leaf] is not None
    return present


def _paste_region(blocks: jax.Array, region: Region) -> jax.Array:
    order = len(region.block)
    box = blocks.reshape(*region.grid, *region.block)  # [g0, g1, ..., b0, b1, ...]
    box = box.transpose([axis + order * k for axis in range(order) for k in (0, 1)])
    sides = (g * b for g, b in zip(region.grid, region.block, strict=True))
    return box.reshape(tuple(sides))


def _join(boxes: list[jax.Array], counts: Sequence[int]) -> jax.Array:
    """Concatenates boxes that are row-major over `counts` boxes along each axis."""
    for axis in reversed(range(len(counts))):
        step = counts[axis]
        if step > 1:
            boxes = [
                jnp.concatenate(boxes[i : i + step], axis)
                for i in range(0, len(boxes), step)
            ]
    (whole,) = boxes
    return whole


def _narrow(leaf: jax.Array, dtype: np.dtype) -> jax.Array:
    limit = float(jnp.finfo(dtype).max)
    if limit < float(jnp.finfo(leaf.dtype).max):
        leaf = jnp.clip(leaf, -limit, limit)
    return leaf.astype(dtype)


def paste(plan: Plan, stacks: Stacks, like: Sequence[jax.Array | None]) -> list:
    """Puts blocks back into leaves with the shapes and dtypes of `like`.

    Numbers beyond the range of a dtype become its largest. A leaf that is `None` in
    `like` comes back as `None`, one without elements as it was.
    """
    boxes = [[] for _ in plan.shapes]
    starts = [[] for _ in plan.shapes]
    for region in plan.regions:
        if like[region.leaf] is not None:
            blocks = stacks[region.stack][region.slots]
            boxes[region.leaf].append(_paste_region(blocks, region))
            starts[region.leaf].append(region.start)
    leaves = []
    for leaf, shape, parts, origin in zip(
        like, plan.shapes, boxes, starts, strict=True
    ):
        if leaf is not None and parts:
            counts = [len(set(along)) for along in zip(*origin, strict=True)]
            leaf = _narrow(_join(parts, counts).reshape(shape), leaf.dtype)
        leaves.append(leaf)
    return leaves
