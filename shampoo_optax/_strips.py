"""The exchange of divided parameters: shards to the owners of blocks, and back.

No device ever has all gradients or directions. Shards become strips, of which every
device has one of each block; a second exchange brings the strips of a block together.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._cutting import assemble, cut_region, fill, pad
from shampoo_optax._exchange import last_wire, own_tables, power_of, scale, wires
from shampoo_optax._routes import (
    Form,
    Names,
    Route,
    Sizes,
    as_vectors,
    forms_of,
    strip_length,
    strips_of,
)
from shampoo_optax._stacks import Piece, Plan, Region, Stack, Stacks, per_slot
from shampoo_optax._trees import narrow


def collect(
    plan: Plan, routes: Sequence[Route | None], sizes: Sizes, leaves: list
) -> Stacks:
    """This device's slots of the gradients of which every device has shards."""
    devices, axes = math.prod(sizes.values()), tuple(sizes)
    forms = forms_of(plan, routes, devices)
    held = {
        n: leaf[None]
        for n, leaf in enumerate(leaves)
        if leaf is not None and routes[n] is not None
    }
    whole = _together(
        _all_gather, held, lambda n: tuple(itertools.chain(*routes[n].gathered))
    )
    opened = {
        n: _open(
            _whole_along(rows, leaves[n].shape, routes[n], sizes), routes[n], sizes
        )
        for n, rows in whole.items()
    }
    opened = _together(_all_to_all, opened, lambda n: _own(routes[n], sizes))
    strips = {n: _close(rows, routes[n], sizes) for n, rows in opened.items()}
    stacks = _cut(plan, routes, forms, devices, strips)
    for wire, names in wires(plan, leaves, None).items():
        for n in names:
            stacks[n] = stacks[n].astype(wire).reshape(devices, -1)
    stacks = _together(_all_to_all, stacks, lambda _: axes)
    return {
        name: _joined(rows, plan.share[name], forms[name], plan, axes)
        for name, rows in stacks.items()
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
        send = _send_scaled if dtype == "float16" else _send
        stacks |= send(plan, forms, axes, wire, sent)
    present = [n for n, leaf in enumerate(leaves) if leaf is not None]
    strips = _paste(plan, routes, forms, devices, stacks, present)
    opened = {
        n: _reopen(narrow(strip, last_wire(dtype, leaves[n].dtype)), routes[n], sizes)
        for n, strip in strips.items()
    }
    opened = _together(_all_to_all, opened, lambda n: _own(routes[n], sizes))
    copies = {n: rows[None] for n, rows in opened.items()}
    opened = _together(_all_gather, copies, lambda n: _others(routes[n], sizes))
    return [
        _reclose(opened[n], leaf, routes[n], sizes) if n in opened else leaf
        for n, leaf in enumerate(leaves)
    ]


def _send(
    plan: Plan, forms: dict[str, Form], axes: Names, wire: np.dtype, sent: Stacks
) -> Stacks:
    """The strips of all slots, of blocks of which each device has its own."""
    rows = {
        n: narrow(_strips(block, plan.share[n], forms[n], plan, axes), wire)
        for n, block in sent.items()
    }
    rows = _together(_all_to_all, rows, lambda _: axes)
    return {
        n: row.astype(plan.stacks[n].dtype).reshape(plan.stacks[n].size, -1)
        for n, row in rows.items()
    }


def _send_scaled(
    plan: Plan, forms: dict[str, Form], axes: Names, wire: np.dtype, sent: Stacks
) -> Stacks:
    """Sends each block near 1, and all devices the power of two that undoes it."""
    powers = {n: power_of(block) for n, block in sent.items()}
    scaled = {n: scale(block, -powers[n]) for n, block in sent.items()}
    strips = _send(plan, forms, axes, wire, scaled)
    rows = {n: power.astype(jnp.float32)[None] for n, power in powers.items()}
    rows = _together(_all_gather, rows, lambda _: axes)
    return {
        n: scale(strip, rows[n].reshape(-1).astype(strip.dtype))
        for n, strip in strips.items()
    }


def _all_to_all(rows: jax.Array, names: Names) -> jax.Array:
    """Sends row i of `[devices, numbers]` to device i of those along axes."""
    return jax.lax.all_to_all(rows, names, 0, 0, tiled=True)


def _all_gather(rows: jax.Array, names: Names) -> jax.Array:
    return jax.lax.all_gather(rows, names, axis=0, tiled=True)


def _together(
    send: Callable[[jax.Array, Names], jax.Array],
    rows: dict[Any, jax.Array],
    names_of: Callable[[Any], Names],
) -> dict[Any, jax.Array]:
    """Sends arrays `[n, ...]` along axes; those of one dtype along the same, as one.

    Returns:
      what arrives of each, `[m, ...]`; itself, where there are no axes.
    """
    groups = {}
    for key, row in rows.items():
        if names := names_of(key):
            groups.setdefault((names, row.dtype), []).append(key)
    found = dict(rows)
    for (names, _), keys in groups.items():
        flat = [rows[key].reshape(len(rows[key]), -1) for key in keys]
        stops = np.cumsum([row.shape[1] for row in flat])[:-1]
        parts = jnp.split(send(_concatenate(flat, 1), names), stops, axis=1)
        for key, part in zip(keys, parts, strict=True):
            found[key] = part.reshape(-1, *rows[key].shape[1:])
    return found


def _own(route: Route, sizes: Sizes) -> Names:
    """The axes that a parameter is divided over, in the order of all of them."""
    return tuple(name for name in sizes if name in route.names)


def _others(route: Route, sizes: Sizes) -> Names:
    """The axes along which devices have copies of a parameter."""
    return tuple(n for n in sizes if n not in route.names and sizes[n] > 1)


def _whole_along(
    rows: jax.Array, shape: tuple[int, ...], route: Route, sizes: Sizes
) -> jax.Array:
    """Shards of a shape, `[devices, ...]`, put together along what is gathered."""
    names = tuple(itertools.chain(*route.gathered))
    rows = rows.reshape(*(sizes[name] for name in names), *shape)
    order, whole = [], []
    for dim, some in enumerate(route.gathered):
        order += [*map(names.index, some), len(names) + dim]
        whole.append(shape[dim] * math.prod(sizes[name] for name in some))
    return rows.transpose(order).reshape(whole)


def _open(leaf: jax.Array, route: Route, sizes: Sizes) -> jax.Array:
    """Cuts a shard into strips for all devices along its axes, `[devices, *part]`."""
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
    return as_vectors(region).axes.index(routes[region.leaf].axis)


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
