"""Where blocks live: on one device, or divided over the devices of a mesh.

The one module that knows meshes. A transform says what it does in block space, on any
number of slots; here it is run on all slots, or on every owner's share of them.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from shampoo_optax._blocking import (
    cut,
    narrow,
    paste,
    plan_of,
    present_slots,
    unpadded_sides,
)
from shampoo_optax._config import Options, check_choice, check_number
from shampoo_optax._division import Division, memory, polynomial
from shampoo_optax._leaves import read_gradients, read_params
from shampoo_optax._stacks import Inputs, Plan, Stack, Stacks
from shampoo_optax._trees import next_count

Wire = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Placement:
    """Divides statistics, roots and the work on them over the devices of a mesh.

    Every block has one owner, which alone keeps its factors, roots and moments and
    computes its direction; one `all_gather` a step brings the directions together.
    Blocks are dealt so that all owners have equal shares, up to padding
    (:func:`describe` shows it).

    With a `mesh` the update is called as any other, on whole arrays, jitted or not.
    Without one it is called inside your own `jax.shard_map` over `axes`, on one
    device's arrays: gradients that are equal on all devices, or, with `reduce`, the
    gradients of each device's own loss, of which the mean is taken in the same
    exchange.

    Args:
      mesh: a `jax.sharding.Mesh` with axes of any type, or `None` for use inside your
        own `jax.shard_map`. Default `None`.
      axes: the name or names of the axes to divide over; devices that differ along
        other axes only hold copies. Default `None`: all axes of the mesh.
      dtype: the dtype in which directions travel, `"float32"`, `"bfloat16"` or
        `"float16"`. Default `None`: that of the gradients, which loses nothing.
      cost: what is divided evenly: `"memory"`, or the work on a block as the
        coefficients of a polynomial of its sides, the constant first. Default
        `"memory"`.
      reduce: whether gradients still have to be averaged over `axes`; needs a
        `mesh` of `None`. Default `False`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = so.shampoo(1e-3, placement=so.Placement(mesh, axes="data"))

      Inside a `shard_map` of your own, which has the gradients of each device's loss:

      >>> tx = so.shampoo(1e-3, placement=so.Placement(axes="data", reduce=True))
      >>> params = {"w": jnp.ones((3, 2))}
      >>> specs = jax.tree.map(lambda s: s.spec, so.state_shardings(tx, params, mesh))
      >>> whole = jax.sharding.PartitionSpec()
      >>> update = jax.shard_map(
      ...     tx.update,
      ...     mesh=mesh,
      ...     in_specs=(whole, specs, whole),
      ...     out_specs=(whole, specs),
      ...     check_vma=False,
      ... )

    References:
      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497,
      section 4.

      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
      Parameter Models, 2020, https://arxiv.org/abs/1910.02054.
    """

    mesh: Mesh | None = None
    axes: str | tuple[str, ...] | None = None
    dtype: Wire | DTypeLike | None = None
    cost: Literal["memory"] | tuple[float, ...] = "memory"
    reduce: bool = False

    def __post_init__(self):
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise ValueError(f"`mesh` must be a jax.sharding.Mesh, got {self.mesh!r}.")
        object.__setattr__(self, "axes", self._checked_axes())
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype))
        if self.cost != "memory":
            object.__setattr__(self, "cost", _checked_cost(self.cost))
        check_choice("reduce", self.reduce, (True, False))
        if self.reduce and self.mesh is not None:
            raise ValueError(
                "`reduce` must be False with a mesh, whose update takes gradients "
                f"that are averaged already, got {self.reduce!r}."
            )

    def _checked_axes(self) -> tuple[str, ...]:
        names = None if self.mesh is None else tuple(self.mesh.axis_names)
        axes = names if self.axes is None else self.axes
        axes = (axes,) if isinstance(axes, str) else axes
        strings = isinstance(axes, tuple | list) and all(
            isinstance(a, str) for a in axes
        )
        if not strings or not axes or len(set(axes)) < len(axes):
            raise ValueError(
                "`axes` must be one or more different names of mesh axes, "
                f"got {self.axes!r}."
            )
        if names is not None and not set(axes) <= set(names):
            raise ValueError(
                f"`axes` must be among the mesh's {names}, got {self.axes!r}."
            )
        return tuple(axes)


def _checked_dtype(dtype: Any) -> Wire | None:
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    choices = (None, *get_args(Wire))
    check_choice("dtype", name if name in choices else dtype, choices)
    return name


def _checked_cost(cost: Any) -> tuple[float, ...]:
    if not isinstance(cost, tuple | list) or not any(cost):
        raise ValueError(
            f"`cost` must be 'memory' or coefficients that are not all 0, got {cost!r}."
        )
    for coefficient in cost:
        check_number("cost", coefficient)
    return tuple(map(float, cost))


class Method(NamedTuple):
    """What a transform does in block space, on any number of slots."""

    state: type  # a NamedTuple with a field `count`
    init: Callable[[dict[str, Stack]], dict[str, Any]]  # the state's other fields
    step: Callable[[Inputs], tuple[Stacks, dict[str, Any]]]  # directions and fields


@dataclass(frozen=True)
class Layout:
    """What `init` returns in place of a state within :func:`only_layouts`."""

    method: Method
    plan: Plan
    placement: Placement | None
    paths: tuple[str, ...]  # of the parameters
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    def abstract(self) -> Any:
        """The whole state, as `ShapeDtypeStruct`s."""
        return jax.eval_shape(lambda: _first_state(self.method, self.plan.stacks))


# What to plan for: a number of owners, 0 for the placement's own, or a mesh; None
# outside of `only_layouts`.
_planned: ContextVar[int | Mesh | None] = ContextVar("planned", default=None)


@contextlib.contextmanager
def only_layouts(owners: int | Mesh = 0) -> Iterator[None]:
    """Within it, `init` of our transforms returns a :class:`Layout`.

    A transform is a pair of functions, and one such pair may be wrapped by others:
    this is how a plan is had from the outermost.

    Args:
      owners: number of owners to plan for; 0 stands for the placement's own, a mesh
        for that of a placement without one.
    """
    token = _planned.set(owners)
    try:
        yield
    finally:
        _planned.reset(token)


def owners_of(placement: Placement | None) -> int:
    """The number of devices that blocks are divided over."""
    planned = _planned.get()
    if planned and not isinstance(planned, Mesh):
        return planned
    if placement is None:
        return 1
    mesh = planned if placement.mesh is None else placement.mesh
    if isinstance(mesh, Mesh):
        return math.prod(mesh.shape[axis] for axis in placement.axes)
    if not all(map(_is_bound, placement.axes)):
        raise ValueError(
            "`placement` without a mesh must be used inside a jax.shard_map over the "
            f"axes {placement.axes}; outside of one, give it a mesh, got {placement!r}."
        )
    return jax.lax.axis_size(placement.axes)


def _is_bound(axis: str) -> bool:
    """Whether we are inside a `shard_map` (or `vmap`) over an axis of that name."""
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def _check_outside(placement: Placement | None) -> None:
    """Refuses the form with a mesh inside a `shard_map` over that mesh."""
    if placement is None or placement.mesh is None:
        return
    bound = tuple(filter(_is_bound, placement.mesh.axis_names))
    if bound:
        raise ValueError(
            "`placement` with a mesh must be used outside of jax.shard_map, got a call "
            f"inside one over {bound}: use Placement(axes={placement.axes!r}) there."
        )


def _division(options: Options, placement: Placement | None) -> Division:
    cost = "memory" if placement is None else placement.cost
    overrides = (options.exponents or {}).items()
    fixed = {order for order, override in overrides if isinstance(override, Mapping)}
    return Division(
        owners=owners_of(placement),
        cost=memory if cost == "memory" else polynomial(cost),
        fixed=frozenset(fixed),
    )


def _first_state(method: Method, stacks: dict[str, Stack]) -> Any:
    """The state before the first step.

    That of a tree without blocks has an array in the place of every dict:
    `optax.tree.map_params` calls `init` on such a tree, and takes what is one array
    there for a part that does not mirror the parameters.
    """
    count = jnp.zeros((), jnp.int32)
    if stacks:
        return method.state(count=count, **method.init(stacks))
    return method.state(*(jnp.zeros_like(count) for _ in method.state._fields))


def block_transform(
    method: Method, options: Options, placement: Placement | None
) -> optax.GradientTransformationExtraArgs:
    """The transform that runs a method on the blocks of every parameter.

    Args:
      method: what is done in block space.
      options: the transform's arguments, of which `blocking`, `root` and `exponents`
        say how blocks are cut and dealt.
      placement: where they live; `None` leaves all to one device.
    """
    if placement is not None and not isinstance(placement, Placement):
        raise ValueError(f"`placement` must be a Placement, got {placement!r}.")
    # Arrays enter a shard_map as its arguments: it closes over none from outside.
    numbers = {k: v for k, v in vars(options).items() if isinstance(v, jax.Array)}

    @functools.lru_cache
    def prepare(leaves: tuple[jax.ShapeDtypeStruct, ...], owners: int) -> tuple:
        division = _division(options, placement)._replace(owners=owners)
        plan = plan_of(leaves, options.blocking, division)
        inside = placement is not None and placement.mesh is None
        held = plan.share if inside else plan.stacks
        expected = jax.eval_shape(lambda: _first_state(method, held))
        run = functools.partial(_step, method, plan, placement)
        if placement is not None and placement.mesh is not None:
            run = _on_mesh(run, placement)
        return plan, expected, run

    def init_fn(params: optax.Params) -> Any:
        leaves, paths = read_params(params)
        owners = owners_of(placement) if leaves else 1
        plan = prepare(_structs(leaves), owners)[0]
        if _planned.get() is not None:
            return Layout(method, plan, placement, paths, _structs(leaves))
        _check_outside(placement)
        share = functools.partial(_first_state, method, plan.share)
        if placement is None or placement.mesh is None:
            return share()
        specs = jax.tree.map(lambda x: _spec(x, placement), jax.eval_shape(share))
        return jax.jit(_shard_map(share, placement, in_specs=(), out_specs=specs))()

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del extra_args
        _check_outside(placement)
        gradients = read_gradients(updates, params)
        owners = owners_of(placement) if gradients.params else 1
        plan, expected, run = prepare(_structs(gradients.params), owners)
        _check_state(state, expected)
        if not plan.stacks:
            return updates, state._replace(count=next_count(state.count))
        fields = state._asdict()
        count = fields.pop("count")
        leaves, count, fields = run(gradients.leaves, count, fields, numbers)
        return gradients.rebuild(leaves), method.state(count=count, **fields)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _structs(leaves: list) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)


def _check_state(state: Any, expected: Any) -> None:
    """Refuses a state of another kind, or one that is cut or divided otherwise."""
    kind = type(expected)
    if not isinstance(state, kind):
        raise ValueError(
            f"`state` must be a {kind.__name__}, got a {type(state).__name__}; restore "
            "checkpoints with the result of `init` as the target."
        )
    for field, wanted, held in zip(kind._fields, expected, state, strict=True):
        wanted, held = (jax.tree.map(np.shape, part) for part in (wanted, held))
        if wanted != held:
            raise ValueError(
                "`state` must come from the `init` of this transform and parameters "
                "like `updates` (pass `params` where their dtypes differ), got "
                f"`{field}` of shapes {held} for {wanted}; `from_portable` converts a "
                "state between placements."
            )


def _step(
    method: Method,
    plan: Plan,
    placement: Placement | None,
    leaves: list,
    count: jax.Array,
    fields: dict[str, Any],
    numbers: dict[str, jax.Array],
) -> tuple[list, jax.Array, dict[str, Any]]:
    """One step on all slots, or on those of the device that runs this."""
    count = next_count(count)
    blocks = cut(plan, leaves)
    tables = present_slots(plan, leaves), unpadded_sides(plan)
    if placement is not None:
        blocks = _own_blocks(plan, placement, blocks, leaves)
        tables = _own_tables(plan, placement, tables)
    directions, fields = method.step(Inputs(blocks, *tables, count, fields, numbers))
    if placement is not None:
        directions = _gather(plan, placement, directions, leaves)
    return paste(plan, directions, leaves), count, fields


def _own(plan: Plan, placement: Placement, stack: jax.Array | np.ndarray) -> jax.Array:
    """This device's slots of a stack that it has whole."""
    size = len(stack) // plan.owners
    start = jax.lax.axis_index(placement.axes).astype(jnp.uint32) * np.uint32(size)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(stack), start, size)


