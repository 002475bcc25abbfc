"""Block space: what a plan says of stacks, and what is common to their arrays."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Stacks = dict[str, jax.Array]  # {stack: [n, *block]}
AxisStacks = dict[str, dict[str, jax.Array]]  # {stack: {axis: [n, d, d]}}


class Stack(NamedTuple):
    """Equal-shaped blocks of one dtype."""

    block: tuple[int, ...]
    dtype: np.dtype  # of the statistics: float32 or wider
    size: int  # number of slots


class Region(NamedTuple):
    """The equal blocks that tile one box of a merged parameter, row-major."""

    leaf: int
    stack: str
    slot: int  # of the first block
    start: tuple[int, ...]
    grid: tuple[int, ...]  # number of blocks along each axis
    block: tuple[int, ...]

    @property
    def limit(self) -> tuple[int, ...]:
        return tuple(
            s + g * b for s, g, b in zip(self.start, self.grid, self.block, strict=True)
        )

    @property
    def slots(self) -> slice:
        return slice(self.slot, self.slot + math.prod(self.grid))


class Plan(NamedTuple):
    """Which block of which parameter lies in which slot of which stack."""

    shapes: tuple[tuple[int, ...], ...]  # of the parameters
    merged: tuple[tuple[int, ...], ...]
    regions: tuple[Region, ...]
    stacks: dict[str, Stack]


def per_slot(values: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes `[n]` so that it broadcasts against a stack `[n, ...]`."""
    return values.reshape(values.shape + (1,) * (like.ndim - 1))


def contract(left: jax.Array, right: jax.Array, subscripts: str) -> jax.Array:
    """An einsum at the highest precision, whatever the process-wide default."""
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST)
