"""The main job: trains one model with several optimizers and compares them."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cli, report
from benchmarks.loop import Record, Run, train
from benchmarks.optimizers import RATES
from benchmarks.tasks import Task


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, prints the table and writes the files."""
    parser = _parser()
    options = parser.parse_args(arguments)
    task = cli.task_of(parser, options)
    cli.make_folder(parser, options.out)
    runs = [_run(task, name, options) for name in dict.fromkeys(options.optimizer)]
    print(_headline(task, runs[0].steps))
    records = [train(task, run) for run in runs]
    print(f"\n{report.table(records)}\n")
    _write(records, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser("benchmarks.train", __doc__)
    cli.add_common(parser)
    parser.add_argument(
        "--learning-rate",
        type=cli.positive_float,
        help="the highest of the schedule, for every optimizer that is run "
        "(default: each one's own)",
    )
    parser.add_argument("--seed", type=cli.count, default=0, help="default: 0")
    parser.add_argument(
        "--eval-every", type=cli.positive_int, default=50, help="default: 50 steps"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="a folder (default: out)"
    )
    return parser


def _run(task: Task, optimizer: str, options: argparse.Namespace) -> Run:
    return Run(
        optimizer=optimizer,
        learning_rate=options.learning_rate or RATES[task.name][optimizer],
        steps=options.steps or task.steps,
        seed=options.seed,
        eval_every=options.eval_every,
        split="test",
        settings=cli.settings_of(task, options),
    )


def _headline(task: Task, steps: int) -> str:
    target = task.target(steps)
    aim = "no target is set for these data" if target is None else f"target {target:g}"
    return f"{task.name}: {task.dataset.name}, {steps} steps, {task.metric}; {aim}"


def _write(records: Sequence[Record], folder: Path) -> None:
    path = folder / f"{records[0].dataset}.png"
    report.plot(records, path)
    numbers = [report.summary(record) for record in records]
    path.with_suffix(".json").write_text(json.dumps(numbers) + "\n")
    print(f"Curves: {path}\nNumbers: {path.with_suffix('.json')}")


if __name__ == "__main__":
    main()
