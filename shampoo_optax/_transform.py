"""A transform from what it does in block space: reading, dealing, stepping, pasting."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shampoo_optax._config import Options
from shampoo_optax._cutting import (
    cut,
    paste,
    present_slots,
    unpadded_sides,
)
from shampoo_optax._exchange import gather, mean_own_blocks, own_blocks, own_tables
from shampoo_optax._idle import warn_if_idle
from shampoo_optax._leaves import read_gradients, read_params
from shampoo_optax._mesh import on_mesh, on_shares, reshard_like_params
from shampoo_optax._placement import (
    Placement,
    check_outside,
    layouts_wanted,
    owners_of,
)
from shampoo_optax._planning import (
    check_owners,
    is_cut_locally,
    plan_blocks,
    plan_undivided,
    specs_at,
    views_at,
)
from shampoo_optax._routes import routes_of
from shampoo_optax._specs import Spec
from shampoo_optax._stacks import Inputs, Plan, Stack, Stacks, View
from shampoo_optax._strips import collect, spread
from shampoo_optax._trees import next_count, when_due


class Method(NamedTuple):
    """What a transform does in block space, on any number of slots."""

    state: type  # a NamedTuple with a field `count`
    init: Callable[[dict[str, Stack]], dict[str, Any]]  # the state's other fields
    step: Callable[[Inputs], tuple[Stacks, dict[str, Any]]]  # directions and fields
    memory: Callable[[tuple[int, ...]], float] = math.prod  # numbers kept for a block
    counted: Callable | None = None  # the step that `describe` counts, if another
    turns: int = 1  # steps in which every slot has its turn to be refreshed


@dataclass(frozen=True)
class Layout:
    """What `init` returns in place of a state within :func:`only_layouts`."""

    method: Method
    plan: Plan
    placement: Placement | None
    paths: tuple[str, ...]  # of the parameters
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[Spec, ...]  # of the leaves; empty without a mesh
    replan: Callable[[bool], Plan]  # for one device: of whole parameters, or of shards

    @property
    def local(self) -> bool:
        """Whether every device has cut its own shards."""
        return is_cut_locally(self.placement, self.plan.owners)

    @property
    def divided(self) -> bool:
        """Whether blocks are exchanged with devices that have shards."""
        if self.local or not any(map(any, self.specs)):
            return False
        return self.plan.owners == math.prod(self.placement.sizes.values())

    def abstract(self) -> Any:
        """The whole state, as `ShapeDtypeStruct`s."""
        return jax.eval_shape(lambda: _first_state(self.method, self.plan.stacks))


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
      options: the transform's arguments, of which `blocking`, `axes` and `exponents`
        say how blocks are cut and dealt.
      placement: where they live; `None` leaves all to one device.
    """
    if placement is not None and not isinstance(placement, Placement):
        raise ValueError(f"`placement` must be a Placement, got {placement!r}.")
    # Arrays enter a shard_map as its arguments: it closes over none from outside.
    numbers = {k: v for k, v in vars(options).items() if isinstance(v, jax.Array)}

    @functools.lru_cache
    def prepare(
        leaves: tuple[jax.ShapeDtypeStruct, ...],
        views: tuple[View, ...],
        specs: tuple[Spec, ...],
        owners: int,
    ) -> tuple:
        plan = plan_blocks(
            leaves, views, specs, owners, options, placement, method.memory
        )
        inside = placement is not None and placement.mesh is None
        held = plan.share if inside else plan.stacks
        expected = jax.eval_shape(lambda: _first_state(method, held))
        make = functools.partial(_first_state, method, plan.share)
        exchange = _exchange(plan, placement, specs)
        run = functools.partial(_step, method, exchange)
        if placement is not None and placement.mesh is not None:
            make, run = on_shares(make, placement), on_mesh(run, placement, specs)
        return plan, expected, make, run

    def plan_for(paths: list, leaves: list) -> tuple:
        specs = specs_at(paths, leaves, placement)
        owners = owners_of(placement) if leaves else 1
        check_owners(placement, specs, owners)
        cut = specs if is_cut_locally(placement, owners) else ()
        views = views_at(paths, leaves, cut, options, placement)
        return prepare(_structs(leaves), views, specs, owners)

    def layout_of(paths: list, leaves: list, plan: Plan) -> Layout:
        structs, specs = _structs(leaves), specs_at(paths, leaves, placement)
        replan = functools.partial(
            plan_undivided, paths, structs, specs, options, placement
        )
        names = tuple(map(jax.tree_util.keystr, paths))
        return Layout(method, plan, placement, names, structs, specs, replan)

    def init_fn(params: optax.Params) -> Any:
        leaves, paths = read_params(params)
        if not layouts_wanted():
            check_outside(placement)  # first: in there leaves are shards
        plan, expected, make, _ = plan_for(paths, leaves)
        if layouts_wanted():
            return layout_of(paths, leaves, plan)
        warn_if_idle(params, plan, expected, options)
        return make()

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        discard = _checked_discard(extra_args.get("discard"))
        check_outside(placement)
        gradients = read_gradients(updates, params)
        plan, expected, _, run = plan_for(gradients.paths, gradients.params)
        _check_state(state, expected)
        if not plan.stacks:
            return updates, state._replace(count=_counted(state.count, discard))
        fields = state._asdict()
        count = fields.pop("count")
        leaves, count, fields = run(gradients.leaves, count, fields, numbers, discard)
        leaves = reshard_like_params(
            leaves, gradients.params, gradients.paths, placement
        )
        return gradients.rebuild(leaves), method.state(count=count, **fields)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _structs(leaves: list) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)


