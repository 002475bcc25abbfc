"""Tables, figures and JSON files made from the records of runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.loop import Record, Run
from benchmarks.optimizers import Settings
from shampoo_optax._tables import aligned

matplotlib.use("Agg")


def table(records: Sequence[Record]) -> str:
    """Returns an aligned table, one line a run."""
    first = records[0]
    unit = "%" if first.metric == "accuracy" else ""
    aim = "target" if first.target is None else f"{first.target:g}{unit}"
    head = ["optimizer", "rate", "loss (nats)", first.metric]
    head += [f"steps to {aim}", f"s to {aim}", "median ms", "mean ms", "state bytes"]
    return aligned(head, *(_row(record, unit) for record in records))


def _row(record: Record, unit: str) -> list[str]:
    seconds = record.seconds_to_target
    return [
        record.run.optimizer,
        f"{record.run.learning_rate:g}",
        f"{record.evaluations[-1][1]:.4f}",
        f"{record.final:.2f}{unit}" if unit else f"{record.final:.4f}",
        str(record.steps_to_target or "not reached" if record.target else "-"),
        f"{seconds:.1f}" if seconds is not None else "-",
        f"{1e3 * record.median_step:.1f}",
        f"{1e3 * record.mean_step:.1f}",
        f"{record.state_bytes:,}",
    ]


def plot(records: Sequence[Record], path: Path) -> None:
    """Saves the training loss by step and the evaluated metric by seconds."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for record in records:
        left.plot(*smooth(record.losses), label=record.run.optimizer)
        right.plot(*metric_by_seconds(record), marker=".", label=record.run.optimizer)
    left.set(xlabel="step", ylabel="training loss (nats)", title=records[0].dataset)
    decorate_metric(right, records[0], "training time (s)")
    left.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=120)


def decorate_metric(axes: Axes, record: Record, xlabel: str) -> None:
    """Labels an axis pair on which a record's metric is drawn."""
    unit = " (%)" if record.metric == "accuracy" else ""
    axes.set(xlabel=xlabel, ylabel=f"{record.run.split} {record.metric}{unit}")
    if record.target is not None:
        axes.axhline(record.target, color="gray", linestyle=":", label="target")
    axes.grid(alpha=0.3)
    axes.legend()


def metric_by_seconds(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of training at each evaluation, and the metric there."""
    seconds = np.cumsum(record.step_seconds)
    steps = [step for step, _, _ in record.evaluations]
    return seconds[np.array(steps) - 1], np.array([m for *_, m in record.evaluations])


def smooth(losses: Sequence[float], window: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and the mean loss of the `window` steps that end there."""
    window = min(window, len(losses))
    means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    return np.arange(window, len(losses) + 1), means


def save(record: Record, path: Path) -> None:
    """Writes a record as JSON; a run that is stopped leaves no half-written file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(summary(record)) + "\n")
    unfinished.replace(path)


def summary(record: Record) -> dict[str, object]:
    """Returns a record as plain data, rounded to what a reader can use."""
    return asdict(record) | {
        "losses": [round(loss, 4) for loss in record.losses],
        "step_seconds": [round(seconds, 5) for seconds in record.step_seconds],
        "final": record.final,
        "median_step_seconds": record.median_step,
        "mean_step_seconds": record.mean_step,
    }


def load(path: Path) -> Record | None:
    """Reads a record back, or returns None where there is no such file."""
    if not path.is_file():
        return None
    return record_of(json.loads(path.read_text()))


def record_of(fields: dict[str, Any]) -> Record:
    """Makes a record of what :func:`summary` gave."""
    settings = Settings(**fields["run"]["settings"])
    known = {name: fields[name] for name in Record.__dataclass_fields__}
    return Record(**known | {"run": Run(**fields["run"] | {"settings": settings})})
