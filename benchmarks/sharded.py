"""What a step sends and how much memory it takes where parameters are sharded.

`python -m benchmarks.sharded` compiles the update of `scale_by_shampoo` for 8 simulated
devices, runs nothing, and writes `benchmarks/results/sharded.md`. Beside it stands what
the official PyTorch package sends for the same parameters.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shampoo_optax as so
from benchmarks.hlo import bytes_by_source
from benchmarks.mesh import provide
from benchmarks.ownership import greedy_owners
from benchmarks.shapes import MODELS, Shapes
from shampoo_optax._tables import aligned

DEVICES, REPLICAS = 8, 2
NAMES = ("ResNet-50", "GPT-2 small")
BLOCK = 1024
MIB = 2**20

OURS = """\
## This package

`scale_by_shampoo()`, {devices} simulated devices, float32, block size {block}; the step
has its state donated. Each mesh axis divides the largest dimension of a parameter that
it divides evenly and that no other has. Figures are of one device. Forward are the
collectives that depend on gradients alone, back those that depend on the state: bytes
of their results, the device's own part included, read from the compiled HLO. The mean
of gradients over a batch is the backward pass's and comes on top everywhere. Temporary
memory is `memory_analysis().temp_size_in_bytes`; the yardstick is what the device has
of gradients and of directions, and all that it keeps for the slots of its largest
stack: factors, roots and moments. The last ratio is to a yardstick that counts of these
slots the factors alone. At most 2.5 times the yardstick is wanted where `specs` are
declared."""
MODES_TEXT = """\
whole: every device has all parameters. Undeclared: parameters are divided, and the
placement has no `specs`. FSDP: one axis of {devices}. HSDP: axes (replica: {replicas},
shard: {shards}); parameters are divided over shard, the state over shard or over both.
FSDP x TP: axes (fsdp: {shards}, model: {replicas}). Lossless and local are `mode`."""
THEIRS = """\
## The official PyTorch package

What `distributed_shampoo` of facebookresearch/optimizers (commit f606606, August 2026)
sends a step for the same parameters, convolutions in PyTorch's order, in float32, its
default `communication_dtype`, with `max_preconditioner_dim={block}`: computed from its
code, not run. Bytes of results as above, on the device with most. Forward are gradients
on their way to who works on them, back are directions or updated parameters."""
SOURCES = """\
DDP: `DDPDistributor._construct_distributed_buffers`. Blocks, each padded to 64 bytes,
are given to the device with least so far, and one all-gather brings from each device as
much as the fullest has. Also README, "DDP Training Support", and arXiv 2309.06497,
section 4.

FSDP: `FSDPDistributor` and `FullyShardDistributor`, "No communication is performed":
blocks are cut inside shards, which are those of dimension 0.

REPLICATE and ROUND_ROBIN: `FSDPParamAssignmentStrategy`,
`FullyShardLosslessDistributor`. The first calls `full_tensor` for every gradient, and
every device works on all of them. The second gives whole parameters to owners: one
all-to-all brings gradients to these, one brings updated parameters back
(`GatherGradientsContext`, `RedistributeParamsContext`).

