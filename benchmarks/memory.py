"""Bytes of state for each parameter: `python -m benchmarks.memory`.

For each configuration and model, without momentum and weight averages that an optimizer
does not have by default: read off the shapes that `init` would give, float32 parameters
and blocks of 1024; nothing is allocated. Adam keeps two numbers a parameter: 8 bytes.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import shampoo_optax as so
from benchmarks.cli import Parser, make_folder
from benchmarks.contenders import LEAN, PACKED, muon
from benchmarks.shapes import SUITE, Shapes, as_matrices, count
from shampoo_optax._tables import aligned

MUON = "muon, adamw for vectors"
BFLOAT16 = dict(factors="bfloat16", roots="bfloat16", momentum="bfloat16")
CONFIGURATIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "optax.adamw": lambda: optax.adamw(1e-3),
    "shampoo": lambda: so.shampoo(1e-3),
    "shampoo, lean": lambda: so.shampoo(1e-3, **LEAN),
    "shampoo, lean, packed": lambda: so.shampoo(1e-3, storage=PACKED, **LEAN),
    "shampoo, blocks of 256": lambda: so.shampoo(1e-3, blocking=so.Blocking(256)),
    "shampoo, packed": lambda: so.shampoo(1e-3, storage=PACKED),
    "shampoo, bfloat16": lambda: so.shampoo(1e-3, storage=so.Storage(**BFLOAT16)),
    "shampoo, bfloat16, packed": lambda: so.shampoo(
        1e-3, storage=so.Storage(**BFLOAT16, packed=True)
    ),
    "shampoo, one side": lambda: so.shampoo(1e-3, axes=so.Axes(sides="input")),
    "shampoo, one side, packed": lambda: so.shampoo(
        1e-3, axes=so.Axes(sides="input"), storage=PACKED
    ),
    "shampoo, diagonal above 1024": lambda: so.shampoo(
        1e-3, axes=so.Axes(diagonal_above=1024)
    ),
    "shampoo, no grafting": lambda: so.shampoo(1e-3, graft=None),
    "shampoo, eigendecomposed": lambda: so.shampoo(1e-3, root=so.Eigendecomposed()),
    "kl_shampoo": lambda: so.kl_shampoo(1e-3),
    "soap": lambda: so.soap(1e-3),
    "soap, packed": lambda: so.soap(1e-3, storage=PACKED),
    "soap, bfloat16": lambda: so.soap(1e-3, storage=so.Storage(**BFLOAT16)),
    "soap, one side": lambda: so.soap(1e-3, axes=so.Axes(sides="input")),
    "kl_soap": lambda: so.kl_soap(1e-3),
    "inverse_free_shampoo": lambda: so.inverse_free_shampoo(1e-3),
    "root_free_rmsprop": lambda: so.root_free_rmsprop(1e-3),
    "sign descent": so.scale_by_sign_descent,
    MUON: lambda: muon(1024),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes it."""
    parser = Parser("benchmarks.memory", __doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args(arguments).out
    make_folder(parser, out)
    text = aligned(["state", *SUITE], *map(row, CONFIGURATIONS))
    title = "# Bytes of state for each parameter"
    (out / "memory.md").write_text(f"{title}\n\n{__doc__}\n```\n{text}\n```\n")
    print(text)


def row(name: str) -> list[str]:
    """Returns a line of the table."""
    tx = CONFIGURATIONS[name]()
    view = as_matrices if name == MUON else list
    numbers = [bytes_each(tx, view(shapes)) for shapes in SUITE.values()]
    return [name, *(f"{number:.2f}" for number in numbers)]


def bytes_each(tx: optax.GradientTransformation, shapes: Shapes) -> float:
    """Returns the bytes of the state over the number of parameters."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, params))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return size / count(shapes)


if __name__ == "__main__":
    main()