def _checked_discard(discard: Any) -> jax.Array | None:
    """The flag of a call whose result is thrown away, if there is one."""
    if discard is None:
        return None
    flag = isinstance(discard, bool) or getattr(discard, "dtype", None) == jnp.bool_
    if not flag or np.shape(discard):
        raise ValueError(f"`discard` must be one boolean, got {discard!r}.")
    return discard if isinstance(discard, jax.Array) else np.bool_(discard)


def _counted(count: jax.Array, discard: jax.Array | None) -> jax.Array:
    """The count after this call."""
    return (
        next_count(count)
        if discard is None
        else jnp.where(discard, count, next_count(count))
    )


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


class Exchange(NamedTuple):
    """How a device gets the gradients of its slots, and gives their directions."""

    plan: Plan
    collect: Callable[[list], Stacks]  # of leaves
    tables: Callable[[Any], Any]  # the part of static tables over all slots
    spread: Callable[[Stacks, list], list]  # of directions, for leaves like these


def _exchange(
    plan: Plan, placement: Placement | None, specs: tuple[Spec, ...]
) -> Exchange:
    if placement is None or is_cut_locally(placement, plan.owners):
        plan = plan._replace(stacks=plan.share, owners=1)
        alone = functools.partial
        return Exchange(plan, alone(cut, plan), lambda x: x, alone(paste, plan))
    tables = functools.partial(own_tables, plan, placement.axes)
    if any(map(any, specs)):
        ways = plan, routes_of(plan, specs, placement.sizes), placement.sizes
        return Exchange(
            plan,
            functools.partial(collect, *ways),
            tables,
            functools.partial(spread, *ways, placement.dtype),
        )

    def collect_whole(leaves: list) -> Stacks:
        blocks = cut(plan, leaves)
        if placement.reduce:
            return mean_own_blocks(plan, placement.axes, blocks, leaves)
        return own_blocks(plan, placement.axes, blocks)

    def spread_whole(directions: Stacks, leaves: list) -> list:
        whole = gather(plan, placement.axes, placement.dtype, directions, leaves)
        return paste(plan, whole, leaves)

    return Exchange(plan, collect_whole, tables, spread_whole)


def _step(
    method: Method,
    exchange: Exchange,
    leaves: list,
    count: jax.Array,
    fields: dict[str, Any],
    numbers: dict[str, jax.Array],
    discard: jax.Array | None,
) -> tuple[list, jax.Array, dict[str, Any]]:
    """One step on all slots, or on those of the device that runs this.

    A call that is discarded gives directions of 0 and the state as it was; all that
    devices exchange is exchanged, since no collective may depend on data.
    """
    blocks, plan = exchange.collect(leaves), exchange.plan
    tables = exchange.tables((present_slots(plan, leaves), unpadded_sides(plan)))

    def step(directions: Stacks, fields: dict[str, Any]) -> tuple[Stacks, dict]:
        del directions
        inputs = Inputs(blocks, *tables, next_count(count), fields, numbers)
        return method.step(inputs)

    still = jax.tree.map(jnp.zeros_like, blocks)
    if discard is None:
        directions, fields = step(still, fields)
    else:
        directions, fields = when_due(~discard, step, still, fields)
    return exchange.spread(directions, leaves), _counted(count, discard), fields
