"""How evenly blocks are divided over devices, as planned and as compiled.

`python -m benchmarks.ownership` plans for well-known models, compiles the update where
it says so, runs nothing, and writes `benchmarks/results/ownership.md`.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shampoo_optax as so
from benchmarks.hlo import Lines, collective_bytes, lines_of
from benchmarks.mesh import mesh_of, provide, whole
from benchmarks.shapes import MODELS
from shampoo_optax._division import Shape, memory
from shampoo_optax._tables import aligned

OWNERS = (8, 64)
ROUNDS = 3
MIB, GIGA = 2**20, 1e9
EFFICIENCY = """\
## Efficiency of a plan

The share of a device if blocks were divided without padding, over the share it has;
block size 1024. Work is that of ten steps with one refresh (28 d^3 for an
eigendecomposition): statistics, application and decompositions, and all operations.
Memory is that of the whole state, and of factors and roots. Wire: bytes of the
all-gather. Wire / all-reduce: bytes of the reduce-scatter and the all-gather of a step
that also averages the gradients, over those of an all-reduce of the gradients, which is
one of each. To reach: at 8 owners work 0.75 and memory 0.85 on ResNet-50, all of them
0.95 on GPT-2 small; at 64 owners work and memory 0.95 on GPT 1.3B."""
WAYS = """\
## Three ways to divide blocks

Efficiency as above at 8 owners. `exact` pads the blocks of each shape to full rounds.
`deal` is what the package does. `greedy` gives the costliest block left to the device
with least work, as the paper does; every device then needs a program of its own, whose
size grows with the devices, so it is a yardstick here. Shapes: of the stacks."""
COUNTS = """\
## One device: the plan beside the compiled program

Block size 1024. Operations are those of a step with a refresh, without
eigendecompositions, which the compiler does not count (`cost_analysis`); arguments are
the state and the gradients (`memory_analysis`); all-gather bytes are read from the
compiled HLO, which has no other collective. `even` is 1/8 of the compiled operations on
one device over those on each of 8."""
SIZE = """\
## Program size: ResNet-50, block size 512

HLO lines are the headers, instructions and closing brackets of the compiled program.
They are what is compared with the bar, at most 9,000 on 8 devices and at most 1.5 times
those on 2. Filled lines, all that are not empty, include the tables of source names
before the program; newlines are those of the whole text (`as_text()`). Both of these
are above 9,000. Seconds are the best of {rounds}, taken in turns in one process."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Plans, compiles, prints the tables and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/ownership.md")
    )
    out = parser.parse_args(arguments).out
    provide(8)
    text = "# Ownership: scale_by_shampoo() on a mesh, float32\n"
    for title, rows in (
        (EFFICIENCY, efficiencies()),
        (WAYS, ways()),
        (COUNTS, counts()),
        (SIZE.format(rounds=ROUNDS), program_sizes()),
    ):
        text += f"\n{title}\n\n```\n{aligned(*rows)}\n```\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(text)


def describe(model: str, devices: int) -> so.Description:
    """Describes the default transform on a model."""
    return so.describe(structs(model, 1), devices=devices)


def structs(model: str, devices: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a model's parameters, a copy on every device."""
    return {
        str(n): jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole(devices))
        for n, shape in enumerate(MODELS[model])
    }


def efficiencies() -> Iterator[list[str]]:
    """Yields the heading, and a row for each model and number of owners."""
    names = ("work", "all work", "memory", "factors + roots", "wire")
    names += ("wire / all-reduce",)
    yield ["model", "owners", "stacks", *names]
    for model in MODELS:
        (alone,) = describe(model, 1).parts
        for owners in OWNERS:
            (part,) = describe(model, owners).parts
            found = part.efficiency
            values = [
                _work(alone.flops) / owners / _work(part.flops),
                *(found[name] for name in ("work", "memory", "matrices", "wire")),
                wire_by_all_reduce(model, owners),
            ]
            numbers = [f"{value:.3f}" for value in values]
            yield [model, str(owners), str(len(part.stacks)), *numbers]