def _own_tables(plan: Plan, placement: Placement, tables: Any) -> Any:
    """This device's part of static tables over all slots, read as one row."""
    leaves, treedef = jax.tree.flatten(tables)
    rows = [leaf.reshape(plan.owners, -1).astype(np.int32) for leaf in leaves]
    row = _own(plan, placement, np.concatenate(rows, axis=1))[0]
    stops = np.cumsum([part.shape[1] for part in rows])
    parts = jnp.split(row, stops[:-1])
    parts = [p.astype(leaf.dtype) for p, leaf in zip(parts, leaves, strict=True)]
    return treedef.unflatten(parts)


def _own_blocks(
    plan: Plan, placement: Placement, blocks: Stacks, leaves: list
) -> Stacks:
    """The gradients of this device's own slots, averaged where that is asked for."""
    if not placement.reduce:
        return {name: _own(plan, placement, block) for name, block in blocks.items()}
    own = {}
    for dtype, names in wires(plan, leaves, None).items():
        rows = [blocks[name].reshape(plan.owners, -1) for name in names]
        rows = jnp.concatenate(rows, axis=1).astype(dtype)  # [owners, entries]
        total = jax.lax.psum_scatter(rows, placement.axes)
        own |= _split(plan, names, total[None])
    return {name: block / plan.owners for name, block in own.items()}