HSDP: {replicas} replicas of {shards} shards; `HSDPDistributor`,
`HybridShardDistributor`, `HybridShardLosslessDistributor`. As above within the shards;
blocks are divided over the replicas, which all-gather them as in DDP."""


class Mode(NamedTuple):
    """A way to divide parameters and state."""

    mesh: dict[str, int]  # the sizes of its axes
    over: tuple[str, ...] = ()  # the axes that divide parameters, in this order
    declared: bool = True  # whether the placement has `specs`
    options: Mapping[str, Any] = {}  # further fields of the placement


FSDP = {"fsdp": DEVICES}
HSDP = {"replica": REPLICAS, "shard": DEVICES // REPLICAS}
MODES = {
    "whole": Mode(FSDP),
    "undeclared FSDP": Mode(FSDP, ("fsdp",), declared=False),
    "lossless FSDP": Mode(FSDP, ("fsdp",)),
    "lossless HSDP, state over shard": Mode(
        HSDP, ("shard",), options={"axes": "shard"}
    ),
    "lossless HSDP, state over both": Mode(HSDP, ("shard",)),
    "lossless FSDP x TP": Mode(
        {"fsdp": DEVICES // REPLICAS, "model": REPLICAS}, ("model", "fsdp")
    ),
    "local FSDP": Mode(FSDP, ("fsdp",), options={"mode": "local"}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles, prints the tables and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/sharded.md")
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=NAMES)
    parser.add_argument("--block-size", type=int, default=BLOCK)
    given = parser.parse_args(arguments)
    provide(DEVICES)
    names = dict(devices=DEVICES, replicas=REPLICAS, shards=DEVICES // REPLICAS)
    names["block"] = given.block_size
    text = "# Sharded parameters: what a step sends, and its memory\n"
    for before, rows, after in (
        (OURS, ours(given.model, given.block_size), MODES_TEXT),
        (THEIRS, theirs(given.model, given.block_size), SOURCES),
    ):
        before, after = before.format(**names), after.format(**names)
        text += f"\n{before}\n\n```\n{aligned(*rows)}\n```\n\n{after}\n"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text)
    print(text)


def ours(models: Sequence[str], block_size: int) -> Iterator[list[str]]:
    """Yields the heading, and a row for each model and mode."""
    sent = ["forward (MiB)", "back (MiB)", "all (gradients)"]
    kept = ["temporary (MiB)", "yardstick (MiB)", "ratio", "factors alone"]
    yield ["model", "mode", *sent, *kept]
    for model in models:
        whole = _bytes(MODELS[model])
        for name, mode in MODES.items():
            found = measure(MODELS[model], mode, block_size)
            numbers = [found.forward.total(), found.back.total()]
            row = [model, name, *map(_mib, numbers), f"{sum(numbers) / whole:.2f}"]
            row += map(_mib, (found.temporary, found.yardstick))
            row += [
                f"{found.temporary / most:.2f}"
                for most in (found.yardstick, found.with_factors)
            ]
            print(*row, flush=True)
            yield row


class Measured(NamedTuple):
    """What is known of a compiled step, in bytes of one device."""

    forward: Counter  # {kind: bytes}, of gradients
    back: Counter  # {kind: bytes}, of directions
    temporary: int
    yardstick: int  # shares of gradients and directions, and the largest stack
    with_factors: int  # those shares, and the factors of the stack with most


def measure(shapes: Shapes, mode: Mode, block_size: int) -> Measured:
    """Compiles a step for parameters that are only known by their shapes."""
    tx, params = transform(shapes, mode, block_size)
    state = so.abstract_state(tx, params)

    def step(
        grads: optax.Updates, state: optax.OptState, params: optax.Params
    ) -> tuple[optax.Updates, optax.OptState]:
        return tx.update(grads, state, params)

    lowered = jax.jit(step, donate_argnums=1).lower(params, state, params)
    compiled = lowered.compile()
    sent = bytes_by_source(compiled.as_text(), "state.")
    share = sum(map(_held, params.values()))
    return Measured(
        forward=sent[False],
        back=sent[True],
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        yardstick=2 * share + max(stacks_of(state).values()),
        with_factors=2 * share + max(stacks_of(state.factors).values()),
    )


def transform(
    shapes: Shapes, mode: Mode, block_size: int
) -> tuple[optax.GradientTransformation, dict[str, jax.ShapeDtypeStruct]]:
    """Makes Shampoo, and parameters as a mode divides them."""
    mesh = jax.make_mesh(
        tuple(mode.mesh.values()),
        tuple(mode.mesh),
        axis_types=(AxisType.Auto,) * len(mode.mesh),
    )
    params = {}
    for n, shape in enumerate(shapes):
        sharding = NamedSharding(mesh, spec_of(shape, mode))
        params[str(n)] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    specs = so.specs_of(params) if mode.declared else None
    placement = so.Placement(mesh, specs=specs, **mode.options)
    blocking = so.Blocking(block_size)
    return so.scale_by_shampoo(blocking=blocking, placement=placement), params


def spec_of(shape: Sequence[int], mode: Mode) -> PartitionSpec:
    """Divides the largest dimension that fits, for one axis after the other."""
    names = [None] * len(shape)
    for axis in mode.over:
        fits = [
            dim
            for dim, side in enumerate(shape)
            if names[dim] is None and side % mode.mesh[axis] == 0
        ]
        if fits:
            names[max(fits, key=lambda dim: (shape[dim], -dim))] = axis
    return PartitionSpec(*names)


def stacks_of(state: optax.OptState) -> Counter:
    """The bytes that a device keeps for each stack, in all fields of a state."""
    held = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        for key in path:
            if isinstance(key, jax.tree_util.DictKey):
                held[key.key] += _held(leaf)
                break
    return held


def _held(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of a device's part of an array."""
    return leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))


