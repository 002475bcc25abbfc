"""The layouts of our states, wherever they are, and where parameters are in them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from shampoo_optax._placement import only_layouts
from shampoo_optax._transform import Layout


class Slots(NamedTuple):
    """Neighbouring slots, counted over all devices: `state.skipped[stack][slots]`."""

    stack: str
    start: int
    stop: int


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
    found = []

    def init(arrays: dict[str, jax.Array]) -> list:
        given = [arrays.get(str(n), leaf) for n, leaf in enumerate(leaves)]
        state, kind = jax.tree.flatten(tx.init(treedef.unflatten(given)))
        ours = {n: read(x) for n, x in enumerate(state) if isinstance(x, Layout)}
        found.append((ours, kind))
        return [None if isinstance(leaf, Layout) else leaf for leaf in state]

    with only_layouts(owners):
        shapes = jax.eval_shape(init, arrays)
    ours, kind = found[-1]
    return kind.unflatten([ours.get(n, leaf) for n, leaf in enumerate(shapes)])


def slots_of(layout: Layout) -> dict[str, tuple[Slots, ...]]:
    """Where the blocks of each parameter are, in their order."""
    slots = {path: () for path in layout.paths}
    for region in layout.plan.regions:
        slots[layout.paths[region.leaf]] += tuple(
            Slots(piece.stack, piece.slot, piece.slot + piece.size)
            for piece in region.pieces
        )
    return slots
