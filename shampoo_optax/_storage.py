"""How factors and roots lie in memory: whole, as one triangle, or as a diagonal.

A factor of side d is `[n, d, d]`, packed `[n, d / 2, d + 1]` for even and
`[n, (d + 1) / 2, d]` for odd d, or, of a diagonal axis, `[n, d]`. With

    A = [[P, B], [Bᵀ, S]],

P of side h = ceil(d / 2), a packed row holds a row of P above its diagonal and one of
S below its own, folded into one square, and then a row of B. That takes shifts and
selections, no gathers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shampoo_optax._stacks import Stack, traces
from shampoo_optax._trees import wide_dtype


def packed_shape(side: int) -> tuple[int, int]:
    """The shape of the triangle of a matrix of this side."""
    return (side // 2, side + 1) if side % 2 == 0 else (side // 2 + 1, side)


def _library(array: jax.Array | np.ndarray) -> Any:
    """Arrays on the host stay there, with all their digits."""
    return np if isinstance(array, np.ndarray) else jnp


def _is_right(rows: int, columns: int, xp: Any, offset: int = 0) -> jax.Array:
    """Where the column is at least the row plus the offset, bool `[1, rows, columns]`.

    Computed, since the program would hold every entry of a constant.
    """
    row, column = xp.arange(rows), xp.arange(columns)
    return column[None, None] >= row[None, :, None] + offset


def pack(matrices: jax.Array) -> jax.Array:
    """One triangle of each symmetric matrix, `[n, d, d]` to `[n, rows, columns]`."""
    xp, side = _library(matrices), matrices.shape[-1]
    half, columns = packed_shape(side)
    first, beside = matrices[:, :half, :half], matrices[:, :half, half:]
    second = matrices[:, half:, half:]
    if side % 2 == 0:
        first = xp.pad(first, ((0, 0), (0, 0), (1, 0)))
        second = xp.pad(second, ((0, 0), (0, 0), (0, 1)))
    else:
        second = xp.pad(second, ((0, 0), (1, 0), (0, 1)))
    above = _is_right(half, columns - side // 2, xp, offset=1 - side % 2)
    folded = xp.where(above, first, second)
    return xp.concatenate([folded, beside], axis=2)


def unpack(packed: jax.Array, side: int) -> jax.Array:
    """The symmetric matrices of packed ones, `[n, side, side]`."""
    xp, width = _library(packed), packed_shape(side)[1] - side // 2
    folded, beside = packed[:, :, :width], packed[:, :, width:]
    if side % 2 == 0:
        first, second = folded[:, :, 1:], folded[:, :, :-1]
    else:
        first, second = folded, folded[:, 1:, :-1]
    first = _mirrored(first, upper=True)
    second = _mirrored(second, upper=False)
    top = xp.concatenate([first, beside], axis=2)
    bottom = xp.concatenate([beside.mT, second], axis=2)
    return xp.concatenate([top, bottom], axis=1)


def _mirrored(squares: jax.Array, upper: bool) -> jax.Array:
    """Symmetric matrices from one triangle of squares, `[n, h, h]`."""
    xp = _library(squares)
    above = _is_right(*squares.shape[1:], xp)
    kept, other = (squares, squares.mT) if upper else (squares.mT, squares)
    return xp.where(above, kept, other)


def is_diagonal(stored: jax.Array) -> bool:
    """Whether only the diagonals of matrices are kept, `[n, d]`."""
    return stored.ndim == 2


def is_packed(stored: jax.Array) -> bool:
    """Whether matrices are kept as one triangle."""
    return stored.ndim == 3 and stored.shape[1] != stored.shape[2]


def side_of(stored: jax.Array) -> int:
    """The side d of matrices in any of the forms."""
    rows, columns = stored.shape[-2:]
    return 2 * rows if is_packed(stored) and columns == 2 * rows + 1 else columns


def _widened(stored: jax.Array) -> jax.Array:
    return stored.astype(wide_dtype(stored.dtype))


def load(stored: jax.Array) -> jax.Array:
    """Whole matrices `[n, d, d]` or diagonals `[n, d]`, float32 or wider."""
    wide = _widened(stored)
    return unpack(wide, side_of(stored)) if is_packed(stored) else wide


def store(values: jax.Array, like: jax.Array) -> jax.Array:
    """Whole matrices or diagonals in the form and dtype of `like`."""
    return (pack(values) if is_packed(like) else values).astype(like.dtype)


def stored_traces(stored: jax.Array) -> jax.Array:
    """The trace of each matrix, `[n]`, float32 or wider; reads the diagonals alone."""
    wide, side = _widened(stored), side_of(stored)
    if not is_packed(stored):
        return traces(wide)
    half, columns = packed_shape(side)
    starts = (0, 1) if side % 2 == 0 else (0, columns)
    flat = wide.reshape(len(wide), -1)
    first, second = (
        jax.lax.slice_in_dim(flat, start, None, columns + 1, axis=1)[:, :half]
        for start in starts
    )
    return jnp.sum(first, axis=1) + jnp.sum(second, axis=1)


def empty_matrices(
    stack: Stack, side: int, dtype: DTypeLike | None, packed: bool
) -> jax.Array:
    """Zero matrices in their stored form."""
    shape = packed_shape(side) if packed else (side, side)
    return jnp.zeros((stack.size, *shape), dtype or stack.dtype)


def identities(
    stack: Stack, side: int, dtype: DTypeLike | None, packed: bool
) -> jax.Array:
    """Identity matrices in their stored form."""
    eye = jnp.eye(side, dtype=dtype or stack.dtype)[None]
    eye = pack(eye) if packed else eye
    return jnp.broadcast_to(eye, (stack.size, *eye.shape[1:])).copy()
