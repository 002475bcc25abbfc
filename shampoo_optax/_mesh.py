"""Running on a mesh: what devices are given of arrays, and where arrays are put."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shampoo_optax._placement import Placement
from shampoo_optax._reshard import per_dim, reshard_back, reshard_like, resharded
from shampoo_optax._specs import Spec, are_declared


def _shard_map(run: Callable, placement: Placement, in_specs: Any, out_specs: Any):
    # What comes out of an all_gather is not known to be equal on all devices.
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def on_shares(share: Callable[[], Any], placement: Placement) -> Callable[[], Any]:
    """Makes the whole of a state of which `share` makes one device's part.

    Arrays are divided by slots; scalars are on all devices.
    """
    divided, whole = PartitionSpec(placement.axes), PartitionSpec()
    specs = jax.tree.map(lambda x: divided if x.ndim else whole, jax.eval_shape(share))
    return jax.jit(_shard_map(share, placement, in_specs=(), out_specs=specs))


def on_mesh(run: Callable, placement: Placement, specs: Sequence[Spec]) -> Callable:
    """Runs a step on arrays, of which each device takes and gives its shares.

    Jitted, since without that every operation would be sent to the devices alone.

    Args:
      run: maps leaves, count, fields and the rest to new leaves, count and fields.
      placement: that of the fields.
      specs: those of the leaves.
    """
    divided, whole = PartitionSpec(placement.axes), PartitionSpec()
    kinds = [PartitionSpec(*spec) for spec in specs]
    around = AxisType.Explicit in placement.mesh.axis_types

    def call(leaves: list, *rest: Any) -> tuple[list, jax.Array, dict[str, Any]]:
        present = [
            None if leaf is None else kind
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        mapped = _shard_map(
            run,
            placement,
            in_specs=(present, whole, divided, whole, whole),
            out_specs=(present, whole, divided),
        )
        if around:
            return _reshard_around(mapped, placement, present, leaves, *rest)
        return mapped(leaves, *rest)

    return jax.jit(call)


def _reshard_around(
    mapped: Callable,
    placement: Placement,
    specs: list,
    leaves: list,
    count: jax.Array,
    fields: dict[str, Any],
    *rest: Any,
) -> tuple[list, jax.Array, dict[str, Any]]:
    """Brings arrays to the types that the mapped step takes, and updates back."""
    mesh = placement.mesh
    whole = NamedSharding(mesh, PartitionSpec())
    divided = _typed(mesh, PartitionSpec(placement.axes))
    kinds = [None if leaf is None else jax.typeof(leaf).sharding for leaf in leaves]
    leaves = [
        None if leaf is None else resharded(leaf, _typed(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    count, rest = jax.sharding.reshard((count, rest), whole)
    fields = jax.tree.map(lambda field: resharded(field, divided), fields)
    leaves, count, fields = mapped(leaves, count, fields, *rest)
    return reshard_back(leaves, kinds), count, fields


def _typed(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """What types say of a spec: its Explicit axes."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kept = [
        tuple(axis for axis in names if types[axis] == AxisType.Explicit) or None
        for names in per_dim(spec, len(spec))
    ]
    return NamedSharding(mesh, PartitionSpec(*kept))


def reshard_like_params(
    leaves: list, params: list, paths: list, placement: Placement | None
) -> list:
    """Brings updates to where the parameters lie, of which nothing was declared.

    On Auto axes, where the step has them whole; of Explicit ones types say it. In local
    mode parameters without a rule are whole, and so are their updates.
    """
    mesh = None if placement is None else placement.mesh
    if mesh is None or mesh.size == 1 or AxisType.Auto not in mesh.axis_types:
        return leaves
    if placement.mode == "local" and placement.specs is not None:
        return leaves
    declared = are_declared(placement.specs, paths, params)
    return [
        leaf if leaf is None or said else reshard_like(leaf, param)
        for leaf, param, said in zip(leaves, params, declared, strict=True)
    ]


def place_rest(
    tx: optax.GradientTransformationExtraArgs, placement: Placement | None
) -> optax.GradientTransformationExtraArgs:
    """Puts what the first state has elsewhere, such as counts, on all devices.

    Where it is after an update: `jax.jit` compiles anew for what lies elsewhere.
    """
    if placement is None or placement.mesh is None:
        return tx
    whole = NamedSharding(placement.mesh, PartitionSpec())

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if not isinstance(leaf, jax.core.Tracer):
            return leaf if leaf.ndim and leaf.committed else jax.device_put(leaf, whole)
        if leaf.ndim:
            return leaf
        if AxisType.Explicit in placement.mesh.axis_types:
            return jax.sharding.reshard(leaf, whole)
        return jax.lax.with_sharding_constraint(leaf, whole)

    def init_fn(params: optax.Params) -> optax.OptState:
        return jax.tree.map(place, tx.init(params))

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)
