"""The exchange of divided parameters: shards to the owners of blocks, and back.

No device ever has all gradients or directions. Shards become strips, of which every
device has one of each block; a second exchange brings the strips of a block together.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._blocking import assemble, cut_region, fill, pad
from shampoo_optax._exchange import own_tables, power_of, scale, wires
from shampoo_optax._routes import Names, Route, lifted, strip_length, strips_of
from shampoo_optax._stacks import Piece, Plan, Region, Stack, Stacks, per_slot
from shampoo_optax._trees import narrow

Sizes = Mapping[str, int]  # of the axes that blocks are divided over, in their order


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
    for region in map(lifted, plan.regions):
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


def collect(
    plan: Plan, routes: Sequence[Route | None], sizes: Sizes, leaves: list
) -> Stacks:
    """This device's slots of the gradients of which every device has shards."""
    devices, axes = math.prod(sizes.values()), tuple(sizes)
    forms = forms_of(plan, routes, devices)
    opened = {
        n: _open(leaf, routes[n], sizes)
        for n, leaf in enumerate(leaves)
        if leaf is not None and routes[n] is not None
    }
    opened = _exchange_alike(opened, routes, sizes)
    strips = {n: _close(rows, routes[n], sizes) for n, rows in opened.items()}
    stacks = _cut(plan, routes, forms, devices, strips)
    found = {}
    for wire, names in wires(plan, leaves, None).items():
        rows = [stacks[n].astype(wire).reshape(devices, -1) for n in names]
        rows = _exchange(rows, axes)
        found |= dict(zip(names, rows, strict=True))
    return {
        name: _joined(found[name], plan.share[name], forms[name], plan, axes)
        for name in plan.stacks
    }


def spread(
    plan: Plan,
    routes: Sequence[Route | None],
    sizes: Sizes,
    dtype: str | None,
    directions: Stacks,
    leaves: list,
) -> list:
    """Each device's shards of the directions of whose blocks it has some slots."""
    devices, axes = math.prod(sizes.values()), tuple(sizes)
    forms = forms_of(plan, routes, devices)
    stacks = {}
    for wire, names in wires(plan, leaves, dtype).items():
        sent = {name: directions[name] for name in names}
        send = _send_scaled if dtype is not None and wire == np.float16 else _send
        stacks |= send(plan, forms, axes, wire, sent)
    present = [n for n, leaf in enumerate(leaves) if leaf is not None]
    strips = _paste(plan, routes, forms, devices, stacks, present)
    opened = {
        n: _reopen(narrow(strip, _wire(dtype, leaves[n].dtype)), routes[n], sizes)
        for n, strip in strips.items()
    }
    opened = _exchange_alike(opened, routes, sizes)
    opened = _gather_alike(opened, routes, sizes)
    return [
        _reclose(opened[n], leaf, routes[n], sizes) if n in opened else leaf
        for n, leaf in enumerate(leaves)
    ]


def _send(
    plan: Plan, forms: dict[str, Form], axes: Names, wire: np.dtype, sent: Stacks
) -> Stacks:
    """The strips of all slots, of blocks of which each device has its own."""
    rows = [
        narrow(_strips(block, plan.share[n], forms[n], plan, axes), wire)
        for n, block in sent.items()
    ]
    rows = _exchange(rows, axes)
    return {
        n: row.astype(plan.stacks[n].dtype).reshape(plan.stacks[n].size, -1)
        for n, row in zip(sent, rows, strict=True)
    }


def _send_scaled(
    plan: Plan, forms: dict[str, Form], axes: Names, wire: np.dtype, sent: Stacks
) -> Stacks:
    """Sends each block near 1, and all devices the power of two that undoes it."""
    powers = {n: power_of(block) for n, block in sent.items()}
    scaled = {n: scale(block, -powers[n]) for n, block in sent.items()}
    strips = _send(plan, forms, axes, wire, scaled)
    row = [power.astype(jnp.float32) for power in powers.values()]
    row = jax.lax.all_gather(jnp.concatenate(row), axes)
    stops = np.cumsum([len(power) for power in powers.values()])[:-1]
    parts = zip(strips.items(), jnp.split(row, stops, axis=1), strict=True)
    return {
        n: scale(strip, part.reshape(-1).astype(strip.dtype))
        for (n, strip), part in parts
    }


