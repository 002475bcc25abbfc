"""How the update's program grows with the number of equal matrices.

Traced decompositions, lines of compiled HLO (without its tables of source names), and
the time to trace and compile (best of
three, taken in turns in one process) for 8 and for 64 matrices.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shampoo_optax as so
from benchmarks.hlo import lines_of
from shampoo_optax._tables import aligned

COUNTS = (8, 64)
SHAPE = (96, 64)
ROUNDS = 3
TRANSFORMS = {
    "shampoo": lambda: so.shampoo(1e-3),
    "soap": lambda: so.soap(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/program_size.md")
    )
    out = parser.parse_args(arguments).out
    rows = [row for name in TRANSFORMS for row in measure(name)]
    head = ["optimizer", "matrices", "eigh", "HLO lines", "trace + compile (s)"]
    text = aligned(head, *rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    title = f"# Program size: matrices of {SHAPE[0]} x {SHAPE[1]}, float32"
    out.write_text(f"{title}\n\n```\n{text}\n```\n")
    print(text)


def measure(name: str) -> list[list[str]]:
    """Returns a row for each number of matrices, and their ratio."""
    best = {count: (0, 0, float("inf")) for count in COUNTS}
    for _ in range(ROUNDS):
        for count in COUNTS:
            best[count] = min(
                best[count], compile_once(name, count), key=lambda m: m[2]
            )
    rows = [
        [name, str(count), str(eigh), str(lines), f"{seconds:.2f}"]
        for count, (eigh, lines, seconds) in best.items()
    ]
    few, many = (best[count] for count in COUNTS)
    ratios = ["", f"{many[1] / few[1]:.2f}x", f"{many[2] / few[2]:.2f}x"]
    return [*rows, [name, "ratio", *ratios]]


def compile_once(name: str, count: int) -> tuple[int, int, float]:
    """Returns the eigendecompositions, HLO lines and seconds of one compilation."""
    transform = TRANSFORMS[name]()
    params = {str(index): jnp.ones(SHAPE) for index in range(count)}
    state = transform.init(params)

    def update(updates: Any, state: Any, params: Any) -> Any:
        return transform.update(updates, state, params)

    began = time.perf_counter()
    traced = jax.jit(update).trace(params, state, params)
    compiled = traced.lower().compile()
    seconds = time.perf_counter() - began
    eigh = str(traced.jaxpr).count("= eigh[")
    return eigh, lines_of(compiled.as_text()).program, seconds


if __name__ == "__main__":
    main()
