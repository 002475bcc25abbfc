"""How far a step without refresh is from its floor: `python -m benchmarks.floor`.

Whoever takes a step of Shampoo without refresh, in float32, has to do two things.

- Matrix products. A block :math:`G` of sides :math:`d_1 ... d_k` adds its Gram matrix
  :math:`G_{(i)} G_{(i)}^T`, [d_i, d_i], to the factor of each axis, and is multiplied
  by the root of each axis, [d_i, d_i], one after another: :math:`2 d_i` operations for
  each entry of the block and each of the two. They are timed here as bare products,
  those of equal blocks in one batch, one compiled call for each shape, at the same
  precision, and summed. This takes as given that products are made at the rate of
  XLA's own, and Gram matrices whole. Blocks of one axis have none: their outer product
  and their product with a matrix take the time of the memory they pass over.
- Memory. The whole state is read once and written once. It is timed as adding 1, in
  place, to an array that does not fit into any cache, whose bytes are scaled to those
  of the state.

The floor is their sum. The step is that of `so.shampoo`: with statistics, grafting by
Adam, filtered gradient, decay and step size. All are timed in turns; the ratio is the
median of the ratios in the same round.
"""

import functools
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import shampoo_optax as so
from benchmarks.cli import Parser, make_folder, positive_int
from benchmarks.shapes import SMALL, SUITE, Shapes, draw
from benchmarks.timing import Step, build, collect, in_turns, timed
from shampoo_optax._tables import aligned, human_bytes

COPIED = 2**28  # bytes
HEAD = ["model", "step (ms)", "products", "GFLOP/s", "state", "copy", "GB/s"]
HEAD += ["floor", "step / floor"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = Parser("benchmarks.floor", __doc__)
    models = SUITE | SMALL
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(models),
        default=["ResNet-50", "GPT 6x384"],
        help="default: ResNet-50 and GPT 6x384",
    )
    parser.add_argument(
        "--block-size", type=positive_int, default=1024, help="default: 1024"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=15, help="steps (default: 15)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    make_folder(parser, options.out)
    rows = [
        measure(name, models[name], options.block_size, options.rounds)
        for name in options.models
    ]
    text = aligned(HEAD, *rows)
    title = "# The floor of a step without refresh"
    (options.out / "floor.md").write_text(f"{title}\n\n{__doc__}\n```\n{text}\n```\n")
    print(text)


def measure(model: str, shapes: Shapes, block_size: int, rounds: int) -> list[str]:
    """Returns a line of the table."""
    grads = jax.device_put(draw(shapes, seed=0))
    blocking = so.Blocking(block_size)
    # Its first refresh is out of reach.
    tx = so.shampoo(1e-3, weight_decay=1e-4, refresh_every=10**9, blocking=blocking)
    (part,) = so.describe(grads, tx).parts
    uses = part.stacks.values()
    stacks = [(use.blocks, *use.block) for use in uses if len(use.block) > 1]
    program = build(tx, grads)
    steps = {"step": lambda _: program.step(grads)}
    steps |= {str(shape): bare_products(shape) for shape in stacks}
    steps |= {"copy": bare_copy(COPIED)}
    turns = tqdm(range(2 + rounds), desc=model, unit="round")
    seconds = {k: np.array(v[2:]) for k, v in collect(in_turns(steps, turns)).items()}
    return row(model, seconds, stacks, program.state_bytes)


def row(
    model: str,
    seconds: dict[str, np.ndarray],
    stacks: Sequence[tuple[int, ...]],
    state_bytes: int,
) -> list[str]:
    """Returns a line of the table from the seconds of each round."""
    products = np.sum([seconds[str(shape)] for shape in stacks], axis=0)
    memory = seconds["copy"] * state_bytes / COPIED
    floor = products + memory
    step, bare, copy = (np.median(x) for x in (seconds["step"], products, memory))
    return [
        model,
        f"{1e3 * step:.2f}",
        f"{1e3 * bare:.2f}",
        f"{sum(map(flops, stacks)) / bare / 1e9:.1f}",
        human_bytes(state_bytes),
        f"{1e3 * copy:.2f}",
        f"{state_bytes / copy / 1e9:.1f}",
        f"{1e3 * np.median(floor):.2f}",
        f"{np.median(seconds['step'] / floor):.2f}x",
    ]


def flops(stack: tuple[int, ...]) -> int:
    """Returns the operations of the products of blocks `[n, d_1, ..., d_k]`."""
    return 4 * int(np.prod(stack)) * sum(stack[1:])


def bare_products(stack: tuple[int, ...]) -> Step:
    """Returns a step that makes the products of equal blocks `[n, d_1, ..., d_k]`."""
    key = jax.random.key(0)
    blocks = jax.random.normal(key, stack)
    roots = [jax.random.normal(key, (stack[0], side, side)) for side in stack[1:]]
    compiled = jax.jit(products).lower(blocks, roots).compile()
    return timed(lambda _: compiled(blocks, roots))


def products(
    blocks: jax.Array, roots: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """Applies a matrix `[n, d_i, d_i]` to each axis; also gives the Gram matrices."""
    result, grams = blocks, []
    for axis, root in enumerate(roots):
        before, gram, after = einsums(len(roots), axis)
        grams.append(_einsum(f"{before},{after}->{gram}", blocks, blocks))
        result = _einsum(f"{before},{gram}->{after}", result, root)
    return result, grams


_einsum: Callable[..., Any] = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST
)


def einsums(order: int, axis: int) -> tuple[str, str, str]:
    """Letters of a block, of a matrix of its axis, and of their product."""
    before = string.ascii_lowercase[:order]
    after = before.replace(before[axis], "z")
    return f"N{before}", f"N{before[axis]}z", f"N{after}"


def bare_copy(size: int) -> Step:
    """Returns a step that reads and writes so many bytes, in place as a state is."""
    held = [jnp.zeros(size // 4, jnp.float32)]
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(*held).compile()

    def copy(_: Any) -> jax.Array:
        held[0] = compiled(held[0])
        return held[0]

    return timed(copy)


if __name__ == "__main__":
    main()
