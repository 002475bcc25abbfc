"""Where arrays lie, and how to bring them to where others do."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.experimental.shard_alike import shard_alike
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, PartitionSpec


def reshard_whole(leaves: list) -> tuple[list, Callable[[list], list]]:
    """Leaves that may be cut anywhere, also on Explicit axes, and the way back."""
    kinds = [jax.typeof(leaf).sharding for leaf in leaves]
    whole = [
        jax.sharding.reshard(leaf, NamedSharding(kind.mesh, PartitionSpec()))
        if any(kind.spec)
        else leaf
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    return whole, lambda new: reshard_back(new, kinds)


def reshard_back(leaves: list, kinds: list) -> list:
    """Leaves as the shardings in their types were."""
    return [
        leaf if kind is None or kind.mesh.empty else resharded(leaf, kind)
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]


def resharded(leaf: jax.Array, kind: NamedSharding) -> jax.Array:
    """A leaf of this type; where it is, what types do not say of it stays."""
    held = jax.typeof(leaf).sharding
    same = held.mesh.axis_names == kind.mesh.axis_names
    if same and per_dim(held.spec, leaf.ndim) == per_dim(kind.spec, leaf.ndim):
        return leaf
    return jax.sharding.reshard(leaf, kind)


def per_dim(spec: PartitionSpec, dims: int) -> tuple[tuple[str, ...], ...]:
    """The axes that a spec names for each dimension."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return (*entries, *((),) * (dims - len(spec)))


_pairs = itertools.count()


def reshard_like(leaf: jax.Array, param: jax.Array) -> jax.Array:
    """An array where another lies, which in a trace the compiler knows."""
    if isinstance(leaf, jax.core.Tracer) or isinstance(param, jax.core.Tracer):
        # Without it all pairs of a shape would lie alike: jax lowers equals once.
        # Paths would not do, which are the same in two models that a step trains.
        with set_xla_metadata(pair=str(next(_pairs))):
            return shard_alike(leaf, param)[0]
    there = _on_mesh(param) and param.sharding.device_set == leaf.sharding.device_set
    return jax.device_put(leaf, param.sharding) if there else leaf


def place_scalars(state: Any, params: optax.Params) -> Any:
    """Puts the scalars of a first state on the mesh of the parameters, if there is one.

    Where they are after an update: `jax.jit` compiles anew for what lies elsewhere.
    """
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(params) if _on_mesh(leaf)]
    if not meshes:
        return state
    whole = NamedSharding(meshes[0], PartitionSpec())

    def place(leaf: jax.Array) -> jax.Array:
        traced = isinstance(leaf, jax.core.Tracer)
        there = traced or leaf.ndim or leaf.committed
        return leaf if there else jax.device_put(leaf, whole)

    return jax.tree.map(place, state)


def _on_mesh(leaf: Any) -> bool:
    """Whether a leaf is an array, and no tracer, that is on a mesh."""
    here = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return here and isinstance(leaf.sharding, NamedSharding)
