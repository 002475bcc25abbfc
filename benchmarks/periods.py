"""Numbers that all timed optimizers share, and what their steps amount to.

A period has `PERIOD` steps, of which all but one are alike where all refreshes come
together. Such an optimizer is built with a shorter period of the same program, which
has another number in it; its weights say for how many steps of a whole period each step
of the short one stands. Where every step is alike, or blocks take turns, it is built
as it is used, and where they take turns whole periods are taken.
"""

from collections.abc import Sequence

import numpy as np

PERIOD, SHORT = 10, 2
RATE, DECAY = 1e-3, 1e-4
ALIKE, EACH = (PERIOD,), (1,) * PERIOD
LAST, FIRST = (PERIOD - 1, 1), (1, PERIOD - 1)


def round_means(
    seconds: Sequence[float], weights: Sequence[int], length: int
) -> np.ndarray:
    """Returns the mean step of a period as each round has it, `[rounds]`.

    Args:
      seconds: of every step.
      weights: for how many steps of a period each step of the short period stands.
      length: the steps of a round, a multiple of those of the short period.
    """
    every = np.tile(weights, length // len(weights))
    return np.reshape(seconds, (-1, length)) @ (every / every.sum())


def ratio_of(ours: np.ndarray, others: np.ndarray) -> float:
    """Returns the median of the ratios of rounds."""
    return float(np.median(ours / others))


def plain_and_refresh(
    seconds: Sequence[float], weights: Sequence[int]
) -> tuple[float, float | None]:
    """Returns the medians of the most frequent steps and of the longest ones."""
    table = np.reshape(seconds, (-1, len(weights)))
    frequent = np.equal(weights, max(weights))
    refresh = np.max(np.median(table, axis=0)) if len(weights) > 1 else None
    return float(np.median(table[:, frequent])), refresh and float(refresh)
