"""The layouts of our states, wherever they are in the state of a transform."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.tree_util import keystr

from shampoo_optax._placement import only_layouts
from shampoo_optax._rules import name_of
from shampoo_optax._specs import check_lies
from shampoo_optax._transform import Layout


def layouts_of(
    tx: optax.GradientTransformation,
    params: optax.Params,
    owners: int | Mesh = 0,
    read: Callable[[Layout], Any] = lambda layout: layout,
) -> Any:
    """The state of a transform with a :class:`Layout` in the place of each of ours.

    Nothing is computed and no device is needed.

    Args:
      tx: an optax transform that holds ours at any depth.
      params: a tree of arrays or `ShapeDtypeStruct`s.
      owners: number of owners to plan for; 0 stands for the placement's own, a mesh
        for that of a placement without one.
      read: what is put in the place of each layout. It is called while `tx.init` is
        traced, as is needed to trace the layout's method: its numbers are tracers
        where `optax.inject_hyperparams` makes the transform.

    Returns:
      a tree like the state, with `ShapeDtypeStruct`s for all other arrays.

    Raises:
      ValueError: if `tx` is no transform.
    """
    if not callable(getattr(tx, "init", None)):
        raise ValueError(f"`tx` must be an optax transform, got {tx!r}.")
    leaves, treedef = jax.tree.flatten(params)
    arrays = {str(n): x for n, x in enumerate(leaves) if hasattr(x, "dtype")}
    paths = jax.tree_util.tree_leaves_with_path(params)
    lying = {keystr(path): (name_of(path), leaf) for path, leaf in paths}
    found = []

    def init(arrays: dict[str, jax.Array]) -> list:
        given = [arrays.get(str(n), leaf) for n, leaf in enumerate(leaves)]
        state, kind = jax.tree.flatten(tx.init(treedef.unflatten(given)))
        _check_lies(state, lying)
        ours = {n: read(x) for n, x in enumerate(state) if isinstance(x, Layout)}
        found.append((ours, kind))
        return [None if isinstance(leaf, Layout) else leaf for leaf in state]

    with only_layouts(owners):
        shapes = jax.eval_shape(init, arrays)
    ours, kind = found[-1]
    return kind.unflatten([ours.get(n, leaf) for n, leaf in enumerate(shapes)])


def _check_lies(state: list, lying: dict[str, tuple[str, Any]]) -> None:
    """Refuses specs that the parameters, which `init` sees traced, do not lie by."""
    for layout in state:
        if isinstance(layout, Layout):
            _check_layout(layout, lying)


def _check_layout(layout: Layout, lying: dict[str, tuple[str, Any]]) -> None:
    placement = layout.placement
    if placement is None or placement.specs is None:
        return
    pairs = zip(layout.paths, layout.leaves, layout.specs, strict=True)
    known = [
        (spec, *lying[path])
        for path, leaf, spec in pairs
        if path in lying and getattr(lying[path][1], "shape", None) == leaf.shape
    ]
    specs, names, leaves = zip(*known, strict=True) if known else ((), (), ())
    check_lies(specs, names, leaves, placement.mesh, placement.mode == "local")
