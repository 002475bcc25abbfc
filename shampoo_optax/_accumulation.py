"""Accumulated gradients: calls whose result is thrown away do no work on roots."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import check_choice, check_integer
from shampoo_optax._reshard import place_scalars


def multi_steps(
    tx: optax.GradientTransformation,
    every: ArrayLike | Callable[[jax.Array], ArrayLike],
    *,
    use_grad_mean: bool = True,
    should_skip_update_fn: Callable | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Accumulates gradients over calls, and takes one step of `tx` with their mean.

    `optax.MultiSteps`, which calls `tx` at every mini-step and throws away all results
    but the last. Here `tx` is told so, by the extra argument `discard` that all
    transforms with blocks take: `True` gives directions of 0 and leaves the state as it
    is, without statistics, roots and products. Statistics see the mean of k gradients,

    .. math::
      \bar G = \frac1k \sum_{i=1}^k G_i

    and `refresh_every` and `start` count steps, not mini-steps. In a loop of your own
    give `discard` to `tx.update`, and keep the old state: what has no blocks, such as
    momentum and schedules, does not know of it.

    Args:
      tx: the transform, such as :func:`shampoo` or a chain.
      every: the number k of mini-steps in a step, an integer >= 1, or a function from
        the number of steps taken to one.
      use_grad_mean: whether the mean is taken, or else the sum. Default `True`.
      should_skip_update_fn: a function that leaves mini-steps out, as that of
        `optax.MultiSteps`, such as `optax.skip_not_finite`. Default `None`: none.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is an
      `optax.MultiStepsState`. The updates of mini-steps that end no step are 0.

    Raises:
      ValueError: if an argument has a value other than those above.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.multi_steps(so.shampoo(0.1), every=2)
      >>> params = jnp.ones((2, 2))
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.eye(2), state, params)
      ...     print(jnp.diag(updates).round(3))
      [0. 0.]
      [-0.1 -0.1]

    References:
      Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
      https://arxiv.org/abs/1706.02677.
    """
    if not callable(every):
        check_integer("every", every)
    check_choice("use_grad_mean", use_grad_mean, (True, False))

    def size(step: jax.Array) -> ArrayLike:
        return every(step) if callable(every) else every

    steps = optax.MultiSteps(
        tx, size, use_grad_mean, should_skip_update_fn=should_skip_update_fn
    )

    def init_fn(params: optax.Params) -> optax.MultiStepsState:
        return place_scalars(steps.init(params), params)

    def update_fn(
        updates: optax.Updates,
        state: optax.MultiStepsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        early = state.mini_step != size(state.gradient_step) - 1
        early |= jnp.asarray(extra_args.pop("discard", False))
        updates, state = steps.update(
            updates, state, params, discard=early, **extra_args
        )
        # Where optax multiplies by 0 what may not be finite.
        sums = _zero_where(state.mini_step == 0, state.acc_grads)
        return _zero_where(early, updates), state._replace(acc_grads=sums)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _zero_where(condition: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(condition, jnp.zeros_like(x), x), tree)
