"""What is kept in the bases of factors: their refresh, and moments in them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._config import Options
from shampoo_optax._eigen import sure_eigenbases
from shampoo_optax._eigen_methods import Basis, CholeskyBasis
from shampoo_optax._factors import apply_axes, statistics_weight
from shampoo_optax._grafting import accumulate
from shampoo_optax._orthogonal import align
from shampoo_optax._powers import condition_numbers, rescaled, unpadded_ridge
from shampoo_optax._refresh import Batch, Derived, Fresh, Report, refresh
from shampoo_optax._stacks import (
    AxisStacks,
    Stacks,
    add_to_diagonal,
    cast_like,
    per_slot,
)
from shampoo_optax._turns import Turns, pick, put, take_turns


def refresh_bases(
    factors: AxisStacks,
    derived: Derived,
    report: Report,
    *,
    usable: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
    correction: jax.Array,
    ridge: ArrayLike,
    basis: Basis,
    least: float,
    options: Options,
    turns: Turns | None = None,
) -> tuple[Derived, Report]:
    """New bases, and eigenvalues where they are kept, from the factors.

    Each column that is an old one is put in its place.

    Args:
      factors: `{stack: {axis: stored factors}}`.
      derived: `bases` and `eigenvalues`, the old ones.
      report: what was said at the last refresh.
      usable: `{stack: bool [n]}`.
      sides: `{stack: {axis: [n]}}`, before padding, where there is any.
      correction: divides the factors.
      ridge: added to the factors.
      basis: the method.
      least: the |cos| from which on a column counts as an old one; a
        :class:`CholeskyBasis` has its own.
      options: the transform's arguments.
      turns: whose turn it is. Default `None`: that of all.
    """

    def compute(batch: Batch) -> Fresh:
        matrices = rescaled(batch.factors, correction, options)
        added = unpadded_ridge(ridge, matrices, batch.padding)
        old = batch.derived["bases"]
        bases, values, *about = sure_eigenbases(
            add_to_diagonal(matrices, added),
            old,
            basis,
            batch.padding,
            basis.max_residual,
        )
        if not isinstance(basis, CholeskyBasis):  # which keeps places
            bases, values = align(old, bases, values, least)
        found = {"bases": bases, "eigenvalues": values}
        if "conditions" in batch.derived:
            found["conditions"] = condition_numbers(values, ridge)
        return Fresh({field: found[field] for field in batch.derived}, *about)

    return refresh(
        factors,
        derived,
        report,
        usable,
        sides,
        compute,
        max_residual=basis.max_residual,
        turns=turns,
    )


def accumulate_squares(
    moments: Stacks, turned: Stacks, usable: dict[str, jax.Array], options: Options
) -> Stacks:
    """Accumulates the squares of the gradient in the bases."""
    weight = statistics_weight(options)
    return {
        name: accumulate(moment, turned[name], usable[name], options.b2, weight)
        for name, moment in moments.items()
    }


def divide_by_roots(
    turned: Stacks,
    moments: Stacks,
    correction: jax.Array,
    exponents: Mapping[int, float],
    eps: ArrayLike,
) -> Stacks:
    """Divides by the corrected moments to the power p, plus eps."""

    def divide(name: str, block: jax.Array) -> jax.Array:
        moment = moments[name] / correction.astype(block.dtype)
        scale = moment ** exponents.get(block.ndim - 1, 0.5)
        scale += jnp.asarray(eps, block.dtype)
        return block / jnp.where(scale > 0, scale, 1)

    return {name: divide(name, block) for name, block in turned.items()}


def move_average(
    filtered: Stacks, before: AxisStacks, after: AxisStacks, usable: dict
) -> Stacks:
    """The moving average in the new bases; that of an absent gradient stays."""
    wide = {
        name: block.astype(np.promote_types(block.dtype, jnp.float32))
        for name, block in filtered.items()
    }
    moved = cast_like(
        apply_axes(after, apply_axes(before, wide), transpose=True), filtered
    )
    return {
        name: jnp.where(per_slot(usable[name], old), moved[name], old)
        for name, old in filtered.items()
    }


def move_due_averages(
    filtered: Stacks, before: AxisStacks, after: AxisStacks, usable: dict, turns: Turns
) -> Stacks:
    """As :func:`move_average`, of the slots whose turn it is."""

    def move(name: str, bases: dict[str, jax.Array], new: dict) -> jax.Array:
        def advance(at: jax.Array, valid: jax.Array, held: jax.Array) -> jax.Array:
            def rows(array: jax.Array) -> jax.Array:
                return pick([array], at)

            parts = (held, bases, new, usable[name])
            moved = move_average(*({name: jax.tree.map(rows, x)} for x in parts))
            return put([held], at, moved[name], valid)[0]

        return take_turns(turns, [name], advance, filtered[name])

    moved = {name: move(name, bases, after[name]) for name, bases in before.items()}
    return filtered | moved
