"""Turns: slots that are refreshed at different steps, so that all steps are alike.

Every slot has a phase, and its turn at the steps t with that remainder by the period.
Phases are dealt by cost. They are static, and the same on every device, since devices
have equally many slots of a stack.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._stacks import per_slot
from shampoo_optax._trees import repeated

# How much of the work may be spent on nothing, for the sake of more slots at once.
_SLACK = 0.1


class Turns(NamedTuple):
    """Whose turn a step is."""

    phases: dict[str, np.ndarray]  # {stack: [n]}, below the period; static
    phase: jax.Array  # [], int32: that of the step; the period where it is nobody's
    period: int


def deal_phases(
    sizes: Mapping[str, int], costs: Mapping[str, float], period: int
) -> dict[str, np.ndarray]:
    """Deals the slots of each stack to the steps of a period.

    As many slots as there are for all phases go to each of them, neighbours to one.
    The others go where there is least to do so far, costly stacks first.

    Args:
      sizes: the slots of each stack.
      costs: of one slot of each stack.
      period: the number of steps.

    Returns:
      the phase of each slot, `{stack: [n]}`, ascending but for the last ones.

    Examples:
      >>> phases = deal_phases({"a": 5, "b": 1}, {"a": 3.0, "b": 2.0}, 2)
      >>> {name: each.tolist() for name, each in phases.items()}
      {'a': [0, 0, 1, 1, 0], 'b': [1]}
    """
    loads, phases = np.zeros(period), {}
    for name in sorted(sizes, key=lambda name: -costs[name]):
        rounds, rest = divmod(sizes[name], period)
        least = np.sort(np.argsort(loads, kind="stable")[:rest])
        loads[least] += costs[name]
        even = np.repeat(np.arange(period), rounds)
        phases[name] = np.concatenate([even, least]).astype(np.int32)
    return {name: phases[name] for name in sizes}


def due_now(turns: Turns) -> dict[str, jax.Array]:
    """The slots whose turn it is, `{stack: bool [n]}`."""
    return {name: turns.phase == phases for name, phases in turns.phases.items()}


def at_once(counts: np.ndarray) -> int:
    """How many slots are worked on at once.

    As many as leave little undone in the last round of a step, in the mean and at the
    step that has most to do.

    Args:
      counts: how many have their turn at each step of a period.
    """

    def done(width: int) -> np.ndarray:
        return width * -(-counts // width)

    def fits(width: int) -> bool:
        sums = (np.sum(done(width)), np.sum(counts))
        tops = (np.max(done(width)), np.max(counts))
        return all(got <= (1 + _SLACK) * want for got, want in (sums, tops))

    return max(filter(fits, range(1, np.max(counts) + 1)))


def take_turns(
    turns: Turns,
    stacks: Sequence[str],
    advance: Callable[[jax.Array, jax.Array, Any], Any],
    held: Any,
) -> Any:
    """Works on the slots whose turn it is, some at once, round after round.

    Args:
      turns: whose turn it is.
      stacks: whose slots follow one another, N in total; a name may come again.
      advance: maps places among these `[w]`, whether they are any, bool `[w]`, and
        what is held to the new of that.
      held: a tree of arrays.
    """
    phases = np.concatenate([turns.phases[name] for name in stacks])
    order = np.argsort(phases, kind="stable").astype(np.int32)
    counts = np.bincount(phases, minlength=turns.period)
    ascending = phases[order]
    first = jnp.sum(ascending < turns.phase, dtype=jnp.int32)
    last = jnp.sum(ascending <= turns.phase, dtype=jnp.int32)
    width = at_once(counts)
    lanes = jnp.arange(width, dtype=jnp.int32)

    def advance_round(index: jax.Array, held: Any) -> Any:
        places = first + index * width + lanes
        at = jnp.take(jnp.asarray(order), places, mode="clip")
        return advance(at, places < last, held)

    return repeated((last - first + width - 1) // width, advance_round, held)


def pick(arrays: Sequence[jax.Array], at: jax.Array) -> jax.Array:
    """The rows at these places among those of arrays that follow one another."""
    rows, start = None, 0
    for array in arrays:
        own = jnp.take(array, at - start, axis=0, mode="clip")
        inside = per_slot(at >= start, own)
        rows = own if rows is None else jnp.where(inside, own, rows)
        start += len(array)
    return rows


def put(
    arrays: Sequence[jax.Array], at: jax.Array, rows: jax.Array, valid: jax.Array
) -> list[jax.Array]:
    """The arrays with these rows in their places, but for those that are not valid."""
    changed, start = [], 0
    for array in arrays:
        size, inside = len(array), valid & (at >= start) & (at < start + len(array))
        where = jnp.where(inside, at - start, size)
        changed.append(array.at[where].set(rows.astype(array.dtype), mode="drop"))
        start += size
    return changed
