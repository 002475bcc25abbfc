"""How shards of parameters become strips of blocks: static, from shapes and specs.

A strip is the part of a block that one device has on the way between the devices that
hold the parameter and the one that owns the block: every so-many-th row along an axis.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shampoo_optax._specs import Spec
from shampoo_optax._stacks import Plan, Region, Stack, View

Names = tuple[str, ...]  # of axes of a mesh
Sizes = Mapping[str, int]  # of the axes that blocks are divided over, in their order
Run = tuple[int, int, int]  # the (start, count, size) of equal blocks along an axis


class Route(NamedTuple):
    """The way of one parameter.

    Its moved dimensions are those of its view, in that order. The carrier are those
    of them that are cut into strips, taken as one dimension.
    """

    gathered: Spec  # the axes along which its dimensions are brought together first
    view: View  # of what a device then has
    carrier: slice  # of the moved dimensions
    cuts: tuple[Run, ...]  # of the carrier, on a device
    spec: Spec  # of the moved dimensions, the carrier as one
    axis: int  # of a merged slice, to which the carrier belongs
    runs: tuple[Run, ...]  # of the blocks along that axis
    strips: tuple[int, ...]  # their shape, of all blocks: `[slices, *merged]`

    @property
    def names(self) -> Names:
        """The axes that the parameter is divided over, once some are gathered."""
        return tuple(itertools.chain(*self.spec))

    @property
    def opened(self) -> tuple[int, ...]:
        """The moved dimensions on a device, the carrier as one."""
        return _as_one(self.view.moved, self.carrier, math.prod)


class _Dim(NamedTuple):
    """A moved dimension of a parameter."""

    size: int  # on all devices
    names: Names
    shards: int
    source: int  # the parameter's dimension


def _as_one(dims: Sequence, carrier: slice, joined) -> tuple:
    return (*dims[: carrier.start], joined(dims[carrier]), *dims[carrier.stop :])


def strip_length(runs: Sequence[Run], devices: int) -> int:
    """The length of a strip of all blocks along an axis."""
    return sum(count * -(-size // devices) for _, count, size in runs)


def as_vectors(region: Region) -> Region:
    """A region, one of scalars as such of vectors of length 1."""
    if region.block:
        return region
    return region._replace(start=(0,), grid=(1,), block=(1,), axes=(0,))


def strips_of(region: Region, route: Route, devices: int) -> Region:
    """The region of strips that belongs to one of blocks."""
    region, axis = as_vectors(region), route.axis
    start, block = list(region.start), list(region.block)
    before = [run for run in route.runs if run[0] < region.start[axis]]
    start[axis] = strip_length(before, devices)
    block[axis] = -(-region.block[axis] // devices)
    return region._replace(start=tuple(start), block=tuple(block))


def routes_of(
    plan: Plan, specs: Sequence[Spec], sizes: Sizes
) -> tuple[Route | None, ...]:
    """The way of every parameter; `None` for one without blocks.

    Args:
      plan: of the blocks.
      specs: of the parameters.
      sizes: of the axes that blocks are divided over.
    """
    runs = [{} for _ in plan.shapes]
    for region in map(as_vectors, plan.regions):
        boxes = zip(region.start, region.grid, region.block, strict=True)
        for axis, run in enumerate(boxes):
            runs[region.leaf].setdefault(axis, set()).add(run)
    return tuple(
        _route(plan, leaf, spec, [sorted(along[axis]) for axis in sorted(along)], sizes)
        if along
        else None
        for leaf, (spec, along) in enumerate(zip(specs, runs, strict=True))
    )


def _route(
    plan: Plan,
    leaf: int,
    spec: Spec,
    runs: list[list[Run]],
    sizes: Sizes,
) -> Route:
    view, devices = plan.views[leaf], math.prod(sizes.values())
    dims, unfit = _moved(plan.shapes[leaf], view, spec, sizes)
    dims = [_gathered(dim) if dim.source in unfit else dim for dim in dims]
    groups = groups_of(view, plan.merged[leaf] or (1,))

    axis, sources = _cheapest([dims[group] for group in groups], runs, devices)
    unfit |= sources
    dims = [_gathered(dim) if dim.source in unfit else dim for dim in dims]
    carrier, cuts = groups[axis], runs[axis]
    if any(dim.shards > 1 for dim in dims[carrier]):
        carrier = slice(carrier.stop - 1, carrier.stop)
        cuts = [(0, 1, dims[carrier][0].size // dims[carrier][0].shards)]
    merged = list(plan.merged[leaf] or (1,))
    merged[axis] = strip_length(runs[axis], devices)
    return Route(
        gathered=tuple(n if dim in unfit else () for dim, n in enumerate(spec)),
        view=_local_view(view, dims),
        carrier=carrier,
        cuts=tuple(cuts),
        spec=_as_one(
            [dim.names for dim in dims], carrier, lambda n: tuple(itertools.chain(*n))
        ),
        axis=axis,
        runs=tuple(runs[axis]),
        strips=(view.slices, *merged),
    )


def _cheapest(
    groups: list[list[_Dim]], runs: list[list[Run]], devices: int
) -> tuple[int, set[int]]:
    """The axis to cut, and the parameter's dimensions to gather for that."""
    prices = [
        (*_price(group, run, devices), -axis)
        for axis, (group, run) in enumerate(zip(groups, runs, strict=True))
    ]
    axis = prices.index(min(prices))
    gathers = prices[axis][0] > 1
    return axis, {dim.source for dim in groups[axis] if gathers and dim.shards > 1}


