"""Reading of compiled programs, as `as_text()` of a compiled function gives them."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


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
        if (found := re.search(rf" = (.+?) ({KINDS})(?:-start)?\(", line))
    ]


def collective_bytes(text: str) -> Counter:
    """Sums the bytes of the results of all collectives, by kind."""
    found = Counter()
    for _, kind, size in collectives(text):
        found[kind] += size
    return found


def bytes_of(shape: str) -> int:
    """Bytes of an array or a tuple of them: `(f32[8,3]{1,0}, u32[])`."""
    return sum(
        _itemsize(dtype) * math.prod(map(int, filter(None, sides.split(","))))
        for dtype, sides in re.findall(r"([a-z]+\d+|pred)\[([\d,]*)\]", shape)
    )


def _itemsize(dtype: str) -> int:
    return 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
