"""Shampoo: Kronecker factors, their inverse roots, and the preconditioned gradient."""

from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.typing import ArrayLike

from shampoo_optax._blocking import Stacks
from shampoo_optax._config import Blocking, Eigh, Exponents, Graft, Options, Root
from shampoo_optax._factors import (
    AxisStacks,
    apply_axes,
    factored_axes,
    full_axes,
    identities,
    statistics_correction,
)
from shampoo_optax._gradients import next_count, plan_parameters
from shampoo_optax._roots import refresh_roots
from shampoo_optax._step import (
    begin,
    finish,
    refresh_if_due,
    shared_state,
    stand_in,
)


class ScaleByShampooState(NamedTuple):
    """State of :func:`scale_by_shampoo`.

    A stack is named by the shape of its blocks, an axis by its number. A tree
    without any block has an array of shape [] in place of each dict.

    Attributes:
      count: the number of steps taken, t.
      factors: the statistics L of each axis (L and R in the papers).
      roots: their inverse roots, the identity before the first refresh.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      failures: how many new roots were refused, for each block.
      skipped: how many gradients were not usable, for each block.
    """

    count: jax.Array  # [], int32
    factors: AxisStacks  # {stack: {axis: [n, d, d]}}, float32 or wider
    roots: AxisStacks  # {stack: {axis: [n, d, d]}}, float32 or wider
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, float32 or wider
    failures: dict[str, jax.Array]  # {stack: [n]}, int32
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


def scale_by_shampoo(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 0.0,
    *,
    relative_eps: ArrayLike | None = None,
    b3: ArrayLike | None = None,
    refresh_every: ArrayLike = 10,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    drop_weighting: bool = False,
    exponents: Exponents | None = None,
    graft: Graft | None = "adam",
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    root: Root = Eigh(),  # noqa: B008
    blocking: Blocking = Blocking(),  # noqa: B008
) -> optax.GradientTransformationExtraArgs:
    options = Options(
        b1=b1,
        b2=b2,
        eps=eps,
        relative_eps=relative_eps,
        b3=b3,
        refresh_every=refresh_every,
        start=start,
        bias_correction=bias_correction,
        drop_weighting=drop_weighting,
        exponents=exponents,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        root=root,
        blocking=blocking,
    )

    def init_fn(params: optax.Params) -> ScaleByShampooState:
        plan = plan_parameters(params, blocking)
        empty = stand_in(ScaleByShampooState, plan)
        if empty is not None:
            return empty
        roots = full_axes(plan, factored_axes(plan, options), identities)
        return ScaleByShampooState(roots=roots, **shared_state(plan, options))

    def update_fn(
        updates: optax.Updates,
        state: ScaleByShampooState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByShampooState]:
        del extra_args
        step = begin(updates, state, params, options)
        if not step.blocks:
            return updates, state._replace(count=next_count(state.count))
        plan = step.gradients.plan
        refresh = partial(
            refresh_roots,
            step.factors,
            usable=step.usable,
            exponents=factored_axes(plan, options),
            correction=statistics_correction(options, step.count),
            options=options,
        )
        roots, failures = refresh_if_due(step, refresh, state.roots, state.failures)
        direct = partial(apply_axes, roots)
        direction, fields = finish(step, state, options, direct)
        return direction, ScaleByShampooState(roots=roots, failures=failures, **fields)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
