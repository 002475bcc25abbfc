"""The suite: what a step of each optimizer costs, beside `optax.adamw` and peers.

For the parameter shapes of a model, without its forward and backward pass. In each
group all optimizers take their steps in turns in one process, with gradients that are
new at every step and a donated state, float32, with one refresh in ten steps. The mean
is that of such a period. A ratio is the median, over the rounds, of ratios within a
round. Compilation is that of the update, with its tracing. Each model has a table, a
figure and a JSON file in the folder for results.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax
import matplotlib
import optax
from matplotlib.figure import Figure

from benchmarks.cli import Parser, make_folder, positive_int
from benchmarks.contenders import BASE, GROUPS, Group
from benchmarks.shapes import SMALL, SUITE, count
from benchmarks.suite import Result, Row, measure
from shampoo_optax._tables import aligned, human_bytes

matplotlib.use("Agg")

HEAD = ["optimizer", "mean (ms)", "ratio", "step (ms)", "refresh", "largest / step"]
HEAD += ["compile (s)", "HLO lines", "state", "bytes each"]
LEGEND = """\
Mean: of a period of 10 steps; ratio: that mean over the one of `optax.adamw`; step and
refresh: medians of the steps without and with, of staggered ones the median of all and
of the slowest of the ten; bytes each: of the state, for each parameter. Peers are as
their packages have them, with this period and this block size where they have one. In
the group of Muon all kernels are matrices, and vectors and tables of a vocabulary go to
AdamW. In the plain group nothing has a factor: AdamW for each group of the rules, and
Shampoo's grafting alone.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures model after model, and writes what was found after each."""
    parser = _parser()
    options = parser.parse_args(arguments)
    make_folder(parser, options.out)
    models = options.models or list(SMALL if options.small else SUITE)
    groups = {name: only(GROUPS[name], options.optimizers) for name in options.groups}
    side = options.block_size or (16 if options.small else 1024)
    for model in models:
        shapes = (SUITE | SMALL)[model]
        found = {
            name: measure(
                shapes,
                groups[name],
                side,
                options.rounds,
                f"{model}, {name}",
            )
            for name in groups
        }
        title = f"{model}: {count(shapes):,} parameters, blocks of {side}, "
        title += f"{options.rounds} rounds"
        save(options.out / slug(model), title, found)
        print(text(title, found))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("benchmarks", __doc__)
    parser.add_argument(
        "--small", action="store_true", help="a small model, in less than a minute"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(SUITE | SMALL),
        help=f"default: {', '.join(SUITE)}; with --small the small one",
    )
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=tuple(GROUPS),
        default=list(GROUPS),
        help="what is measured together (default: all)",
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=tuple(dict.fromkeys(n for g in GROUPS.values() for n in g.contenders)),
        help=f"beside {BASE} (default: all of each group)",
    )
    parser.add_argument(
        "--block-size", type=positive_int, help="default: 1024; with --small 16"
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=7,
        help="periods of each optimizer, of which medians are taken (default: 7)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/suite"),
        help="default: benchmarks/results/suite",
    )
    return parser


def only(group: Group, names: Sequence[str] | None) -> Group:
    """Leaves in a group what is named, and `BASE`."""
    kept = group.contenders
    if names is not None:
        kept = {name: c for name, c in kept.items() if name in (BASE, *names)}
    return replace(group, contenders=kept)


def slug(model: str) -> str:
    """Makes a model's name one of files."""
    return model.lower().replace(" ", "-").replace("/", "-")


def save(path: Path, title: str, found: dict[str, Result]) -> None:
    """Writes a table, a figure and all numbers, beside each other."""
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "optax": optax.__version__,
    }
    groups = {name: asdict(result) for name, result in found.items()}
    numbers = json.dumps({"title": title, "machine": machine, "groups": groups})
    path.with_suffix(".json").write_text(numbers + "\n")
    path.with_suffix(".md").write_text(f"# {text(title, found)}\n")
    plot(title, found, path.with_suffix(".png"))


def text(title: str, found: dict[str, Result]) -> str:
    """Returns the title, a table for each group, its ratios, and what did not run."""
    cores = f"{os.cpu_count()} CPU cores, jax {jax.__version__}, optax "
    parts = [title, cores + optax.__version__ + f".\n{LEGEND.strip()}"]
    parts += [f"{name}:\n\n```\n{table(r)}\n```" for name, r in found.items()]
    absent = {k: v for result in found.values() for k, v in result.absent.items()}
    if absent:
        notes = "\n".join(f"- {name}: {why}" for name, why in absent.items())
        parts.append(f"Not measured here:\n\n{notes}")
    return "\n\n".join(parts)


def table(result: Result) -> str:
    """Returns the aligned table of a group, and the ratios of its rivals."""
    lines = [aligned(HEAD, *map(cells, result.rows))]
    lines += [
        f"{ours} / {other}: {ratio:.2f}x, period by period"
        for ours, other, ratio in result.rivals
    ]
    return "\n".join(lines)


def cells(row: Row) -> list[str]:
    """Returns a line of the table."""
    return [
        row.name,
        f"{1e3 * row.mean:.2f}",
        f"{row.ratio:.2f}x",
        f"{1e3 * row.plain:.2f}",
        "-" if row.refresh is None else f"{1e3 * row.refresh:.2f}",
        f"{row.largest:.2f}x",
        f"{row.compilation:.1f}",
        f"{row.lines:,}",
        human_bytes(row.state_bytes),
        f"{row.bytes_each:.1f}",
    ]


def plot(title: str, found: dict[str, Result], path: Path) -> None:
    """Saves two rows of bars: time and memory."""
    rows = {BASE: found[next(iter(found))].rows[0]}
    for result in found.values():
        rows |= {row.name: row for row in result.rows if row.name not in rows}
    figure = Figure(figsize=(11, 1.2 + 0.35 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    ratios = [row.ratio for row in rows.values()]
    left.plot(ratios, list(rows), "o", color="tab:blue")
    for name, ratio in zip(rows, ratios, strict=True):
        left.annotate(
            f"{ratio:.3g}", (ratio, name), (7, -3), textcoords="offset points"
        )
    left.set(xscale="log", xlabel=f"mean step of a period, over that of {BASE}")
    left.margins(x=0.15)
    right.barh(list(rows), [row.bytes_each for row in rows.values()], color="tab:green")
    right.set(xlabel="bytes of state for each parameter")
    left.invert_yaxis()
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
