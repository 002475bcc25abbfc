"""The update of a scanned transformer, and that of fewer and of unrolled layers.

The parameters are those of layers of width 256, of which the scanned model has one
array for all layers, the batch axis in front. Counted are stacks, lines of compiled
HLO (without its tables of source names) and the processor time to trace and compile
(best of three, taken in turns in one process). Then scanned and unrolled layers are
given the same gradients for two steps, the second with new roots.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shampoo_optax as so
from benchmarks.hlo import lines_of
from shampoo_optax._tables import aligned

WIDTH = 256
LAYERS = 24
ROUNDS = 3
LAYER = {
    "attention": {name: (WIDTH, WIDTH) for name in ("key", "out", "query", "value")},
    "mlp": {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)},
    "bias": {"up": (4 * WIDTH,), "down": (WIDTH,)},
    "norm": {"attention": (WIDTH,), "mlp": (WIDTH,)},
}
REST = {"embedding": (512, WIDTH), "norm": (WIDTH,)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/scanned.md")
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    given = parser.parse_args(arguments)
    models = {
        "2 scanned": scanned(2),
        f"{given.layers} scanned": scanned(given.layers),
        f"{given.layers} unrolled": unrolled(scanned(given.layers)),
    }
    head = ["layers", "stacks", "HLO lines", "trace + compile (s)", "ratio"]
    text = aligned(head, *measure(models))
    worst = largest_difference(given.layers)
    text += f"\n\nlargest difference of an update, same gradients: {worst:.1e}"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    title = f"# Scanned layers: a transformer of width {WIDTH}, float32"
    given.out.write_text(f"{title}\n\n```\n{text}\n```\n")
    print(text)


def scanned(layers: int) -> dict[str, Any]:
    """The shapes of a model whose layers are stacked."""
    stacked = jax.tree.map(lambda shape: (layers, *shape), LAYER, is_leaf=is_shape)
    tree = REST | {"layers": stacked}
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), tree, is_leaf=is_shape
    )


def is_shape(node: Any) -> bool:
    """Whether a node of a tree is the shape of a leaf."""
    return isinstance(node, tuple)


def unrolled(model: dict[str, Any]) -> dict[str, Any]:
    """The same model, its layers one by one."""
    stacked = model["layers"]
    count = jax.tree.leaves(stacked)[0].shape[0]
    layers = {
        f"layer_{index}": jax.tree.map(lambda x, index=index: take(x, index), stacked)
        for index in range(count)
    }
    return {name: model[name] for name in REST} | layers


def take(stacked: Any, index: int) -> Any:
    """One slice of an array, or of the shape of one."""
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
    return stacked[index]


def transform() -> optax.GradientTransformation:
    """Makes Shampoo, for which what is under `layers` is stacked."""
    blocking = so.Blocking(batch={"^layers/": 0})
    return so.shampoo(1e-3, b2=0.99, refresh_every=2, blocking=blocking)


def measure(models: dict[str, Any]) -> list[list[str]]:
    """Returns a row for each model; ratios are to the first."""
    best = {name: (0, 0, float("inf")) for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            best[name] = min(best[name], compile_once(model), key=lambda m: m[2])
    least = next(iter(best.values()))[2]
    return [
        [name, str(stacks), str(lines), f"{seconds:.2f}", f"{seconds / least:.2f}x"]
        for name, (stacks, lines, seconds) in best.items()
    ]


def compile_once(model: Any) -> tuple[int, int, float]:
    """Returns the stacks, HLO lines and processor seconds of one compilation."""
    tx = transform()  # a new one, whose update has not been traced
    state = jax.eval_shape(tx.init, model)
    began = time.process_time()
    compiled = jax.jit(tx.update).lower(model, state, model).compile()
    seconds = time.process_time() - began
    (part,) = so.describe(model, tx).parts
    return len(part.stacks), lines_of(compiled.as_text()).program, seconds


def largest_difference(layers: int) -> float:
    """Between updates of scanned and of unrolled layers, over the largest entry."""
    tx, rng, worst = transform(), np.random.default_rng(0), 0.0
    update, shapes = jax.jit(tx.update), scanned(layers)
    states = [None, None]
    for _ in range(2):
        grads = jax.tree.map(
            lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype),
            shapes,
        )
        updates = []
        for index, tree in enumerate((grads, unrolled(grads))):
            state = states[index] or tx.init(tree)
            found, states[index] = update(tree, state, tree)
            updates.append(found)
        pairs = zip(
            jax.tree.leaves(unrolled(updates[0])),
            jax.tree.leaves(updates[1]),
            strict=True,
        )
        for got, want in pairs:
            difference = jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))
            worst = max(worst, float(difference))
    return worst


if __name__ == "__main__":
    main()
