"""What the form of the state costs: bytes, and the time of a step without refresh.

All forms of a tree are compiled, and then take a step each, again and again in turns.
Times are medians; a ratio is the median of the ratios to the first form's step in the
same round, so that what else runs on the machine weighs on both. The memory of the
state is donated, as in training.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Read once, when the libraries start: before the first import of jax.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np

import shampoo_optax as so
from benchmarks.cli import positive_int
from benchmarks.shapes import Shapes
from shampoo_optax._tables import aligned, human_bytes

TREES: dict[str, Shapes] = {
    "one of 1024 x 1024": [(1024, 1024)],
    "8 of 512 x 512": [(512, 512)] * 8,
    "a layer of GPT-2 small": [
        *((768, 2304), (2304,), (768, 768), (768,)),
        *((768, 3072), (3072,), (3072, 768), (768,)),
        *[(768,)] * 4,
    ],
    "64 of 64 x 48, 64 of 48": [(64, 48), (48,)] * 64,
}
BFLOAT16 = dict(factors="bfloat16", roots="bfloat16")
FORMS = {
    "float32": so.Storage(),
    "float32 packed": so.Storage(packed=True),
    "bfloat16": so.Storage(**BFLOAT16),
    "bfloat16 packed": so.Storage(**BFLOAT16, packed=True),
    "bfloat16 packed, momentum": so.Storage(
        **BFLOAT16, momentum="bfloat16", packed=True
    ),
}
HEAD = ["tree", "state", "factors + roots", "ratio", "step (ms)", "ratio"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/storage.md")
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=101, help="steps of each (default: 101)"
    )
    parser.add_argument(
        "--tree", choices=TREES, nargs="+", default=list(TREES), help="default: all"
    )
    options = parser.parse_args(arguments)
    rows = [row for tree in options.tree for row in measure(tree, options.rounds)]
    text = aligned(HEAD, *rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    title = "# Storage: scale_by_shampoo(storage=...), a step without refresh"
    note = f"{__doc__.strip()}\nSteps of each form: {options.rounds}."
    options.out.write_text(f"{title}\n\n{note}\n\n```\n{text}\n```\n")
    print(text)


def measure(tree: str, rounds: int) -> list[list[str]]:
    """Returns a row for each form of the state of a tree."""
    rng = np.random.default_rng(0)
    grads = {
        str(index): jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for index, shape in enumerate(TREES[tree])
    }
    transforms = {name: transform(storage) for name, storage in FORMS.items()}
    seconds = times(transforms, grads, rounds)
    first, rows = next(iter(FORMS)), [[tree, *[""] * (len(HEAD) - 1)]]
    matrices = {name: matrix_bytes(grads, tx) for name, tx in transforms.items()}
    for name in FORMS:
        ratios = map(float.__truediv__, seconds[name], seconds[first])
        rows.append(
            [
                "",
                name,
                human_bytes(matrices[name]),
                f"{matrices[name] / matrices[first]:.3f}",
                f"{1e3 * statistics.median(seconds[name]):.2f}",
                f"{statistics.median(ratios):.3f}",
            ]
        )
    return rows


def transform(storage: so.Storage) -> Any:
    """Returns Shampoo with a first refresh that is out of reach."""
    return so.scale_by_shampoo(refresh_every=10**9, storage=storage)


def matrix_bytes(grads: Any, tx: Any) -> int:
    """Returns the bytes of factors and roots."""
    (part,) = so.describe(grads, tx).parts
    return part.bytes["factors"].total + part.bytes["roots"].total


def times(
    transforms: dict[str, Any], grads: Any, rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of every step of each transform, taken in turns."""
    steps = {name: stepper(tx, grads) for name, tx in transforms.items()}
    seconds = {name: [] for name in transforms}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def stepper(tx: Any, grads: Any) -> Callable[[], None]:
    """Returns a function that takes a step; the first two have been taken."""
    update = jax.jit(tx.update, donate_argnums=1)
    held = [tx.init(grads)]

    def step() -> None:
        updates, held[0] = update(grads, held[0])
        jax.block_until_ready((updates, held[0]))

    for _ in range(2):
        step()
    return step


if __name__ == "__main__":
    main()
