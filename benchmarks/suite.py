"""Measures groups of optimizers on the parameters of a model, steps taken in turns."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.contenders import BASE, Contender, Group
from benchmarks.shapes import Shapes, count, draw
from benchmarks.timing import Program, build, collect, in_turns


@dataclass(frozen=True)
class Row:
    """What is told of one optimizer; times in seconds.

    Attributes:
      name: of the optimizer.
      mean: of a period's steps, with its refresh; the median of the rounds.
      ratio: that of the mean to that of `BASE` in the same round, their median.
      plain: the median of the steps that most of a period are.
      refresh: the median of the steps that take longest; None if all are alike.
      largest: the largest single step over `plain`.
      compilation: of tracing and compiling the update.
      lines: of HLO.
      state_bytes: of the state.
      bytes_each: those of the state for each parameter.
      steps: the seconds of every step.
    """

    name: str
    mean: float
    ratio: float
    plain: float
    refresh: float | None
    largest: float
    compilation: float
    lines: int
    state_bytes: int
    bytes_each: float
    steps: list[float]


@dataclass(frozen=True)
class Result:
    """What was found for a group.

    Attributes:
      rows: one for each optimizer that ran, `BASE` first.
      rivals: `(ours, the other, ratio)`, the median ratio of means in the same round.
      absent: why peers did not run, by name.
    """

    rows: list[Row]
    rivals: list[tuple[str, str, float]]
    absent: dict[str, str]


def measure(
    shapes: Shapes, group: Group, block_size: int, rounds: int, label: str
) -> Result:
    """Compiles all, warms them up, and lets them take their steps in turns."""
    shapes = group.view(shapes)
    programs, absent = _prepare(shapes, group.contenders, block_size, label)
    contenders = {name: group.contenders[name] for name in programs}
    length = math.lcm(*(len(c.weights) for c in contenders.values()))
    turns = rounds * length
    pairs = in_turns(
        {name: program.step for name, program in programs.items()},
        _gradients(shapes, range(1, turns + 1)),
    )
    bar = tqdm(pairs, desc=label, total=turns * len(programs), unit="step")
    seconds = collect(bar)
    means = {
        name: round_means(seconds[name], c.weights, length)
        for name, c in contenders.items()
    }
    rows = [
        _row(name, c, programs[name], seconds[name], means, count(shapes))
        for name, c in contenders.items()
    ]
    rivals = [
        (ours, other, ratio_of(means[ours], means[other]))
        for ours, other in group.rivals
        if ours in means and other in means
    ]
    return Result(rows, rivals, absent)


def _prepare(
    shapes: Shapes, contenders: Mapping[str, Contender], block_size: int, label: str
) -> tuple[dict[str, Program], dict[str, str]]:
    """Returns programs after their first steps, and why others do not run."""
    params = next(_gradients(shapes, [0]))
    programs, absent = {}, {}
    bar = tqdm(contenders.items(), desc=f"{label}: compiling", unit="update")
    for name, contender in bar:
        bar.set_postfix_str(name)
        peer = contender.peer
        if peer is not None and peer.make is None:
            absent[name] = peer.note
            continue
        try:
            programs[name] = _warm(contender, block_size, shapes, params)
        except Exception as error:
            if peer is None:
                raise
            message = str(error).strip().partition("\n")[0]
            absent[name] = f"{peer.note}: {type(error).__name__}: {message}"
    return programs, absent


def _warm(
    contender: Contender, block_size: int, shapes: Shapes, params: Any
) -> Program:
    with warnings.catch_warnings():
        if contender.peer is not None:
            warnings.simplefilter("ignore")
        program = build(contender.make(block_size), params)
    for grads in _gradients(shapes, range(-contender.warm_up, 0)):
        program.step(grads)
    return program


def _gradients(shapes: Shapes, turns: Sequence[int]) -> Iterator[dict[str, jax.Array]]:
    """Yields trees of the same gradients for the same turns."""
    for turn in turns:
        arrays = enumerate(draw(shapes, seed=turn % 2**32))
        yield jax.device_put({f"{index:03}": array for index, array in arrays})


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


def _row(
    name: str,
    contender: Contender,
    program: Program,
    seconds: list[float],
    means: Mapping[str, np.ndarray],
    parameters: int,
) -> Row:
    plain, refresh = plain_and_refresh(seconds, contender.weights)
    return Row(
        name=name,
        mean=float(np.median(means[name])),
        ratio=ratio_of(means[name], means[BASE]),
        plain=plain,
        refresh=refresh,
        largest=max(seconds) / plain,
        compilation=program.seconds,
        lines=program.lines,
        state_bytes=program.state_bytes,
        bytes_each=program.state_bytes / parameters,
        steps=seconds,
    )
