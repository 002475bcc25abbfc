"""SOAP: second moments in the eigenbasis of Shampoo's factors."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._blocking import Stacks
from shampoo_optax._config import Blocking, Eigh, Graft, Options, check_number
from shampoo_optax._eigen import scaled_eigh
from shampoo_optax._factors import (
    AxisStacks,
    apply_axes,
    factored_axes,
    full_axes,
    identities,
    statistics_correction,
    statistics_weight,
)
from shampoo_optax._gradients import next_count, plan_parameters
from shampoo_optax._grafting import accumulate, zero_blocks
from shampoo_optax._refresh import refresh
from shampoo_optax._step import (
    begin,
    finish,
    refresh_if_due,
    shared_state,
    stand_in,
)


class ScaleBySoapState(NamedTuple):
    """State of :func:`scale_by_soap`.

    Attributes:
      count: the number of steps taken, t.
      factors: the statistics L of each axis.
      bases: their eigenvectors Q in columns, the identity before the first refresh.
      moments: second moments D of the gradient in the bases.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      failures: how many new bases were refused, for each block.
      skipped: how many gradients were not usable, for each block.
    """

    count: jax.Array  # [], int32
    factors: AxisStacks  # {stack: {axis: [n, d, d]}}, float32 or wider
    bases: AxisStacks  # {stack: {axis: [n, d, d]}}, float32 or wider
    moments: Stacks  # {stack: [n, *block]}, float32 or wider
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, float32 or wider
    failures: dict[str, jax.Array]  # {stack: [n]}, int32
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


def _eigenbases(factors: jax.Array, _) -> tuple[jax.Array, jax.Array]:
    _, bases, residuals, _ = scaled_eigh(factors, jnp.zeros((), factors.dtype))
    return bases, residuals


def scale_by_soap(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    *,
    exponent: ArrayLike = 0.5,
    b3: ArrayLike | None = None,
    refresh_every: ArrayLike = 10,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    drop_weighting: bool = False,
    graft: Graft | None = None,
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    blocking: Blocking = Blocking(),  # noqa: B008
) -> optax.GradientTransformationExtraArgs:
    check_number("exponent", exponent)
    options = Options(
        b1=b1,
        b2=b2,
        eps=eps,
        relative_eps=None,
        b3=b3,
        refresh_every=refresh_every,
        start=start,
        bias_correction=bias_correction,
        drop_weighting=drop_weighting,
        exponents=None,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        root=Eigh(),
        blocking=blocking,
    )

    def init_fn(params: optax.Params) -> ScaleBySoapState:
        plan = plan_parameters(params, blocking)
        empty = stand_in(ScaleBySoapState, plan)
        if empty is not None:
            return empty
        return ScaleBySoapState(
            bases=full_axes(plan, factored_axes(plan, options), identities),
            moments=zero_blocks(plan),
            **shared_state(plan, options),
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleBySoapState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleBySoapState]:
        del extra_args
        step = begin(updates, state, params, options)
        if not step.blocks:
            return updates, state._replace(count=next_count(state.count))
        recompute = partial(
            refresh,
            step.factors,
            usable=step.usable,
            compute=_eigenbases,
            max_residual=options.root.max_residual,
        )
        bases, failures = refresh_if_due(step, recompute, state.bases, state.failures)
        rotated = apply_axes(bases, step.blocks, transpose=True)
        weight = statistics_weight(options)
        moments = {
            name: accumulate(moment, rotated[name], step.usable[name], b2, weight)
            for name, moment in state.moments.items()
        }
        correction = statistics_correction(options, step.count)

        def divide(name: str, block: jax.Array) -> jax.Array:
            moment = moments[name] / correction.astype(block.dtype)
            scale = moment ** jnp.asarray(exponent, block.dtype)
            scale += jnp.asarray(eps, block.dtype)
            return block / jnp.where(scale > 0, scale, 1)

        def direct(used: Stacks) -> Stacks:
            used = apply_axes(bases, used, transpose=True)
            divided = {name: divide(name, block) for name, block in used.items()}
            return apply_axes(bases, divided)

        direction, fields = finish(step, state, options, direct)
        return direction, ScaleBySoapState(
            bases=bases, moments=moments, failures=failures, **fields
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
