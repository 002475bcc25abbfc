"""Root-free RMSProp: second moments that divide the gradient without a square root."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import Graft
from shampoo_optax._config import Blocking, Options
from shampoo_optax._factors import statistics_weight
from shampoo_optax._grafting import accumulate
from shampoo_optax._placement import Placement
from shampoo_optax._stacks import Inputs, Stack, Stacks
from shampoo_optax._step import begin, finish, plain_fields
from shampoo_optax._transform import Method, block_transform


class ScaleByRootFreeRmsState(NamedTuple):
    """State of :func:`scale_by_root_free_rms`.

    Attributes:
      count: the number of steps taken, t.
      moments: second moments S of the gradient, 1 before the first step.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      skipped: how many steps gave no finite direction, for each block.
    """

    count: jax.Array  # [], int32
    moments: Stacks  # {stack: [n, *block]}, float32 or wider
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, float32 or wider
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


def _fields(options: Options, stacks: dict[str, Stack]) -> dict[str, Any]:
    moments = {
        name: jnp.ones((stack.size, *stack.block), stack.dtype)
        for name, stack in stacks.items()
    }
    return dict(moments=moments, **plain_fields(stacks, options))


def _step(options: Options, inputs: Inputs) -> tuple[Stacks, dict[str, Any]]:
    options = replace(options, **inputs.numbers)
    step = begin(inputs, options)
    weight = statistics_weight(options) * options.batch_size
    moments = {
        name: accumulate(
            moment, step.blocks[name], step.usable[name], options.b2, weight
        )
        for name, moment in inputs.fields["moments"].items()
    }

    def divide(name: str, used: jax.Array) -> jax.Array:
        scale = moments[name] + jnp.asarray(options.eps, used.dtype)
        return used / jnp.where(scale > 0, scale, 1)

    def direct(used: Stacks) -> Stacks:
        return {name: divide(name, blocks) for name, blocks in used.items()}

    directions, fields = finish(step, options, direct)
    return directions, dict(fields, moments=moments)


def scale_by_root_free_rms(
    b1: ArrayLike = 0.0,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-4,
    *,
    batch_size: ArrayLike = 1.0,
    b3: ArrayLike | None = None,
    bias_correction: bool = True,
    graft: Graft | None = None,
    graft_b2: ArrayLike = 0.99,
    graft_eps: ArrayLike = 1e-8,
    blocking: Blocking = Blocking(),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    options = Options(
        b1=b1,
        b2=b2,
        b3=b3,
        eps=eps,
        start=1,
        bias_correction=bias_correction,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=False,
        blocking=blocking,
        batch_size=batch_size,
    )
    method = Method(
        ScaleByRootFreeRmsState, partial(_fields, options), partial(_step, options)
    )
    return block_transform(method, options, placement)
