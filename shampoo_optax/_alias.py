"""Ready optimizers: chains of the transforms and nothing else."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._averaging import scale_by_momentum
from shampoo_optax._config import (
    Blocking,
    Eigh,
    Exponents,
    Graft,
    Root,
    ScalarOrSchedule,
    check_choice,
    check_rate,
    is_static,
)
from shampoo_optax._decay import decay_weights
from shampoo_optax._shampoo import scale_by_shampoo
from shampoo_optax._soap import scale_by_soap

Decay = Literal["l2", "decoupled", "corrected", "independent"]
Mask = Any | Callable[[optax.Params], Any]


def fill_absent() -> optax.GradientTransformationExtraArgs:
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

        filled = jax.tree.map(fill, updates, params, is_leaf=lambda x: x is None)
        return filled, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _descend(
    learning_rate: ScalarOrSchedule,
    direction: optax.GradientTransformation,
    *,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    decay: Decay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    momentum: ArrayLike = 0.0,
    dampening: ArrayLike = 0.0,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Chains a direction with decay, momentum and the step size, in their order."""
    check_rate("learning_rate", learning_rate)
    check_choice("decay", decay, get_args(Decay))
    before, after = [], []
    if not is_static(weight_decay, 0):
        if decay == "l2":
            before = [decay_weights(weight_decay, mask=mask)]
        else:
            after = [
                decay_weights(
                    weight_decay,
                    mode=decay,
                    learning_rate=learning_rate,
                    peak_learning_rate=peak_learning_rate,
                    mask=mask,
                )
            ]
    if not is_static(momentum, 0):
        after += [scale_by_momentum(momentum, dampening=dampening, nesterov=nesterov)]
    step = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(*before, direction, *after, step, fill_absent())


def shampoo(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 0.0,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    *,
    relative_eps: ArrayLike | None = None,
    b3: ArrayLike | None = None,
    refresh_every: ArrayLike = 10,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    exponents: Exponents | None = None,
    graft: Graft | None = "adam",
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    momentum: ArrayLike = 0.0,
    dampening: ArrayLike = 0.0,
    nesterov: bool = False,
    decay: Decay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    root: Root = Eigh(),  # noqa: B008
    blocking: Blocking = Blocking(),  # noqa: B008
) -> optax.GradientTransformationExtraArgs:
    direction = scale_by_shampoo(
        b1,
        b2,
        eps,
        relative_eps=relative_eps,
        b3=b3,
        refresh_every=refresh_every,
        start=start,
        bias_correction=bias_correction,
        exponents=exponents,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        root=root,
        blocking=blocking,
    )
    return _descend(
        learning_rate,
        direction,
        weight_decay=weight_decay,
        mask=mask,
        decay=decay,
        peak_learning_rate=peak_learning_rate,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
    )


def soap(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    mask: Mask | None = None,
    *,
    exponent: ArrayLike = 0.5,
    b3: ArrayLike | None = None,
    refresh_every: ArrayLike = 10,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    decay: Decay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
    blocking: Blocking = Blocking(),  # noqa: B008
) -> optax.GradientTransformationExtraArgs:
    direction = scale_by_soap(
        b1,
        b2,
        eps,
        exponent=exponent,
        b3=b3,
        refresh_every=refresh_every,
        start=start,
        bias_correction=bias_correction,
        blocking=blocking,
    )
    return _descend(
        learning_rate,
        direction,
        weight_decay=weight_decay,
        mask=mask,
        decay=decay,
        peak_learning_rate=peak_learning_rate,
    )
