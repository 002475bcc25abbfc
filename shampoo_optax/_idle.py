"""A warning where nothing is preconditioned."""

import sys
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import jax
import optax

from shampoo_optax._config import Options
from shampoo_optax._stacks import Plan

LIBRARIES = ("shampoo_optax", "optax", "jax", "flax")


def warn_if_idle(params: Any, plan: Plan, expected: Any, options: Options) -> None:
    """Warns where nothing is preconditioned, unless `exponents` of 0 ask for that."""
    if not plan.stacks:
        asked = _leaves_out(options, options.exponents or ())
        idle = not plan.shapes and _is_empty_group(params) and not asked
        message = (
            "this group of a partition or mask is empty; change the labels or the mask "
            "(`describe_groups` prints which parameter went where)."
        )
    else:
        asked = _leaves_out(
            options, {len(stack.block) for stack in plan.stacks.values()}
        )
        factors = getattr(expected, "factors", None)
        idle = factors is not None and not jax.tree.leaves(factors) and not asked
        message = (
            f"no axis of the shapes {sorted(set(plan.shapes))} has a factor; change "
            "`axes`, or leave such parameters to another transform by "
            "`optax.partition` (`label_by` makes the labels)."
        )
    if idle:
        warnings.warn(
            f"no parameter is preconditioned: {message}", stacklevel=_users_level()
        )


def _users_level() -> int:
    """How far up the stack the first line is that is in none of the libraries."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _module(frame) in LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _leaves_out(options: Options, orders: Iterable[int]) -> bool:
    """Whether an exponent of 0 is given for an axis of a block of such an order."""
    overrides = (options.exponents or {}).get
    axes = (
        {"all": e} if not isinstance(e, Mapping) else e for e in map(overrides, orders)
    )
    return any(0 in exponents.values() for exponents in axes)


def _is_empty_group(params: Any) -> bool:
    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return any(map(masked, jax.tree.leaves(params, is_leaf=masked)))
