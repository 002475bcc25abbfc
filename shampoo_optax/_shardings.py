"""Where states lie: their shapes and shardings, before there is any state."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shampoo_optax._layouts import layouts_of
from shampoo_optax._transform import Layout


def abstract_state(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | None = None
) -> optax.OptState:
    """The shapes, dtypes and shardings of a state, without any memory for it.

    What Orbax and other libraries want as the target of a restore.

    Args:
      tx: a transform with ours anywhere inside.
      params: the parameters, or `jax.ShapeDtypeStruct`s with their shardings.
      mesh: as in :func:`state_shardings`. Default `None`.

    Returns:
      A tree like the state, of `jax.ShapeDtypeStruct`s; they have shardings where
      a mesh is known.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> state = so.abstract_state(so.scale_by_shampoo(), {"w": jnp.ones((3, 2))})
      >>> state.factors["3x2"]["0"].shape
      (1, 3, 3)
    """
    tree = find_ours(tx, params, mesh)
    state, mesh = abstract(tree), mesh_of(tree, mesh)
    if mesh is None:
        return state
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        shardings_of(tree, params, mesh),
    )


def state_shardings(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | None = None
) -> optax.OptState:
    """Where every array of a state lies: what `jax.jit` takes as shardings.

    Statistics, roots and moments are divided by slots, as the transform's
    :class:`Placement` says. Buffers of other transforms that mirror a parameter lie
    as it does, everything else is on all devices.

    Args:
      tx: a transform with ours anywhere inside.
      params: the parameters, or `jax.ShapeDtypeStruct`s with their shardings.
      mesh: the mesh of your own `jax.shard_map`, for a :class:`Placement` without
        one. Default `None`: that of the transform's placement.

    Returns:
      A tree like the state, of `jax.sharding.NamedSharding`s. Their `spec`s are the
      `in_specs` and `out_specs` of a `jax.shard_map`.

    Raises:
      ValueError: if there is no mesh.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = so.shampoo(1e-3, placement=so.Placement(mesh))
      >>> params = {"w": jnp.ones((3, 2))}
      >>> shardings = so.state_shardings(tx, params)
      >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> shardings[0].factors["3x2"]["0"].spec == jax.sharding.PartitionSpec("data")
      True
    """
    tree = find_ours(tx, params, mesh)
    mesh = mesh_of(tree, mesh)
    if mesh is None:
        raise ValueError(
            "`mesh` must be given where no placement in `tx` has one, got None."
        )
    return shardings_of(tree, params, mesh)


@dataclass(frozen=True)
class Ours:
    """What is in the place of each of our states."""

    layout: Layout
    state: Any  # the whole of it, as `ShapeDtypeStruct`s


def find_ours(tx: Any, params: optax.Params, mesh: Mesh | None) -> Any:
    """A tree like the state, with an :class:`Ours` for each of our states."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}.")
    return layouts_of(tx, params, mesh or 0, lambda held: Ours(held, held.abstract()))


def is_ours(node: Any) -> bool:
    """Whether a node is in the place of one of our states."""
    return isinstance(node, Ours)


def abstract(tree: Any) -> optax.OptState:
    """The state that a tree stands for, as `ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda node: node.state if is_ours(node) else node, tree, is_leaf=is_ours
    )


def mesh_of(tree: Any, mesh: Mesh | None) -> Mesh | None:
    """The mesh of the placements in a tree, or the one that is given for them."""
    nodes = jax.tree.leaves(tree, is_leaf=is_ours)
    placements = [node.layout.placement for node in nodes if is_ours(node)]
    meshes = [p.mesh for p in placements if p is not None and p.mesh is not None]
    if mesh is not None and any(own != mesh for own in meshes):
        raise ValueError(
            f"`mesh` must be that of the placement, {meshes[0]!r}, got {mesh!r}."
        )
    return mesh if mesh is not None else next(iter(meshes), None)


def shardings_of(tree: Any, params: optax.Params, mesh: Mesh) -> Any:
    """The shardings of the state that a tree stands for."""
    whole = NamedSharding(mesh, PartitionSpec())
    mirrored = [
        (path, leaf.shape, leaf.sharding)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]

    def place(path: tuple, node: Any) -> Any:
        if is_ours(node):
            return _our_shardings(node, mesh)
        like = (
            sharding
            for end, shape, sharding in mirrored
            if shape == node.shape and path[len(path) - len(end) :] == end
        )
        return next(like, whole)

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_ours)


def _our_shardings(node: Ours, mesh: Mesh) -> Any:
    placement, divided = node.layout.placement, PartitionSpec()
    if placement is not None:
        mesh = placement.mesh or mesh
        divided = PartitionSpec(placement.axes)
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, divided if leaf.ndim else PartitionSpec()),
        node.state,
    )
