"""What a whole training step costs with each optimizer, by the size of the batch.

The byte-level language model of the main job, with its loss, gradient, clipping, update
and new parameters in one jitted step, refreshes included (period 10). All optimizers
take their steps in turns in one process, on the same batches. Ratios are medians, over
periods, of the mean step of a period by AdamW's in the same one.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from benchmarks.cli import Parser, make_folder, positive_int
from benchmarks.loop import TrainState, initial_state, make_step
from benchmarks.optimizers import OPTIMIZERS, Settings, make_optimizer, warmup_cosine
from benchmarks.periods import PERIOD, ratio_of
from benchmarks.tasks import Task, make_task
from benchmarks.timing import Step, collect, in_turns, timed
from shampoo_optax._tables import aligned

BASE = "adamw"
NAMES = (BASE, "shampoo", "shampoo_lean", "kl_shampoo", "soap", "muon")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = Parser("benchmarks.overhead", __doc__)
    parser.add_argument(
        "--batches",
        nargs="+",
        type=positive_int,
        default=[32, 128, 512],
        help="sizes, in windows of 64 bytes (default: 32 128 512)",
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=list(NAMES)
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=7, help="periods (default: 7)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    make_folder(parser, options.out)
    names = list(dict.fromkeys([BASE, *options.optimizers]))
    rows = []
    for batch in options.batches:
        task = make_task("text", batch=batch)
        settings = Settings(task.weight_decay, 256, PERIOD, task.clip)
        means = measure(task, names, task.draw(0), settings, options.rounds)
        rows += rows_of(batch, means)
    text = aligned(["batch", "optimizer", "mean step (ms)", f"by {BASE}'s"], *rows)
    note = f"{__doc__.strip()}\n\n{os.cpu_count()} CPU cores, {options.rounds} periods."
    report = f"# A whole training step\n\n{note}\n\n```\n{text}\n```\n"
    (options.out / "overhead.md").write_text(report)
    print(text)


def rows_of(batch: int, means: dict[str, np.ndarray]) -> list[list[str]]:
    """Returns the lines of a batch from each optimizer's mean steps, `[rounds]`."""
    return [
        [
            str(batch),
            name,
            f"{1e3 * np.median(mean):.1f}",
            f"{ratio_of(mean, means[BASE]):.3f}x",
        ]
        for name, mean in means.items()
    ]


def measure(
    task: Task,
    names: Sequence[str],
    batches: Iterator[np.ndarray],
    settings: Settings,
    rounds: int,
) -> dict[str, np.ndarray]:
    """Returns the mean step of every period, `{optimizer: [rounds]}`, in seconds.

    The first period is not counted.
    """
    first, data = next(batches), jax.device_put(task.dataset.train)
    steps = {name: stepper(task, name, data, first, settings) for name in names}
    period = settings.refresh_every
    turns = period * (1 + rounds)
    bar = tqdm(islice(batches, turns), f"batch {len(first)}", turns, unit="step")
    seconds = collect(in_turns(steps, bar))
    return {
        name: np.reshape(spent, (-1, period))[1:].mean(axis=1)
        for name, spent in seconds.items()
    }


def stepper(
    task: Task,
    name: str,
    data: tuple[jax.Array, ...],
    index: np.ndarray,
    settings: Settings,
) -> Step:
    """Returns a timed training step, on batches such as this, that holds its state."""
    optimizer = make_optimizer(name, warmup_cosine(1e-3, 1000), settings)
    held = [initial_state(task, optimizer, seed=0, devices=1)]
    shardings = jax.tree.map(lambda leaf: leaf.sharding, held[0])
    step = make_step(task, optimizer, shardings)
    step = step.lower(held[0], data, index).compile()

    def take(index: np.ndarray) -> TrainState:
        held[0], _ = step(held[0], data, index)
        return held[0]

    return timed(take)


if __name__ == "__main__":
    main()
