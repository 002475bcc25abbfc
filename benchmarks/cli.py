"""Options that the commands share, and errors that fit on one line."""

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.mesh import provide
from benchmarks.optimizers import OPTIMIZERS, WIRES, Settings
from benchmarks.tasks import TASKS, Task, make_task


class Parser(argparse.ArgumentParser):
    """A parser that reports a bad value in one line."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m {name}",
            description=description,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Leaves with status 2, without the usage."""
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds what both commands understand."""
    parser.add_argument(
        "--task", choices=TASKS, default="text", help="default: text, verses as bytes"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a text file, a folder of MNIST-like idx files, or a CSV file of pixels "
        "and labels (default: packaged verses; installed Fashion-MNIST, else digits)",
    )
    parser.add_argument(
        "--optimizer",
        nargs="+",
        choices=tuple(OPTIMIZERS),
        default=["shampoo", "adamw"],
        help="one or several (default: shampoo adamw)",
    )
    parser.add_argument("--steps", type=positive_int, help="default: the task's own")
    parser.add_argument(
        "--block-size", type=positive_int, default=256, help="default: 256"
    )
    parser.add_argument(
        "--refresh-every", type=positive_int, default=10, help="default: 10 steps"
    )


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Adds what divides a run over several devices."""
    parser.add_argument(
        "--devices",
        type=positive_int,
        default=1,
        help="how many share every batch and the work of Shampoo and SOAP, simulated "
        "ones on CPU (default: 1)",
    )
    parser.add_argument(
        "--wire",
        choices=WIRES,
        help="the dtype in which directions travel between devices (default: float32)",
    )


def check_devices(
    parser: argparse.ArgumentParser, task: Task, options: argparse.Namespace
) -> None:
    """Provides the devices, or ends the command where they cannot be used."""
    count, batch = options.devices, len(next(task.draw(0)))
    if batch % count:
        parser.error(f"argument --devices: must divide the batch {batch}, got {count}")
    if count == 1 and options.wire:
        parser.error(f"argument --wire: needs --devices > 1, got {options.wire!r}")
    if count > 1 and count > (most := provide(count)):
        parser.error(f"argument --devices: must be at most {most} here, got {count}")


def task_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Task:
    """Builds the task, or ends the command where its data cannot be read."""
    try:
        return make_task(options.task, options.data)
    except (OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Makes the folder for results, or ends the command before anything is run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")


def settings_of(task: Task, options: argparse.Namespace) -> Settings:
    """Joins the task's own settings with those of the command line."""
    return Settings(
        weight_decay=task.weight_decay,
        block_size=options.block_size,
        refresh_every=options.refresh_every,
        clip=task.clip,
    )


def positive_int(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """Parses a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number > 0, got {text!r}")
    return value
