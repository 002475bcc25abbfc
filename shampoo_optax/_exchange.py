"""What devices send each other: gradients to the owners of blocks, directions back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._stacks import Plan, Stacks, per_slot
from shampoo_optax._trees import narrow

Axes = tuple[str, ...]  # of a mesh, over which blocks are divided


def own_slots(plan: Plan, axes: Axes, stack: jax.Array | np.ndarray) -> jax.Array:
    """This device's slots of a stack that it has whole."""
    size = len(stack) // plan.owners
    start = jax.lax.axis_index(axes).astype(jnp.uint32) * np.uint32(size)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(stack), start, size)


def own_tables(plan: Plan, axes: Axes, tables: Any) -> Any:
    """This device's part of static tables over all slots, read as one row."""
    leaves, treedef = jax.tree.flatten(tables)
    rows = [leaf.reshape(plan.owners, -1).astype(np.int32) for leaf in leaves]
    row = own_slots(plan, axes, np.concatenate(rows, axis=1))[0]
    stops = np.cumsum([part.shape[1] for part in rows])
    parts = jnp.split(row, stops[:-1])
    parts = [p.astype(leaf.dtype) for p, leaf in zip(parts, leaves, strict=True)]
    return treedef.unflatten(parts)


def own_blocks(plan: Plan, axes: Axes, blocks: Stacks) -> Stacks:
    """This device's slots of the gradients that every device has."""
    return {name: own_slots(plan, axes, block) for name, block in blocks.items()}


def mean_own_blocks(plan: Plan, axes: Axes, blocks: Stacks, leaves: list) -> Stacks:
    """This device's slots of the mean of all devices' gradients.

    They travel in the order of their owners, in the gradients' dtypes, divided first
    by a power of two no less than their number: a sum never leaves a dtype's range.
    """
    own, early = {}, 2 ** (plan.owners - 1).bit_length()
    for dtype, names in wires(plan, leaves, None).items():
        rows = [blocks[name].reshape(plan.owners, -1) for name in names]
        rows = (jnp.concatenate(rows, axis=1) / early).astype(dtype)
        total = jax.lax.psum_scatter(rows, axes)  # [owners, entries] -> [entries]
        own |= _split(plan, names, total[None])
    return {name: block * (early / plan.owners) for name, block in own.items()}


def gather(
    plan: Plan, axes: Axes, dtype: Any, directions: Stacks, leaves: list
) -> Stacks:
    """The directions of all slots, by one exchange for each dtype that travels."""
    whole = {}
    for wire, names in wires(plan, leaves, dtype).items():
        asked = dtype is not None and wire == np.float16
        collect = _gather_scaled if asked else _gather_plain
        whole |= collect(plan, axes, wire, {name: directions[name] for name in names})
    return whole


def _gather_plain(plan: Plan, axes: Axes, wire: np.dtype, sent: Stacks) -> Stacks:
    rows = _gather_rows(axes, wire, list(sent.values()))
    return _split(plan, list(sent), rows)


def _gather_scaled(plan: Plan, axes: Axes, wire: np.dtype, sent: Stacks) -> Stacks:
    """Sends with each block a power of two that brings its largest entry near 1.

    For dtypes with few exponents.
    """
    names = list(sent)
    powers = {name: power_of(block) for name, block in sent.items()}
    scaled = [scale(block, -powers[name]) for name, block in sent.items()]
    rows = _gather_rows(axes, wire, [*scaled, *powers.values()])
    slots = sum(plan.share[name].size for name in names)
    powers = _split(plan, names, rows[:, -slots:], numbers=True)
    found = _split(plan, names, rows)
    return {name: scale(block, powers[name]) for name, block in found.items()}


def _gather_rows(axes: Axes, wire: np.dtype, parts: list[jax.Array]) -> jax.Array:
    """All numbers of this device in one row, and those of all, `[owners, numbers]`."""
    row = jnp.concatenate([part.reshape(-1) for part in parts])
    return jax.lax.all_gather(narrow(row, wire), axes)


def power_of(blocks: jax.Array) -> jax.Array:
    """An even power of two next to the largest entry of each block, `[n]`."""
    axes = tuple(range(1, blocks.ndim))
    tiny = jnp.finfo(blocks.dtype).tiny
    largest = jnp.max(jnp.abs(blocks), axis=axes, initial=tiny)
    return 2 * jnp.ceil(jnp.log2(largest) / 2)


def scale(blocks: jax.Array, powers: jax.Array) -> jax.Array:
    """Multiplies by powers of two, in two steps so that none is out of range."""
    half = per_slot(jnp.exp2(powers / 2), blocks)
    return (blocks * half) * half


def last_wire(asked: str | None, dtype: np.dtype) -> np.dtype:
    """The dtype in which an update travels to the devices that hold the parameter."""
    return jnp.dtype(asked) if asked == "bfloat16" else dtype


def wires(plan: Plan, leaves: list, chosen: Any) -> dict[np.dtype, list[str]]:
    """The stacks that travel together, by the dtype in which they do.

    Args:
      plan: of the blocks.
      leaves: the gradients, `None` where they are absent.
      chosen: a dtype for all; `None` stands for the widest one of the gradients whose
        statistics have the same dtype.
    """
    kinds = {stack.dtype: set() for stack in plan.stacks.values()}
    for region in plan.regions:
        if leaves[region.leaf] is not None:
            stack = plan.stacks[region.pieces[0].stack]
            kinds[stack.dtype].add(leaves[region.leaf].dtype)
    travelling = {}
    for name, stack in plan.stacks.items():
        found = np.dtype(jnp.result_type(*(kinds[stack.dtype] or [stack.dtype])))
        found = min(found, stack.dtype, key=lambda dtype: dtype.itemsize)
        travelling.setdefault(np.dtype(chosen or found), []).append(name)
    return travelling


def _split(
    plan: Plan, names: list[str], rows: jax.Array, numbers: bool = False
) -> Stacks:
    """Rows `[r, entries]`, one an owner, as stacks `[r * share, *block]`.

    With `numbers` there is one number a slot, and stacks are `[r * share]`.
    """
    stacks, stop = {}, 0
    for name in names:
        block, dtype, size = plan.share[name]
        shape = () if numbers else block
        start, stop = stop, stop + size * math.prod(shape)
        part = rows[:, start:stop].astype(dtype)
        stacks[name] = part.reshape(-1, *shape)
    return stacks
