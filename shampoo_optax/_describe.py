"""What a transform costs: memory, operations and traffic, read off its plan."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shampoo_optax._checks import check_integer
from shampoo_optax._cutting import unpadded_sides
from shampoo_optax._exchange import wires
from shampoo_optax._flops import Flops, count_flops
from shampoo_optax._layouts import layouts_of
from shampoo_optax._routes import routes_of
from shampoo_optax._shampoo import scale_by_shampoo
from shampoo_optax._slots import Slots, cut_apart, slots_of
from shampoo_optax._stacks import Inputs, Plan
from shampoo_optax._storage import is_diagonal
from shampoo_optax._tables import aligned, human, human_bytes
from shampoo_optax._traffic import traffic
from shampoo_optax._transform import Layout

# The efficiency of work is that of so many steps with one refresh.
PERIOD = 10


class StackUse(NamedTuple):
    """A stack, as one device has it."""

    block: tuple[int, ...]
    dtype: np.dtype  # of the statistics
    blocks: int  # in total
    slots: int  # a device
    padding: float  # the share of its entries, on all devices, that is padding


class Bytes(NamedTuple):
    """What one kind of state takes."""

    device: int
    total: int


@dataclass(frozen=True)
class Part:
    """The costs of one transform, figures of each device unless they say otherwise.

    Attributes:
      state: the kind of its state, and where it is in the whole state.
      owners: the number of devices that blocks are divided over.
      stacks: `{stack: StackUse}`.
      slots: `{path of a parameter: its blocks' Slots}`, in the order of the blocks.
      bytes: `{field of the state: Bytes}`.
      flops: operations, `{kind: number}`: `"statistics"`, `"application"` (all other
        matrix products, and singular value decompositions, 48 m n min(m, n) each) and
        `"entrywise"` at every step, as if all had statistics; `"refresh"` (products and
        checks; one turn of an iteration) and `"decompositions"` (28 d^3 each, 17 d^3 by
        QR, 3 d^3 by Cholesky and 5 m d^2 a triangular system) at a refresh.
      wire: bytes sent in a step, `{"reduce-scatter": n, "all-gather": n}`, or with
        `specs` also `"all-to-all"`; each is what such exchanges bring to a device from
        all of them, itself included.
      cut_apart: paths of the parameters that local mode cuts into other blocks. Where
        there are none both modes do the same.
      efficiency: the share of a device if blocks were divided without padding, over
        the share it has: of `"work"` (ten steps and one refresh), `"memory"` (the
        whole state), `"matrices"` (factors and roots or bases) and `"wire"`.
    """

    state: str
    owners: int
    stacks: dict[str, StackUse]
    slots: dict[str, tuple[Slots, ...]]
    bytes: dict[str, Bytes]
    flops: dict[str, int]
    wire: dict[str, int]
    cut_apart: tuple[str, ...]
    efficiency: dict[str, float]

    def __str__(self) -> str:
        """Aligned tables in human units."""
        return "\n\n".join(_tables(self))


@dataclass(frozen=True)
class Description:
    """What :func:`describe` finds; printed, an aligned table in human units.

    Attributes:
      parts: one for each of our transforms in the order of their states, with
        `owners`, `stacks`, `slots`, `bytes`, `flops`, `wire` and `efficiency`.
      other_bytes: bytes of the rest of the state, which no `Placement` divides.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> (part,) = so.describe({"w": jnp.zeros((4, 3))}, so.scale_by_shampoo()).parts
      >>> part.bytes["factors"].total
      100
    """

    parts: tuple[Part, ...]
    other_bytes: int

    def __str__(self) -> str:
        rest = f"rest of the state  {human_bytes(self.other_bytes)}"
        return "\n\n".join([*map(str, self.parts), rest])


class _Found(NamedTuple):
    """What is read of a layout while `tx.init` is traced."""

    layout: Layout
    state: Any  # of ShapeDtypeStructs
    flops: Flops  # of one owner


def describe(
    params: optax.Params,
    tx: optax.GradientTransformation | None = None,
    *,
    devices: int | None = None,
) -> Description:
    """Says what a transform will cost, before anything is allocated or compiled.

    Bytes are exact. Operations are counted in the traced step, a multiplication and
    an addition as two; compilers do not count decompositions: one into eigenvectors is
    taken as 28 d^3 operations, one into singular vectors as 48 m n min(m, n). Bytes on
    the wire are those of the dtype asked for; XLA on CPU sends bfloat16 as float32.
    Transforms that work on blocks, such as Shampoo and SOAP, are described wherever
    they are in `tx`, whose `init` must not be jitted; of others only the memory is
    given.

    Args:
      params: a tree of parameters, arrays or `jax.ShapeDtypeStruct`s of any shapes.
        Gradients are taken to have the same dtypes.
      tx: a transform with ours anywhere inside, as an alias, `optax.chain`,
        `optax.partition` or `optax.inject_hyperparams` make it. Default `None`:
        `scale_by_shampoo()`.
      devices: the number of devices to divide blocks over, which need not exist; where
        parameters are divided too, that of their mesh, or 1. Default `None`: as the
        transform's `placement` says.

    Returns:
      A :class:`Description`: exact numbers in its fields, a table when printed.

    Raises:
      ValueError: if `tx` holds no transform of ours, `devices` is not an integer >= 1,
        or it is `None` and a `placement` has no mesh.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> params = {
      ...     "kernel": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
      ...     "bias": jax.ShapeDtypeStruct((1024,), jnp.float32),
      ... }
      >>> costs = so.describe(params, so.shampoo(1e-3), devices=4)
      >>> costs.parts[0].bytes["factors"]
      Bytes(device=12582912, total=50331648)
      >>> costs.parts[0].slots["['kernel']"]
      (Slots(stack='1024x1024@4', start=0, stop=4),)
      >>> print(costs)
      ScaleByShampooState at [0]: parameters 2, blocks 5, stacks 2, owners 4
      <BLANKLINE>
      stack          dtype  blocks  slots a device  padding
      1024@4       float32       1               1    75.0%
      1024x1024@4  float32       4               1     0.0%
      <BLANKLINE>
      state          a device  in total
      count               4 B       4 B
      factors        12.0 MiB  48.0 MiB
      roots          12.0 MiB  48.0 MiB
      graft_moments  4.00 MiB  16.0 MiB
      filtered       4.00 MiB  16.0 MiB
      failures            8 B      32 B
      residuals           8 B      32 B
      iterations          8 B      32 B
      skipped             8 B      32 B
      sum            32.0 MiB   128 MiB
      <BLANKLINE>
      work of a device        a step   a refresh
      statistics          4.30 GFLOP
      application         4.30 GFLOP
      entrywise           51.4 MFLOP
      refresh                         6.50 GFLOP
      decompositions                  90.2 GFLOP
      all-gather (bytes)    16.0 MiB
      <BLANKLINE>
      efficiency   work  memory  matrices   wire
                  0.868   0.812     0.750  0.999
      <BLANKLINE>
      rest of the state  0 B
    """
    if devices is not None:
        check_integer("devices", devices)
    tx = scale_by_shampoo() if tx is None else tx
    tree = layouts_of(tx, params, devices or 0, _read)
    places, rest = _split(tree)
    if not places:
        raise ValueError(
            "`tx` must hold a transform that works on blocks, such as "
            f"scale_by_shampoo or scale_by_soap, at some depth, got {tx!r}."
        )
    undivided, _ = _split(layouts_of(tx, params, 1, _read))
    parts = tuple(_part(place, places[place], undivided[place]) for place in places)
    return Description(parts, other_bytes=sum(map(_bytes, rest)))


def _read(layout: Layout) -> _Found:
    plan, method = layout.plan, layout.method
    if not plan.stacks:
        return _Found(layout, layout.abstract(), Flops())

    def inputs() -> Inputs:
        shapes = {n: (s.size, *s.block) for n, s in plan.share.items()}
        return Inputs(
            blocks={n: jnp.zeros(shapes[n], s.dtype) for n, s in plan.share.items()},
            present={n: jnp.ones(s.size, bool) for n, s in plan.share.items()},
            sides=jax.tree.map(
                lambda x: jnp.asarray(x[: len(x) // plan.owners]), unpadded_sides(plan)
            ),
            count=jnp.int32(1),
            fields=method.init(plan.share),
        )

    step = method.counted or method.step
    traced = jax.make_jaxpr(step)(jax.eval_shape(inputs))
    return _Found(layout, layout.abstract(), count_flops(traced.jaxpr))


def _split(tree: Any) -> tuple[dict[str, _Found], list[Any]]:
    """What was found in a state, by its place, and the other leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, _Found)
    )
    places = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, _Found)
    }
    return places, [leaf for _, leaf in leaves if not isinstance(leaf, _Found)]


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def _part(place: str, found: _Found, undivided: _Found) -> Part:
    plan = found.layout.plan
    memory = _state_bytes(found)
    kind = type(found.state).__name__
    statistics = _statistics(plan, found.state)
    return Part(
        state=f"{kind} at {place}" if place else kind,
        owners=plan.owners,
        stacks=_stacks(found.layout),
        slots=slots_of(found.layout),
        bytes=memory,
        flops=dict(
            statistics=statistics,
            application=found.flops.products - statistics,
            entrywise=found.flops.entrywise,
            refresh=found.flops.refresh,
            decompositions=found.flops.decompositions,
        ),
        wire=_wire(found.layout)[0] if plan.owners > 1 else {},
        cut_apart=cut_apart(found.layout),
        efficiency={
            what: _ratio(ideal / plan.owners, real)
            for (what, ideal), real in zip(
                _loads(undivided).items(), _loads(found).values(), strict=True
            )
        },
    )


