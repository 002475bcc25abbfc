"""The process of one optimizer: it takes a step whenever it is told to.

The number of a turn comes in a line, and the seconds of its step go out in one. What a
step needs besides is made ready before its time is taken.
"""

import sys
import time
from collections.abc import Callable

Prepare = Callable[[int], Callable[[], object]]


def serve(prepare: Prepare) -> None:
    """Answers until the input ends; `prepare(turn)` returns what is timed."""
    for line in sys.stdin:
        step = prepare(int(line))
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)
