"""Reading of compiled programs, as `as_text()` of a compiled function gives them."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" = (.+?) ({KINDS})(?:-start)?\(")


class Lines(NamedTuple):
    """Three ways to count the lines of a program."""

    newlines: int  # of the whole text
    filled: int  # those that are not empty
    program: int  # without the tables of source names: what is called HLO lines


def lines_of(text: str) -> Lines:
    """Counts lines; those of the program are headers, instructions and brackets."""
    filled = [line for line in text.split("\n") if line]
    table = re.compile(r"\d+ |(FileNames|FunctionNames|FileLocations|StackFrames)$")
    program = sum(not table.match(line) for line in filled)
    return Lines(text.count("\n"), len(filled), program)


def computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each computation, by its name."""
    found, lines = {}, []
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = found.setdefault(start[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def collectives(text: str) -> list[tuple[str, str, int]]:
    """Returns `(computation, kind, bytes of the results)` of each collective."""
    return [
        (name, found[2], bytes_of(found[1]))
        for name, lines in computations(text).items()
        for line in lines
        if (found := _COLLECTIVE.search(line))
    ]


def collective_bytes(text: str) -> Counter:
    """Sums the bytes of the results of all collectives, by kind."""
    found = Counter()
    for _, kind, size in collectives(text):
        found[kind] += size
    return found


def bytes_by_source(text: str, prefix: str) -> dict[bool, Counter]:
    """Tells collectives that depend on some arguments from those that do not.

    Args:
      text: the program.
      prefix: what the names of these arguments start with, as the traced function has
        them: `"state."`.

    Returns:
      bytes by kind, as :func:`collective_bytes` has them, of those that depend under
      `True` and of the others under `False`.

    Raises:
      RuntimeError: if a collective stands elsewhere than in the main computation.
    """
    found, dependent = {True: Counter(), False: Counter()}, set()
    (main,) = re.findall(r"^ENTRY %?([\w.\-]+)", text, re.M)
    for line in computations(text)[main]:
        name, _, rest = line.partition(" = ")
        name = name.replace("ROOT", "").strip()
        operands = re.findall(r"(?<![=\w])%[\w.\-]+", rest.partition("metadata=")[0])
        argument = f'op_name="{prefix}' in rest and " parameter(" in rest
        if argument or dependent.intersection(operands):
            dependent.add(name)
        if collective := _COLLECTIVE.search(line):
            found[name in dependent][collective[2]] += bytes_of(collective[1])
    if found[True] + found[False] != collective_bytes(text):
        raise RuntimeError(f"a collective stands outside of {main}")
    return found


def bytes_of(shape: str) -> int:
    """Bytes of an array or a tuple of them: `(f32[8,3]{1,0}, u32[])`."""
    return sum(
        _itemsize(dtype) * math.prod(map(int, filter(None, sides.split(","))))
        for dtype, sides in re.findall(r"([a-z]+\d+|pred)\[([\d,]*)\]", shape)
    )


def _itemsize(dtype: str) -> int:
    return 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
