"""Heavy-ball momentum of updates, for the end of a chain."""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import check_choice, check_number
from shampoo_optax._config import Stored
from shampoo_optax._trees import advance, tree_map, wide, wide_dtype


class ScaleByMomentumState(NamedTuple):
    """State of :func:`scale_by_momentum`.

    Attributes:
      momentum: the buffer M, a tree like the parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_momentum(0.9)
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.momentum["w"].shape
      (4, 3)
    """

    momentum: optax.Updates  # the shapes of the parameters, `dtype`


def scale_by_momentum(
    momentum: ArrayLike,
    *,
    dampening: ArrayLike = 0.0,
    nesterov: bool = False,
    dtype: Stored | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Classic momentum: heavy ball, with dampening, or Nesterov's.

    .. math::
      M \leftarrow \mu M + (1 - \delta) P, \qquad
      P \leftarrow M \;\text{or}\; (1 - \delta) P + \mu M \;\text{(Nesterov)}

    As `optax.trace` with dampening, computed in at least float32, and with absent
    gradients (`None`), whose buffers stay as they are.

    Args:
      momentum: :math:`\mu` in [0, 1].
      dampening: :math:`\delta` in [0, 1]. Default 0.
      nesterov: whether to look ahead. Default `False`.
      dtype: in which the buffer is kept, `"float32"`, `"bfloat16"`, or, with 64-bit
        arrays enabled, `"float64"`. Default `None`: that of the parameter, float32
        or wider.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleByMomentumState`.

    Raises:
      ValueError: if an argument has a value other than those above.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_momentum(0.5, dampening=0.5)
      >>> state = tx.init(jnp.zeros(2))
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.ones(2), state)
      ...     print(updates)
      [0.5 0.5]
      [0.75 0.75]

    References:
      Sutskever et al., On the Importance of Initialization and Momentum in Deep
      Learning, 2013, https://proceedings.mlr.press/v28/sutskever13.html.
    """
    check_number("momentum", momentum, high=1.0)
    check_number("dampening", dampening, high=1.0)
    check_choice("nesterov", nesterov, (True, False))
    check_choice("dtype", dtype, (None, *get_args(Stored)))

    def init_fn(params: optax.Params) -> ScaleByMomentumState:
        def buffer(param):
            kept = dtype or wide_dtype(param.dtype)
            if not param.size:
                return jnp.zeros((), kept)
            return jnp.zeros_like(param, kept)  # sharded as the parameter

        return ScaleByMomentumState(jax.tree.map(buffer, params))

    def update_fn(
        updates: optax.Updates,
        state: ScaleByMomentumState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByMomentumState]:
        del params, extra_args

        def accumulate(buffer, update):
            if not update.size:  # checkpoints hold no empty arrays
                return buffer
            moved = momentum * wide(buffer) + (1 - dampening) * wide(update)
            return moved.astype(buffer.dtype)

        def look_ahead(update, buffer):
            if not update.size:
                return update
            if not nesterov:
                return buffer.astype(update.dtype)
            ahead = (1 - dampening) * wide(update) + momentum * wide(buffer)
            return ahead.astype(update.dtype)

        buffers = advance(accumulate, state.momentum, updates)
        return tree_map(look_ahead, updates, buffers), ScaleByMomentumState(buffers)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
