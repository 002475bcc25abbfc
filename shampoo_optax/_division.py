"""Dealing blocks to owners: which shapes share a stack, and how large stacks are.

All devices run one program, so every owner has as many slots of each stack as any
other. Static: functions of the blocks' shapes and the number of owners.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]

# How much of an owner's share may be spent on padding for the sake of fewer shapes.
SLACK = 0.03


class Division(NamedTuple):
    """By what rules blocks are dealt.

    Attributes:
      owners: the number of devices that the blocks are dealt to.
      cost: the cost of a block, by its shape.
      fixed: orders of the blocks whose axes keep their places; those of other
        blocks are put in descending order, so that there are fewer shapes.
    """

    owners: int
    cost: Callable[[Shape], float]
    fixed: frozenset[int]

    def axes(self, block: Shape) -> tuple[int, ...]:
        """The axis of a block that is put at each place."""
        places = range(len(block))
        if self.owners == 1 or len(block) in self.fixed:
            return tuple(places)
        return tuple(sorted(places, key=lambda axis: -block[axis]))


def memory(block: Shape, sides: Sequence[int] | None = None) -> float:
    """Numbers kept for a block: factors and roots, two averages of its size.

    Args:
      block: its shape.
      sides: those of its axes that have whole factors. Default `None`: all.
    """
    sides = block if sides is None else sides
    return 2 * sum(side**2 for side in sides) + 2 * math.prod(block)


def polynomial(coefficients: Sequence[float]) -> Callable[[Shape], float]:
    """The cost of a block by a polynomial of its sides, the constant first."""

    def cost(block: Shape) -> float:
        return sum(
            factor * side**power
            for side in block
            for power, factor in enumerate(coefficients)
        )

    return cost


UNDIVIDED = Division(1, memory, frozenset())


def deal(counts: Mapping[Shape, int], division: Division) -> dict[Shape, Counter]:
    """Deals blocks of one dtype to the stacks.

    Full rounds, one block an owner, stay among equals. What remains is sorted and
    dealt round by round, each padded to its largest sides, and rounds that differ
    little are put together.

    Args:
      counts: the number of blocks of each shape.
      division: the rules.

    Returns:
      the shapes in each stack and their numbers, `{stack's block: {shape: n}}`.

    Examples:
      >>> rules = Division(4, memory, frozenset())
      >>> deal({(8, 8): 9, (8, 6): 2}, rules)
      {(8, 8): Counter({(8, 8): 9, (8, 6): 2})}
    """
    if division.owners == 1:
        return {shape: Counter({shape: n}) for shape, n in counts.items()}
    stacks: dict[Shape, Counter] = {}
    for order in sorted({len(shape) for shape in counts}):
        equals = {shape: n for shape, n in counts.items() if len(shape) == order}
        stacks |= _deal_order(equals, division.owners, division.cost)
    return stacks


def _deal_order(counts: Mapping[Shape, int], owners: int, cost: Callable) -> dict:
    stacks, rest = {}, []
    for shape, n in counts.items():
        rest += [shape] * (n % owners)
        if n >= owners:
            stacks[shape] = Counter({shape: n - n % owners})
    for members in _rounds(rest, owners, cost):
        stacks.setdefault(_largest(members), Counter()).update(members)
    return _join(stacks, owners, cost)


def _largest(shapes: Sequence[Shape]) -> Shape:
    return tuple(map(max, zip(*shapes, strict=True)))


def _rounds(shapes: list[Shape], owners: int, cost: Callable) -> list[list[Shape]]:
    """Cuts the shapes, sorted in some way, into rounds of at least total cost."""
    order = len(shapes[0]) if shapes else 0

    def rotated(shift: int) -> Callable[[Shape], tuple]:
        return lambda shape: (shape[shift:] + shape[:shift], shape)

    keys = [rotated(shift) for shift in range(order)]
    keys.append(lambda shape: (cost(shape), shape))
    cuts = (_cut(sorted(shapes, key=key, reverse=True), owners, cost) for key in keys)
    return min(cuts, key=lambda rounds: sum(cost(_largest(r)) for r in rounds))


def _cut(ranked: list[Shape], owners: int, cost: Callable) -> list[list[Shape]]:
    """The cheapest cut of a sequence into runs of at most `owners` members.

    A run that starts earlier with the same largest sides is never worse, so only
    starts at which the shape changes, and the earliest, are tried.
    """
    total, first, change = [0.0], [0], [0]
    for stop in range(1, len(ranked) + 1):
        if stop > 1 and ranked[stop - 1] != ranked[stop - 2]:
            change.append(stop - 1)
        earliest = max(0, stop - owners)
        best, begin, top = math.inf, earliest, ranked[stop - 1]
        for start in itertools.chain(reversed(change), [earliest]):
            start = max(start, earliest)
            top = _largest((top, ranked[start]))
            if total[start] + cost(top) < best:
                best, begin = total[start] + cost(top), start
            if start == earliest:
                break
        total.append(best)
        first.append(begin)
    rounds, stop = [], len(ranked)
    while stop:
        rounds.append(ranked[first[stop] : stop])
        stop = first[stop]
    return rounds


def _join(stacks: dict[Shape, Counter], owners: int, cost: Callable) -> dict:
    """Joins the pairs of stacks that cost least, within the slack."""

    def price(block: Shape, members: Counter) -> float:
        return cost(block) * -(-members.total() // owners)

    def added(one: Shape, other: Shape) -> float:
        both = price(_largest((one, other)), stacks[one] + stacks[other])
        return both - price(one, stacks[one]) - price(other, stacks[other])

    share = sum(cost(s) * n for held in stacks.values() for s, n in held.items())
    budget = SLACK * share / owners
    costs = {pair: added(*pair) for pair in itertools.combinations(stacks, 2)}
    while costs:
        pair = min(costs, key=costs.get)
        block = _largest(pair)
        if costs[pair] > budget:
            break
        if block in stacks and block not in pair:  # a third stack: not these two
            del costs[pair]
            continue
        budget -= max(0.0, costs[pair])
        both = stacks.pop(pair[0]) + stacks.pop(pair[1])
        costs = {p: c for p, c in costs.items() if not set(p) & set(pair)}
        stacks[block] = both
        costs |= {
            (other, block): added(other, block) for other in stacks if other != block
        }
    return stacks
