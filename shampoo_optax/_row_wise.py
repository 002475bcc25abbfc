"""Row-wise AdaGrad, for tables of embeddings."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import check_number
from shampoo_optax._leaves import check_leaves
from shampoo_optax._trees import advance, tree_map, wide, wide_dtype


class ScaleByRowWiseAdagradState(NamedTuple):
    """State of :func:`scale_by_row_wise_adagrad`.

    Attributes:
      accumulators: V, a tree like the parameters with one number for each row.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_row_wise_adagrad()
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.accumulators["w"].shape
      (4,)
    """

    accumulators: optax.Updates  # [rows], [] for scalars; float32 or wider


def scale_by_row_wise_adagrad(
    eps: ArrayLike = 1e-10, *, initial: ArrayLike = 0.0
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each row by the root of its summed mean squares (row-wise AdaGrad).

    For huge tables, whose state it keeps to one number a row. A row is what has one
    index of the leading axis; for its gradient :math:`G_i` with d entries,

    .. math::
      V_i \leftarrow V_i + \|G_i\|^2 / d, \qquad P_i = G_i / (\sqrt{V_i} + \varepsilon)

    Parameters of one dimension or none have rows of one entry, for which this is
    AdaGrad. Rows with a gradient of 0 do not move. As in FBGEMM and TorchRec, but
    for dense gradients; without step size and decay, which a chain adds.

    The PyTorch submission that won AlgoPerf in 2024 gives tables with a dimension of
    1,000,000 or more to an optimizer which its log line calls Row-Wise AdaGrad, but
    which it configures as Adam: take `optax.adamw` to follow the file, and this to
    follow the line.

    Guards: a row whose gradient is not finite, or overflows when squared, keeps its
    accumulator and gets 0. A gradient that is `None` leaves its parameter's as they
    are.

    Args:
      eps: added to the root, >= 0. Default 1e-10.
      initial: V before the first step, >= 0. Default 0.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleByRowWiseAdagradState`. Updates have the shapes and dtypes of the
      gradients.

    Raises:
      ValueError: if an argument has a value other than those above.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_row_wise_adagrad()
      >>> state = tx.init(jnp.zeros((2, 2)))
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.array([[1.0, 7.0], [0.0, 0.0]]), state)
      ...     print(updates)
      [[0.2 1.4]
       [0.  0. ]]
      [[0.14142136 0.9899495 ]
       [0.         0.        ]]

    References:
      Mudigere et al., Software-Hardware Co-design for Fast and Scalable Training of
      Deep Learning Recommendation Models, 2021, https://arxiv.org/abs/2104.05158.

      Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and
      Stochastic Optimization, 2011, https://jmlr.org/papers/v12/duchi11a.html.
    """
    check_number("eps", eps)
    check_number("initial", initial)

    def init_fn(params: optax.Params) -> ScaleByRowWiseAdagradState:
        def accumulator(param):
            dtype = wide_dtype(param.dtype)
            if not param.size:  # checkpoints hold no empty arrays
                return jnp.full((), initial, dtype)
            whole = jnp.zeros_like(param, dtype)  # its rows are sharded as these
            return jnp.max(whole, axis=tuple(range(1, param.ndim))) + initial

        return ScaleByRowWiseAdagradState(jax.tree.map(accumulator, params))

    def update_fn(
        updates: optax.Updates,
        state: ScaleByRowWiseAdagradState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByRowWiseAdagradState]:
        del params, extra_args
        check_leaves("updates", jax.tree_util.tree_leaves_with_path(updates))

        def accumulate(held, update):
            if not update.size:
                return held
            total = (held + _mean_squares(update)).astype(held.dtype)
            return jnp.where(jnp.isfinite(total), total, held)

        def divide(update, held):
            if not update.size:
                return update
            root = jnp.sqrt(held) + eps
            moves = jnp.isfinite(_mean_squares(update)) & (root > 0)
            root = _along_rows(jnp.where(moves, root, 1), update)
            scaled = jnp.where(_along_rows(moves, update), wide(update) / root, 0)
            return scaled.astype(update.dtype)

        accumulators = advance(accumulate, state.accumulators, updates)
        scaled = tree_map(divide, updates, accumulators)
        return scaled, ScaleByRowWiseAdagradState(accumulators)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _mean_squares(update: jax.Array) -> jax.Array:
    """The mean square of each row, which is one entry of a vector or scalar."""
    return jnp.mean(wide(update) ** 2, axis=tuple(range(1, update.ndim)))


def _along_rows(numbers: jax.Array, update: jax.Array) -> jax.Array:
    """One number a row, with as many dimensions as the update."""
    return jnp.expand_dims(numbers, tuple(range(1, update.ndim)))
