"""Block space: what a plan says of stacks, and what is common to their arrays."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Stacks = dict[str, jax.Array]  # {stack: [n, *block]}
AxisStacks = dict[str, dict[str, jax.Array]]  # {stack: {axis: [n, d, d]}}


class Stack(NamedTuple):
    """Blocks of one shape and dtype; smaller ones are padded to it with zeros."""

    block: tuple[int, ...]
    dtype: np.dtype  # of the statistics: float32 or wider
    size: int  # number of slots


def blocks_of(stacks: dict[str, Stack]) -> dict[str, tuple[int, ...]]:
    """The shape of the blocks of each stack."""
    return {name: stack.block for name, stack in stacks.items()}


class Piece(NamedTuple):
    """Neighbouring slots of a stack that hold neighbouring blocks of a region."""

    stack: str
    slot: int  # of the first block
    size: int  # number of blocks

    @property
    def slots(self) -> slice:
        return slice(self.slot, self.slot + self.size)


class View(NamedTuple):
    """A parameter as its slices: reshaped, its batch axes in front."""

    shape: tuple[int, ...]  # with two axes for each that is split
    order: tuple[int, ...]  # of these axes
    batch: int  # how many of them are batch

    @property
    def moved(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.order)

    @property
    def slices(self) -> int:
        return math.prod(self.moved[: self.batch])

    @property
    def rest(self) -> tuple[int, ...]:
        """The shape of a slice."""
        return self.moved[self.batch :]


def whole_view(shape: Sequence[int]) -> View:
    """A parameter as the one slice that it is."""
    return View(tuple(shape), tuple(range(len(shape))), 0)


class Region(NamedTuple):
    """The equal blocks that tile one box of a merged parameter, row-major.

    Where axes of the parameter are batch, that is one box of each of its slices.
    """

    leaf: int
    slices: int  # of the parameter, each with such a box
    start: tuple[int, ...]
    grid: tuple[int, ...]  # number of blocks along each axis
    block: tuple[int, ...]
    axes: tuple[int, ...]  # the region's axis that is each axis of the stack
    pieces: tuple[Piece, ...]  # where the blocks lie, in their order

    @property
    def limit(self) -> tuple[int, ...]:
        return tuple(
            s + g * b for s, g, b in zip(self.start, self.grid, self.block, strict=True)
        )

    @property
    def size(self) -> int:
        return self.slices * math.prod(self.grid)

    @property
    def stacked(self) -> tuple[int, ...]:
        """The shape of a block in its stack, before padding."""
        return tuple(self.block[axis] for axis in self.axes)


class Plan(NamedTuple):
    """Which block of which parameter lies in which slot of which stack.

    An owner has `size / owners` consecutive slots of each stack.
    """

    shapes: tuple[tuple[int, ...], ...]  # of the parameters
    views: tuple[View, ...]  # of the parameters as slices
    merged: tuple[tuple[int, ...], ...]  # shapes of a slice
    regions: tuple[Region, ...]
    stacks: dict[str, Stack]
    owners: int

    @property
    def share(self) -> dict[str, Stack]:
        """The stacks of one owner."""
        return {
            name: stack._replace(size=stack.size // self.owners)
            for name, stack in self.stacks.items()
        }


class Inputs(NamedTuple):
    """What a step in block space is given."""

    blocks: Stacks  # the gradient, {stack: [n, *block]}, float32 or wider
    present: dict  # {stack: bool [n]}: the slots that hold a gradient
    sides: dict  # {stack: {axis: int32 [n]}}: sides before padding, where there is any
    count: jax.Array  # [], int32: this step's number t, from 1
    fields: dict[str, Any]  # of the state, its count left out
    numbers: dict[str, jax.Array] = {}  # the hyperparameters that are arrays


# The entries of a bundle: joining saves operations, which counts for small stacks, and
# copies numbers, on CPU up to 20 ns for each, which counts for large ones.
BUNDLE = 2**14


def bundles(stacks: Stacks) -> dict[str, list[str]]:
    """Which stacks are joined: of one dtype, and together no more than a bundle."""
    groups, sizes = {}, {}
    for name, stack in stacks.items():
        keys = (f"{stack.dtype}-{index}" for index in itertools.count())
        key = next(
            k for k in keys if sizes.get(k, 0) + stack.size <= BUNDLE or k not in sizes
        )
        sizes[key] = sizes.get(key, 0) + stack.size
        groups.setdefault(key, []).append(name)
    return groups


def join(stacks: Stacks, groups: dict[str, list[str]]) -> Stacks:
    """Joins the entries of all blocks of a bundle, `{bundle: [entries]}`.

    What is done entry by entry is then one operation a bundle, not one a stack. A
    stack that is alone keeps its shape.
    """

    def join_one(names: list[str]) -> jax.Array:
        if len(names) == 1:
            return stacks[names[0]]
        return jnp.concatenate([stacks[name].reshape(-1) for name in names])

    return {key: join_one(names) for key, names in groups.items()}


def split(joined: Stacks, groups: dict[str, list[str]], like: Stacks) -> Stacks:
    """The stacks that were joined, with the shapes of `like`."""
    stacks = {}
    for key, names in groups.items():
        flat, stop = joined[key].reshape(-1), 0
        for name in names:
            start, stop = stop, stop + like[name].size
            stacks[name] = flat[start:stop].reshape(like[name].shape)
    return {name: stacks[name] for name in like}


def cast_like(stacks: Stacks, like: Stacks) -> Stacks:
    """Stacks in the dtypes of those of the same names."""
    return {name: block.astype(like[name].dtype) for name, block in stacks.items()}


def per_slot(values: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes `[n]` so that it broadcasts against a stack `[n, ...]`."""
    return values.reshape(values.shape + (1,) * (like.ndim - 1))