def _ratio(ideal: float, real: float) -> float:
    return ideal / real if real else 1.0


def _loads(found: _Found) -> dict[str, float]:
    """What efficiencies are about, of one device."""
    flops, memory = found.flops, _state_bytes(found)
    parts = found.state._asdict().items()
    matrices = [n for n, axes in parts if n != "metrics" and _nested(axes)]
    _, sent = _wire(found.layout)
    return {
        "work": flops.step + (flops.refresh + flops.decompositions) / PERIOD,
        "memory": sum(kind.device for kind in memory.values()),
        "matrices": sum(memory[name].device for name in matrices),
        "wire": sent,
    }


def _nested(part: Any) -> bool:
    """Whether a part of a state has a matrix for every axis of every block."""
    return isinstance(part, dict) and any(isinstance(x, dict) for x in part.values())


def _state_bytes(found: _Found) -> dict[str, Bytes]:
    def share(leaf: jax.ShapeDtypeStruct) -> int:
        return _bytes(leaf) // (found.layout.plan.owners if leaf.ndim else 1)

    return {
        name: Bytes(sum(map(share, leaves)), sum(map(_bytes, leaves)))
        for name, part in found.state._asdict().items()
        for leaves in [jax.tree.leaves(part)]
    }


def _statistics(plan: Plan, state: Any) -> int:
    """Operations of the Gram products, 2 d for each entry of a block.

    Those of diagonal axes are entrywise, and not counted here.
    """
    factors = getattr(state, "factors", {}) if plan.stacks else {}
    return sum(
        2 * stack.size * math.prod(stack.block) * stack.block[int(axis)]
        for name, stack in plan.share.items()
        for axis, factor in factors.get(name, {}).items()
        if not is_diagonal(factor)
    )


