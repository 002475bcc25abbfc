"""The parts of a step that all Kronecker-factored transforms share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shampoo_optax._blocking import cut, paste, plan_of, present_slots
from shampoo_optax._config import Blocking, Options
from shampoo_optax._factors import (
    factored_axes,
    full_axes,
    update_factors,
    usable_slots,
    zeros,
)
from shampoo_optax._grafting import (
    filter_gradient,
    graft,
    keeps_filtered,
    keeps_moments,
    update_moments,
    zero_blocks,
)
from shampoo_optax._stacks import AxisStacks, Plan, Stacks, per_slot
from shampoo_optax._trees import is_none, next_count


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


def shared_state(plan: Plan, options: Options) -> dict[str, Any]:
    """The initial values of the fields that all states share."""
    axes = factored_axes(plan, options)

    def counters(names):
        return {name: jnp.zeros(plan.stacks[name].size, jnp.int32) for name in names}

    return dict(
        count=jnp.zeros((), jnp.int32),
        factors=full_axes(plan, axes, zeros),
        graft_moments=zero_blocks(plan) if keeps_moments(options) else {},
        filtered=zero_blocks(plan) if keeps_filtered(options) else {},
        failures=counters(axes),
        skipped=counters(plan.stacks),
    )


def stand_in(state_type: type, plan: Plan) -> Any:
    """The state of a tree without blocks: an array in the place of every dict.

    `optax.tree.map_params` calls `init` on such a tree, and takes what is one
    array there for a part that does not mirror the parameters.
    """
    if plan.stacks:
        return None
    return state_type(*(jnp.zeros((), jnp.int32) for _ in state_type._fields))


class Step(NamedTuple):
    """What is known of a step before roots or bases are looked at."""

    gradients: Gradients
    count: jax.Array  # [], int32: this step's number t, from 1
    blocks: Stacks  # the gradient, zero in unusable slots
    usable: dict[str, jax.Array]  # {stack: [n]}, bool
    factors: AxisStacks  # with this step's statistics
    due: jax.Array  # [], bool: whether this step refreshes
    started: jax.Array  # [], bool


def begin(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None,
    options: Options,
    like: type,
) -> Step | None:
    """Reads the gradients, finds the usable slots, and updates the factors.

    The state must be of the type `like`. Returns `None` for a tree without blocks.
    """
    gradients = read_gradients(updates, params, options.blocking)
    _check_state(gradients.plan, state, like, options)
    if not gradients.plan.stacks:
        return None
    count = next_count(state.count)
    usable = usable_slots(
        gradients.plan, gradients.present, gradients.blocks, state.factors
    )
    blocks = {
        name: jnp.where(per_slot(usable[name], block), block, 0)
        for name, block in gradients.blocks.items()
    }
    factors = update_factors(state.factors, blocks, usable, options)
    every = jnp.asarray(options.refresh_every, jnp.int32)
    start = every if options.start is None else jnp.asarray(options.start, jnp.int32)
    due = (count == start) | ((count > start) & (count % every == 0))
    return Step(gradients, count, blocks, usable, factors, due, count >= start)


def _check_state(plan: Plan, state: Any, like: type, options: Options) -> None:
    """Refuses a state of another kind, or one that is cut otherwise."""
    if not isinstance(state, like):
        raise ValueError(
            f"`state` must be a {like.__name__}, got a {type(state).__name__}; restore "
            "checkpoints with the result of `init` as the target."
        )
    blocks = {name: stack.size for name, stack in plan.stacks.items()}
    kept = {
        "skipped": blocks,
        "filtered": blocks if keeps_filtered(options) else {},
        "graft_moments": blocks if keeps_moments(options) else {},
    }
    for field, wanted in kept.items():
        held = getattr(state, field) if plan.stacks else {}
        sizes = {k: len(v) for k, v in held.items()} if isinstance(held, dict) else {}
        if plan.stacks and sizes != wanted:
            raise ValueError(
                "`state` must come from the `init` of this transform and parameters "
                "like `updates` (pass `params` where their dtypes differ), got "
                f"`{field}` with {sizes} for {wanted} blocks."
            )


def refresh_if_due(step: Step, refresh: Callable, *derived: Any) -> Any:
    """Calls `refresh(*derived)` at a refresh, else returns `derived`."""
    if not isinstance(step.due, jax.core.Tracer):  # no compilation without jit
        return refresh(*derived) if step.due else derived
    return jax.lax.cond(step.due, refresh, lambda *kept: kept, *derived)


def finish(
    step: Step, state: Any, options: Options, direct: Callable[[Stacks], Stacks]
) -> tuple[optax.Updates, dict[str, Any]]:
    """Filters the gradient, takes its direction, grafts, and pastes.

    Args:
      step: the step begun.
      state: the state before the step.
      options: the transform's arguments.
      direct: maps the filtered gradient to its direction, in block space.

    Returns:
      the tree of directions, and the new values of the fields that all states
      share.
    """
    usable = step.usable
    moments = update_moments(state.graft_moments, step.blocks, usable, options)
    used, filtered = filter_gradient(
        state.filtered, step.blocks, usable, step.count, options
    )
    direction = graft(direct(used), moments, used, step.count, step.started, options)
    moving = {
        name: usable[name] & jnp.all(jnp.isfinite(block), axis=range(1, block.ndim))
        for name, block in direction.items()
    }
    direction = {
        name: jnp.where(per_slot(moving[name], block), block, 0)
        for name, block in direction.items()
    }
    present = step.gradients.present
    skipped = {
        name: counter + (present[name] & ~moving[name]).astype(counter.dtype)
        for name, counter in state.skipped.items()
    }
    fields = dict(
        count=step.count,
        factors=step.factors,
        graft_moments=moments,
        filtered=filtered,
        skipped=skipped,
    )
    return step.gradients.paste(direction), fields
