"""Steps beside those of the official PyTorch package: `... benchmarks.compare_torch`.

A process of each kind stays in memory, and they take their steps in turns, so that one
works while the others wait. XLA has as many threads as there are cores, with
`OPENBLAS_NUM_THREADS=1`, torch those that `--torch-threads` says: MKL's
eigendecompositions take many times as long with two where anything else runs. The same
shapes (kernels of convolutions laid out as each package has them) and normal gradients
that are new at every step, float32, Adam grafting, roots by eigendecomposition, one
refresh in ten steps. `official` is the package as it comes, which keeps triangles of
its matrices, as `like for like` does; `lean` has no factors of vectors, statistics of
each fifth gradient, and whole matrices. The mean is that of a period of ten steps;
ratios are medians, over the rounds, of ratios within a round. Every step ends with the
new parameters, in the place of the old ones.

It takes a Python with torch, and a checkout of facebookresearch/optimizers.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.cli import Parser, make_folder, positive_int
from benchmarks.contenders import BASE, BESIDE_TORCH
from benchmarks.periods import (
    ALIKE,
    LAST,
    plain_and_refresh,
    ratio_of,
    round_means,
)
from benchmarks.shapes import SMALL, SUITE
from benchmarks.timing import collect, in_turns
from shampoo_optax._tables import aligned

OFFICIAL = "official"
TORCH = {"torch.optim.AdamW": ALIKE, OFFICIAL: LAST, "official, unpacked": LAST}
OURS = {name: contender.weights for name, contender in BESIDE_TORCH.items()}
WEIGHTS = TORCH | OURS
DEFAULT = ["torch.optim.AdamW", BASE, OFFICIAL, "ours, like for like", "ours, lean"]
WARM_UP = 4  # steps, a multiple of every short period
# Threads of OpenMP spin for a while after their work.
PAUSE = 0.3
HEAD = ["optimizer", "mean (ms)", "step", "refresh", f"mean / {OFFICIAL}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the tables and writes them with all numbers."""
    parser = _parser()
    options = parser.parse_args(arguments)
    make_folder(parser, options.out)
    parts, numbers = ["# Beside the official PyTorch package", __doc__.strip()], {}
    for model in options.models:
        seconds = measure(model, options)
        numbers[model] = seconds
        head = f"{model}, blocks of {options.block_size}, {options.rounds} rounds, "
        head += f"torch with {options.torch_threads} threads"
        parts.append(f"{head}\n\n```\n{table(seconds)}\n```")
        print(parts[-1])
    (options.out / "torch.json").write_text(json.dumps(numbers) + "\n")
    (options.out / "torch.md").write_text("\n\n".join(parts) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("benchmarks.compare_torch", __doc__)
    parser.add_argument(
        "--torch-python", type=Path, required=True, help="a Python that has torch"
    )
    parser.add_argument(
        "--torch-repo",
        type=Path,
        required=True,
        help="the folder that holds `distributed_shampoo`",
    )
    parser.add_argument(
        "--torch-threads", type=positive_int, default=2, help="default: 2"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(SUITE | SMALL),
        default=["ResNet-50", "GPT 6x384"],
        help="default: ResNet-50 and GPT 6x384",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=tuple(WEIGHTS),
        default=DEFAULT,
        help="default: all but those that say unpacked",
    )
    parser.add_argument(
        "--block-size", type=positive_int, default=1024, help="default: 1024"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=7, help="of four steps (default: 7)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser


def measure(model: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of the steps of each kind, after the first few."""
    turns = WARM_UP + options.rounds * round_length(options.kinds)
    with contextlib.ExitStack() as stack:
        # They end where their input is closed.
        workers = {
            kind: stack.enter_context(start(model, kind, options))
            for kind in options.kinds
        }
        steps = {
            kind: functools.partial(ask, worker, kind)
            for kind, worker in workers.items()
        }
        pairs = in_turns(steps, range(1, turns + 1))
        bar = tqdm(pairs, desc=model, total=turns * len(steps), unit="step")
        seconds = collect(bar)
    return {kind: spent[WARM_UP:] for kind, spent in seconds.items()}


def round_length(kinds: Sequence[str]) -> int:
    """Returns the number of steps that hold whole short periods of all."""
    return math.lcm(*(len(WEIGHTS[kind]) for kind in kinds))


def start(model: str, kind: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Starts the process of one kind."""
    here = Path(__file__).parents[1]
    paths, python, module = [here], Path(sys.executable), "benchmarks.jax_worker"
    if kind in TORCH:
        paths.append(options.torch_repo.absolute())
        python, module = options.torch_python.absolute(), "benchmarks.torch_worker"
    numbers = [str(options.block_size), str(options.torch_threads)]
    return subprocess.Popen(
        [str(python), "-m", module, model, kind, *numbers],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(worker: subprocess.Popen[str], kind: str, turn: int) -> float:
    """Lets a process take a step, and returns its seconds."""
    time.sleep(PAUSE)
    worker.stdin.write(f"{turn}\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process of {kind!r} ended: {worker.wait()}")
    return float(answer)


def table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Returns the aligned table of a model."""
    length = round_length(list(seconds))
    means = {k: round_means(v, WEIGHTS[k], length) for k, v in seconds.items()}
    rows = []
    for kind, spent in seconds.items():
        plain, refresh = plain_and_refresh(spent, WEIGHTS[kind])
        over = OFFICIAL in means
        rows.append(
            [
                kind,
                f"{1e3 * np.median(means[kind]):.2f}",
                f"{1e3 * plain:.2f}",
                "-" if refresh is None else f"{1e3 * refresh:.2f}",
                f"{ratio_of(means[kind], means[OFFICIAL]):.2f}x" if over else "-",
            ]
        )
    return aligned(HEAD, *rows)


if __name__ == "__main__":
    main()