def _wire(layout: Layout) -> tuple[dict[str, int], float]:
    """Bytes of the exchanges of a step, and a device's share of the directions'."""
    plan, placement, leaves = layout.plan, layout.placement, list(layout.leaves)
    if layout.local:
        return {}, 0
    dtype = None if placement is None else placement.dtype
    if layout.divided:
        sizes = placement.sizes
        return traffic(plan, routes_of(plan, layout.specs, sizes), sizes, dtype, leaves)

    def exchanged(chosen: Any) -> int:
        total = 0
        for dtype, names in wires(plan, leaves, chosen).items():
            stacks = [plan.stacks[name] for name in names]
            entries = sum(stack.size * math.prod(stack.block) for stack in stacks)
            if chosen is not None and dtype == np.float16:  # with powers of two
                entries += sum(stack.size for stack in stacks)
            total += entries * dtype.itemsize
        return total

    sent = {}
    if placement is not None and placement.reduce:
        sent["reduce-scatter"] = exchanged(None)
    directions = exchanged(dtype)
    return sent | {"all-gather": directions}, directions / plan.owners


def _stacks(layout: Layout) -> dict[str, StackUse]:
    plan, copies = layout.plan, layout.plan.owners if layout.local else 1
    blocks, entries = Counter(), Counter()
    for region in plan.regions:
        for piece in region.pieces:
            blocks[piece.stack] += piece.size * copies
            entries[piece.stack] += piece.size * copies * math.prod(region.block)
    return {
        name: StackUse(
            stack.block,
            stack.dtype,
            blocks[name],
            stack.size // plan.owners,
            1 - entries[name] / (stack.size * math.prod(stack.block)),
        )
        for name, stack in plan.stacks.items()
    }


def _tables(part: Part) -> Iterator[str]:
    blocks = sum(stack.blocks for stack in part.stacks.values())
    yield (
        f"{part.state}: parameters {len(part.slots)}, blocks {blocks}, "
        f"stacks {len(part.stacks)}, owners {part.owners}"
    )
    head = ("stack", "dtype", "blocks", "slots a device", "padding")
    yield aligned(head, *(_stack_row(*item) for item in part.stacks.items()))
    yield aligned(("state", "a device", "in total"), *_memory_rows(part.bytes))
    head = ("work of a device", "a step", "a refresh")
    yield aligned(head, *_work_rows(part.flops), *_wire_rows(part.wire))
    values = (f"{value:.3f}" for value in part.efficiency.values())
    yield aligned(("efficiency", *part.efficiency), ("", *values))
    if part.cut_apart:
        first, others = part.cut_apart[0], len(part.cut_apart) - 1
        more = f" and {others} more" if others else ""
        yield f"local mode cuts other blocks: {first}{more}"


def _stack_row(name: str, stack: StackUse) -> tuple[str, ...]:
    numbers = map(str, (stack.dtype, stack.blocks, stack.slots))
    return (name, *numbers, f"{stack.padding:.1%}")


def _memory_rows(kinds: dict[str, Bytes]) -> Iterator[tuple[str, ...]]:
    kept = {name: kind for name, kind in kinds.items() if kind.total}
    kept["sum"] = Bytes(*map(sum, zip(*kept.values(), strict=True)))
    return ((name, *map(human_bytes, kind)) for name, kind in kept.items())


def _work_rows(flops: dict[str, int]) -> Iterator[tuple[str, ...]]:
    for name, number in flops.items():
        cells = (human(number, "FLOP"), "")
        seldom = name in ("refresh", "decompositions")
        yield (name, *(reversed(cells) if seldom else cells))


def _wire_rows(wire: dict[str, int]) -> Iterator[tuple[str, ...]]:
    return ((f"{name} (bytes)", human_bytes(n), "") for name, n in wire.items())
