"""The main job on 1 device, on 8, and on 8 with directions that travel in bfloat16.

Each is a command of its own, since a process has one number of simulated devices. What
is not listed below is passed on to `python -m benchmarks.train`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.figure import Figure

from benchmarks import cli, report
from benchmarks.loop import Record
from benchmarks.optimizers import OPTIMIZERS
from shampoo_optax._tables import aligned

# Their names, and what they add to the command.
CASES = {
    "1 device": [],
    "8 devices": ["--devices", "8"],
    "8, bfloat16 wire": ["--devices", "8", "--wire", "bfloat16"],
}
Runs = dict[str, dict[str, Record]]  # {optimizer: {case: record}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all commands, and writes the table, the figure and the records."""
    parser = cli.Parser("benchmarks.compare_devices", __doc__)
    parser.add_argument(
        "--optimizer",
        nargs="+",
        choices=tuple(OPTIMIZERS),
        default=["shampoo", "soap", "adamw"],
        help="one or several (default: shampoo soap adamw)",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/devices"))
    options, passed = parser.parse_known_args(arguments)
    cli.make_folder(parser, options.out)
    runs: Runs = {name: {} for name in dict.fromkeys(options.optimizer)}
    for case, more in CASES.items():
        # AdamW's updates are computed on every device: there are none to send.
        names = [name for name in runs if name != "adamw" or "--wire" not in more]
        for record in run(["--optimizer", *names, *more, *passed]) if names else []:
            runs[record.run.optimizer][case] = record
    write(runs, options.out)


def run(arguments: Sequence[str]) -> list[Record]:
    """Runs the main job in a process of its own."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.train", *arguments]
        subprocess.run([*command, "--out", folder], check=True)
        (numbers,) = Path(folder).glob("*.json")
        return [report.record_of(fields) for fields in json.loads(numbers.read_text())]


def write(runs: Runs, folder: Path) -> None:
    """Writes and prints what the runs have shown."""
    records = [record for cases in runs.values() for record in cases.values()]
    numbers = [report.summary(record) for record in records]
    (folder / "runs.json").write_text(json.dumps(numbers) + "\n")
    plot(runs, folder / "results.png")
    text = markdown(runs)
    (folder / "results.md").write_text(text)
    print(text)


def markdown(runs: Runs) -> str:
    """Returns the table, with the distances between curves."""
    first = next(iter(next(iter(runs.values())).values()))
    head = ["optimizer", "devices", "loss (nats)", "to 1 device", "curve", "to 8"]
    head += [first.metric, f"steps to {first.target or 'target'}", "state bytes"]
    rows = [
        [name, case, *_row(record, cases)]
        for name, cases in runs.items()
        for case, record in cases.items()
    ]
    return f"""# The main job on simulated devices: {first.dataset}

`python -m benchmarks.compare_devices`, {first.run.steps} steps, seed {first.run.seed}.

```
{aligned(head, *rows)}
```

Loss: of the test data after the last step. To 1 device, to 8: how far that loss is from
the one on 1 device, and from the one on 8 with float32. Curve: the largest distance of
the training loss, in means of 10 steps, to that on 1 device. State bytes: of a device.

The mean over a divided batch is rounded otherwise, and training enlarges last bits: how
much, AdamW shows, whose update is the same on every device.
"""


def _row(record: Record, cases: dict[str, Record]) -> list[str]:
    one, eight, *_ = cases.values()
    wired = record.run.settings.wire is not None
    return [
        f"{final_loss(record):.4f}",
        f"{100 * (final_loss(record) / final_loss(one) - 1):+.2f}%",
        f"{100 * distance(record, one):.2f}%",
        f"{100 * (final_loss(record) / final_loss(eight) - 1):+.2f}%" if wired else "-",
        f"{record.final:.4f}",
        str(record.steps_to_target or "-"),
        f"{record.state_bytes:,}",
    ]


def final_loss(record: Record) -> float:
    """Returns the evaluated loss after the last step."""
    return record.evaluations[-1][1]


def distance(record: Record, other: Record) -> float:
    """Returns the largest relative distance of two smoothed training curves."""
    (_, mine), (_, theirs) = report.smooth(record.losses), report.smooth(other.losses)
    return float(np.max(np.abs(mine - theirs) / theirs))


def plot(runs: Runs, path: Path) -> None:
    """Saves the training loss of every run by step, one panel an optimizer."""
    figure = Figure(figsize=(4.5 * len(runs), 4.2), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (name, cases) in zip(panels, runs.items(), strict=True):
        for case, style in zip(cases, ("-", "--", ":"), strict=False):
            axes.plot(*report.smooth(cases[case].losses), style, label=case)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("training loss (nats)")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
