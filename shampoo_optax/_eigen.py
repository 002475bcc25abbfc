"""Symmetric eigendecompositions of a stack, with a residual and a common scale."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shampoo_optax._stacks import contract, per_slot, traces


def scale_to_one(
    matrices: jax.Array, floor: ArrayLike = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Divides by a power of two next to the trace, which is exact.

    The smallest and the largest factors of a dtype then keep their digits.

    Args:
      matrices: `[n, d, d]`, symmetric, finite.
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


def checked_eigh(matrices: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Eigendecompositions of a stack, with residuals.

    Args:
      matrices: `[n, d, d]`, symmetric, of about norm 1.

    Returns:
      eigenvalues `[n, d]` ascending, eigenvectors `[n, d, d]` in columns, and the
      residuals `[n]`, relative to the largest eigenvalue.
    """
    if jax.default_backend() == "cpu":
        values, vectors = _eigh_one_by_one(matrices)
    else:
        values, vectors = jax.lax.platform_dependent(
            matrices, cpu=_eigh_one_by_one, default=_eigh
        )
    return values, vectors, _residual(matrices, values, vectors)


def _eigh(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tuple(jnp.linalg.eigh(matrices, symmetrize_input=False))


@jax.jit
def _eigh_one_by_one(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One matrix at a time, in one traced call.

    On CPU a batched eigh waits for threads of the pool that it itself runs in: as
    many of them at once as the pool has threads, one a side or one a simulated
    device, wait for each other for ever.
    """
    return jax.lax.map(_eigh, matrices)


def _residual(matrices, values, vectors) -> jax.Array:
    """How far the decomposition is off, seen by one probe vector v of norm 1, `[n]`.

    The larger of the norms of (A - Q Λ Qᵀ) v / λ_max and (I - Q Qᵀ) v.
    """
    side = matrices.shape[-1]
    probe = jnp.cos(jnp.arange(1, side + 1, dtype=matrices.dtype))
    probe = jnp.broadcast_to(probe / jnp.linalg.norm(probe), values.shape)
    coordinates = contract(vectors, probe, "nij,ni->nj")
    product = contract(matrices, probe, "nij,nj->ni")
    rebuilt = contract(vectors, values * coordinates, "nij,nj->ni")
    identity = contract(vectors, coordinates, "nij,nj->ni")
    spectral = jnp.linalg.norm(product - rebuilt, axis=1)
    largest = jnp.max(jnp.abs(values), axis=1)
    return jnp.maximum(
        spectral / jnp.where(largest > 0, largest, 1),
        jnp.linalg.norm(identity - probe, axis=1),
    )