def _gather(
    plan: Plan, placement: Placement, directions: Stacks, leaves: list
) -> Stacks:
    """The directions of all slots, by one exchange for each dtype that travels."""
    whole = {}
    for dtype, names in wires(plan, leaves, placement.dtype).items():
        row = jnp.concatenate([directions[name].reshape(-1) for name in names])
        rows = _all_gather(row, dtype, placement.axes)
        whole |= _split(plan, names, rows)
    return whole


def _all_gather(row: jax.Array, dtype: np.dtype, axes: tuple[str, ...]) -> jax.Array:
    """Gathers `[entries]` to `[owners, entries]`.

    float16 has few exponents, so a power of two that brings the largest entry to 1
    travels with the entries.
    """
    if dtype != np.float16:
        return jax.lax.all_gather(narrow(row, dtype), axes)
    largest = jnp.max(jnp.abs(row), initial=jnp.finfo(row.dtype).tiny)
    exponent = jnp.ceil(jnp.log2(largest))
    half = jnp.exp2(-exponent / 2)  # in two steps, so that no power is out of range
    row = jnp.append((row * half) * half, exponent).astype(dtype)
    rows = jax.lax.all_gather(row, axes)
    half = jnp.exp2(rows[:, -1:].astype(half.dtype) / 2)
    return (rows[:, :-1].astype(half.dtype) * half) * half


