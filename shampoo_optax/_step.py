"""A step in block space: the parts that all transforms share.

Everything here is written for plain stacks, all of them or one owner's share.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shampoo_optax._config import Options
from shampoo_optax._factors import (
    Whiten,
    asked_dtype,
    factored_axes,
    stored_axes,
    update_factors,
    usable_slots,
    zero_factors,
)
from shampoo_optax._grafting import (
    filter_gradient,
    graft_direction,
    keeps_filtered,
    keeps_moments,
    take_norms,
    update_moments,
    zero_blocks,
)
from shampoo_optax._metrics import Metrics, refresh_metrics, step_metrics
from shampoo_optax._periods import (
    first_refresh,
    period_at,
    statistics_due,
    takes_all_statistics,
)
from shampoo_optax._refresh import Derived, Report
from shampoo_optax._stacks import (
    AxisStacks,
    Inputs,
    Stack,
    Stacks,
    blocks_of,
    bundles,
    cast_like,
    join,
    per_slot,
    split,
)
from shampoo_optax._storage import is_diagonal, side_of
from shampoo_optax._trees import when_due
from shampoo_optax._turns import Turns, deal_phases, due_now


class Step(NamedTuple):
    """What is known of a step before roots or bases are looked at."""

    inputs: Inputs
    blocks: Stacks  # the gradient, zero in unusable slots
    usable: dict[str, jax.Array]  # {stack: [n]}, bool
    groups: dict[str, list[str]]  # {bundle: stacks}
    entries: Stacks  # the gradient, {bundle: [entries]}, zero in unusable slots
    kept: dict[str, jax.Array]  # {bundle: [entries] or [n]}, bool, in usable slots
    factors: AxisStacks  # with this step's statistics; empty where none are kept
    due: jax.Array  # [], bool: whether this step refreshes
    started: jax.Array  # [], bool
    turns: Turns | None  # whose turn it is to be refreshed; None: that of all

    @property
    def due_slots(self) -> dict[str, jax.Array]:
        """The usable slots that are refreshed, `{stack: bool [n]}`."""
        if self.turns is None:
            return {name: self.due & slots for name, slots in self.usable.items()}
        now = due_now(self.turns)
        return {name: slots & self.usable[name] for name, slots in now.items()}


class Turned(NamedTuple):
    """The gradient in coordinates in which norms are what they are in its own."""

    blocks: Stacks  # [n, *block]
    back: Callable[[Stacks], Stacks]  # maps blocks to the gradient's own coordinates


def plain_fields(stacks: dict[str, Stack], options: Options) -> dict[str, Any]:
    """The initial values of the fields that all states have, `count` left out."""
    dtype = asked_dtype(options.storage, "momentum")
    return dict(
        graft_moments=zero_blocks(stacks) if keeps_moments(options) else {},
        filtered=zero_blocks(stacks, dtype) if keeps_filtered(options) else {},
        skipped=_counters(stacks, stacks),
    )


def factored_fields(stacks: dict[str, Stack], options: Options) -> dict[str, Any]:
    """Those, and the fields that the states with factors share."""
    axes = factored_axes(blocks_of(stacks), options)
    return dict(
        factors=zero_factors(stacks, options),
        failures=_counters(stacks, axes),
        metrics=_first_metrics(stacks, options),
        residuals={n: jnp.zeros(stacks[n].size, jnp.float32) for n in axes},
        iterations=_counters(stacks, axes),
        **plain_fields(stacks, options),
    )


def _first_metrics(stacks: dict[str, Stack], options: Options) -> Metrics:
    """The metrics before the first step, all 0."""
    if not options.metrics:
        return {}

    def zero(stack: Stack, side: int | None = None) -> jax.Array:
        return jnp.zeros(stack.size, jnp.float32)

    names = ["rms", "cosines"] + ["grafting"] * (options.graft is not None)
    axes = factored_axes(blocks_of(stacks), options)
    return dict(
        conditions=stored_axes(stacks, options, zero, zero),
        refreshed={name: jnp.zeros(stacks[name].size, jnp.int32) for name in axes},
        **{metric: {n: zero(stack) for n, stack in stacks.items()} for metric in names},
    )


def _counters(stacks: dict[str, Stack], names: Iterable[str]) -> dict[str, jax.Array]:
    return {name: jnp.zeros(stacks[name].size, jnp.int32) for name in names}


def begin(inputs: Inputs, options: Options, whiten: Whiten | None = None) -> Step:
    """Finds the usable slots, and updates the factors, if there are any.

    Args:
      inputs: what the step is given.
      options: the transform's arguments.
      whiten: as in :func:`update_factors`. Default `None`.
    """
    count, factors = inputs.count, inputs.fields.get("factors", {})
    groups = bundles(inputs.blocks)
    usable = usable_slots(inputs.present, inputs.blocks, factors, groups)
    kept = _entries_of(usable, inputs.blocks, groups)
    entries = {
        key: jnp.where(per_slot(kept[key], entry), entry, 0)
        for key, entry in join(inputs.blocks, groups).items()
    }
    blocks = split(entries, groups, inputs.blocks)
    factors = _with_statistics(factors, blocks, usable, options, whiten, count)
    every = period_at(options, count)
    start = first_refresh(options, every)
    due = (count == start) | ((count > start) & (count % every == 0))
    common = inputs, blocks, usable, groups, entries, kept, factors
    turns = _turns(factors, options, count, start) if options.stagger else None
    return Step(*common, due, count >= start, turns)


def _turns(
    factors: AxisStacks, options: Options, count: jax.Array, start: jax.Array
) -> Turns:
    """Whose turn this step is, if it is one of the period that ends with the start."""
    sizes = {name: len(next(iter(axes.values()))) for name, axes in factors.items()}
    costs = {
        name: sum(side_of(x) ** (1 if is_diagonal(x) else 3) for x in axes.values())
        for name, axes in factors.items()
    }
    period = options.turns
    phase = jnp.where(count > start - period, count % period, period)
    return Turns(deal_phases(sizes, costs, period), phase, period)


def _with_statistics(
    factors: AxisStacks,
    blocks: Stacks,
    usable: dict[str, jax.Array],
    options: Options,
    whiten: Whiten | None,
    count: jax.Array,
) -> AxisStacks:
    """The factors after this step, which may be one without statistics."""

    def accumulate(held: AxisStacks) -> tuple[AxisStacks]:
        return (update_factors(held, blocks, usable, options, whiten),)

    if takes_all_statistics(options):
        return accumulate(factors)[0]
    return when_due(statistics_due(options, count), accumulate, factors)[0]


def _entries_of(usable: dict, blocks: Stacks, groups: dict) -> dict[str, jax.Array]:
    """Which entries of a bundle, or slots of a stack that is alone, are usable."""
    lone = {names[0] for names in groups.values() if len(names) == 1}
    masks = {
        name: slots
        if name in lone
        else jnp.broadcast_to(per_slot(slots, blocks[name]), blocks[name].shape)
        for name, slots in usable.items()
    }
    return join(masks, groups)


def refresh_if_due(
    step: Step,
    recompute: Callable[[Derived, Report], tuple[Derived, Report]],
    names: tuple[str, ...],
) -> dict[str, Any]:
    """Calls `recompute` at a refresh, else keeps what there is.

    Where slots take turns it is called at every step, and knows whose it is.

    Args:
      step: the step begun.
      recompute: maps what is derived from factors, and the last report, to new ones.
      names: the fields that are derived.

    Returns:
      the new values of these fields, `failures`, `residuals`, `iterations` and, of
      `metrics`, those of refreshes.
    """
    fields = step.inputs.fields
    metrics = fields["metrics"]
    derived = {name: fields[name] for name in names}
    if metrics:
        derived["conditions"] = metrics["conditions"]
    unfailed = {name: jnp.zeros_like(step.usable[name]) for name in fields["failures"]}
    still = {name: jnp.zeros_like(step.usable[name]) for name in unfailed if metrics}
    report = Report(unfailed, fields["residuals"], fields["iterations"], still)
    derived, report = _recomputed(step, recompute, derived, report)
    return dict(
        {name: derived[name] for name in names},
        failures=count_slots(fields["failures"], report.failed, step.groups),
        residuals=report.residuals,
        iterations=report.iterations,
        metrics=refresh_metrics(metrics, derived, report.renewed, step.inputs.count),
    )


def _recomputed(step: Step, recompute: Callable, *held: Any) -> tuple:
    if step.turns is None:
        return when_due(step.due, recompute, *held)
    return recompute(*held)


def finish(
    step: Step,
    options: Options,
    direct: Callable[[Stacks], Stacks],
    turned: Turned | None = None,
) -> tuple[Stacks, dict[str, Any]]:
    """Filters the gradient, takes its direction, and grafts.

    Args:
      step: the step begun.
      options: the transform's arguments.
      direct: maps the filtered gradient to its direction.
      turned: the coordinates in which the gradient is filtered. Default `None`: its
        own.

    Returns:
      the directions, and the new values of the fields that all states have, with
      the `metrics` of a step where the state has any.
    """
    inputs, groups, kept = step.inputs, step.groups, step.kept
    held = inputs.fields["filtered"]
    moments, filtered = (
        join(blocks, groups) if blocks else {}
        for blocks in (inputs.fields["graft_moments"], cast_like(held, step.blocks))
    )
    moments = update_moments(moments, step.entries, kept, options)
    entries = step.entries if turned is None else join(turned.blocks, groups)
    used, filtered = filter_gradient(filtered, entries, kept, inputs.count, options)
    own = used
    if turned is not None and options.graft is not None:
        own = join(turned.back(split(used, groups, inputs.blocks)), groups)
    magnitude = graft_direction(moments, own, inputs.count, options)
    used, magnitude, moments, filtered = (
        split(joined, groups, inputs.blocks) if joined else {}
        for joined in (used, magnitude, moments, filtered)
    )
    alone = {
        name: block
        for name, block in magnitude.items()
        if options.is_left_to_grafting(block.shape[1:])
    }
    direction, moving, ratios = take_norms(
        direct(used) | alone, magnitude, step.usable, step.started, groups
    )
    still = {name: inputs.present[name] & ~slots for name, slots in moving.items()}
    skipped = count_slots(inputs.fields["skipped"], still, groups)
    filtered = cast_like(filtered, held)
    fields = dict(graft_moments=moments, filtered=filtered, skipped=skipped)
    if inputs.fields.get("metrics"):
        fields["metrics"] = step_metrics(
            direction, step.blocks, moving, ratios, inputs.sides
        )
    return direction, fields


def unite(*parts: dict[str, Any]) -> dict[str, Any]:
    """The fields of all parts, and in `metrics` what each of them has there."""
    fields = {name: field for part in parts for name, field in part.items()}
    metrics = [part["metrics"] for part in parts if "metrics" in part]
    return fields | {"metrics": dict(itertools.chain(*map(dict.items, metrics)))}


def count_slots(counters: dict, slots: dict, groups: dict) -> dict[str, jax.Array]:
    """Counts one more in the given slots."""
    groups = {
        key: [name for name in names if name in counters]
        for key, names in groups.items()
    }
    groups = {key: names for key, names in groups.items() if names}
    counts, slots = join(counters, groups), join(slots, groups)
    counts = {
        key: count + slots[key].astype(count.dtype) for key, count in counts.items()
    }
    return split(counts, groups, counters)
