"""Recomputing what is derived from factors: one traced call a side, guarded."""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shampoo_optax._stacks import AxisStacks, per_slot, traces


def refresh(
    factors: AxisStacks,
    derived: AxisStacks,
    usable: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
    compute: Callable[[jax.Array, jax.Array | None, list[tuple[str, str, int]]], tuple],
    max_residual: float,
    ridge: ArrayLike = 0.0,
    kind: Callable[[str, str], Hashable] = lambda name, axis: None,
) -> tuple[AxisStacks, dict[str, jax.Array]]:
    """Recomputes the matrices derived from the factors of all usable slots.

    A matrix stays as it was where its block has no usable gradient at this step,
    where its factor is zero without a ridge, and where the new one is not finite or
    has too large a residual; the last is a failure of the block.

    Args:
      factors: `{stack: {axis: [n, d, d]}}`.
      derived: like `factors`, the previous roots or bases.
      usable: `{stack: [n]}`, bool.
      sides: `{stack: {axis: [n]}}`, int32, the sides of the factors before padding,
        where there is any.
      compute: maps all factors of one side `[N, d, d]`, where there is padding, bool
        `[N, d]` or `None`, and the list of the (stack, axis, slots) that the factors
        come from, to the new matrices and their residuals `[N]`.
      max_residual: the largest residual that is not refused.
      ridge: what is added to the factors, if anything.
      kind: maps a stack and an axis to a key; only factors of equal keys share a
        call.

    Returns:
      the new matrices, and which blocks have failed, `{stack: bool [n]}`.
    """
    fresh = {name: dict(axes) for name, axes in derived.items()}
    failed = {name: jnp.zeros_like(usable[name]) for name in factors}
    for members in _by_side(factors, kind).values():
        batch = jnp.concatenate([factors[name][axis] for name, axis, _ in members])
        matrices, residuals = compute(batch, _padding(sides, members, batch), members)
        sound = jnp.all(jnp.isfinite(matrices), axis=(1, 2))
        sound &= residuals <= max_residual
        alive = (traces(batch) > 0) | (jnp.asarray(ridge) > 0)
        stop = 0
        for name, axis, slots in members:
            start, stop = stop, stop + slots
            tried = usable[name] & alive[start:stop]
            taken = per_slot(tried & sound[start:stop], batch)
            fresh[name][axis] = jnp.where(
                taken, matrices[start:stop], derived[name][axis]
            )
            failed[name] |= tried & ~sound[start:stop]
    return fresh, failed


def _padding(sides: dict, members: list, batch: jax.Array) -> jax.Array | None:
    """Which rows and columns of each factor are padding, `[N, d]`, if any are."""
    if not any(name in sides for name, _, _ in members):
        return None
    side = batch.shape[-1]
    own = [
        jnp.asarray(sides[name][axis]) if name in sides else jnp.full(slots, side)
        for name, axis, slots in members
    ]
    return jnp.arange(side)[None] >= jnp.concatenate(own)[:, None]  # [N, d]


def _by_side(factors: AxisStacks, kind: Callable[[str, str], Hashable]) -> dict:
    """Groups the (stack, axis, slots) of all factors by side, dtype and kind."""
    groups = {}
    for name, axes in factors.items():
        for axis, factor in axes.items():
            key = (factor.shape[-1], factor.dtype, kind(name, axis))
            group = groups.setdefault(key, [])
            group.append((name, axis, len(factor)))
    return groups
