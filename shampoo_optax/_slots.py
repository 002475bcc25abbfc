"""Where the blocks of every parameter lie in a state, whoever cut them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shampoo_optax._routes import groups_of
from shampoo_optax._specs import Spec, shards_of
from shampoo_optax._stacks import Plan, Region, View
from shampoo_optax._transform import Layout

Key = tuple  # of a block: where in its parameter it starts, and its shape


class Slots(NamedTuple):
    """Neighbouring slots, counted over all devices: `state.skipped[stack][slots]`.

    In local mode those of the first device that has the blocks.
    """

    stack: str
    start: int
    stop: int


class RegionSlots(NamedTuple):
    """Where the equal blocks of a region lie."""

    region: Region
    slots: tuple[tuple[str, np.ndarray], ...]  # (stack, [copies, n]), in their order


def region_slots(layout: Layout) -> Iterator[RegionSlots]:
    """The places of all blocks, region by region.

    In local mode the regions are those of whole parameters where these have the same
    blocks, and else those of a :class:`Batch` that splits parameters into shards.
    """
    if not layout.local:
        for region in layout.plan.regions:
            yield RegionSlots(
                region,
                tuple(
                    (piece.stack, np.arange(piece.slot, piece.slot + piece.size)[None])
                    for piece in region.pieces
                ),
            )
        return
    held = _held(layout)
    whole, apart = layout.replan(False), layout.replan(True)
    different = _differing(whole, apart)
    for plan, chosen in ((whole, False), (apart, True)):
        for region in plan.regions:
            if (region.leaf in different) == chosen:
                yield _local_place(plan, region, held[region.leaf])


def slots_of(layout: Layout) -> dict[str, tuple[Slots, ...]]:
    """Where the blocks of each parameter are, in their order."""
    slots = {path: () for path in layout.paths}
    for place in region_slots(layout):
        path = layout.paths[place.region.leaf]
        for stack, (first, *_) in place.slots:
            for run in np.split(first, np.flatnonzero(np.diff(first) != 1) + 1):
                slots[path] += (Slots(stack, int(run[0]), int(run[-1]) + 1),)
    return slots


def cut_apart(layout: Layout) -> tuple[str, ...]:
    """The paths of the parameters whose blocks are others in local mode."""
    different = _differing(layout.replan(False), layout.replan(True))
    return tuple(path for n, path in enumerate(layout.paths) if n in different)


def _differing(one: Plan, other: Plan) -> set[int]:
    """The parameters that two plans cut into different blocks."""
    found = []
    for plan in (one, other):
        blocks = defaultdict(set)
        for region in plan.regions:
            blocks[region.leaf].update(_keys(plan, region))
        found.append(blocks)
    return {n for n in found[0] if found[0][n] != found[1][n]}


def _local_place(
    plan: Plan, region: Region, held: Mapping[Key, list[tuple[str, int]]]
) -> RegionSlots:
    found = [held[key] for key in _keys(plan, region)]
    slots = np.array([[slot for _, slot in copies] for copies in found]).T
    return RegionSlots(region, ((found[0][0][0], slots),))


def _held(layout: Layout) -> dict[int, dict[Key, list[tuple[str, int]]]]:
    """The slots of every block of every parameter, on all devices that have it."""
    plan, placement = layout.plan, layout.placement
    coordinates = np.unravel_index(
        np.arange(plan.owners), tuple(placement.sizes.values())
    )
    where = dict(zip(placement.sizes, coordinates, strict=True))
    held = defaultdict(lambda: defaultdict(list))
    for region in plan.regions:
        spec = layout.specs[region.leaf]
        starts = _starts(layout, region.leaf, spec, where)
        (piece,) = region.pieces
        share = plan.share[piece.stack].size
        for device, start in enumerate(starts):
            for n, key in enumerate(_keys(plan, region, start)):
                slot = device * share + piece.slot + n
                held[region.leaf][key].append((piece.stack, slot))
    return held


def _starts(
    layout: Layout, leaf: int, spec: Spec, where: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Where the shard of every device begins, `[devices, dimensions]`."""
    sizes = layout.placement.sizes
    counts = shards_of(spec, layout.placement.mesh)
    starts = np.zeros((layout.plan.owners, len(spec)), int)
    for dim, names in enumerate(spec):
        index = 0
        for name in names:
            index = index * sizes[name] + where[name]
        starts[:, dim] = index * (layout.leaves[leaf].shape[dim] // counts[dim])
    return starts


def _keys(plan: Plan, region: Region, start: np.ndarray | int = 0) -> list[Key]:
    """The keys of a region's blocks, in their order."""
    grid = np.indices((region.slices, *region.grid)).reshape(1 + len(region.grid), -1)
    boxes = zip(region.start, grid[1:], region.block, strict=True)
    merged = [begin + index * side for begin, index, side in boxes]
    entries = _entries(plan, region.leaf, grid[0], merged) + start
    return [(tuple(entry), region.block) for entry in entries.tolist()]


def _entries(
    plan: Plan, leaf: int, slices: np.ndarray, merged: list[np.ndarray]
) -> np.ndarray:
    """Entries of merged slices as such of the parameter, `[n, dimensions]`."""
    view = plan.views[leaf]
    moved = _unravelled(slices, view.moved[: view.batch])
    for group, index in zip(groups_of(view, plan.merged[leaf]), merged, strict=True):
        moved += _unravelled(index, view.moved[group])
    seen = [None] * len(moved)
    for place, index in zip(view.order, moved, strict=True):
        seen[place] = index
    plain = View(view.shape, tuple(range(len(view.shape))), 0)
    entries = np.zeros((len(slices), len(plan.shapes[leaf])), int)
    for dim, group in enumerate(groups_of(plain, plan.shapes[leaf])):
        for side, index in zip(view.shape[group], seen[group], strict=True):
            entries[:, dim] = entries[:, dim] * side + index
    return entries


def _unravelled(index: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    return list(np.unravel_index(index, shape)) if shape else []