def traffic(
    plan: Plan,
    routes: Sequence[Route | None],
    sizes: Sizes,
    dtype: str | None,
    leaves: list,
) -> tuple[dict[str, int], int]:
    """Bytes that a device gets in a step, itself as a sender included.

    Returns:
      those of all exchanges of a kind, and those of directions to strips alone.
    """
    devices, sent = math.prod(sizes.values()), {"all-to-all": 0, "all-gather": 0}
    forms = forms_of(plan, routes, devices)

    def between_owners(chosen: str | None) -> int:
        return sum(
            wire.itemsize * plan.stacks[name].size * forms[name].width
            for wire, names in wires(plan, leaves, chosen).items()
            for name in names
        )

    for leaf, route in zip(leaves, routes, strict=True):
        if route is None:
            continue
        back = jnp.dtype(_wire(dtype, leaf.dtype)).itemsize
        shards = math.prod(sizes[name] for name in route.names)
        strips = math.prod(route.strips)
        if shards > 1:
            sent["all-to-all"] += strips * (leaf.dtype.itemsize + back)
        if shards < devices:
            sent["all-gather"] += strips * (devices // shards) * back
        gathered = math.prod(sizes[n] for names in route.gathered for n in names)
        if gathered > 1:
            sent["all-gather"] += leaf.size // shards * leaf.dtype.itemsize
    if dtype == "float16":  # with powers of two
        sent["all-gather"] += 4 * sum(stack.size for stack in plan.stacks.values())
    directions = between_owners(dtype)
    sent["all-to-all"] += between_owners(None) + directions
    return {kind: number for kind, number in sent.items() if number}, directions


def _wire(asked: str | None, dtype: np.dtype) -> np.dtype:
    """The dtype in which an update travels to the devices that hold the parameter."""
    return jnp.dtype(asked) if asked == "bfloat16" else dtype


def _exchange(rows: list[jax.Array], axes: Names) -> list[jax.Array]:
    """Sends row i of each array, `[devices, ...]`, to device i of those along axes."""
    if not rows or not axes:
        return rows
    flat = [row.reshape(len(row), -1) for row in rows]
    stops = np.cumsum([row.shape[1] for row in flat])[:-1]
    sent = jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]
    sent = jax.lax.all_to_all(sent, axes, 0, 0, tiled=True)
    parts = jnp.split(sent, stops, axis=1)
    return [part.reshape(row.shape) for part, row in zip(parts, rows, strict=True)]


def _own(route: Route, sizes: Sizes) -> Names:
    """The axes that a parameter is divided over, in the order of all of them."""
    return tuple(name for name in sizes if name in route.names)


def _groups(
    opened: dict[int, jax.Array], routes: Sequence[Route | None], sizes: Sizes
) -> dict[tuple, list[int]]:
    """The parameters that travel together: over the same axes, in the same dtype."""
    groups = {}
    for n, rows in opened.items():
        groups.setdefault((_own(routes[n], sizes), rows.dtype), []).append(n)
    return groups


def _exchange_alike(
    opened: dict[int, jax.Array], routes: Sequence[Route | None], sizes: Sizes
) -> dict[int, jax.Array]:
    found = {}
    for (names, _), members in _groups(opened, routes, sizes).items():
        rows = _exchange([opened[n] for n in members], names)
        found |= dict(zip(members, rows, strict=True))
    return found


def _gather_alike(
    opened: dict[int, jax.Array], routes: Sequence[Route | None], sizes: Sizes
) -> dict[int, jax.Array]:
    """Adds a first dimension: over the devices along axes that hold copies."""
    found = {}
    for (names, _), members in _groups(opened, routes, sizes).items():
        others = tuple(name for name in sizes if name not in names)
        rows = [opened[n].reshape(-1) for n in members]
        stops = np.cumsum([len(row) for row in rows])[:-1]
        row = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
        row = jax.lax.all_gather(row, others) if others else row[None]
        for n, part in zip(members, jnp.split(row, stops, axis=1), strict=True):
            found[n] = part.reshape(-1, *opened[n].shape)
    return found


