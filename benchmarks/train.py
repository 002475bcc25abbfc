"""The main job: trains one model with several optimizers and compares them."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
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
    cli.check_devices(parser, task, options)
    cli.make_folder(parser, options.out)
    runs = [_run(task, name, options) for name in dict.fromkeys(options.optimizer)]
    print(_headline(task, runs[0]))
    records = [train(task, run) for run in runs]
    print(f"\n{report.table(records)}\n")
    _write(records, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser("benchmarks.train", __doc__)
    cli.add_common(parser)
    cli.add_devices(parser)
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
    settings = replace(
        cli.settings_of(task, options), devices=options.devices, wire=options.wire
    )
    return Run(
        optimizer=optimizer,
        learning_rate=options.learning_rate or RATES[task.name][optimizer],
        steps=options.steps or task.steps,
        seed=options.seed,
        eval_every=options.eval_every,
        split="test",
        settings=settings,
    )


def _headline(task: Task, run: Run) -> str:
    target, devices = task.target(run.steps), run.settings.devices
    aim = "no target is set for these data" if target is None else f"target {target:g}"
    if devices > 1:
        wire = run.settings.wire or "float32"
        aim += f"; {devices} devices, directions travel in {wire}"
    return f"{task.name}: {task.dataset.name}, {run.steps} steps, {task.metric}; {aim}"


def _write(records: Sequence[Record], folder: Path) -> None:
    path = folder / f"{records[0].dataset}.png"
    report.plot(records, path)
    numbers = [report.summary(record) for record in records]
    path.with_suffix(".json").write_text(json.dumps(numbers) + "\n")
    print(f"Curves: {path}\nNumbers: {path.with_suffix('.json')}")


if __name__ == "__main__":
    main()
