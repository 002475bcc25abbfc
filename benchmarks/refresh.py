"""How alike steps are, with all refreshes together and staggered.

Seconds of the update of Shampoo (Adam grafting, period 10, state donated) for the
shapes of a model, over two periods after the first one. Both run in turns in one
process, step by step. Largest and median are of single steps: where all refresh
together, one step in ten does the work of the period.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import shampoo_optax as so
from benchmarks.cli import Parser, make_folder, positive_int
from benchmarks.shapes import MODELS, Shapes, draw
from benchmarks.timing import build, collect, in_turns
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
    grads = jax.device_put(draw(shapes, seed=0))
    programs = {
        name: build(
            so.scale_by_shampoo(
                refresh_every=PERIOD,
                stagger=stagger,
                blocking=so.Blocking(block_size=block_size),
            ),
            grads,
        )
        for name, stagger in KINDS.items()
    }
    steps = {name: program.step for name, program in programs.items()}
    turns = itertools.repeat(grads, PERIOD * (1 + MEASURED))
    seconds = collect(in_turns(steps, turns))
    return {name: (programs[name].seconds, seconds[name][PERIOD:]) for name in KINDS}


if __name__ == "__main__":
    main()
