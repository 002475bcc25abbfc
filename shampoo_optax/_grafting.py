"""Filtered gradients, and the diagonal methods whose step size is grafted."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from shampoo_optax._checks import is_static
from shampoo_optax._config import Options
from shampoo_optax._stacks import (
    Stack,
    Stacks,
    join,
    largest_entries,
    norms,
    per_slot,
    plain_norms,
    split,
)


def keeps_filtered(options: Options) -> bool:
    """Whether a moving average of the gradient is part of the state."""
    return not is_static(options.b1, 0)


def keeps_moments(options: Options) -> bool:
    """Whether grafting has second moments of its own."""
    return options.graft not in (None, "sgd")


def zero_blocks(stacks: dict[str, Stack], dtype: DTypeLike | None = None) -> Stacks:
    """A zero for every entry of every block, `{stack: [n, *block]}`."""
    return {
        name: jnp.zeros((stack.size, *stack.block), dtype or stack.dtype)
        for name, stack in stacks.items()
    }


def filter_gradient(
    filtered: Stacks, blocks: Stacks, usable: dict, count: jax.Array, options: Options
) -> tuple[Stacks, Stacks]:
    r"""The gradient that is preconditioned, and the moving average that is kept.

    Used now: :math:`b_3 \tilde G + (1 - b_3) G`, divided by
    :math:`1 - b_3 b_1^{t-1}` with bias correction; kept:
    :math:`b_1 \tilde G + (1 - b_1) G`.

    Args:
      filtered: `{stack: [n, *block]}`, or empty where b1 = 0.
      blocks: the gradient, `{stack: [n, *block]}`, zero in unusable slots.
      usable: `{stack: [n]}`; the average of other slots stays as it is.
      count: the number t of this step, from 1.
      options: the transform's arguments.

    Returns:
      the filtered gradient used now, and the new averages.
    """
    if not keeps_filtered(options):
        return blocks, filtered
    used, kept = {}, {}
    for name, block in blocks.items():
        old = filtered[name]
        average = _average(old, block, options.b1)
        average = jnp.where(per_slot(usable[name], old), average, old)
        kept[name] = mixed = average
        missing = _power(options.b1, count)
        if options.b3 is not None:
            b3 = jnp.where(options.b1 == 0, 0, options.b3)
            mixed = _average(old, block, b3)
            missing = jnp.asarray(b3, missing.dtype) * _power(options.b1, count - 1)
        if options.bias_correction:
            mixed = _divide(mixed, 1 - missing)
        used[name] = mixed
    return used, kept


def _average(old: jax.Array, new: jax.Array, decay: ArrayLike) -> jax.Array:
    weight = jnp.asarray(1 - decay, new.dtype)
    return weight * new + jnp.asarray(decay, new.dtype) * old


def _divide(block: jax.Array, number: jax.Array) -> jax.Array:
    """Divides each entry: a single divisor XLA may turn into its reciprocal."""
    return block / jnp.where(block != 0, number.astype(block.dtype), 1)


def _power(decay: ArrayLike, count: jax.Array) -> jax.Array:
    """`decay` to the power `count` in the widest float."""
    decay = jnp.asarray(decay, jnp.result_type(float))
    return decay ** count.astype(decay.dtype)


def accumulate(
    moment: jax.Array,
    block: jax.Array,
    usable: jax.Array,
    decay: ArrayLike,
    weight: ArrayLike,
) -> jax.Array:
    """`decay * moment + weight * block**2` in usable slots, `[n, *block]`.

    Sums are held below the largest number of the dtype, so that they stay finite. The
    selection comes last: XLA computes cheaper ends once more for each use, from the old
    moments, which it then has to copy before they are replaced in place.
    """
    square = jnp.asarray(weight, moment.dtype) * jnp.square(block)
    total = jnp.asarray(decay, moment.dtype) * moment + square
    total = jnp.minimum(total, jnp.finfo(moment.dtype).max)
    return jnp.where(per_slot(usable, moment), total, moment)


def update_moments(
    moments: Stacks, blocks: Stacks, usable: dict, options: Options
) -> Stacks:
    """Accumulates the squared gradient as the grafted method does."""
    adagrad = options.graft == "adagrad"
    b2 = options.b2 if options.graft_b2 is None else options.graft_b2
    decay = 1.0 if adagrad else b2
    weight = 1.0 if adagrad or options.graft_drop_weighting else 1 - b2
    return {
        name: accumulate(moment, blocks[name], usable[name], decay, weight)
        for name, moment in moments.items()
    }


def graft_direction(
    moments: Stacks, used: Stacks, count: jax.Array, options: Options
) -> Stacks:
    r"""The grafted method's own direction, :math:`\tilde G / (\sqrt V + \epsilon_g)`.

    Adam divides V by :math:`1 - b_{2g}^t` first; SGD gives the filtered gradient;
    without grafting there is none. The operations are those of optax in their order,
    and where none are fused the bits are too; RMSprop multiplies by the reciprocal.
    """
    if options.graft is None:
        return {}
    if not keeps_moments(options):
        return used
    b2 = options.b2 if options.graft_b2 is None else options.graft_b2

    def direction(name, gradient):
        dtype, moment = gradient.dtype, moments[name]
        if options.graft == "adam" and not options.graft_drop_weighting:
            moment = _divide(moment, 1 - _power(b2, count))
        scale = jnp.sqrt(moment) + jnp.asarray(options.graft_eps, dtype)
        scale = jnp.where(scale > 0, scale, 1)
        return gradient / scale if options.graft == "adam" else 1 / scale * gradient

    return {name: direction(name, gradient) for name, gradient in used.items()}


def take_norms(
    direction: Stacks,
    magnitude: Stacks,
    usable: dict[str, jax.Array],
    started: jax.Array,
    groups: dict[str, list[str]],
) -> tuple[Stacks, dict[str, jax.Array], dict[str, jax.Array]]:
    """The direction with the grafted norms; before the start, the grafted one.

    Args:
      direction: `{stack: [n, *block]}`.
      magnitude: like it, the grafted direction; empty without grafting.
      usable: `{stack: [n]}`; the direction of other slots becomes 0.
      started: scalar, bool.
      groups: `{bundle: stacks}`.

    Returns:
      the direction, which slots have one that is finite, `{stack: [n]}`, and the
      norms of `magnitude` over those of `direction`, likewise; empty without grafting.
    """
    sizes = join(_per_block(norms if magnitude else largest_entries, direction), groups)
    ratios, moving = {}, join(usable, groups)
    if magnitude:
        wanted = join(_per_block(plain_norms, magnitude), groups)
        ratios = {key: wanted[key] / (size + 1e-16) for key, size in sizes.items()}
        sizes = {
            key: wanted[key] + jnp.where(started, size, 0)
            for key, size in sizes.items()
        }
    moving = {key: slots & jnp.isfinite(sizes[key]) for key, slots in moving.items()}
    ratios, moving = (split(x, groups, usable) if x else {} for x in (ratios, moving))

    def take(name: str, block: jax.Array) -> jax.Array:
        if magnitude:
            grafted = per_slot(ratios[name], block) * block
            block = jnp.where(started, grafted, magnitude[name])
        return jnp.where(per_slot(moving[name], block), block, 0)

    taken = {name: take(name, block) for name, block in direction.items()}
    return taken, moving, ratios


def _per_block(function, stacks: Stacks) -> Stacks:
    return {name: function(block) for name, block in stacks.items()}