def largest_entries(blocks: jax.Array) -> jax.Array:
    """The largest absolute entry of each block, `[n]`."""
    return jnp.max(jnp.abs(blocks), axis=tuple(range(1, blocks.ndim)), initial=0)


def plain_norms(blocks: jax.Array) -> jax.Array:
    """The norm of each block, `[n]`, where its square is in range."""
    return jnp.sqrt(jnp.sum(jnp.square(blocks), axis=tuple(range(1, blocks.ndim))))


def norms(blocks: jax.Array) -> jax.Array:
    """The norm of each block, `[n]`, also where its square is out of range."""
    # Larger ones have reciprocals below the normal range, which count as 0.
    limit = float(jnp.finfo(blocks.dtype).max) / 2**28
    largest = largest_entries(blocks)
    scale = jnp.where(largest > 0, jnp.minimum(largest, limit), 1)
    return scale * plain_norms(blocks / per_slot(scale, blocks))


def traces(matrices: jax.Array) -> jax.Array:
    """The trace of each matrix, `[n]`, or of diagonals; reads the diagonals alone."""
    if matrices.ndim == 2:
        return jnp.sum(matrices, axis=1)
    n, side, _ = matrices.shape
    flat = matrices.reshape(n, -1)
    # In older JAX an index with a stride is a gather.
    return jnp.sum(jax.lax.slice_in_dim(flat, 0, None, side + 1, axis=1), axis=1)


def scale_to_one(
    matrices: jax.Array, floor: ArrayLike = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Divides by a power of two next to the trace, which is exact.

    The smallest and the largest factors of a dtype then keep their digits.

    Args:
      matrices: `[n, d, d]`, symmetric, or diagonals `[n, d]`; finite.
      floor: counts in the place of a smaller trace. Default 0.

    Returns:
      the scaled matrices, and the powers of two `[n]`.
    """
    trace = traces(matrices)
    info = jnp.finfo(trace.dtype)
    trace = jnp.clip(trace, jnp.asarray(floor, trace.dtype), info.max / 4)
    scale = jax.lax.reduce_precision(trace, info.nexp, 0)
    scale = jnp.maximum(scale, info.tiny)
    return matrices / per_slot(scale, matrices), scale


def contract(
    left: jax.Array,
    right: jax.Array,
    subscripts: str,
    precision: jax.lax.PrecisionLike = "highest",
) -> jax.Array:
    """An einsum at the highest precision, or another, not the process-wide default."""
    return jnp.einsum(subscripts, left, right, precision=precision)


def add_to_diagonal(matrices: jax.Array, values: jax.Array) -> jax.Array:
    """Adds `[n]` or `[n, d]` to the diagonals of `[n, d, d]`."""
    return matrices + values.reshape(len(values), -1, 1) * eye_of(matrices)


def largest_row_sum(matrices: jax.Array) -> jax.Array:
    """The norm that bounds the largest eigenvalue from above, `[n]`."""
    return jnp.max(jnp.sum(jnp.abs(matrices), axis=2), axis=1)


def eye_of(matrices: jax.Array) -> jax.Array:
    eye = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    return jnp.expand_dims(eye, tuple(range(matrices.ndim - 2)))
