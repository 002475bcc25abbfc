"""What the exchange of divided parameters sends: static, from routes."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from shampoo_optax._exchange import last_wire, wires
from shampoo_optax._routes import Route, Sizes, forms_of
from shampoo_optax._stacks import Plan


def traffic(
    plan: Plan,
    routes: Sequence[Route | None],
    sizes: Sizes,
    dtype: str | None,
    leaves: list,
) -> tuple[dict[str, int], int]:
    """Bytes that a device gets in a step, itself as a sender included.

    Returns:
      those of all exchanges of a kind, and those of directions to strips alone.
    """
    forms = forms_of(plan, routes, math.prod(sizes.values()))
    directions = _between_owners(plan, forms, leaves, dtype)
    sent = {
        "all-to-all": _between_owners(plan, forms, leaves, None) + directions,
        "all-gather": 0,
    }
    for leaf, route in zip(leaves, routes, strict=True):
        back = jnp.dtype(last_wire(dtype, leaf.dtype)).itemsize
        for kind, number in _of_parameter(leaf, route, sizes, back).items():
            sent[kind] += number
    if dtype == "float16":  # with powers of two
        sent["all-gather"] += 4 * sum(stack.size for stack in plan.stacks.values())
    return {kind: number for kind, number in sent.items() if number}, directions


def _between_owners(plan: Plan, forms: dict, leaves: list, chosen: str | None) -> int:
    return sum(
        wire.itemsize * plan.stacks[name].size * forms[name].width
        for wire, names in wires(plan, leaves, chosen).items()
        for name in names
    )


def _of_parameter(
    leaf: Any, route: Route | None, sizes: Sizes, back: int
) -> dict[str, int]:
    """Bytes between shards and strips, `back` for a number on its way back."""
    if route is None:
        return {}
    devices, forth = math.prod(sizes.values()), leaf.dtype.itemsize
    shards = math.prod(sizes[name] for name in route.names)
    gathered = math.prod(sizes[n] for names in route.gathered for n in names)
    strips = math.prod(route.strips)
    copies = strips * (devices // shards) * back if shards < devices else 0
    whole = leaf.size // shards * forth if gathered > 1 else 0
    moved = strips * (forth + back) if shards > 1 else 0
    return {"all-to-all": moved, "all-gather": copies + whole}
