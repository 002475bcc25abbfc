"""Finds each optimizer's best learning rate, then compares them over several seeds.

Every run leaves a JSON record; a run whose record is there is not run again, so a
stopped sweep goes on where it was. Rates are chosen on held-out training data, by the
fewest steps to the target and then by the last metric. Several seeds at the chosen rate
are judged on the test data. Steps do not depend on what else the machine does. Seconds
to the target are these steps times the seconds of a training step with its share of
refreshes, which all optimizers take in turns at the end, on a machine that should be
idle then; neither compilation nor evaluation is in them.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks import cli, overhead, report
from benchmarks.loop import Record, Run, train
from benchmarks.optimizers import RATES, Settings
from benchmarks.tasks import Task

STEPS = {"images": 1500, "text": 1200}
GRID = (2e-3, 4e-3, 8e-3, 1.6e-2)
EVAL_EVERY, ROUNDS = 50, 7


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing and writes the table, the figure and the records."""
    parser = _parser()
    options = parser.parse_args(arguments)
    task = cli.task_of(parser, options)
    folder = options.out / task.dataset.name.lower()
    tried = {
        name: _try_rates(task, name, options, folder) for name in options.optimizer
    }
    documented = RATES[task.name] if options.documented else {}
    final = [
        _repeat(task, records[0].run, rate, options.seeds, folder)
        for name, records in tried.items()
        for rate in _final_rates(task, records, documented.get(name))
    ]
    seconds = mean_seconds(task, options.optimizer, final[0][0].run.settings)
    text = markdown(task, tried, final, seconds)
    (folder / "results.md").write_text(text)
    plot(final, folder / "results.png")
    print(text)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser("benchmarks.sweep", __doc__)
    cli.add_common(parser)
    parser.add_argument(
        "--rates",
        nargs="+",
        type=cli.positive_float,
        help="the grid (default: 2e-3, twice, 4 and 8 times as much)",
    )
    parser.add_argument("--seeds", type=cli.positive_int, default=3, help="how many")
    parser.add_argument(
        "--documented",
        action="store_true",
        help="seeds at the rate of `benchmarks.train` too, where that is another",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="a folder"
    )
    return parser


def _try_rates(
    task: Task, optimizer: str, options: argparse.Namespace, folder: Path
) -> list[Record]:
    """Runs one seed at every rate of the grid, judged on held-out data."""
    settings = cli.settings_of(task, options)
    steps = options.steps or STEPS[task.name]
    return [
        _run_once(task, _run(optimizer, rate, steps, 0, "held_out", settings), folder)
        for rate in options.rates or GRID
    ]


def choose(task: Task, records: Sequence[Record]) -> Record:
    """Returns the record with the fewest steps to the target, then the best metric."""
    sign = -1 if task.metric == "accuracy" else 1

    def key(record: Record) -> tuple[float, float]:
        return record.steps_to_target or float("inf"), sign * record.final

    return min(records, key=key)


def _final_rates(
    task: Task, records: Sequence[Record], documented: float | None
) -> list[float]:
    chosen = choose(task, records).run.learning_rate
    return list(dict.fromkeys([chosen, documented or chosen]))


def _repeat(
    task: Task, run: Run, rate: float, seeds: int, folder: Path
) -> list[Record]:
    """Runs several seeds at a rate, judged on the test data."""
    name, steps, settings = run.optimizer, run.steps, run.settings
    return [
        _run_once(task, _run(name, rate, steps, seed, "test", settings), folder)
        for seed in range(1, seeds + 1)
    ]


def _run(
    optimizer: str, rate: float, steps: int, seed: int, split: str, settings: Settings
) -> Run:
    return Run(optimizer, rate, steps, seed, EVAL_EVERY, split, settings)


def _run_once(task: Task, run: Run, folder: Path) -> Record:
    """Reads the record of a run, or runs it and writes the record."""
    name = f"{run.optimizer}-{run.learning_rate:g}-{run.split}-{run.seed}.json"
    path = folder / "runs" / name
    record = report.load(path)
    if record is None or record.run != run:
        record = train(task, run)
        report.save(record, path)
    return record


def mean_seconds(
    task: Task, names: Sequence[str], settings: Settings
) -> dict[str, float]:
    """Returns the mean step of a period of each optimizer, the median of periods."""
    means = overhead.measure(task, names, task.draw(0), settings, ROUNDS)
    return {name: float(np.median(mean)) for name, mean in means.items()}


def markdown(
    task: Task,
    tried: dict[str, list[Record]],
    final: list[list[Record]],
    seconds: dict[str, float],
) -> str:
    """Returns the two tables of a sweep as Markdown; `seconds` are those of a step."""
    run = final[0][0].run
    target = task.target(run.steps)
    aim = "no target" if target is None else f"target {target:g}"
    settings = f"block size {run.settings.block_size}, "
    settings += f"refresh every {run.settings.refresh_every}"
    return "\n".join(
        [
            f"# {task.dataset.name}: {task.metric}, {run.steps} steps, {aim}\n",
            f"All but AdamW: {settings}; Muon has whole matrices. "
            f"Evaluated every {EVAL_EVERY} steps.\n",
            f"## At the chosen rates, {len(final[0])} seeds, test data\n",
            "A second line of an optimizer: at the rate of `benchmarks.train`. "
            "Seconds: mean steps to the target times the step, which is the mean of a "
            f"period, the median of {ROUNDS} periods, in turns on {os.cpu_count()} CPU "
            "cores.\n",
            *_final_table(final, seconds),
            "\n## The rates, one seed, held-out data\n",
            *_rates_table(tried),
            "",
        ]
    )


def _final_table(final: list[list[Record]], seconds: dict[str, float]) -> list[str]:
    head = ["optimizer", "rate", "steps to target", "mean", "step (ms)"]
    head += ["seconds to target", "final metric", "state bytes"]
    rows = [_final_row(records, seconds[records[0].run.optimizer]) for records in final]
    return _rows([head, ["---"] * len(head), *rows])


def _final_row(records: list[Record], seconds: float) -> list[str]:
    reached = [record.steps_to_target for record in records]
    mean = statistics.fmean(reached) if all(reached) else None
    return [
        records[0].run.optimizer,
        f"{records[0].run.learning_rate:g}",
        ", ".join(str(steps or "-") for steps in reached),
        f"{mean:.0f}" if mean else "-",
        f"{1e3 * seconds:.1f}",
        f"{mean * seconds:.1f}" if mean else "-",
        mean_and_deviation([record.final for record in records]),
        f"{records[0].state_bytes:,}",
    ]


def mean_and_deviation(values: Sequence[float]) -> str:
    """Returns the mean and the sample's standard deviation, `92.20 ± 0.15`."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"


def _rates_table(tried: dict[str, list[Record]]) -> list[str]:
    head = ["optimizer", "rate", "steps to target", "final metric"]
    rows = [
        [
            name,
            f"{record.run.learning_rate:g}",
            str(record.steps_to_target or "-"),
            f"{record.final:.3f}",
        ]
        for name, records in tried.items()
        for record in records
    ]
    return _rows([head, ["---"] * len(head), *rows])


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def plot(final: list[list[Record]], path: Path) -> None:
    """Saves the test metric of every seed by step."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for color, records in enumerate(final):
        run = records[0].run
        for i, record in enumerate(records):
            label = f"{run.optimizer}, rate {run.learning_rate:g}" if i == 0 else None
            steps, _, metric = zip(*record.evaluations, strict=True)
            axes.plot(steps, metric, color=f"C{color}", label=label)
    report.decorate_metric(axes, final[0][0], "step")
    axes.set_title(final[0][0].dataset)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
