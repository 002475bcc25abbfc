"""The leaves of gradients and parameters: which are there, and whether they fit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shampoo_optax._trees import is_none


class Gradients(NamedTuple):
    """The gradients of a tree of parameters, leaf by leaf."""

    leaves: list  # of the parameters' leaves, None where the gradient is absent
    params: list  # those leaves of the parameters, or of the gradients themselves
    paths: list  # of those leaves, as `jax.tree_util` has them
    places: list  # of those leaves among all leaves of the tree, None included
    treedef: Any  # in which None is a leaf

    def rebuild(self, leaves: list) -> optax.Updates:
        """The tree of updates that has these leaves."""
        whole = [None] * self.treedef.num_leaves
        for place, leaf in zip(self.places, leaves, strict=True):
            whole[place] = leaf
        return self.treedef.unflatten(whole)


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


def read_params(params: optax.Params) -> tuple[list, list]:
    """The leaves of a tree of parameters, checked, and their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    check_leaves("params", leaves)
    return [leaf for _, leaf in leaves], [path for path, _ in leaves]


def read_gradients(updates: optax.Updates, params: optax.Params | None) -> Gradients:
    """The leaves of a tree of gradients, checked against the parameters.

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
    return Gradients(
        leaves=[mine[place][1] for place in places],
        params=[theirs[place][1] for place in places],
        paths=[theirs[place][0] for place in places],
        places=places,
        treedef=treedef,
    )


def _flatten(tree: Any) -> tuple[list, Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)


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
