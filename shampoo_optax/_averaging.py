"""Averages of the iterates, and the parameters to evaluate and to train."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import (
    Decay,
    ScalarOrSchedule,
    check_number,
    check_rate,
)
from shampoo_optax._decay import check_decay, decay_rate, rate_at
from shampoo_optax._reshard import place_scalars
from shampoo_optax._trees import (
    advance,
    next_count,
    require_params,
    tree_map,
    wide,
)


class IterateAveragingState(NamedTuple):
    """State of :func:`primal_averaging` and :func:`schedule_free`.

    Attributes:
      count: the number of steps taken.
      fast: the fast iterates Z, a tree like the parameters.
      weight_sum: the sum of the averaging weights so far (schedule-free).
      train_coefficient: the y of the formulas, for :func:`eval_params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> import optax
      >>> tx = optax.chain(so.scale_by_shampoo(), so.schedule_free(0.1))
      >>> _, state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.fast["w"].shape
      (4, 3)
    """

    count: jax.Array  # [], int32
    fast: optax.Params  # the shapes of the parameters, float32 or wider
    weight_sum: jax.Array  # [], the widest float
    train_coefficient: jax.Array  # [], the widest float


def primal_averaging(
    learning_rate: ScalarOrSchedule,
    *,
    eval_coefficient: ArrayLike,
    train_coefficient: ArrayLike,
    weight_decay: ArrayLike = 0.0,
    decay: Decay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Generalized primal averaging: trains between the fast iterates and their mean.

    Last in a chain, in place of the step size. With the direction P and the
    parameters Y,

    .. math::
      Z &\leftarrow (1 - \eta_t \alpha_t) Z, \qquad U = -\eta_t P \\
      Y &\leftarrow Y + (1 - \mu_x)(Z - Y) + (1 - \mu_x \mu_y) U, \qquad
      Z \leftarrow Z + U

    where :math:`\alpha_t` is the rate of :func:`decay_weights`. Evaluate at
    :func:`eval_params`. With :math:`\mu_y = 1` this is heavy-ball momentum
    :math:`\mu_x` at the rate :math:`\eta (1 - \mu_x)`. Absent gradients (`None`)
    leave Y and Z as they are.

    Args:
      learning_rate: a number >= 0, or a schedule that maps the number of steps taken
        to one.
      eval_coefficient: :math:`\mu_x` in [0, 1], the weight of the old mean.
      train_coefficient: :math:`\mu_y` in (0, 1], the weight of the mean in the
        parameters that are trained.
      weight_decay: decay of the fast iterates, >= 0. Default 0.
      decay: `"decoupled"`, `"corrected"` or `"independent"`, as in
        :func:`decay_weights`. Default `"decoupled"`.
      peak_learning_rate: the largest learning rate, as in :func:`decay_weights`.
        Default `None`.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is an
      :class:`IterateAveragingState`; `update` needs `params`.

    Raises:
      ValueError: if an argument has a value other than those above, or `update` is
        called without `params`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_shampoo(refresh_every=2),
      ...     so.primal_averaging(0.1, eval_coefficient=0.5, train_coefficient=0.8),
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(so.eval_params(state, w)):.2f}")
      29.01
      27.73
      26.31
      24.88
      23.43

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of
      LLMs, 2025, https://arxiv.org/abs/2512.17131.
    """
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
    decay: Decay = "decoupled",
    peak_learning_rate: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Schedule-free averaging of the iterates.

    :func:`primal_averaging` with :math:`\mu_x = 1 - \eta_t^r / \sum_s \eta_s^r`, so
    that the mean weighs every iterate by its rate to the power r; the mean stays
    while all rates so far are 0. No decay of the rate is needed, but a warm-up is:
    without it the first iterates, which are far off, weigh as much as the others.

    At a constant rate without decay `optax.contrib.schedule_free` is the same. It
    weighs by the largest rate so far, which it reads one step ahead, so that it parts
    from the official package, which this follows, where the rate varies. Its decay
    takes the parameters that are trained, not the fast iterates.

    Args:
      learning_rate: a number >= 0, or a schedule that maps the number of steps taken
        to one.
      train_coefficient: :math:`\mu_y` in (0, 1], the weight of the mean in the
        parameters that are trained. Default 0.9.
      power: r >= 0. Default 2.
      weight_decay: decay of the fast iterates, >= 0. Default 0.
      decay: `"decoupled"`, `"corrected"` or `"independent"`, as in
        :func:`decay_weights`. Default `"decoupled"`.
      peak_learning_rate: the largest learning rate, as in :func:`decay_weights`.
        Default `None`.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is an
      :class:`IterateAveragingState`; `update` needs `params`.

    Raises:
      ValueError: if an argument has a value other than those above, or `update` is
        called without `params`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(so.scale_by_shampoo(refresh_every=2), so.schedule_free(0.1))
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(so.eval_params(state, w)):.2f}")
      28.04
      27.25
      26.47
      25.70
      24.95

    References:
      Defazio et al., The Road Less Scheduled, 2024,
      https://arxiv.org/abs/2405.15682.
    """
    check_number("power", power)
    decays = (weight_decay, decay, learning_rate, peak_learning_rate)

    def coefficient(rate, weight_sum):
        weight = jnp.asarray(rate, weight_sum.dtype) ** power
        total = weight_sum + weight
        newest = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 0)
        return 1 - newest, total

    return _iterate_averaging(learning_rate, coefficient, train_coefficient, decays)


def _iterate_averaging(
    learning_rate: ScalarOrSchedule,
    coefficient: Any,
    train_coefficient: ArrayLike,
    decays: tuple,
) -> optax.GradientTransformationExtraArgs:
    """Averages iterates with the eval coefficient that `coefficient` returns."""
    check_rate("learning_rate", learning_rate)
    check_number("train_coefficient", train_coefficient, high=1.0, positive=True)
    check_decay(*decays)

    def first(param):  # checkpoints hold no empty arrays
        return jnp.array(wide(param)) if param.size else jnp.zeros(())

    def init_fn(params: optax.Params) -> IterateAveragingState:
        widest = jnp.result_type(float)
        state = IterateAveragingState(
            count=jnp.zeros((), jnp.int32),
            fast=jax.tree.map(first, params),
            weight_sum=jnp.zeros((), widest),
            train_coefficient=jnp.array(train_coefficient, widest),
        )
        return place_scalars(state, params)

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
            pull = (1 - towards) * (shrink * fast - wide(param))
            return (pull - ahead * rate * wide(update)).astype(update.dtype)

        def step(fast, update):
            if not update.size:
                return fast
            return (shrink * fast - rate * wide(update)).astype(fast.dtype)

        moved = tree_map(move, updates, state.fast, params)
        fast = advance(step, state.fast, updates)
        return moved, state._replace(
            count=next_count(state.count),
            fast=fast,
            weight_sum=weight_sum,
            train_coefficient=jnp.array(train_coefficient, weight_sum.dtype),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _interpolate(
    state: Any, params: optax.Params, scale: Callable[[jax.Array], jax.Array]
) -> optax.Params:
    """Moves the parameters of every averaging state towards its fast iterates."""

    def is_averaging(node):
        return isinstance(node, IterateAveragingState)

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    found = [n for n in jax.tree.leaves(state, is_leaf=is_averaging) if is_averaging(n)]
    if not found:
        raise ValueError(
            "`state` must hold a state of `primal_averaging` or `schedule_free`, "
            f"got {type(state).__name__} without one."
        )
    for averaging in found:
        rate = scale(averaging.train_coefficient)

        def move(fast, param, rate=rate):
            if is_masked(fast):
                return param
            moved = wide(param) + rate.astype(fast.dtype) * (fast - wide(param))
            return moved.astype(jnp.asarray(param).dtype)

        params = jax.tree.map(move, averaging.fast, params, is_leaf=is_masked)
    return params


def eval_params(state: Any, params: optax.Params) -> optax.Params:
    r"""The mean iterate, at which a model with averaged iterates is evaluated.

    .. math:: Y + (1 - 1/\mu_y)(Z - Y)

    Args:
      state: an optax state that holds states of :func:`primal_averaging` or
        :func:`schedule_free` at any depth, one for each parameter at most.
      params: the parameters that are trained, Y.

    Returns:
      The parameters to evaluate, with the shapes and dtypes of `params`.

    Raises:
      ValueError: if `state` holds no such state.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.primal_averaging(1.0, eval_coefficient=0.5, train_coefficient=0.5)
      >>> params = jnp.zeros(1)
      >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
      >>> print(updates, so.eval_params(state, params + updates))
      [-0.75] [-0.5]

    References:
      Defazio et al., The Road Less Scheduled, 2024,
      https://arxiv.org/abs/2405.15682.
    """
    return _interpolate(state, params, lambda y: 1 - 1 / y)


def train_params(state: Any, params: optax.Params) -> optax.Params:
    r"""The parameters that are trained, from those at which a model is evaluated.

    .. math:: X + (1 - \mu_y)(Z - X)

    The inverse of :func:`eval_params`, for a model restored from evaluated
    parameters and the state.

    Args:
      state: an optax state that holds states of :func:`primal_averaging` or
        :func:`schedule_free` at any depth, one for each parameter at most.
      params: the parameters to evaluate, X.

    Returns:
      The parameters to train, with the shapes and dtypes of `params`.

    Raises:
      ValueError: if `state` holds no such state.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.primal_averaging(1.0, eval_coefficient=0.5, train_coefficient=0.5)
      >>> params = jnp.zeros(1)
      >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
      >>> print(so.train_params(state, so.eval_params(state, params + updates)))
      [-0.75]

    References:
      Defazio et al., The Road Less Scheduled, 2024,
      https://arxiv.org/abs/2405.15682.
    """
    return _interpolate(state, params, lambda y: 1 - y)
