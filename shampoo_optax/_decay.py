"""Weight decay: coupled, decoupled, corrected and independent."""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import (
    Decay,
    Mask,
    ScalarOrSchedule,
    check_choice,
    check_number,
    check_rate,
)
from shampoo_optax._reshard import place_scalars
from shampoo_optax._trees import next_count, require_params, tree_map, wide


class DecayWeightsState(NamedTuple):
    """State of :func:`decay_weights`.

    Attributes:
      count: the number of steps taken.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.decay_weights(0.1)
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> int(state.count)
      0
    """

    count: jax.Array  # [], int32


def rate_at(learning_rate: ScalarOrSchedule, count: jax.Array) -> ArrayLike:
    """The learning rate after `count` steps."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def check_decay(
    weight_decay: ArrayLike,
    decay: str,
    learning_rate: ScalarOrSchedule | None,
    peak_learning_rate: ArrayLike | None,
) -> None:
    """Refuses bad decay rates, and kinds of decay whose rates are not known."""
    check_number("weight_decay", weight_decay)
    check_choice("decay", decay, get_args(Decay))
    if learning_rate is not None:
        check_rate("learning_rate", learning_rate)
    if peak_learning_rate is not None:
        check_number("peak_learning_rate", peak_learning_rate, positive=True)
    if decay == "corrected" and learning_rate is None:
        raise ValueError(
            "`learning_rate` must be given for 'corrected' decay, got None."
        )
    fixed = isinstance(learning_rate, int | float) and learning_rate > 0
    if decay != "decoupled" and peak_learning_rate is None and not fixed:
        raise ValueError(
            f"`peak_learning_rate` must be a number above 0 for {decay!r} decay where "
            f"`learning_rate` is not a Python number above 0, got {learning_rate!r}."
        )


def check_mask(mask: Any) -> None:
    """Refuses a mask with leaves that are not booleans."""
    leaves = () if callable(mask) else jax.tree.leaves(mask)
    if not all(isinstance(leaf, bool | np.bool_) for leaf in leaves):
        raise ValueError(
            f"`mask` must be a tree of booleans or a callable, got {mask!r}."
        )


def decay_rate(
    weight_decay: ArrayLike,
    decay: Decay,
    learning_rate: ScalarOrSchedule | None,
    peak_learning_rate: ArrayLike | None,
    count: jax.Array,
) -> ArrayLike:
    r"""The rate :math:`\alpha_t` that multiplies the parameters, before the step size.

    :math:`\lambda` (decoupled), :math:`\lambda \eta_t / \eta_{peak}` (corrected) or
    :math:`\lambda / \eta_{peak}` (independent).
    """
    if decay == "decoupled":
        return weight_decay
    peak = learning_rate if peak_learning_rate is None else peak_learning_rate
    if decay == "independent":
        return weight_decay / peak
    return weight_decay * rate_at(learning_rate, count) / peak


def decay_weights(
    weight_decay: ArrayLike,
    *,
    decay: Decay = "decoupled",
    learning_rate: ScalarOrSchedule | None = None,
    peak_learning_rate: ArrayLike | None = None,
    mask: Mask | None = None,
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
      decay: `"decoupled"`, `"corrected"` or `"independent"`. Default `"decoupled"`.
      learning_rate: :math:`\eta_t`, the number >= 0 or the schedule of the chain's
        step size; needed for corrected decay. Default `None`.
      peak_learning_rate: :math:`\eta_{peak}` > 0; `None` stands for `learning_rate`
        where that is a Python number. Default `None`.
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
    check_decay(weight_decay, decay, learning_rate, peak_learning_rate)
    check_mask(mask)

    def init_fn(params: optax.Params) -> DecayWeightsState:
        return place_scalars(DecayWeightsState(jnp.zeros((), jnp.int32)), params)

    def update_fn(
        updates: optax.Updates,
        state: DecayWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DecayWeightsState]:
        del extra_args
        require_params(params, "for weight decay")
        rate = decay_rate(
            weight_decay, decay, learning_rate, peak_learning_rate, state.count
        )

        def add(update, param, decays):
            if not decays:
                return update
            return (wide(update) + rate * wide(param)).astype(update.dtype)

        updates = tree_map(add, updates, params, _broadcast_mask(mask, params))
        return updates, DecayWeightsState(next_count(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _broadcast_mask(mask: Any, params: optax.Params) -> Any:
    """A tree of booleans like `params` from a mask, a prefix of one, or a callable."""
    mask = mask(params) if callable(mask) else True if mask is None else mask
    try:
        return jax.tree.map(
            lambda decays, part: jax.tree.map(lambda _: decays, part), mask, params
        )
    except ValueError as error:
        raise ValueError(
            f"`mask` must be a tree like the parameters or a prefix, got {mask!r}."
        ) from error
