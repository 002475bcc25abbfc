"""How alike steps are, with all refreshes together and staggered.

Seconds of the update of Shampoo (Adam grafting, period 10, state donated) for the
shapes of a model, over two periods after the first one. Both run in turns in one
process, step by step. Largest and median are of single steps: where all refresh
together, one step in ten does the work of the period.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import shampoo_optax as so
from benchmarks.cli import Parser, make_folder, positive_int
from benchmarks.shapes import MODELS, Shapes
from shampoo_optax._tables import aligned

PERIOD, MEASURED = 10, 2
KINDS = {"together": False, "staggered": True}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = Parser("benchmarks.refresh", __doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="ResNet-50")
    parser.add_argument(
        "--block-size", type=positive_int, default=256, help="default: 256"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    make_folder(parser, options.out)
    seconds = measure(MODELS[options.model], options.block_size)
    head = ["refreshes", "compile (s)", "mean (ms)", "median", "largest", "over median"]
    text = aligned(head, *(row(name, *found) for name, found in seconds.items()))
    title = f"# Steps of Shampoo, {options.model}, block size {options.block_size}"
    notes = f"{os.cpu_count()} CPU cores, float32, period {PERIOD}, "
    notes += f"{MEASURED * PERIOD} steps; over median: the largest step by the median."
    (options.out / "refresh.md").write_text(f"{title}\n\n{notes}\n\n```\n{text}\n```\n")
    print(text)


def row(name: str, compilation: float, steps: Sequence[float]) -> list[str]:
    """Returns a line of the table."""
    middle, largest = np.median(steps), np.max(steps)
    numbers = (f"{1e3 * x:.2f}" for x in (np.mean(steps), middle, largest))
    return [name, f"{compilation:.1f}", *numbers, f"{largest / middle:.2f}x"]


def measure(shapes: Shapes, block_size: int) -> dict[str, tuple[float, list[float]]]:
    """Returns, for each kind, the seconds to compile and those of each step."""
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(shape, np.float32) for shape in shapes]
    grads = jax.device_put(grads)
    runs, seconds = {}, {}
    for name, stagger in KINDS.items():
        tx = so.scale_by_shampoo(
            refresh_every=PERIOD,
            stagger=stagger,
            blocking=so.Blocking(block_size=block_size),
        )
        began = time.perf_counter()
        state = tx.init(grads)
        update = jax.jit(tx.update, donate_argnums=1).lower(grads, state).compile()
        seconds[name] = time.perf_counter() - began, []
        runs[name] = update, state
    for step in range(PERIOD * (1 + MEASURED)):
        for name, (update, state) in runs.items():
            state, spent = take_step(update, grads, state)
            runs[name] = update, state
            if step >= PERIOD:
                seconds[name][1].append(spent)
    return seconds


def take_step(
    update: Any, grads: optax.Updates, state: optax.OptState
) -> tuple[optax.OptState, float]:
    """Returns the state after one step, and its seconds."""
    began = time.perf_counter()
    _, state = jax.block_until_ready(update(grads, state))
    return state, time.perf_counter() - began


if __name__ == "__main__":
    main()
