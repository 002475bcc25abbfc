"""Orthogonal matrices: their columns, how far off they are, padding among them."""

import jax
import jax.numpy as jnp

from shampoo_optax._stacks import (
    add_to_diagonal,
    contract,
    eye_of,
    largest_row_sum,
    traces,
)

Pair = tuple[jax.Array, jax.Array]


def align(
    previous: jax.Array, bases: jax.Array, values: jax.Array, least: float
) -> tuple[jax.Array, jax.Array]:
    r"""Puts columns that are old vectors, up to sign, in the old vectors' places.

    What is kept for each column of a basis, such as second moments, then stays with
    its vector when eigenvalues change their order. A new column q is an old one p
    where :math:`|p^\top q|` is at least `least`, which allows for no second one; the
    other columns fill the places that are left, in their order.

    Args:
      previous: `[..., d, d]`, the old orthogonal bases.
      bases: `[..., d, d]`, the new ones.
      values: `[..., d]`, what belongs to the new columns: eigenvalues.
      least: above :math:`1 / \sqrt 2`.

    Returns:
      the new bases and values, in the new order.
    """
    cosines = contract(previous, bases, "...ij,...ik->...jk")
    same = jnp.abs(cosines) >= least
    place, column = (~jnp.any(same, axis=axis) for axis in (-1, -2))
    counts = jnp.cumsum(place, axis=-1), jnp.cumsum(column, axis=-1)
    order = counts[0][..., :, None] == counts[1][..., None, :]
    same |= place[..., :, None] & column[..., None, :] & order
    return reorder(bases, values, jnp.argmax(same, axis=-1))


def orthogonal(vectors: jax.Array) -> jax.Array:
    """Takes away what rounding adds, by one Newton-Schulz step.

    Without it a float32 basis that is followed for ever loses 5e-8 of its
    orthogonality at every refresh, until the guard refuses all that follow.
    """
    gram = contract(vectors, vectors, "...ji,...jk->...ik")
    return 1.5 * vectors - 0.5 * contract(vectors, gram, "...ij,...jk->...ik")


def distance_from_orthogonal(vectors: jax.Array, probe: jax.Array) -> jax.Array:
    """The norm of (I - Q Qᵀ) v, `[n]`."""
    coordinates = contract(vectors, probe, "nij,ni->nj")
    identity = contract(vectors, coordinates, "nij,nj->ni")
    return jnp.linalg.norm(identity - probe, axis=1)


def probe_of(values: jax.Array, padding: jax.Array | None) -> jax.Array:
    """A vector of norm 1 that is 0 on padding, `[n, d]`."""
    probe = jnp.cos(jnp.arange(1, values.shape[1] + 1, dtype=values.dtype))
    probe = jnp.broadcast_to(probe, values.shape)
    if padding is not None:
        probe = jnp.where(padding, 0, probe)
    norm = jnp.linalg.norm(probe, axis=1, keepdims=True)
    return probe / jnp.where(norm > 0, norm, 1)


def is_diagonal(matrices: jax.Array, tolerance: float) -> jax.Array:
    """Whether what is off the diagonal has at most this share of the norm, `[n]`.

    It is summed by itself: as the difference of two sums of squares it would drown
    in rounding below the root of the machine epsilon, 3e-4 in float32.
    """
    squares = jnp.square(matrices)
    off = jnp.sum(squares * (1 - eye_of(matrices)), axis=(1, 2))
    return off <= tolerance**2 * jnp.sum(squares, axis=(1, 2))


def rotate(matrices: jax.Array, bases: jax.Array) -> jax.Array:
    """Qᵀ A Q."""
    products = contract(matrices, bases, "nij,njk->nik")
    return contract(bases, products, "nji,njk->nik")


def reorder(bases: jax.Array, values: jax.Array, order: jax.Array) -> Pair:
    """The columns, and what belongs to them, in the order `[..., d]`."""
    columns = jnp.take_along_axis(bases, order[..., None, :], axis=-1)
    return columns, jnp.take_along_axis(values, order, axis=-1)


def with_last(matrices: jax.Array, padding: jax.Array | None) -> jax.Array:
    """Gives padding eigenvalues above all others, which come last."""
    if padding is None:
        return matrices
    above = 2 * largest_row_sum(matrices)
    return add_to_diagonal(matrices, jnp.where(padding, above[:, None], 0))


def settle_padding(
    values: jax.Array, vectors: jax.Array, matrices: jax.Array, padding
) -> Pair:
    """Gives padding its unit vectors, and the mean eigenvalue before padding."""
    if padding is None:
        return values, vectors
    inside = jnp.maximum(jnp.sum(~padding, axis=1), 1)
    mean = traces(matrices) / inside.astype(values.dtype)
    outside = padding[:, :, None] | padding[:, None]
    return (
        jnp.where(padding, mean[:, None], values),
        jnp.where(outside, eye_of(vectors), vectors),
    )


def diagonals(matrices: jax.Array) -> jax.Array:
    return jnp.sum(matrices * eye_of(matrices), axis=2)


def reorder_both(matrices: jax.Array, order: jax.Array) -> jax.Array:
    """Rows and columns in the order `[n, d]`; rows alone are moved, which is faster."""

    def rows(matrices: jax.Array) -> jax.Array:
        return jax.vmap(lambda matrix, places: matrix[places])(matrices, order)

    return jnp.swapaxes(rows(jnp.swapaxes(rows(matrices), 1, 2)), 1, 2)
