"""Grafting as a combinator: the direction of one transform, the size of another."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shampoo_optax._blocking import views_of
from shampoo_optax._config import Blocking
from shampoo_optax._cutting import cut, paste, plan_of
from shampoo_optax._grafting import take_norms
from shampoo_optax._leaves import check_leaves
from shampoo_optax._reshard import reshard_whole
from shampoo_optax._stacks import Stacks, bundles
from shampoo_optax._trees import is_none, narrow, wide


class GraftState(NamedTuple):
    """State of :func:`graft`.

    Attributes:
      direction: the state of the transform whose direction is taken.
      magnitude: the state of the transform whose norms are taken.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> import optax
      >>> tx = so.graft(so.scale_by_shampoo(graft=None), optax.scale_by_adam())
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> type(state.magnitude).__name__
      'ScaleByAdamState'
    """

    direction: optax.OptState  # as that transform has it
    magnitude: optax.OptState  # as that transform has it


def graft(
    direction: optax.GradientTransformation,
    magnitude: optax.GradientTransformation,
    *,
    blocking: Blocking | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The direction of one transform with the norms of another.

    With the update D of `direction` and M of `magnitude`, for each parameter or block

    .. math:: U = D\, \|M\| / (\|D\| + 10^{-16})

    as the `graft` of :func:`scale_by_shampoo` does for its blocks. Both transforms are
    given the same gradients. Where D or M is not finite, or the square of
    M out of range, U is 0, which it stays where
    one of them, as `optax.scale_by_adam`, keeps a NaN: put `optax.apply_if_finite`
    around it. Absent gradients (`None`) stay so.

    Args:
      direction: an optax transform, such as `scale_by_shampoo(graft=None)`.
      magnitude: another transform, such as `optax.scale_by_adam()`.
      blocking: how parameters are cut into the blocks that have norms of their own, a
        :class:`Blocking`. Default `None`: one norm for each parameter.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a :class:`GraftState`.
      Updates have the shapes and dtypes of those of `direction`.

    Raises:
      ValueError: if an argument is none of these, or, in `update`, if the updates of
        the two are not alike.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.graft(so.scale_by_sign_descent(b1=0.0), optax.identity()),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      20.25
      14.03
      10.09
      7.15
      5.31

    References:
      Agarwal et al., Disentangling Adaptive Gradient Methods from Learning Rates,
      2020, https://arxiv.org/abs/2002.11803.
    """
    parts = (_checked("direction", direction), _checked("magnitude", magnitude))
    if blocking is not None and not isinstance(blocking, Blocking):
        raise ValueError(f"`blocking` must be a Blocking or None, got {blocking!r}.")

    def init_fn(params: optax.Params) -> GraftState:
        return GraftState(*(part.init(params) for part in parts))

    def update_fn(
        updates: optax.Updates,
        state: GraftState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, GraftState]:
        both = [
            part.update(updates, held, params, **extra_args)
            for part, held in zip(parts, state, strict=True)
        ]
        (direction, magnitude), states = zip(*both, strict=True)
        return _graft_trees(direction, magnitude, blocking), GraftState(*states)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _checked(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(f"`{name}` must be an optax transform, got {tx!r}.")
    return optax.with_extra_args_support(tx)


def _graft_trees(
    direction: optax.Updates, magnitude: optax.Updates, blocking: Blocking | None
) -> optax.Updates:
    """The leaves of one tree with the norms of another's."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(direction, is_leaf=is_none)
    paths, leaves = [path for path, _ in pairs], [leaf for _, leaf in pairs]
    others, other = jax.tree.flatten(magnitude, is_leaf=is_none)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (direction, magnitude)]
    if treedef != other or shapes[0] != shapes[1]:
        raise ValueError(
            "`magnitude` must give updates like those of `direction`, got "
            f"{shapes[1]} for {shapes[0]}."
        )
    check_leaves("updates", jax.tree_util.tree_leaves_with_path(direction))
    places = [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.size]
    chosen = ([found[i] for i in places] for found in (paths, leaves, others))
    for place, new in zip(places, _graft_leaves(*chosen, blocking), strict=True):
        leaves[place] = new
    return treedef.unflatten(leaves)


def _graft_leaves(
    paths: list, leaves: list, others: list, blocking: Blocking | None
) -> list:
    if blocking is None:
        directions, magnitudes = map(_uncut, (leaves, others))
        taken = _take(directions, magnitudes)
        pairs = zip(leaves, taken.values(), strict=True)
        return [narrow(block[0], leaf.dtype) for leaf, block in pairs]
    plan = plan_of(leaves, blocking, views=views_of(blocking.batch, paths, leaves))
    whole, back = reshard_whole(leaves)
    taken = _take(cut(plan, whole), cut(plan, reshard_whole(others)[0]))
    return back(paste(plan, taken, leaves))


def _uncut(leaves: list) -> Stacks:
    return {str(index): wide(leaf)[None] for index, leaf in enumerate(leaves)}


def _take(directions: Stacks, magnitudes: Stacks) -> Stacks:
    usable = {
        name: jnp.all(jnp.isfinite(block), axis=tuple(range(1, block.ndim)))
        for name, block in directions.items()
    }
    started = jnp.array(True)
    return take_norms(directions, magnitudes, usable, started, bundles(directions))[0]
