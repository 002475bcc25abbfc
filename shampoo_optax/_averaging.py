"""Averages after the direction: classic momentum and averages of the iterates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._config import (
    ScalarOrSchedule,
    check_choice,
    check_number,
    check_rate,
)
from shampoo_optax._decay import DecayMode, check_decay, decay_rate, rate_at
from shampoo_optax._gradients import next_count, require_params, tree_map, wide


class ScaleByMomentumState(NamedTuple):
    """State of :func:`scale_by_momentum`.

    Attributes:
      momentum: the buffer M, a tree like the parameters.
    """

    momentum: optax.Updates  # like the parameters, float32 or wider


class IterateAveragingState(NamedTuple):
    """State of :func:`primal_averaging` and :func:`schedule_free`.

    Attributes:
      count: the number of steps taken.
      fast: the fast iterates Z, a tree like the parameters.
      weight_sum: the sum of the averaging weights so far (schedule-free).
      train_coefficient: the y of the formulas, for :func:`eval_params`.
    """

    count: jax.Array  # [], int32
    fast: optax.Params  # like the parameters, float32 or wider
    weight_sum: jax.Array  # [], the widest float
    train_coefficient: jax.Array  # [], the widest float


def scale_by_momentum(
    momentum: ArrayLike, *, dampening: ArrayLike = 0.0, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    check_number("momentum", momentum, high=1.0)
    check_number("dampening", dampening, high=1.0)
    check_choice("nesterov", nesterov, (True, False))

    def init_fn(params: optax.Params) -> ScaleByMomentumState:
        return ScaleByMomentumState(
            jax.tree.map(lambda p: jnp.zeros_like(wide(p)), params)
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleByMomentumState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByMomentumState]:
        del params, extra_args

        def accumulate(buffer, update):
            return (momentum * buffer + (1 - dampening) * update).astype(buffer.dtype)

        def look_ahead(update, buffer):
            ahead = (1 - dampening) * update + momentum * buffer if nesterov else buffer
            return ahead.astype(update.dtype)

        buffers = _advance(accumulate, state.momentum, updates)
        return tree_map(look_ahead, updates, buffers), ScaleByMomentumState(buffers)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _advance(function: Any, trees: Any, updates: optax.Updates) -> Any:
    """Maps over a tree of buffers; a buffer whose update is absent stays as it is."""
    return jax.tree.map(
        lambda update, buffer: buffer if update is None else function(buffer, update),
        updates,
        trees,
        is_leaf=lambda leaf: leaf is None,
    )


def primal_averaging(
    learning_rate: ScalarOrSchedule,
    *,
    eval_coefficient: ArrayLike,
    train_coefficient: ArrayLike,
    weight_decay: ArrayLike = 0.0,
    decay: DecayMode = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    check_number("eval_coefficient", eval_coefficient, high=1.0)
    decays = (weight_decay, decay, learning_rate, peak_learning_rate)

    def coefficient(rate, weight_sum):
        del rate
        return eval_coefficient, weight_sum

    return _iterate_averaging(learning_rate, coefficient, train_coefficient, decays)


def schedule_free(
    learning_rate: ScalarOrSchedule,
    *,
    train_coefficient: ArrayLike = 0.9,
    power: ArrayLike = 2.0,
    weight_decay: ArrayLike = 0.0,
    decay: DecayMode = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    check_number("power", power)
    decays = (weight_decay, decay, learning_rate, peak_learning_rate)

    def coefficient(rate, weight_sum):
        weight = jnp.asarray(rate, weight_sum.dtype) ** power
        total = weight_sum + weight
        return 1 - jnp.where(
            total > 0, weight / jnp.where(total > 0, total, 1), 0
        ), total

    return _iterate_averaging(learning_rate, coefficient, train_coefficient, decays)


def _iterate_averaging(
    learning_rate: ScalarOrSchedule,
    coefficient: Any,
    train_coefficient: ArrayLike,
    decays: tuple,
) -> optax.GradientTransformationExtraArgs:
    """Averages iterates with the eval coefficient that `coefficient` returns."""
    check_rate("learning_rate", learning_rate)
    check_number("train_coefficient", train_coefficient, high=1.0)
    check_decay(*decays)

    def init_fn(params: optax.Params) -> IterateAveragingState:
        widest = jnp.result_type(float)
        return IterateAveragingState(
            count=jnp.zeros((), jnp.int32),
            fast=jax.tree.map(lambda p: jnp.array(wide(p)), params),
            weight_sum=jnp.zeros((), widest),
            train_coefficient=jnp.asarray(train_coefficient, widest),
        )

    def update_fn(
        updates: optax.Updates,
        state: IterateAveragingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, IterateAveragingState]:
        del extra_args
        require_params(params, "for iterate averaging")
        rate = rate_at(learning_rate, state.count)
        shrink = 1 - rate * decay_rate(*decays, state.count)
        towards, weight_sum = coefficient(rate, state.weight_sum)
        ahead = 1 - towards * train_coefficient

        def move(update, fast, param):
            pull = (1 - towards) * (shrink * fast - param)
            return (pull - ahead * rate * update).astype(update.dtype)

        def advance(fast, update):
            return (shrink * fast - rate * update).astype(fast.dtype)

        moved = tree_map(move, updates, state.fast, params)
        fast = _advance(advance, state.fast, updates)
        return moved, state._replace(
            count=next_count(state.count), fast=fast, weight_sum=weight_sum
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _find_averaging(state: Any) -> IterateAveragingState:
    def is_averaging(node):
        return isinstance(node, IterateAveragingState)

    found = [n for n in jax.tree.leaves(state, is_leaf=is_averaging) if is_averaging(n)]
    if len(found) != 1:
        raise ValueError(
            "`state` must hold exactly one state of `primal_averaging` or "
            f"`schedule_free`, got {len(found)}."
        )
    return found[0]


def eval_params(state: Any, params: optax.Params) -> optax.Params:
    averaging = _find_averaging(state)
    scale = 1 - 1 / averaging.train_coefficient
    return _interpolate(params, averaging.fast, scale)


def train_params(state: Any, params: optax.Params) -> optax.Params:
    averaging = _find_averaging(state)
    return _interpolate(params, averaging.fast, 1 - averaging.train_coefficient)


def _interpolate(params: optax.Params, fast: optax.Params, scale: jax.Array):
    return jax.tree.map(
        lambda p, z: (p + scale * (z - p)).astype(jnp.asarray(p).dtype), params, fast
    )
