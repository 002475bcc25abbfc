"""Batched symmetric eigendecompositions that do not depend on scale."""

import jax
import jax.numpy as jnp

from shampoo_optax._stacks import contract


def scaled_eigh(matrices: jax.Array, shift: jax.Array) -> tuple[jax.Array, ...]:
    r"""Eigendecomposition of :math:`2^{-s} (A + \mathrm{shift}\, I)`.

    The power of two nearest to the trace is divided out, which is exact, so that
    the smallest and the largest factors of the dtype keep their digits.

    Args:
      matrices: `[n, d, d]`, symmetric, finite.
      shift: `[n]` or scalar, added to the diagonal, in the units of `matrices`.

    Returns:
      eigenvalues `[n, d]` ascending, eigenvectors `[n, d, d]` in columns, the
      residual `[n]` (relative to the largest eigenvalue), and s `[n]`, int32.
    """
    _, power = jnp.frexp(jnp.trace(matrices, axis1=1, axis2=2))
    scaled = jnp.ldexp(matrices, -power[:, None, None])
    ridge = jnp.ldexp(jnp.broadcast_to(shift, power.shape).astype(scaled.dtype), -power)
    eye = jnp.eye(matrices.shape[-1], dtype=scaled.dtype)
    scaled = scaled + ridge[:, None, None] * eye[None]
    values, vectors = jax.lax.platform_dependent(
        scaled, cpu=_eigh_one_by_one, default=_eigh
    )
    return values, vectors, _residual(scaled, values, vectors), power


def _eigh(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tuple(jnp.linalg.eigh(matrices, symmetrize_input=False))


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
