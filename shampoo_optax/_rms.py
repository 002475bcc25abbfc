"""The root mean square of updates: a cap on it, or one that all parameters have."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import check_number
from shampoo_optax._leaves import check_leaves
from shampoo_optax._stacks import norms
from shampoo_optax._trees import narrow, tree_map, wide


def cap_rms(max_rms: ArrayLike) -> optax.GradientTransformationExtraArgs:
    r"""Scales the update of a parameter down where its root mean square is too large.

    .. math::
      U \leftarrow U \min(1, r_{max} / \mathrm{rms}(U)), \qquad
      \mathrm{rms}(U) = \|U\| / \sqrt n

    for each parameter of n entries. After a direction, one gradient that is far larger
    than those before moves no parameter further than :math:`r_{max}` times the learning
    rate; momentum behind it adds up what it is given. The norm of all parameters
    together is clipped by `optax.clip_by_global_norm`.

    Args:
      max_rms: :math:`r_{max} > 0`.

    Returns:
      An `optax.GradientTransformationExtraArgs` without state.

    Raises:
      ValueError: if `max_rms` has another value.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.cap_rms(1.0)
      >>> updates = {"spike": jnp.array([3.0, -4.0]), "calm": jnp.array([0.5, 0.5])}
      >>> capped, _ = tx.update(updates, tx.init(updates))
      >>> print(capped["spike"], capped["calm"])
      [ 0.84852815 -1.1313709 ] [0.5 0.5]

    References:
      Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory
      Cost, 2018, https://arxiv.org/abs/1804.04235.
    """
    check_number("max_rms", max_rms, positive=True)
    return _with_rms(lambda found: jnp.minimum(found, max_rms))


def match_rms(rms: ArrayLike = 0.2) -> optax.GradientTransformationExtraArgs:
    r"""Gives the updates of all parameters one root mean square.

    .. math:: U \leftarrow U\, r / \mathrm{rms}(U)

    for each parameter, in place of factors that depend on its shape. The default is
    about what AdamW's updates have, so that its learning rate and decay can be kept.
    Put it behind momentum, or let that be part of the direction (`b1`). An update of 0
    stays 0.

    Args:
      rms: r > 0. Default 0.2.

    Returns:
      An `optax.GradientTransformationExtraArgs` without state.

    Raises:
      ValueError: if `rms` has another value.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.match_rms(0.2)
      >>> updates = {"large": jnp.array([3.0, -3.0]), "small": jnp.array([0.01, 0.01])}
      >>> matched, _ = tx.update(updates, tx.init(updates))
      >>> print(matched["large"].round(3), matched["small"].round(3))
      [ 0.2 -0.2] [0.2 0.2]

    References:
      Liu et al., Muon is Scalable for LLM Training, 2025,
      https://arxiv.org/abs/2502.16982.
    """
    check_number("rms", rms, positive=True)
    return _with_rms(lambda found: rms)


def _with_rms(
    wanted: Callable[[jax.Array], ArrayLike],
) -> optax.GradientTransformationExtraArgs:
    """Gives each update what `wanted` makes of its root mean square."""

    def scaled(update: jax.Array) -> jax.Array:
        if not update.size:
            return update
        whole = wide(update)
        (norm,) = norms(whole[None])
        found = norm / math.sqrt(update.size)
        size = jnp.asarray(wanted(found), whole.dtype)
        moved = whole / jnp.where(found == 0, 1, found) * size
        return narrow(jnp.where(size == found, whole, moved), update.dtype)

    def scale_all(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        check_leaves("updates", jax.tree_util.tree_leaves_with_path(updates))
        return tree_map(scaled, updates)

    return optax.with_extra_args_support(optax.stateless(scale_all))
