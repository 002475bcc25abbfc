"""What the form of the state costs: bytes, and the time of a step without refresh.

All forms of a tree are compiled, and then take a step each, again and again in turns.
Times are medians; a ratio is the median of the ratios to the first form's step in the
same round, so that what else runs on the machine weighs on both. The memory of the
state is donated, as in training.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import shampoo_optax as so
from benchmarks.cli import positive_int
from benchmarks.shapes import Shapes, draw
from benchmarks.timing import build, collect, in_turns
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
WARM_UP = 2
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
    grads = {
        str(index): jnp.asarray(grad)
        for index, grad in enumerate(draw(TREES[tree], seed=0))
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
    steps = {name: build(tx, grads).step for name, tx in transforms.items()}
    seconds = collect(in_turns(steps, itertools.repeat(grads, WARM_UP + rounds)))
    return {name: spent[WARM_UP:] for name, spent in seconds.items()}


if __name__ == "__main__":
    main()