def _price(group: list[_Dim], runs: Sequence[Run], devices: int) -> tuple:
    """What it costs to cut along an axis: copies, then divided axes, then padding."""
    whole = all(dim.shards == 1 for dim in group)
    gathers = not whole and not _in_phase(group, runs, devices)
    copies = math.prod(dim.shards for dim in group) if gathers else 1
    rows = sum(count * size for _, count, size in runs)
    return copies, not whole, strip_length(runs, devices) / rows


def _gathered(dim: _Dim) -> _Dim:
    return dim._replace(names=(), shards=1)


def _moved(
    shape: tuple[int, ...], view: View, spec: Spec, sizes: Sizes
) -> tuple[list[_Dim], set[int]]:
    """The moved dimensions, and the parameter's whose parts are cut by its shards."""
    dims, unfit = [], set()
    places = groups_of(View(view.shape, tuple(range(len(view.shape))), 0), shape)
    for source, (place, names) in enumerate(zip(places, spec, strict=True)):
        shards = math.prod(sizes[name] for name in names)
        parts = view.shape[place]
        # The first of a dimension's parts that is longer than 1 is divided.
        held = next((n for n, part in enumerate(parts) if part > 1), 0)
        if parts[held : held + 1] and parts[held] % shards:
            unfit.add(source)
        dims += [
            _Dim(part, names, shards, source)
            if n == held
            else _Dim(part, (), 1, source)
            for n, part in enumerate(parts)
        ]
    return [dims[place] for place in view.order], unfit


def groups_of(view: View, merged: Sequence[int]) -> list[slice]:
    """The moved dimensions that each dimension of a merged slice consists of."""
    moved, groups, start = view.moved, [], view.batch
    for index, side in enumerate(merged):
        stop, found = start, 1
        while stop < len(moved) and (found != side or stop == start):
            found *= moved[stop]
            stop += 1
        stop = len(moved) if index == len(merged) - 1 else stop
        groups.append(slice(start, stop))
        start = stop
    return groups


def _in_phase(group: list[_Dim], runs: Sequence[Run], devices: int) -> bool:
    """Whether the shards along an axis can be cut into strips where they are.

    Then its every `devices`-th row is so in each of its shards and of its blocks.
    """
    last = group[-1]
    blocks = all(size % devices == 0 for *_, size in runs)
    return blocks and (last.size // last.shards) % devices == 0


def _local_view(view: View, dims: Sequence[_Dim]) -> View:
    shape = list(view.shape)
    for place, dim in zip(view.order, dims, strict=True):
        shape[place] = dim.size // dim.shards
    return view._replace(shape=tuple(shape))


class Form(NamedTuple):
    """How the strips of a stack lie."""

    strips: dict[int, tuple[int, ...]]  # {axis that is cut: shape of a strip}
    width: int  # numbers sent for a slot
    axes: np.ndarray  # [n], the axis that is cut, of each slot


def forms_of(
    plan: Plan, routes: Sequence[Route | None], devices: int
) -> dict[str, Form]:
    """How the strips of each stack lie."""
    axes = {name: np.full(s.size, -1, np.int32) for name, s in plan.stacks.items()}
    for region in map(as_vectors, plan.regions):
        place = region.axes.index(routes[region.leaf].axis)
        for piece in region.pieces:
            axes[piece.stack][piece.slots] = place
    forms = {}
    for name, stack in plan.stacks.items():
        found = sorted(set(axes[name].tolist()) - {-1})
        strips = {axis: _strip(stack, axis, devices) for axis in found}
        width = max(map(math.prod, strips.values()))
        forms[name] = Form(strips, width, axes[name])
    return forms


def _strip(stack: Stack, axis: int, devices: int) -> tuple[int, ...]:
    block = list(stack.block or (1,))
    block[axis] = -(-block[axis] // devices)
    return tuple(block)
