"""What devices send each other: gradients to the owners of blocks, directions back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._stacks import Plan, Stacks
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

    They travel in the order of their owners, in the gradients' dtypes.
    """
    own = {}
    for dtype, names in wires(plan, leaves, None).items():
        rows = [blocks[name].reshape(plan.owners, -1) for name in names]
        rows = jnp.concatenate(rows, axis=1).astype(dtype)  # [owners, entries]
        total = jax.lax.psum_scatter(rows, axes)
        own |= _split(plan, names, total[None])
    return {name: block / plan.owners for name, block in own.items()}


def gather(
    plan: Plan, axes: Axes, dtype: Any, directions: Stacks, leaves: list
) -> Stacks:
    """The directions of all slots, by one exchange for each dtype that travels."""
    whole = {}
    for wire, names in wires(plan, leaves, dtype).items():
        row = jnp.concatenate([directions[name].reshape(-1) for name in names])
        whole |= _split(plan, names, _all_gather(row, wire, axes))
    return whole


def _all_gather(row: jax.Array, dtype: np.dtype, axes: Axes) -> jax.Array:
    """Gathers `[entries]` to `[owners, entries]`.

    float16 has few exponents, so a power of two that brings the largest entry near 1
    travels with the entries.
    """
    if dtype != np.float16:
        return jax.lax.all_gather(narrow(row, dtype), axes)
    largest = jnp.max(jnp.abs(row), initial=jnp.finfo(row.dtype).tiny)
    exponent = 2 * jnp.ceil(jnp.log2(largest) / 2)
    half = jnp.exp2(-exponent / 2)  # in two steps, so that no power is out of range
    row = jnp.append((row * half) * half, exponent).astype(dtype)
    rows = jax.lax.all_gather(row, axes)
    half = jnp.exp2(rows[:, -1:].astype(half.dtype) / 2)
    return (rows[:, :-1].astype(half.dtype) * half) * half


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
        found = jnp.result_type(*(kinds[stack.dtype] or [stack.dtype]))
        travelling.setdefault(np.dtype(chosen or found), []).append(name)
    return travelling


def _split(plan: Plan, names: list[str], rows: jax.Array) -> Stacks:
    """Rows `[r, entries]`, one an owner, as stacks `[r * share, *block]`."""
    stacks, stop = {}, 0
    for name in names:
        block, dtype, size = plan.share[name]
        start, stop = stop, stop + size * math.prod(block)
        part = rows[:, start:stop].astype(dtype)
        stacks[name] = part.reshape(-1, *block)
    return stacks