def ways(owners: int = 8) -> Iterator[list[str]]:
    """Yields the heading, and three rows for each model."""
    yield ["model", "way", "shapes", "work", "memory", "wire"]
    for model in MODELS:
        alone, dealt = (describe(model, n).parts[0].stacks for n in (1, owners))
        blocks = Counter()
        for stack in alone.values():
            blocks[stack.block] += stack.blocks
        rounds = {block: -(-n // owners) for block, n in blocks.items()}
        deal = {stack.block: stack.slots for stack in dealt.values()}
        for way, shares in (
            ("exact", [rounds]),
            ("deal", [deal]),
            ("greedy", _greedy(blocks, owners)),
        ):
            values = (
                _total(blocks, cost) / owners / max(_total(s, cost) for s in shares)
                for cost in (_block_work, memory, math.prod)
            )
            shapes = str(len(set().union(*shares)))
            yield [model, way, shapes, *(f"{value:.3f}" for value in values)]


def _total(blocks: Mapping[Shape, int], cost: Callable[[Shape], float]) -> float:
    return sum(n * cost(block) for block, n in blocks.items())


def _block_work(block: Shape) -> float:
    """Statistics and application, and a tenth of the decompositions."""
    return 4 * math.prod(block) * sum(block) + 2.8 * sum(side**3 for side in block)


def _greedy(blocks: Counter, owners: int) -> list[Counter]:
    """The blocks of each owner, by longest work first."""
    every = list(blocks.elements())
    shares = [Counter() for _ in range(owners)]
    chosen = greedy_owners([_block_work(block) for block in every], owners)
    for block, owner in zip(every, chosen, strict=True):
        shares[owner][block] += 1
    return shares


def greedy_owners(costs: Sequence[float], owners: int) -> list[int]:
    """Gives the costliest block left to the owner with least, for each the owner.

    Of equal blocks the earlier one goes first, of equal owners the lower one takes.
    """
    chosen, load = [0] * len(costs), [0.0] * owners
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        chosen[index] = load.index(min(load))
        load[chosen[index]] += costs[index]
    return chosen


def wire_by_all_reduce(model: str, owners: int) -> float:
    """Returns the bytes of a step that reduces, over those of an all-reduce."""
    tx = so.scale_by_shampoo(placement=so.Placement(axes="data", reduce=True))
    (part,) = so.describe(structs(model, 1), tx, devices=owners).parts
    return sum(part.wire.values()) / (2 * gradient_bytes(model))


def gradient_bytes(model: str) -> int:
    """Returns the bytes of a model's gradients in float32."""
    return sum(4 * math.prod(shape) for shape in MODELS[model])


def _work(flops: dict[str, int]) -> float:
    products = flops["statistics"] + flops["application"]
    return products + flops["decompositions"] / 10


class Compiled(NamedTuple):
    """What is known of a compiled update, figures of one device."""

    flops: float
    arguments: int  # bytes
    temporary: int  # bytes
    collectives: Counter  # {kind: bytes}
    lines: Lines
    seconds: float  # to trace and compile


def compile_model(model: str, devices: int, block_size: int) -> Compiled:
    """Compiles the update of the default transform on the first devices."""
    mesh = mesh_of(devices)
    tx = so.scale_by_shampoo(
        blocking=so.Blocking(block_size),
        placement=None if mesh is None else so.Placement(mesh),
    )
    return compile_update(tx, structs(model, devices))


def compile_update(tx: optax.GradientTransformation, params: optax.Params) -> Compiled:
    """Compiles an update for parameters that are only known by their shapes."""
    state = so.abstract_state(tx, params)
    began = time.perf_counter()
    compiled = jax.jit(tx.update).lower(params, state).compile()
    seconds = time.perf_counter() - began
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return Compiled(
        compiled.cost_analysis()["flops"],
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        collective_bytes(text),
        lines_of(text),
        seconds,
    )


def counts() -> Iterator[list[str]]:
    """Yields the heading, and for each model a row for 1 device and one for 8."""
    work = ("GFLOP: plan", "compiled", "even")
    memory = ("arguments (MiB): plan", "compiled", "temporary (MiB)")
    wire = ("all-gather (MiB): plan", "compiled")
    yield ["model", "devices", *work, *memory, *wire]
    for model in MODELS:
        alone = compile_model(model, 1, 1024)
        yield _count(model, 1, alone, "")
        many = compile_model(model, 8, 1024)
        yield _count(model, 8, many, f"{alone.flops / 8 / many.flops:.3f}")


def _count(model: str, devices: int, compiled: Compiled, even: str) -> list[str]:
    (part,) = describe(model, devices).parts
    counted = sum(part.flops.values()) - part.flops["decompositions"]
    state = sum(kind.device for kind in part.bytes.values())
    if set(compiled.collectives) - {"all-gather"}:
        raise RuntimeError(f"other collectives: {compiled.collectives}")
    return [
        model,
        str(devices),
        *(f"{number / GIGA:.2f}" for number in (counted, compiled.flops)),
        even,
        *(
            f"{number / MIB:.1f}"
            for number in (
                state + gradient_bytes(model),
                compiled.arguments,
                compiled.temporary,
                part.wire.get("all-gather", 0),
                compiled.collectives["all-gather"],
            )
        ),
    ]


def program_sizes() -> Iterator[list[str]]:
    """Yields the heading, a row for 2 and one for 8 devices, and their ratio."""
    counts = ("HLO lines", "filled lines", "newlines")
    yield ["devices", *counts, "trace + compile (s)"]
    best = {}
    for _ in range(ROUNDS):
        for devices in (2, 8):
            found = compile_model("ResNet-50", devices, 512)
            seconds = min(found.seconds, best.get(devices, (np.inf,))[-1])
            best[devices] = (*reversed(found.lines), seconds)
    for devices, (*lines, seconds) in best.items():
        yield [str(devices), *map(str, lines), f"{seconds:.2f}"]
    ratios = (many / few for few, many in zip(best[2], best[8], strict=True))
    yield ["ratio", *(f"{ratio:.2f}x" for ratio in ratios)]


if __name__ == "__main__":
    main()
