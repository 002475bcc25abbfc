"""Checked gradients: the tree of updates read against the tree of parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shampoo_optax._blocking import Plan, Stacks, cut, paste, plan_of, present_slots
from shampoo_optax._config import Blocking


def _is_none(leaf: Any) -> bool:
    return leaf is None


def tree_map(function, updates: optax.Updates, *trees: Any) -> optax.Updates:
    """Maps over a tree of updates in which absent gradients are `None` and stay so."""
    return jax.tree.map(
        lambda update, *leaves: None if update is None else function(update, *leaves),
        updates,
        *trees,
        is_leaf=_is_none,
    )


def next_count(count: jax.Array) -> jax.Array:
    """The count of one more step; it stays at the largest int32."""
    return count + (count < jnp.iinfo(count.dtype).max).astype(count.dtype)


def wide(leaf: jax.Array) -> jax.Array:
    """The leaf in float32, or as it is where its dtype is wider."""
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def require_params(params: Any, purpose: str) -> None:
    """Refuses an update without parameters."""
    if params is None:
        raise ValueError(f"`params` must be passed to `update` {purpose}, got None.")


def check_leaves(name: str, leaves: list) -> None:
    """Refuses leaves that are not real floating-point arrays."""
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if leaf is None:
            continue
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            kind = (
                type(leaf).__name__ if dtype is None else f"{dtype}{list(leaf.shape)}"
            )
            raise ValueError(
                f"`{name}` must hold real floating-point arrays, got {kind} "
                f"at {jax.tree_util.keystr(path)!r}; "
                "leave other leaves out with `optax.masked` or `optax.partition`."
            )


def plan_parameters(params: optax.Params, blocking: Blocking) -> Plan:
    """The plan of a tree of parameters, whose leaves are checked."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    check_leaves("params", leaves)
    return plan_of([leaf for _, leaf in leaves], blocking)


class Gradients(NamedTuple):
    """Gradients in block space."""

    plan: Plan
    blocks: Stacks  # {stack: [n, *block]}, float32 or wider, zero where absent
    present: dict  # {stack: [n]}, static bool
    leaves: list  # of the parameters' leaves, None where the gradient is absent
    places: list  # of those leaves among all leaves of the tree, None included
    treedef: Any  # in which None is a leaf

    def paste(self, stacks: Stacks) -> optax.Updates:
        """The tree of updates that holds these blocks, in the gradients' dtypes."""
        whole = [None] * self.treedef.num_leaves
        pasted = paste(self.plan, stacks, self.leaves)
        for place, leaf in zip(self.places, pasted, strict=True):
            whole[place] = leaf
        return self.treedef.unflatten(whole)


def read_gradients(
    updates: optax.Updates, params: optax.Params | None, blocking: Blocking
) -> Gradients:
    """Cuts a tree of gradients into blocks, as its parameters are cut.

    A leaf that is `None` where the parameters have an array is an absent gradient.

    Raises:
      ValueError: if paths or shapes differ from those of the parameters, or a
        leaf is not a real floating-point array.
    """
    mine, treedef = _flatten(updates)
    theirs, _ = _flatten(updates if params is None else params)
    check_leaves("updates", mine)
    if params is not None:
        _check_match(mine, theirs)
    places = [place for place, (_, leaf) in enumerate(theirs) if leaf is not None]
    plan = plan_of([theirs[place][1] for place in places], blocking)
    leaves = [mine[place][1] for place in places]
    present = present_slots(plan, leaves)
    return Gradients(plan, cut(plan, leaves), present, leaves, places, treedef)


def _flatten(tree: Any) -> tuple[list, Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)


def _check_match(mine: list, theirs: list) -> None:
    """Refuses gradients whose paths or shapes are not those of the parameters."""
    keystr = jax.tree_util.keystr
    paths = [{keystr(path): leaf for path, leaf in pairs} for pairs in (mine, theirs)]
    if list(paths[0]) != list(paths[1]):
        odd = sorted(paths[0].keys() ^ paths[1].keys()) or list(paths[0])
        raise ValueError(
            "`updates` must be a tree like `params`, got a difference at "
            f"{', '.join(map(repr, odd[:4]))}."
        )
    for path, leaf in paths[0].items():
        param = paths[1][path]
        if leaf is not None and (param is None or leaf.shape != param.shape):
            wanted = None if param is None else list(param.shape)
            raise ValueError(
                "`updates` must have the shapes of `params`, got "
                f"{list(leaf.shape)} for {wanted} at {path!r}."
            )