def _open(leaf: jax.Array, route: Route, sizes: Sizes) -> jax.Array:
    """Cuts a shard into strips for all devices along its axes, `[devices, *part]`."""
    for dim, names in enumerate(route.gathered):
        if names:
            leaf = jax.lax.all_gather(leaf, names, axis=dim, tiled=True)
    view, axis = route.view, route.carrier.start
    leaf = leaf.reshape(view.shape).transpose(view.order).reshape(route.opened)
    devices = math.prod(sizes.values())
    runs = [_cut_run(leaf, axis, run, devices) for run in route.cuts]
    rows = jnp.moveaxis(_concatenate(runs, axis), axis + 1, 0)
    rows = rows.reshape(*sizes.values(), *rows.shape[1:])
    own = _own(route, sizes)
    for place, name in reversed(list(enumerate(sizes))):
        if name not in own:
            index = jax.lax.axis_index(name)
            rows = jax.lax.dynamic_index_in_dim(rows, index, place, keepdims=False)
    return rows.reshape(-1, *rows.shape[len(own) :])


def _concatenate(parts: list[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def _cut_run(leaf: jax.Array, axis: int, run: tuple, devices: int) -> jax.Array:
    """Blocks along an axis as strips: `[..., count * strip, devices, ...]`."""
    start, count, size = run
    before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
    leaf = jax.lax.slice_in_dim(leaf, start, start + count * size, axis=axis)
    leaf = leaf.reshape(*before, count, size, *after)
    length = -(-size // devices)
    widths = [(0, 0)] * leaf.ndim
    widths[axis + 1] = (0, length * devices - size)
    leaf = jnp.pad(leaf, widths) if length * devices > size else leaf
    return leaf.reshape(*before, count * length, devices, *after)


def _parted(route: Route, sizes: Sizes, part: Sequence[int]) -> list[list[int]]:
    """For each dimension of a part, the numbers of devices along it, and its own."""
    return [
        [*(sizes[name] for name in names), side]
        for names, side in zip(route.spec, part, strict=True)
    ]


def _places(route: Route, own: Names) -> list[int]:
    """Where `[*own, *part]` has what :func:`_parted` has, in its order."""
    places = []
    for dim, names in enumerate(route.spec):
        places += [*map(own.index, names), len(own) + dim]
    return places


def _close(rows: jax.Array, route: Route, sizes: Sizes) -> jax.Array:
    """One strip of every block of a parameter, of what all of its devices sent."""
    own = _own(route, sizes)
    rows = rows.reshape(*(sizes[name] for name in own), *rows.shape[1:])
    return rows.transpose(_places(route, own)).reshape(route.strips)


def _reopen(strips: jax.Array, route: Route, sizes: Sizes) -> jax.Array:
    """Undoes :func:`_close`."""
    own = _own(route, sizes)
    part = list(route.opened)
    part[route.carrier.start] = strip_length(route.cuts, math.prod(sizes.values()))
    parted = itertools.chain(*_parted(route, sizes, part))
    strips = strips.reshape(tuple(parted))
    strips = strips.transpose(tuple(map(int, np.argsort(_places(route, own)))))
    return strips.reshape(-1, *part)


def _reclose(rows: jax.Array, like: jax.Array, route: Route, sizes: Sizes) -> jax.Array:
    """Undoes :func:`_open`, of `[devices along other axes, devices, *part]`."""
    own, axis = _own(route, sizes), route.carrier.start
    others = tuple(name for name in sizes if name not in own)
    part, devices = rows.shape[2:], math.prod(sizes.values())
    rows = rows.reshape(*(sizes[name] for name in (*others, *own)), *part)
    order = [(*others, *own).index(name) for name in sizes]
    rows = rows.transpose(*order, *range(len(sizes), rows.ndim))
    rows = jnp.moveaxis(rows.reshape(devices, *part), 0, axis + 1)
    runs, stop = [], 0
    for _, count, size in route.cuts:
        start, stop = stop, stop + count * -(-size // devices)
        run = jax.lax.slice_in_dim(rows, start, stop, axis=axis)
        run = run.reshape(*part[:axis], count, -1, *part[axis + 1 :])
        run = jax.lax.slice_in_dim(run, 0, size, axis=axis + 1)
        runs.append(run.reshape(*part[:axis], count * size, *part[axis + 1 :]))
    leaf, view = _concatenate(runs, axis), route.view
    leaf = leaf.reshape(view.moved).transpose(tuple(map(int, np.argsort(view.order))))
    whole = [
        side * math.prod(sizes[name] for name in names)
        for side, names in zip(like.shape, route.gathered, strict=True)
    ]
    leaf = leaf.reshape(whole)
    for dim, names in enumerate(route.gathered):
        if names:
            start = jax.lax.axis_index(names) * like.shape[dim]
            leaf = jax.lax.dynamic_slice_in_dim(leaf, start, like.shape[dim], dim)
    return narrow(leaf, like.dtype)


def _cut(
    plan: Plan,
    routes: Sequence[Route | None],
    forms: dict[str, Form],
    devices: int,
    strips: dict[int, jax.Array],
) -> Stacks:
    """The strips of all slots, `{stack: [n, width]}`."""

    def blocks_of(region: Region) -> jax.Array:
        part = strips_of(region, routes[region.leaf], devices)
        if region.leaf not in strips:
            return jnp.zeros((part.size, *part.stacked))
        return cut_region(strips[region.leaf], part)

    def shaped(region: Region, stack: str, blocks: jax.Array) -> jax.Array:
        strip = forms[stack].strips[_place(region, routes)]
        blocks = pad(blocks, len(blocks), strip).reshape(len(blocks), -1)
        blocks = pad(blocks, len(blocks), (forms[stack].width,))
        return blocks.astype(plan.stacks[stack].dtype)

    flat = {n: s._replace(block=(forms[n].width,)) for n, s in plan.stacks.items()}
    return fill(flat, plan.regions, blocks_of, shaped)


def _paste(
    plan: Plan,
    routes: Sequence[Route | None],
    forms: dict[str, Form],
    devices: int,
    stacks: Stacks,
    present: Sequence[int],
) -> dict[int, jax.Array]:
    """The strips of parameters, from those of all slots."""

    def part_of(region: Region, piece: Piece) -> jax.Array:
        strip = forms[piece.stack].strips[_place(region, routes)]
        blocks = stacks[piece.stack][piece.slots, : math.prod(strip)]
        blocks = blocks.reshape(-1, *strip)
        return blocks[:, *map(slice, region.stacked)]

    regions = [
        strips_of(region, routes[region.leaf], devices)
        for region in plan.regions
        if region.leaf in present
    ]
    return assemble(regions, part_of)


def _place(region: Region, routes: Sequence[Route | None]) -> int:
    """The axis of a stack along which a region's blocks are cut into strips."""
    return lifted(region).axes.index(routes[region.leaf].axis)


def _own_axes(plan: Plan, axes: Names, form: Form, like: jax.Array) -> jax.Array:
    """The axis that is cut of each of this device's slots, `[share, 1, ...]`."""
    return per_slot(own_tables(plan, axes, form.axes), like)


def _joined(
    rows: jax.Array, stack: Stack, form: Form, plan: Plan, axes: Names
) -> jax.Array:
    """This device's blocks of a stack, from the strips that all devices sent."""
    block, whole = stack.block or (1,), None
    rows = rows.astype(stack.dtype).reshape(len(rows), stack.size, form.width)
    for axis, strip in form.strips.items():
        found = rows[..., : math.prod(strip)].reshape(*rows.shape[:2], *strip)
        found = jnp.moveaxis(found, 0, axis + 2)
        found = found.reshape(stack.size, *strip[:axis], -1, *strip[axis + 1 :])
        found = jax.lax.slice_in_dim(found, 0, block[axis], axis=axis + 1)
        cut = None if whole is None else _own_axes(plan, axes, form, found) == axis
        whole = found if whole is None else jnp.where(cut, found, whole)
    return whole.reshape(stack.size, *stack.block)


def _strips(
    blocks: jax.Array, stack: Stack, form: Form, plan: Plan, axes: Names
) -> jax.Array:
    """Undoes :func:`_joined`: strips for all devices, `[devices, share * width]`."""
    block, rows = stack.block or (1,), None
    for axis, strip in form.strips.items():
        side = strip[axis] * plan.owners
        found = pad(
            blocks.reshape(stack.size, *block),
            stack.size,
            (*block[:axis], side, *block[axis + 1 :]),
        )
        found = found.reshape(
            stack.size, *strip[: axis + 1], plan.owners, *strip[axis + 1 :]
        )
        found = jnp.moveaxis(found, axis + 2, 1).reshape(stack.size, plan.owners, -1)
        found = jnp.pad(found, [(0, 0), (0, 0), (0, form.width - found.shape[-1])])
        cut = None if rows is None else _own_axes(plan, axes, form, found) == axis
        rows = found if rows is None else jnp.where(cut, found, rows)
    return jnp.moveaxis(rows, 1, 0).reshape(plan.owners, -1)
