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
from benchmarks.periods import plain_and_refresh, ratio_of, round_means
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
