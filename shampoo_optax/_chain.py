"""What follows a direction in a chain: decay, momentum, step size, absent updates."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import (
    Decay,
    Mask,
    ScalarOrSchedule,
    check_choice,
    check_rate,
    is_static,
)
from shampoo_optax._config import Stored
from shampoo_optax._decay import decay_weights
from shampoo_optax._mesh import place_rest
from shampoo_optax._momentum import scale_by_momentum
from shampoo_optax._placement import Placement
from shampoo_optax._rms import cap_rms, match_rms
from shampoo_optax._trees import is_none, tree_map

AliasDecay = Decay | Literal["l2"]


def fill_absent() -> optax.GradientTransformationExtraArgs:
    """Makes the updates of absent gradients 0.

    Last in a chain, after transforms that leave `None` as `None`; then
    `optax.apply_updates` takes the result. Needs `params` in `update`; without them
    the updates pass as they are.

    Returns:
      An `optax.GradientTransformationExtraArgs` without state.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.fill_absent()
      >>> params = {"seen": jnp.ones(2), "unseen": jnp.ones(2)}
      >>> updates = {"seen": jnp.ones(2), "unseen": None}
      >>> tx.update(updates, tx.init(params), params)[0]["unseen"].tolist()
      [0.0, 0.0]
    """

    def init_fn(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del extra_args
        if params is None:
            return updates, state

        def fill(update, param):
            absent = update is None and param is not None
            return jnp.zeros_like(param) if absent else update

        filled = jax.tree.map(fill, updates, params, is_leaf=is_none)
        return filled, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_by_step_size(
    learning_rate: ScalarOrSchedule,
) -> optax.GradientTransformation:
    """Multiplies by -rate and keeps the dtype, also where the rate is an array."""
    if callable(learning_rate):
        return optax.scale_by_learning_rate(learning_rate)

    def scale(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return tree_map(lambda u: (-learning_rate * u).astype(u.dtype), updates)

    return optax.stateless(scale)


def descend(
    learning_rate: ScalarOrSchedule,
    direction: optax.GradientTransformation,
    *,
    weight_decay: ArrayLike,
    mask: Mask | None,
    decay: AliasDecay,
    peak_learning_rate: ArrayLike | None,
    max_rms: ArrayLike | None,
    rms: ArrayLike | None,
    momentum: ArrayLike | None = None,
    dampening: ArrayLike = 0.0,
    nesterov: bool = False,
    momentum_dtype: Stored | None = None,
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Chains a direction with its size, decay, momentum, step size, in that order."""
    check_rate("learning_rate", learning_rate)
    check_choice("decay", decay, (*get_args(Decay), "l2"))
    decays = decay_weights(
        weight_decay,
        decay="decoupled" if decay == "l2" else decay,
        learning_rate=learning_rate,
        peak_learning_rate=peak_learning_rate,
        mask=mask,
    )
    heavy_ball = scale_by_momentum(
        0.0 if momentum is None else momentum,
        dampening=dampening,
        nesterov=nesterov,
        dtype=momentum_dtype,
    )
    parts = [direction]
    if rms is not None:
        parts.append(match_rms(rms))
    if max_rms is not None:
        parts.append(cap_rms(max_rms))
    if not is_static(weight_decay, 0):
        parts.insert(0 if decay == "l2" else len(parts), decays)
    if momentum is not None:
        parts.append(heavy_ball)
    parts += [scale_by_step_size(learning_rate), fill_absent()]
    return place_rest(optax.chain(*parts), placement)
