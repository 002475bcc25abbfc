"""Weight decay: coupled, decoupled, corrected and independent."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

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
from shampoo_optax._trees import next_count, require_params, tree_map, wide

DecayMode = Literal["decoupled", "corrected", "independent"]


class DecayWeightsState(NamedTuple):
    """State of :func:`decay_weights`.

    Attributes:
      count: the number of steps taken.
    """

    count: jax.Array  # [], int32


def rate_at(learning_rate: ScalarOrSchedule, count: jax.Array) -> ArrayLike:
    """The learning rate after `count` steps."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def check_decay(
    weight_decay: ArrayLike,
    mode: str,
    learning_rate: ScalarOrSchedule | None,
    peak_learning_rate: ArrayLike | None,
) -> None:
    """Refuses bad decay rates, and modes whose learning rates are not known."""
    check_number("weight_decay", weight_decay)
    check_choice("mode", mode, get_args(DecayMode))
    if learning_rate is not None:
        check_rate("learning_rate", learning_rate)
    if peak_learning_rate is not None:
        check_number("peak_learning_rate", peak_learning_rate, positive=True)
    if mode == "corrected" and learning_rate is None:
        raise ValueError(
            "`learning_rate` must be given for 'corrected' decay, got None."
        )
    peak = learning_rate if peak_learning_rate is None else peak_learning_rate
    known = not isinstance(peak, jax.core.Tracer)
    if mode != "decoupled" and (peak is None or callable(peak) or known and peak == 0):
        raise ValueError(
            f"`peak_learning_rate` must be a number above 0 for {mode!r} decay where "
            f"`learning_rate` is not one, got {peak_learning_rate!r}."
        )


def decay_rate(
    weight_decay: ArrayLike,
    mode: DecayMode,
    learning_rate: ScalarOrSchedule | None,
    peak_learning_rate: ArrayLike | None,
    count: jax.Array,
) -> ArrayLike:
    r"""The rate :math:`\alpha_t` that multiplies the parameters, before the step size.

    :math:`\lambda` (decoupled), :math:`\lambda \eta_t / \eta_{peak}` (corrected) or
    :math:`\lambda / \eta_{peak}` (independent).
    """
    if mode == "decoupled":
        return weight_decay
    peak = learning_rate if peak_learning_rate is None else peak_learning_rate
    if mode == "independent":
        return weight_decay / peak
    return weight_decay * rate_at(learning_rate, count) / peak


def decay_weights(
    weight_decay: ArrayLike,
    *,
    mode: DecayMode = "decoupled",
    learning_rate: ScalarOrSchedule | None = None,
    peak_learning_rate: ArrayLike | None = None,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adds the parameters, times a rate, to the updates.

    .. math::
      P \leftarrow P + \alpha_t W, \qquad \alpha_t = \lambda, \;
      \lambda \eta_t / \eta_{peak} \; \text{or} \; \lambda / \eta_{peak}

    for decoupled, corrected and independent decay. Put it after the direction and
    before the step size; before the direction, it is coupled (L2) decay. Absent
    gradients (`None`) stay absent: their parameters do not decay.

    Args:
      weight_decay: :math:`\lambda` >= 0.
      mode: `"decoupled"`, `"corrected"` or `"independent"`. Default `"decoupled"`.
      learning_rate: :math:`\eta_t`, the number >= 0 or the schedule of the chain's
        step size; needed for corrected decay. Default `None`.
      peak_learning_rate: :math:`\eta_{peak}` > 0; `None` stands for `learning_rate`
        where that is a number. Default `None`.
      mask: which parameters decay: a tree of booleans like the parameters, or a prefix
        of one, or a function from parameters to one. Default `None`: all.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`DecayWeightsState`; `update` needs `params`.

    Raises:
      ValueError: if an argument has a value other than those above, or `update` is
        called without `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.decay_weights(0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, _ = tx.update(jnp.zeros(2), tx.init(params), params)
      >>> print(updates)
      [0.1 0.2]

    References:
      Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2017,
      https://arxiv.org/abs/1711.05101.

      Defazio, Why Gradients Rapidly Increase Near the End of Training, 2025,
      https://arxiv.org/abs/2506.02285.
    """
    check_decay(weight_decay, mode, learning_rate, peak_learning_rate)

    def init_fn(params: optax.Params) -> DecayWeightsState:
        del params
        return DecayWeightsState(jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: DecayWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DecayWeightsState]:
        del extra_args
        require_params(params, "for weight decay")
        rate = decay_rate(
            weight_decay, mode, learning_rate, peak_learning_rate, state.count
        )

        def decay(update, param, decayed):
            if not decayed:
                return update
            return (update + rate * wide(param)).astype(update.dtype)

        decayed = _broadcast_mask(mask, params)
        updates = tree_map(decay, updates, params, decayed)
        return updates, DecayWeightsState(next_count(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _broadcast_mask(mask: Any, params: optax.Params) -> Any:
    """A tree of booleans like `params` from a mask, a prefix of one, or a callable."""
    mask = mask(params) if callable(mask) else True if mask is None else mask
    return jax.tree.map(lambda m, part: jax.tree.map(lambda _: m, part), mask, params)
