r"""What following eigenvectors costs and gives: `python -m benchmarks.warm_bases`.

A factor is a moving average of :math:`G G^\top` (b2 = 0.99). The eigenvectors of G's
distribution turn a little at each step, and the variances along them fall as 1/k. Each
method follows the factor from its basis of the refresh before: the eigenvectors anew, a
QR iteration, or the orthogonal iteration by two Cholesky decompositions, all with the
places that columns get at a refresh of SOAP. They take their refreshes in turns in one
process, float32, one factor at a time.

The time is the median of the refreshes after the first, whose old basis is exact for
all. The share is the norm off the diagonal of :math:`Q^\top L Q` over that of all.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import shampoo_optax as so
from benchmarks.cli import Parser, make_folder, positive_int
from benchmarks.timing import Step, timed
from shampoo_optax._eigen import eigenbases
from shampoo_optax._eigen_methods import Basis
from shampoo_optax._orthogonal import align
from shampoo_optax._tables import aligned

BASES = (so.EighBasis(), so.QRBasis(1, 0.0), so.CholeskyBasis())
B2, PERIOD, LEAST = 0.99, 10, 0.71


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    make_folder(parser, options.out)
    rows = [row for side in options.sides for row in follow(side, options.refreshes)]
    head = ["side", "basis", "ms", "against EighBasis", "share off the diagonal"]
    text = aligned(head, *rows)
    title = f"# Bases from those of the refresh before, on {jax.default_backend()}"
    note = f"{__doc__.strip()}\n\n{options.refreshes} refreshes."
    report = f"{title}\n\n{note}\n\n```\n{text}\n```\n"
    (options.out / "warm_bases.md").write_text(report)
    print(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("benchmarks.warm_bases", __doc__)
    parser.add_argument(
        "--sides",
        nargs="+",
        type=positive_int,
        default=[96, 384, 1024],
        help="default: 96 384 1024",
    )
    parser.add_argument(
        "--refreshes", type=positive_int, default=9, help="timed (default: 9)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/roots"))
    return parser


def follow(side: int, refreshes: int) -> list[list[str]]:
    """Returns a line for each basis that follows a factor of this side."""
    factors = drifting(side)
    start = np.linalg.eigh(next(factors))[1]
    held = [jnp.asarray(start, jnp.float32)[None] for _ in BASES]
    steps = [stepper(basis, held, row) for row, basis in enumerate(BASES)]
    seconds, shares = np.zeros((2, len(BASES), 1 + refreshes))
    for turn in tqdm(range(1 + refreshes), f"side {side}", unit="refresh"):
        factor = next(factors)
        matrices = jnp.asarray(factor, jnp.float32)[None]
        for row, step in enumerate(steps):
            seconds[row, turn] = step(matrices)
            shares[row, turn] = share_off_diagonal(factor, np.asarray(held[row][0]))
    times = np.median(seconds[:, 1:], axis=1)
    return [
        [
            str(side),
            type(basis).__name__,
            f"{1e3 * times[row]:.2f}",
            f"{np.median(seconds[row, 1:] / seconds[0, 1:]):.2f}x",
            f"{np.median(shares[row, 1:]):.4f}",
        ]
        for row, basis in enumerate(BASES)
    ]


def stepper(basis: Basis, held: list[jax.Array], row: int) -> Step:
    """Returns a timed refresh from factors, which replaces a row of the held bases."""

    @jax.jit
    def refresh(matrices: jax.Array, old: jax.Array) -> jax.Array:
        vectors, values, *_ = eigenbases(matrices, old, basis)
        if isinstance(basis, so.CholeskyBasis):  # which keeps places
            return vectors
        return align(old, vectors, values, LEAST)[0]

    def take(matrices: jax.Array) -> jax.Array:
        held[row] = refresh(matrices, held[row])
        return held[row]

    return timed(take)


def drifting(side: int) -> Iterator[np.ndarray]:
    """Yields the factor `[side, side]` at one refresh after another, in float64."""
    rng = np.random.default_rng(side)
    scales = np.arange(1, side + 1.0) ** -0.5
    skew = rng.standard_normal((side, side)) * 0.002 / np.sqrt(side)
    turn, _ = np.linalg.qr(np.eye(side) + skew - skew.T)
    vectors, _ = np.linalg.qr(rng.standard_normal((side, side)))
    factor = np.zeros((side, side))
    while True:
        for _ in range(PERIOD):
            noise = rng.standard_normal((side, 2 * side))
            gradient = vectors @ (scales[:, None] * noise)
            factor = B2 * factor + (1 - B2) * gradient @ gradient.T / (2 * side)
            vectors = turn @ vectors
        yield factor


def share_off_diagonal(factor: np.ndarray, basis: np.ndarray) -> float:
    """Returns the share of the norm that is off the diagonal in a basis."""
    rotated = basis.T.astype(float) @ factor @ basis
    off = rotated - np.diag(np.diag(rotated))
    return float(np.linalg.norm(off) / np.linalg.norm(rotated))


if __name__ == "__main__":
    main()
