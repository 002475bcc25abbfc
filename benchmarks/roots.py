"""Time and error of the inverse roots: `python -m benchmarks.roots`.

Factors are G Gᵀ of Gaussian gradients that are up to a thousand times as large in some
directions as in others, divided by their largest eigenvalue; the ridge is 1e-5. For
every method, side and number of factors in a batch: milliseconds a factor (the median
of some rounds in which the compiled calls take turns), turns of the iteration, and the
error against float64, relative to the largest entry of the root.

The rule for the default. On CPU it is `Eigh`: from side 128 on it is two to six times
as fast as an iteration, and at smaller sides about as fast. A decomposition costs about
five matrix products of its side there, an iteration that converges 60 to 100 of them.
An accelerator runs a batch of products many times as fast as a batch of decompositions,
which turns the order round: run this command on it, and take the fastest row. The error
does not speak against an iteration: products keep small eigenvalues better than
a decomposition in float32 does, by a factor of five to ten here. The default of the
package is `Eigh()` everywhere, since it alone takes every exponent, and every factor
without regard to its condition.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

import shampoo_optax as so
from benchmarks.cli import Parser, make_folder, positive_int
from shampoo_optax._config import Root
from shampoo_optax._roots import inverse_roots
from shampoo_optax._tables import aligned

matplotlib.use("Agg")

METHODS = {
    "Eigh": so.Eigh(),
    "CoupledNewton": so.CoupledNewton(),
    "HigherOrderNewton(2)": so.HigherOrderNewton(order=2),
    "HigherOrderNewton(3)": so.HigherOrderNewton(order=3),
    "HigherOrderNewton(4)": so.HigherOrderNewton(order=4),
    "NewtonDB": so.NewtonDB(),
}
RIDGE = 1e-5
ROUNDS, ENOUGH = 51, 8.0  # of all methods, or seconds after which no other is begun


@dataclass(frozen=True)
class Measurement:
    """What one method took on one batch."""

    method: str
    side: int
    batch: int
    milliseconds: float  # a factor
    turns: float  # the mean over the batch
    error: float  # the largest of the batch


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes it and the figure."""
    parser = Parser("benchmarks.roots", __doc__)
    options = _options(parser).parse_args(arguments)
    make_folder(parser, options.out)
    rows = [
        row
        for side in options.sides
        for batch in options.batches
        for row in measure(list(METHODS), side, batch, options.power)
    ]
    backend = jax.default_backend()
    title = f"# Inverse roots, p = {options.power}, float32, {backend}"
    text = table(rows)
    (options.out / f"{backend}-p{options.power}.md").write_text(
        f"{title}\n\n`{' '.join(['python -m benchmarks.roots', *_given(arguments)])}`"
        f"\n\n```\n{text}\n```\n"
    )
    plot(rows, title[2:], options.out / f"{backend}-p{options.power}.png")
    print(text)


def _options(parser: Parser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--sides",
        nargs="+",
        type=positive_int,
        default=[32, 64, 128, 256, 512],
        help="default: 32 64 128 256 512",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        type=positive_int,
        default=[1, 8],
        help="numbers of factors (default: 1 8)",
    )
    parser.add_argument(
        "--power",
        type=int,
        choices=(1, 2, 4, 8),
        default=4,
        help="the p of the inverse p-th roots (default: 4)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/roots"),
        help="default: benchmarks/results/roots",
    )
    return parser


def _given(arguments: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if arguments is None else arguments)


def measure(
    methods: Sequence[str], side: int, batch: int, power: int
) -> list[Measurement]:
    """Times compiled calls in turns, and compares their roots with float64."""
    factors, exact = factors_of(side, batch, power)
    calls = {name: _compiled(METHODS[name], factors, power) for name in methods}
    results = {name: jax.block_until_ready(calls[name](factors)) for name in methods}
    seconds, began = {name: [] for name in methods}, time.perf_counter()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(factors))
            seconds[name].append(time.perf_counter() - start)
        if time.perf_counter() > began + ENOUGH:
            break

    def found(name: str) -> Measurement:
        roots, _, turns = results[name]
        errors = np.max(np.abs(roots - exact), (1, 2)) / np.max(np.abs(exact), (1, 2))
        milliseconds = 1e3 * statistics.median(seconds[name]) / batch
        turns, error = float(np.mean(turns)), float(np.max(errors))
        return Measurement(name, side, batch, milliseconds, turns, error)

    return [found(name) for name in methods]


def _compiled(root: Root, factors: jax.Array, power: int) -> Callable:
    exponents = np.full(len(factors), 1 / power)

    def compute(batch: jax.Array) -> tuple[jax.Array, ...]:
        return inverse_roots(batch, exponents, root, RIDGE, 0.0)

    return jax.jit(compute).lower(factors).compile()


@functools.cache
def factors_of(side: int, batch: int, power: int) -> tuple[jax.Array, np.ndarray]:
    """Returns factors in float32 and the roots of what they are, in float64."""
    rng = np.random.default_rng(side)
    frame = np.linalg.qr(rng.standard_normal((side, side)))[0]
    frame *= 10.0 ** -np.linspace(0, 3, side)
    gradients = frame @ rng.standard_normal((batch, side, 2 * side))
    sums = gradients @ gradients.transpose(0, 2, 1)
    factors = np.float32(sums / np.linalg.norm(sums, 2, axis=(1, 2), keepdims=True))
    values, vectors = np.linalg.eigh(factors.astype(np.float64))
    values = values + RIDGE
    exact = (vectors * values[:, None] ** (-1 / power)) @ vectors.transpose(0, 2, 1)
    return jnp.asarray(factors), exact


def table(rows: Sequence[Measurement]) -> str:
    """Returns an aligned table, one line a measurement."""
    head = ["side", "batch", "method", "ms a factor", "against Eigh", "turns", "error"]
    eigh = {(r.side, r.batch): r.milliseconds for r in rows if r.method == "Eigh"}
    lines = [
        [
            str(row.side),
            str(row.batch),
            row.method,
            f"{row.milliseconds:.3f}",
            f"{row.milliseconds / eigh[row.side, row.batch]:.2f}x",
            f"{row.turns:.0f}" if row.turns else "-",
            f"{row.error:.0e}",
        ]
        for row in rows
    ]
    return aligned(head, *lines)


def plot(rows: Sequence[Measurement], title: str, path: Path) -> None:
    """Saves time and error by side, for the largest batch."""
    batch = max(row.batch for row in rows)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in METHODS:
        own = [row for row in rows if (row.method, row.batch) == (method, batch)]
        sides = [row.side for row in own]
        left.loglog(sides, [r.milliseconds for r in own], marker=".", label=method)
        right.loglog(sides, [row.error for row in own], marker=".", label=method)
    left.set(xlabel="side", ylabel=f"ms a factor, {batch} at a time", title=title)
    right.set(xlabel="side", ylabel="error against float64")
    sides = sorted({row.side for row in rows})
    for axes in (left, right):
        axes.set_xticks(sides, labels=map(str, sides))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