def wires(plan: Plan, leaves: list, chosen: Wire | None) -> dict[np.dtype, list[str]]:
    """The stacks that travel together, by the dtype in which they do.

    By default that is the widest one of the gradients whose statistics have one dtype.
    """
    kinds = {stack.dtype: set() for stack in plan.stacks.values()}
    for region in plan.regions:
        if leaves[region.leaf] is not None:
            stack = plan.stacks[region.pieces[0].stack]
            kinds[stack.dtype].add(leaves[region.leaf].dtype)
    travelling = {}
    for name, stack in plan.stacks.items():
        found = jnp.result_type(*(kinds[stack.dtype] or [stack.dtype]))
        travelling.setdefault(np.dtype(chosen or found), []).append(name)
    return travelling


def _split(plan: Plan, names: list[str], rows: jax.Array) -> Stacks:
    """Rows `[r, entries]`, one an owner, as stacks `[r * share, *block]`."""
    stacks, stop = {}, 0
    for name in names:
        block, dtype, size = plan.share[name]
        start, stop = stop, stop + size * math.prod(block)
        part = rows[:, start:stop].astype(dtype)
        stacks[name] = part.reshape(-1, *block)
    return stacks


def _spec(leaf: Any, placement: Placement) -> PartitionSpec:
    """Divided by slots, or whole where there are none."""
    return PartitionSpec(placement.axes) if leaf.ndim else PartitionSpec()


def _shard_map(run: Callable, placement: Placement, in_specs: Any, out_specs: Any):
    # What comes out of an all_gather is not known to be equal on all devices.
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _on_mesh(run: Callable, placement: Placement) -> Callable:
    """Runs a step on whole arrays, of which each device takes and gives its share.

    Jitted, since without that every operation would be sent to the devices alone.
    """
    mesh, divided, whole = (
        placement.mesh,
        PartitionSpec(placement.axes),
        PartitionSpec(),
    )
    mapped = _shard_map(
        run,
        placement,
        (whole, whole, divided, whole),
        (whole, whole, divided),
    )
    if AxisType.Explicit not in mesh.axis_types:
        return jax.jit(mapped)

    def reshard(tree: Any, spec: PartitionSpec) -> Any:
        return jax.sharding.reshard(tree, NamedSharding(mesh, spec))

    def with_types(
        leaves: list, count: jax.Array, fields: dict, numbers: dict
    ) -> tuple:
        wanted = [
            None if leaf is None else jax.typeof(leaf).sharding for leaf in leaves
        ]
        leaves, count, fields = mapped(
            *reshard((leaves, count), whole),
            reshard(fields, divided),
            reshard(numbers, whole),
        )
        leaves = [
            leaf
            if kind is None or kind.mesh.empty
            else jax.sharding.reshard(leaf, kind)
            for leaf, kind in zip(leaves, wanted, strict=True)
        ]
        return leaves, count, fields

    return jax.jit(with_types)


def place_scalars(
    tx: optax.GradientTransformationExtraArgs, placement: Placement | None
) -> optax.GradientTransformationExtraArgs:
    """Puts the scalars of the first state, such as counts, on all devices.

    Where they are after an update: `jax.jit` compiles anew for what lies elsewhere.
    """
    if placement is None or placement.mesh is None:
        return tx
    whole = NamedSharding(placement.mesh, PartitionSpec())

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim:
            return leaf
        if not isinstance(leaf, jax.core.Tracer):
            return jax.device_put(leaf, whole)
        if AxisType.Explicit in placement.mesh.axis_types:
            return jax.sharding.reshard(leaf, whole)
        return jax.lax.with_sharding_constraint(leaf, whole)

    def init_fn(params: optax.Params) -> optax.OptState:
        return jax.tree.map(place, tx.init(params))

    return optax.GradientTransformationExtraArgs(init_fn, tx.update)
