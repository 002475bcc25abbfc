"""Plans for a tree of parameters: whole, or as the shards that devices have."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shampoo_optax._blocking import views_of
from shampoo_optax._config import Options
from shampoo_optax._cutting import on_each, plan_of
from shampoo_optax._division import UNDIVIDED, Division, polynomial
from shampoo_optax._placement import Placement
from shampoo_optax._rules import name_of
from shampoo_optax._specs import Spec, check_lies, shards_of, specs_for
from shampoo_optax._stacks import Plan, View

Leaves = Sequence[Any]  # arrays or `ShapeDtypeStruct`s of whole parameters


def is_cut_locally(placement: Placement | None, owners: int) -> bool:
    """Whether every one of so many devices cuts its own shards."""
    if placement is None or placement.mode != "local":
        return False
    return owners == math.prod(placement.sizes.values())


def check_owners(
    placement: Placement | None, specs: tuple[Spec, ...], owners: int
) -> None:
    """Refuses to plan shards of a mesh for another number of devices."""
    if not any(map(any, specs)) and getattr(placement, "mode", None) != "local":
        return
    devices = math.prod(placement.sizes.values())
    if owners not in (1, devices):
        raise ValueError(
            f"`devices` must be {devices}, the mesh's, where parameters are divided "
            f"over it, got {owners}."
        )


def specs_at(
    paths: Sequence[tuple], leaves: Leaves, placement: Placement | None
) -> tuple[Spec, ...]:
    """How parameters are divided; nothing where there is no mesh."""
    if placement is None or placement.mesh is None:
        return ()
    mesh, local = placement.mesh, placement.mode == "local"
    specs = specs_for(placement.specs, paths, leaves, mesh, placement.axes, local)
    if placement.specs is not None:
        check_lies(specs, [name_of(path) for path in paths], leaves, mesh, local)
    return specs


def views_at(
    paths: Sequence[tuple],
    leaves: Leaves,
    specs: tuple[Spec, ...],
    options: Options,
    placement: Placement | None,
    apart: bool = False,
) -> tuple[View, ...]:
    """The views of parameters, or with `specs` those of their shards."""
    shards = [shards_of(spec, placement.mesh) for spec in specs] or None
    return views_of(options.blocking.batch, paths, leaves, shards, apart)


def plan_blocks(
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    views: tuple[View, ...],
    specs: tuple[Spec, ...],
    owners: int,
    options: Options,
    placement: Placement | None,
    memory: Callable[[tuple[int, ...]], float],
) -> Plan:
    """The plan of a transform.

    Args:
      leaves: the whole parameters.
      views: of them, or of the shards of a device in local mode.
      specs: how they are divided.
      owners: the number of devices that have blocks.
      options: the transform's arguments.
      placement: where blocks live.
      memory: the numbers that the transform keeps for a block.
    """
    blocking, limits = options.blocking, options.axes.limits
    if is_cut_locally(placement, owners):
        shards = [
            jax.ShapeDtypeStruct(_shard_shape(leaf, spec, placement), leaf.dtype)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        return on_each(plan_of(shards, blocking, UNDIVIDED, limits, views), owners)
    cost = "memory" if placement is None else placement.cost
    division = Division(
        owners=owners,
        cost=memory if cost == "memory" else polynomial(cost),
        fixed=options.fixed_orders,
    )
    return plan_of(leaves, blocking, division, limits, views)


def _shard_shape(leaf: Any, spec: Spec, placement: Placement) -> tuple[int, ...]:
    shards = shards_of(spec, placement.mesh)
    return tuple(map(operator.floordiv, leaf.shape, shards))


def plan_undivided(
    paths: Sequence[tuple],
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    specs: tuple[Spec, ...],
    options: Options,
    placement: Placement | None,
    apart: bool,
) -> Plan:
    """The plan for one device, of whole parameters or, `apart`, of all their shards."""
    views = views_at(paths, leaves, specs if apart else (), options, placement, apart)
    return plan_of(leaves, options.blocking, UNDIVIDED, options.axes.limits, views)
