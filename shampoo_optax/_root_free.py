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

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_root_free_rms(batch_size=8.0)
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.moments["4x3"].shape
      (1, 4, 3)
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
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-4,
    *,
    batch_size: ArrayLike = 128,
    b3: ArrayLike | None = None,
    bias_correction: bool = True,
    graft: Graft | None = None,
    graft_b2: ArrayLike = 0.99,
    graft_eps: ArrayLike = 1e-8,
    blocking: Blocking = Blocking(),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides gradients by their second moments, without a square root.

    For each entry of a gradient G, with the filtered gradient :math:`\hat G` of
    :func:`scale_by_shampoo` and B the `batch_size`,

    .. math::
      S \leftarrow b_2 S + w\, B\, G^2, \qquad P = \hat G / (S + \varepsilon)

    from :math:`S = 1`, with :math:`w = 1 - b_2`, or 1 where :math:`b_2 = 1`. S is the
    diagonal of a curvature, and P a Newton step: its sign is that of the gradient, and
    its units those of the inverse gradient, so that its size depends on `batch_size`.
    It starts as plain gradient descent. Tune the learning rate first (1e-3 to 1e-2
    with a momentum of 0.9), then `eps` and `b2`. With `graft` the size is that of
    another method.

    Precision, guards and absent gradients are those of :func:`scale_by_shampoo`.

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.
      b2: decay rate of the second moments, in [0, 1]; 1 makes them sums, as AdaGrad
        does. Default 0.95.
      eps: damping, >= 0, in units of the squared gradient times `batch_size`. Default
        1e-4.
      batch_size: the number of examples of which the gradient is the mean, > 0; their
        squared gradients are taken to be that much larger. Default 128.
      b3: weight of the old average in the gradient used now, in [0, 1); `None` stands
        for `b1`. Default `None`.
      bias_correction: whether the filtered gradient is divided by the sum of its
        weights. Default `True`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1). Default 0.99.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      blocking: how parameters are merged and cut, a :class:`Blocking`; felt through
        guards and grafting alone. Default `Blocking()`.
      placement: the devices that moments and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleByRootFreeRmsState`. Updates have the shapes and dtypes of the
      gradients.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a leaf is not a real floating-point array, or the gradients'
        paths or shapes are not those of the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_root_free_rms(batch_size=1),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      26.05
      23.76
      22.15
      20.91
      19.90

    References:
      Lin et al., Can We Remove the Square-Root in Adaptive Gradient Methods? A
      Second-Order Perspective, 2024, https://arxiv.org/abs/2402.03496.
    """
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
