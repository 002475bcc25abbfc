"""Triangular operations whose halves are matrix products, on any batch of matrices."""

import jax
import jax.numpy as jnp

from shampoo_optax._stacks import contract

# The side up to which LAPACK, or what stands for it, does all: beyond it the products
# of halves are many times as fast.
_LEAF = 256


def cholesky(matrices: jax.Array) -> jax.Array:
    """The lower triangular C of A = C Cᵀ, `[..., d, d]`; A is read below its diagonal.

    Where A is not positive definite there are NaN.
    """
    side = matrices.shape[-1]
    if side <= _LEAF:
        return jnp.linalg.cholesky(matrices, symmetrize_input=False)
    half = side // 2
    first = cholesky(matrices[..., :half, :half])
    below = divide_by_transpose(matrices[..., half:, :half], first)
    products = contract(below, below, "...ij,...kj->...ik")
    last = cholesky(matrices[..., half:, half:] - products)
    return _lower(first, below, last)


def gram_of_lower(lower: jax.Array) -> jax.Array:
    """LᵀL of a lower triangular L, `[..., d, d]`, right on and below its diagonal."""
    side = lower.shape[-1]
    if side <= _LEAF:
        return contract(lower, lower, "...ji,...jk->...ik")
    half = side // 2
    below, last = lower[..., half:, :half], lower[..., half:, half:]
    first = gram_of_lower(lower[..., :half, :half])
    first += contract(below, below, "...ji,...jk->...ik")
    return _lower(
        first, contract(last, below, "...ji,...jk->...ik"), gram_of_lower(last)
    )


def divide_by_transpose(matrices: jax.Array, lower: jax.Array) -> jax.Array:
    """The X of X Lᵀ = A, `[..., m, d]`, with a lower triangular L `[..., d, d]`."""
    side = lower.shape[-1]
    if side <= _LEAF:
        return jax.lax.linalg.triangular_solve(
            lower, matrices, left_side=False, lower=True, transpose_a=True
        )
    half = side // 2
    first = divide_by_transpose(matrices[..., :half], lower[..., :half, :half])
    products = contract(first, lower[..., half:, :half], "...ij,...kj->...ik")
    rest = matrices[..., half:] - products
    last = divide_by_transpose(rest, lower[..., half:, half:])
    return jnp.concatenate([first, last], axis=-1)


def _lower(first: jax.Array, below: jax.Array, last: jax.Array) -> jax.Array:
    """A matrix of three blocks, and zeros above them."""
    above = jnp.zeros_like(jnp.swapaxes(below, -1, -2))
    upper = jnp.concatenate([first, above], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([below, last], axis=-1)], axis=-2)