def _bytes(shapes: Shapes) -> int:
    return sum(4 * math.prod(shape) for shape in shapes)


def _mib(number: float) -> str:
    return f"{number / MIB:.1f}"


def theirs(models: Sequence[str], block_size: int) -> Iterator[list[str]]:
    """Yields the heading, and a row for each model and mode of the package."""
    yield ["model", "mode", "forward (MiB)", "back (MiB)", "all (gradients)"]
    for model in models:
        whole = _bytes(MODELS[model])
        for name, sent in official(MODELS[model], block_size).items():
            yield [model, name, *map(_mib, sent), f"{sum(sent) / whole:.2f}"]


def official(shapes: Shapes, block_size: int) -> dict[str, tuple[int, int]]:
    """The bytes that each mode of the official package sends, forward and back."""
    # Those of a convolution are reversed in PyTorch: (out, in, height, width).
    shapes = [shape[::-1] if len(shape) == 4 else shape for shape in shapes]
    shards = DEVICES // REPLICAS
    owned = owned_by(shapes, DEVICES)
    owned_shards = owned_by(shapes, shards)
    return {
        "DDP": (0, all_gather(shapes, DEVICES, block_size)),
        "FSDP": (0, 0),
        "FSDP, REPLICATE": (_bytes(chunks(shapes, DEVICES)) * DEVICES, 0),
        "FSDP, ROUND_ROBIN": (
            max(map(_bytes, owned)),
            _bytes(chunks(shapes, DEVICES)),
        ),
        "HSDP": (0, all_gather(chunks(shapes, shards), REPLICAS, block_size)),
        "HSDP, REPLICATE": (
            _bytes(chunks(shapes, shards)) * shards,
            all_gather(shapes, REPLICAS, block_size),
        ),
        "HSDP, ROUND_ROBIN": (
            max(map(_bytes, owned_shards)),
            max(all_gather(part, REPLICAS, block_size) for part in owned_shards)
            + _bytes(chunks(shapes, shards)),
        ),
    }


def chunks(shapes: Shapes, devices: int) -> Shapes:
    """What the first device has, which has most, of dimension 0 of each parameter."""
    return [(-(-shape[0] // devices), *shape[1:]) for shape in shapes]


def owned_by(shapes: Shapes, devices: int) -> list[Shapes]:
    """The parameters of each owner, given as wholes to the one with least so far."""
    owners = greedy_owners([_padded(math.prod(shape)) for shape in shapes], devices)
    return [
        [shape for shape, owner in zip(shapes, owners, strict=True) if owner == device]
        for device in range(devices)
    ]


def all_gather(shapes: Shapes, devices: int, block_size: int) -> int:
    """The bytes of the buffer that brings the blocks of all devices together."""
    sizes = [_padded(size) for size in blocks_of(shapes, block_size)]
    load = Counter()
    for size, owner in zip(sizes, greedy_owners(sizes, devices), strict=True):
        load[owner] += size
    return devices * max(load.values(), default=0)


def blocks_of(shapes: Shapes, block_size: int) -> list[int]:
    """The numbers of entries of all blocks, cut as the official package does."""
    structs = {
        str(n): jax.ShapeDtypeStruct(shape, jnp.float32)
        for n, shape in enumerate(shapes)
    }
    blocking = so.Blocking(block_size, merge_to=1, merge_from="trailing")
    (part,) = so.describe(structs, so.scale_by_shampoo(blocking=blocking)).parts
    return [
        math.prod(stack.block)
        for stack in part.stacks.values()
        for _ in range(stack.blocks)
    ]


def _padded(entries: int) -> int:
    """Bytes in float32, up to the next multiple of 64."""
    return -(-4 * entries // 64) * 64


if __name__ == "__main__":
    main()
