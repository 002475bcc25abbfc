"""Compiled updates whose steps are timed in turns, in one process."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.hlo import lines_of

Step = Callable[[Any], float]


class Program(NamedTuple):
    """A compiled update that holds its state."""

    step: Step  # takes gradients, returns seconds
    seconds: float  # of tracing and compiling
    lines: int  # of HLO
    state_bytes: int


def build(tx: optax.GradientTransformation, params: Any) -> Program:
    """Compiles an update whose state is donated, as in training."""
    # One buffer a leaf: what is donated must not be there twice.
    state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tx.init(params))
    began = time.perf_counter()
    update = jax.jit(tx.update, donate_argnums=1)
    update = update.lower(params, state, params).compile()
    seconds = time.perf_counter() - began
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    held = [state]
    del state

    def take(grads: Any) -> Any:
        updates, held[0] = update(grads, held[0], params)
        return updates, held[0]

    return Program(timed(take), seconds, lines_of(update.as_text()).program, size)


def timed(call: Callable[[Any], Any]) -> Step:
    """Returns a function that runs the call to its end and returns its seconds."""

    def step(argument: Any) -> float:
        began = time.perf_counter()
        jax.block_until_ready(call(argument))
        return time.perf_counter() - began

    return step


def in_turns(
    steps: Mapping[str, Step], arguments: Iterable[Any]
) -> Iterator[tuple[str, float]]:
    """Gives every argument to all steps, one after another; yields name and seconds."""
    for argument in arguments:
        for name, step in steps.items():
            yield name, step(argument)


def collect(pairs: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Gathers the seconds of each name."""
    seconds = {}
    for name, spent in pairs:
        seconds.setdefault(name, []).append(spent)
    return seconds
