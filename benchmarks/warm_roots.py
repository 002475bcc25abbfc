"""Whether previous roots are good starts: `python -m benchmarks.warm_roots`.

A factor L is a moving average of G Gᵀ (b2 = 0.99) and its root is refreshed every 10
steps, with the relative ridge 1e-6, in float32. The coupled Newton iteration for
:math:`A^{-1/p}` is started from a multiple of the identity (cold) and from c X' with
the exact previous root X' (warm), where the power iteration gives the c with which
:math:`c^p A X'^p` has no eigenvalue much above 1. Turns, and the residual, the largest
entry of |A X^p - I|, are medians over refreshes.

What it shows: an inverse, p = 1, needs 3 to 5 turns in the place of 7 to 24, and has
the same residual. For p > 1 the warm iteration ends as early, at a matrix that is no
root: its M is the identity, but M = A X^p holds only where X and A commute, which
A and the root of an older A do not. The residual is a hundred times that of the
cold start where the factor is well-conditioned, and ten thousand times and more
where it is not. So `warm_start` of `CoupledNewton` and `HigherOrderNewton` is for the
exponent 1 alone. `NewtonDB` has none: its Z goes to U A^{-1/2} with U orthogonal.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.cli import Parser, make_folder
from shampoo_optax._tables import aligned

SIDES, POWERS = (64, 256), (1, 2, 4, 8)
RIDGE, B2, EVERY, REFRESHES, SKIPPED = 1e-6, 0.99, 10, 20, 6


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = Parser("benchmarks.warm_roots", __doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/roots"))
    out = parser.parse_args(arguments).out
    make_folder(parser, out)
    head = ["side", "rank of G", "condition", "p", "cold turns", "residual"]
    rows = [
        row
        for side in SIDES
        for rank, decades in ((side, 0), (side // 4, 0), (side, 3), (16, 3))
        for row in follow(side, rank, decades)
    ]
    text = aligned([*head, "warm turns", "residual"], *rows)
    title = "# Coupled Newton from the identity and from the previous root"
    (out / "warm_start.md").write_text(f"{title}\n\n```\n{text}\n```\n")
    print(text)


def follow(side: int, rank: int, decades: float) -> list[list[str]]:
    """Follows one factor, whose gradient's rows differ by so many powers of ten."""
    rng = np.random.default_rng(side)
    frame = np.linalg.qr(rng.standard_normal((side, side)))[0]
    frame *= 10.0 ** (-decades * np.linspace(0, 1, side))
    factor, previous = np.zeros((side, side)), {}
    found = {power: [] for power in POWERS}
    for _ in range(REFRESHES):
        for _ in range(EVERY):
            gradient = frame @ rng.standard_normal((side, rank))
            factor = B2 * factor + (1 - B2) * gradient @ gradient.T
        lifted = with_ridge(factor)
        values, vectors = np.linalg.eigh(lifted.astype(np.float64))
        for power in POWERS:
            if power in previous:
                found[power].append(cold_and_warm(lifted, previous[power], power))
            exact = (vectors * values ** (-1 / power)) @ vectors.T
            previous[power] = np.float32(exact)
    condition = f"{values[-1] / values[0]:.0e}"
    return [
        [str(side), str(rank), condition, str(power), *medians(found[power])]
        for power in POWERS
    ]


def medians(rows: list[tuple]) -> list[str]:
    """Returns the medians after the first refreshes, as text."""
    turns, residual, warm_turns, warm_residual = np.median(rows[SKIPPED:], axis=0)
    cold = [f"{turns:.0f}", f"{residual:.0e}"]
    return [*cold, f"{warm_turns:.0f}", f"{warm_residual:.0e}"]


def with_ridge(factor: np.ndarray) -> np.ndarray:
    """Returns the factor at norm 1 with its ridge, in float32."""
    scaled = factor / np.trace(factor)
    ridge = RIDGE * np.max(np.sum(np.abs(scaled), axis=1))
    return np.float32(scaled + ridge * np.eye(len(scaled)))


def cold_and_warm(matrix: np.ndarray, previous: np.ndarray, power: int) -> tuple:
    """Returns turns and residual of the cold start, then of the warm one."""
    identity = np.eye(len(matrix), dtype=np.float32)
    scale = np.float32((power + 1) / (2 * np.linalg.norm(matrix)))
    product = matrix @ np.linalg.matrix_power(previous, power)
    shrink = np.float32(1 / largest_eigenvalue(product))
    root = np.float32(1 / power)
    return (
        *newton(matrix, scale**root * identity, scale * matrix, power),
        *newton(matrix, shrink**root * previous, shrink * product, power),
    )


def newton(
    matrix: np.ndarray, root: np.ndarray, product: np.ndarray, power: int
) -> tuple[int, float]:
    """Iterates as `CoupledNewton` does; returns turns and residual."""
    identity = np.eye(len(matrix), dtype=np.float32)
    error, turns = np.max(np.abs(product - identity)), 0
    while error > 1e-6 and turns < 100:
        factor = ((power + 1) * identity - product) / np.float32(power)
        root = root @ factor
        product = np.linalg.matrix_power(factor, power) @ product
        before, error = error, np.max(np.abs(product - identity))
        turns += 1
        if turns > 1 and (error > 1.2 * before or error == before < 1e-3):
            break
    powered = np.linalg.matrix_power(root.astype(np.float64), power)
    return turns, float(np.max(np.abs(matrix @ powered - identity)))


def largest_eigenvalue(matrix: np.ndarray, turns: int = 10) -> float:
    """Returns the estimate of a power iteration."""
    rows, columns = np.arange(1, len(matrix) + 1), np.arange(1, 5)
    vectors = np.cos(rows[:, None] * columns)
    for _ in range(turns):
        vectors = matrix @ (vectors / np.linalg.norm(vectors, axis=0))
    return float(np.max(np.linalg.norm(vectors, axis=0)))


if __name__ == "__main__":
    main()
