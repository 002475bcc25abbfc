"""Recomputing what is derived from factors: one traced call a side, guarded."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._stacks import AxisStacks, per_slot, traces
from shampoo_optax._storage import is_diagonal, load, side_of, store
from shampoo_optax._trees import wide_dtype
from shampoo_optax._turns import Turns, pick, put, take_turns

# What is kept of a refresh, by field of the state: matrices or eigenvalues.
Derived = dict[str, AxisStacks]


class Member(NamedTuple):
    """The factors of one axis of one stack, among those of a call."""

    stack: str
    axis: str
    slots: slice  # in the call


class Batch(NamedTuple):
    """The factors that are worked on in one call, N of one side d."""

    factors: jax.Array  # [N, d, d], or [N, d] of diagonal axes
    derived: dict[str, jax.Array]  # {field: [N, ...]}, what they had before
    padding: jax.Array | None  # bool [N, d]: which rows and columns; None: none
    members: tuple[Member, ...]
    at: jax.Array | None = None  # [N], the places of the factors among those of members

    def per_factor(self, values: Callable[[str, str], float]) -> np.ndarray | jax.Array:
        """An array `[N]` of a static number for each stack and axis."""
        sizes = [member.slots.stop - member.slots.start for member in self.members]
        each = np.repeat([values(m.stack, m.axis) for m in self.members], sizes)
        if self.at is None:
            return each
        equal = np.all(each == each[0])
        return each[: len(self.at)] if equal else jnp.asarray(each)[self.at]


class Fresh(NamedTuple):
    """What a call gives."""

    derived: dict[str, jax.Array]  # {field: [N, ...]}
    residuals: jax.Array  # [N]; NaN where the method failed
    iterations: jax.Array  # [N], int32; 0 where there are none


class Report(NamedTuple):
    """What a refresh says of each block, the worst of its axes."""

    failed: dict[str, jax.Array]  # {stack: bool [n]}
    residuals: dict[str, jax.Array]  # {stack: [n]}, float32
    iterations: dict[str, jax.Array]  # {stack: [n]}, int32
    renewed: dict[str, jax.Array]  # {stack: bool [n]}: all axes; empty without metrics


class Call(NamedTuple):
    """All factors of one side, N, of which some at a time are worked on."""

    members: tuple[Member, ...]
    factors: list[jax.Array]  # of each member, as stored
    derived: dict[str, list[jax.Array]]  # likewise
    usable: jax.Array  # [N], bool
    padding: jax.Array | None  # bool [N, d]
    wide: np.dtype  # in which they are computed


class Task(NamedTuple):
    """What is done with all factors of one side, and what is refused."""

    compute: Callable[[Batch], Fresh]
    max_residual: float
    ridge: ArrayLike  # what is added to the factors, if anything


# Of the slots of a factor: which were tried and which failed, residuals, iterations.
Note = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def refresh(
    factors: AxisStacks,
    derived: Derived,
    report: Report,
    usable: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
    compute: Callable[[Batch], Fresh],
    max_residual: float,
    ridge: ArrayLike = 0.0,
    kind: Callable[[str, str], Hashable] = lambda name, axis: None,
    turns: Turns | None = None,
) -> tuple[Derived, Report]:
    """Recomputes what is derived from the factors of all usable slots.

    All stays as it was where a block has no usable gradient at this step and where
    its factor is zero without a ridge. What is not finite or has too large a residual
    is refused, and the old is kept; that is a failure of the block.

    Args:
      factors: `{stack: {axis: stored factors}}`.
      derived: `{field: {stack: {axis: [n, ...]}}}`, the previous roots or bases.
      report: what was said at the last refresh.
      usable: `{stack: [n]}`, bool.
      sides: `{stack: {axis: [n]}}`, int32, the sides of the factors before padding,
        where there is any.
      compute: what is done with all factors of one side.
      max_residual: the largest residual that is not refused.
      ridge: what is added to the factors, if anything.
      kind: maps a stack and an axis to a key; only factors of equal keys share a
        call.
      turns: whose turn it is, of whom alone anything is recomputed. Default `None`:
        that of all.
    """
    task = Task(compute, max_residual, ridge)
    work = _together if turns is None else functools.partial(_in_turns, turns)
    fresh = {field: _copied(stacks) for field, stacks in derived.items()}
    notes = {name: [] for name in factors}
    for members in _by_side(factors, kind).values():
        done = work(members, factors, derived, usable, sides, task)
        for (name, axis, _), (arrays, note) in zip(members, done, strict=True):
            for field, array in arrays.items():
                fresh[field][name][axis] = array
            notes[name].append(note)
    return fresh, _report(report, notes)


def _copied(stacks: AxisStacks) -> AxisStacks:
    return {name: dict(axes) for name, axes in stacks.items()}


def _together(
    members: list[Member],
    factors: AxisStacks,
    derived: Derived,
    usable: dict[str, jax.Array],
    sides: dict,
    task: Task,
) -> Iterator[tuple[dict[str, jax.Array], Note]]:
    """What a call gives each of its members, and what is to be said of it."""
    batch = _batch(factors, derived, sides, members)
    found = task.compute(batch)
    alive, sound = _is_alive(batch, task), _is_sound(found, task)
    for name, axis, slots in members:
        tried = usable[name] & alive[slots]
        taken, arrays = tried & sound[slots], {}
        for field, values in found.derived.items():
            old = derived[field][name][axis]
            arrays[field] = _replaced(old, values[slots], taken)
        residuals, turns = found.residuals[slots], found.iterations[slots]
        yield arrays, (tried, tried & ~sound[slots], residuals, turns)


def _in_turns(
    turns: Turns,
    members: list[Member],
    factors: AxisStacks,
    derived: Derived,
    usable: dict[str, jax.Array],
    sides: dict,
    task: Task,
) -> Iterator[tuple[dict[str, jax.Array], Note]]:
    """As :func:`_together`, of the slots whose turn it is."""
    call = _call(members, factors, derived, usable, sides)
    free = call.usable
    note = (free & False, free & False, free.astype(call.wide), free.astype(jnp.int32))

    def advance(at: jax.Array, valid: jax.Array, held: tuple) -> tuple:
        derived, note = held
        before = {field: pick(arrays, at) for field, arrays in derived.items()}
        batch = _batch_at(at, call, before)
        found = task.compute(batch)
        tried, sound = free[at] & _is_alive(batch, task), _is_sound(found, task)
        for field, values in found.derived.items():
            rows = _replaced(before[field], values, tried & sound)
            derived = derived | {field: put(derived[field], at, rows, valid)}
        said = (tried, tried & ~sound, found.residuals, found.iterations)
        pairs = zip(note, said, strict=True)
        return derived, tuple(put([old], at, rows, valid)[0] for old, rows in pairs)

    names = [name for name, _, _ in members]
    new, note = take_turns(turns, names, advance, (call.derived, note))
    return _shared_out(members, new, note)


def _call(
    members: list[Member],
    factors: AxisStacks,
    derived: Derived,
    usable: dict[str, jax.Array],
    sides: dict,
) -> Call:
    """All that a call could be about; nothing large is copied."""
    stored = [factors[name][axis] for name, axis, _ in members]
    held = {
        field: [stacks[name][axis] for name, axis, _ in members]
        for field, stacks in derived.items()
        if members[0].axis in stacks.get(members[0].stack, {})
    }
    free = jnp.concatenate([usable[name] for name, _, _ in members])
    padding = _padding(sides, members, factors)
    wide = wide_dtype(stored[0].dtype)
    return Call(tuple(members), stored, held, free, padding, wide)


def _batch_at(at: jax.Array, call: Call, before: dict[str, jax.Array]) -> Batch:
    """The factors at these places of a call, with what is stored of them before."""
    derived = {field: load(rows).astype(call.wide) for field, rows in before.items()}
    padding = None if call.padding is None else call.padding[at]
    return Batch(load(pick(call.factors, at)), derived, padding, call.members, at)


def _shared_out(
    members: list[Member], derived: dict[str, list[jax.Array]], note: Note
) -> Iterator[tuple[dict[str, jax.Array], Note]]:
    """What each member has of the arrays of a call, in their order."""
    for index, (_, _, slots) in enumerate(members):
        arrays = {field: arrays[index] for field, arrays in derived.items()}
        yield arrays, tuple(values[slots] for values in note)


def _is_alive(batch: Batch, task: Task) -> jax.Array:
    """Which factors there is a root or a basis of, `[N]`."""
    return (traces(batch.factors) > 0) | (jnp.asarray(task.ridge) > 0)


def _is_sound(found: Fresh, task: Task) -> jax.Array:
    return _is_finite(found.derived) & (found.residuals <= task.max_residual)


def _replaced(old: jax.Array, values: jax.Array, taken: jax.Array) -> jax.Array:
    """What is stored, with these values where they are taken."""
    return jnp.where(per_slot(taken, old), store(values, old), old)


def _report(before: Report, notes: dict[str, list[tuple]]) -> Report:
    """Puts together what was found of the axes of each stack."""
    report = Report({}, {}, {}, {})
    for name, axes in notes.items():
        tried, failed, residuals, turns = map(jnp.stack, zip(*axes, strict=True))
        largest = jnp.finfo(jnp.float32).max
        residuals = jnp.nan_to_num(residuals, nan=largest, posinf=largest)
        worst = (
            jnp.max(jnp.where(tried, x, 0), axis=0, initial=0)
            for x in (residuals.astype(jnp.float32), turns)
        )
        tried = jnp.any(tried, axis=0)
        report.failed[name] = jnp.any(failed, axis=0)
        if name in before.renewed:
            report.renewed[name] = tried & ~report.failed[name]
        for kept, old, new in zip(report[1:3], before[1:3], worst, strict=True):
            kept[name] = jnp.where(tried, new, old[name])
    return report


def _batch(
    factors: AxisStacks, derived: Derived, sides: dict, members: list[Member]
) -> Batch:
    """Brings the factors of a call, and what was derived from them, together."""
    loaded = jnp.concatenate([load(factors[name][axis]) for name, axis, _ in members])
    held = {
        field: [
            load(stacks[name][axis]).astype(loaded.dtype)
            for name, axis, _ in members
            if axis in stacks.get(name, {})
        ]
        for field, stacks in derived.items()
    }
    return Batch(
        loaded,
        {field: jnp.concatenate(parts) for field, parts in held.items() if parts},
        _padding(sides, members, factors),
        tuple(members),
    )


def _is_finite(derived: dict[str, jax.Array]) -> jax.Array:
    finite = (
        jnp.all(jnp.isfinite(values), axis=tuple(range(1, values.ndim)))
        for field, values in derived.items()
        if field != "conditions"
    )
    return functools.reduce(jnp.logical_and, finite)


def _padding(
    sides: dict, members: list[Member], factors: AxisStacks
) -> jax.Array | None:
    """Which rows and columns of each factor are padding, `[N, d]`, if any are."""
    if not any(name in sides for name, _, _ in members):
        return None
    name, axis, _ = members[0]
    side = side_of(factors[name][axis])
    own = [
        jnp.asarray(sides[name][axis])
        if name in sides
        else jnp.full(slots.stop - slots.start, side)
        for name, axis, slots in members
    ]
    return jnp.arange(side)[None] >= jnp.concatenate(own)[:, None]  # [N, d]


def _by_side(
    factors: AxisStacks, kind: Callable[[str, str], Hashable]
) -> dict[Hashable, list[Member]]:
    """The factors of all axes, by side, dtype and kind."""
    groups, sizes = {}, Counter()
    for name, axes in factors.items():
        for axis, factor in axes.items():
            form = (is_diagonal(factor), side_of(factor), factor.dtype)
            key = (*form, kind(name, axis))
            slots = slice(sizes[key], sizes[key] + len(factor))
            groups.setdefault(key, []).append(Member(name, axis, slots))
            sizes[key] = slots.stop
    return groups
