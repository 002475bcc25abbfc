"""Where blocks live: on one device, or divided over the devices of a mesh."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.typing import DTypeLike

from shampoo_optax._checks import check_choice, check_number
from shampoo_optax._rules import Chooser, Rules
from shampoo_optax._specs import checked_specs

Wire = Literal["float32", "bfloat16", "float16"]
Mode = Literal["lossless", "local"]


@dataclass(frozen=True)
class Placement:
    """Divides statistics, roots and the work on them over the devices of a mesh.

    Every block has one owner, which alone keeps its factors, roots and moments and
    computes its direction; one `all_gather` a step brings the directions together.
    Blocks are dealt so that all owners have equal shares, up to padding
    (:func:`describe` shows it).

    Parameters may themselves be divided over the mesh, as `specs` says: by FSDP, HSDP,
    tensor parallelism or all of them, and some of them not. Then one `all_to_all` over
    the axes of each parameter turns its shards into strips, so that every device has
    one of each block, and a second one brings the strips of a block to its owner;
    directions go back the same way. A strip is every n-th row of a block, n being
    the number of devices, along a dimension of the merged parameter that is not
    divided, or else whose shards and blocks are multiples of n long. Where there is
    none, as in short vectors, and in matrices that are divided along both dimensions
    with other block sizes, shards are gathered along one. Updates lie as the parameters
    do.

    With a `mesh` the update is called as any other, on whole arrays, jitted or not.
    Without one `init` and `update` are called inside your own `jax.shard_map` over
    `axes`, with `check_vma=False`, on one device's arrays: gradients that are equal on
    all devices, or, with `reduce`, the gradients of each device's own loss.

    With `reduce` their mean over `axes` is taken here, by the owners; over further
    axes take it before (`jax.lax.pmean`). Where blocks are even, the step then moves
    as many bytes as a plain all-reduce of the gradients; padding comes on top. What
    stands before in a chain sees one device's gradients: do not clip by norms there,
    and wrap it in nothing that branches on gradients (`optax.apply_if_finite`), since
    devices that take different branches wait for each other for ever. Bad gradients
    are guarded here.

    Parameters that are divided over Auto axes need a placement on jax 0.7: its compiler
    gets uneven pieces of such arrays wrong outside of `jax.shard_map`. Newer releases,
    0.10 among them, do not.

    On a cluster a program adds these lines; on CPU, before them, `jax.config.update(
    "jax_cpu_collectives_implementation", "gloo")`. ::

        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        jax.distributed.initialize()  # elsewhere than on SLURM or TPU: with addresses
        mesh = Mesh(np.array(jax.devices()), ("data",))  # of all processes
        whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        tx = so.shampoo(schedule, placement=so.Placement(mesh))
        params = jax.jit(model.init, out_shardings=whole)(jax.random.key(0), inputs)
        shardings = so.state_shardings(tx, params)
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        for local_batch in batches:  # of this process
            batch = jax.make_array_from_process_local_data(divided, local_batch)
            params, state = train_step(params, state, batch)  # jitted, as ever

    Args:
      mesh: a `jax.sharding.Mesh` with Auto or Explicit axes, or `None` for use inside
        your own `jax.shard_map`. Default `None`.
      axes: the name or names of the axes to divide over; devices that differ along
        other axes hold copies. Default `None`: all axes of the mesh.
      dtype: the dtype in which directions travel, `"float32"`, `"bfloat16"` or
        `"float16"` (then with a power of two for each block). With `specs` they leave
        their owners so, and reach the shards in bfloat16 or the gradients' dtype.
        Default `None`: that of the gradients, which loses nothing.
      cost: what is divided evenly: `"memory"`, or the work on a block as the
        coefficients of a polynomial of its sides, the constant first. Default
        `"memory"`.
      reduce: whether gradients still have to be averaged over `axes`; needs a
        `mesh` of `None`. Default `False`.
      specs: how parameters are divided over the mesh, a `jax.sharding.PartitionSpec`
        for all; or a mapping from regular expressions, searched for in the path
        whatever the case of its letters, to one or to `None` (whole), of which the
        first that is found counts, parameters without a rule being whole; or a function
        `(path: str, jax.ShapeDtypeStruct)` of the whole shape that returns one or
        `None`. :func:`specs_of` writes down how arrays lie. Axes are those of `axes`;
        Explicit ones that are not are left out of types. Default `None`: as the types
        say on Explicit axes, and whole on Auto axes. That is correct there too, and
        updates still lie as parameters do, or where a compiler divides whole ones, but
        every device has all gradients; and JAX numbers such programs anew each time,
        so that its persistent cache may miss them. What is declared, if only as
        `PartitionSpec()`, is free of all this.
      mode: `"lossless"`, which cuts whole parameters into blocks and so does what is
        done without a mesh; or `"local"`, in which every device cuts its own shards
        into blocks, and keeps and works on these, every one on what is whole: nothing
        is sent, and the step is that without a mesh whose :class:`Batch` splits the
        dimensions into their shards. It needs `specs` on Auto axes. Default
        `"lossless"`.

    Raises:
      ValueError: if a field has a value other than those above; in `init`, if `specs`
        do not fit a parameter: an entry too many, an axis twice or not among `axes`, a
        dimension that its shards do not divide evenly, or in local mode shards that
        do not hold whole parts of a `Batch.split`; or if arrays are known to lie
        otherwise than `specs` say.

    Examples:
      >>> import functools, jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = so.shampoo(1e-3, placement=so.Placement(mesh, axes="data"))

      Inside a `shard_map` of your own, `init` too, on each device's own gradients:

      >>> P = jax.sharding.PartitionSpec
      >>> tx = so.shampoo(1e-3, placement=so.Placement(axes="data", reduce=True))
      >>> params, batch = {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))
      >>> batch = jax.device_put(batch, jax.sharding.NamedSharding(mesh, P("data")))
      >>> specs = jax.tree.map(lambda s: s.spec, so.state_shardings(tx, params, mesh))
      >>> inside = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
      >>> loss = lambda params, batch: jnp.sum((batch @ params["w"]) ** 2)
      >>> step = lambda p, state, b: tx.update(jax.grad(loss)(p, b), state, p)
      >>> state = jax.jit(inside(tx.init, in_specs=P(), out_specs=specs))(params)
      >>> step = inside(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
      >>> updates, state = jax.jit(step)(params, state, batch)

    References:
      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497,
      section 4.

      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
      Parameter Models, 2020, https://arxiv.org/abs/1910.02054.

      Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
      2023, https://arxiv.org/abs/2304.11277.
    """

    mesh: Mesh | None = None
    axes: str | tuple[str, ...] | None = None
    dtype: Wire | DTypeLike | None = None
    cost: Literal["memory"] | tuple[float, ...] = "memory"
    reduce: bool = False
    specs: (
        PartitionSpec | Mapping[str, PartitionSpec | None] | Rules | Chooser | None
    ) = None
    mode: Mode = "lossless"

    def __post_init__(self):
        if self.mesh is None:
            _check_meshless(self.specs, self.mode)
        else:
            _check_mesh(self.mesh)
        object.__setattr__(self, "axes", self._checked_axes())
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype))
        if not isinstance(self.cost, str) or self.cost != "memory":
            object.__setattr__(self, "cost", _checked_cost(self.cost))
        check_choice("reduce", self.reduce, (True, False))
        object.__setattr__(self, "reduce", bool(self.reduce))
        if self.reduce and self.mesh is not None:
            raise ValueError(
                "`reduce` must be False with a mesh, whose update takes gradients "
                f"that are averaged already, got {self.reduce!r}."
            )
        object.__setattr__(self, "specs", checked_specs(self.specs))
        check_choice("mode", self.mode, get_args(Mode))
        if self.mode == "local":
            self._check_local()

    def _check_local(self):
        for name, default in (("dtype", None), ("cost", "memory")):
            if getattr(self, name) != default:
                raise ValueError(
                    f"`{name}` must be {default!r} in local mode, in which nothing is "
                    f"dealt or sent, got {getattr(self, name)!r}."
                )
        self._check_local_axes()

    def _check_local_axes(self):
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        kinds = {types[axis] for axis in self.axes}
        if len(kinds) > 1:
            raise ValueError(
                "`axes` must be all Auto or all Explicit in local mode, got "
                f"{ {axis: types[axis].name for axis in self.axes} }."
            )
        if self.specs is None and kinds == {AxisType.Auto}:
            raise ValueError(
                "`specs` must say how parameters are divided over Auto axes in local "
                f"mode, such as specs_of(params), got {self.specs!r}."
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes to divide over, of a mesh."""
        return {axis: self.mesh.shape[axis] for axis in self.axes}

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
            raise ValueError(f"`axes` must be among {names}, got {self.axes!r}.")
        return tuple(axes)


def _check_meshless(specs: Any, mode: Mode) -> None:
    for name, value, default in (("specs", specs, None), ("mode", mode, "lossless")):
        if value != default:
            raise ValueError(
                f"`{name}` must come with a `mesh`: inside your own jax.shard_map "
                "a transform without placement, on each device's own shards, is local "
                f"mode, got {value!r}."
            )


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}.")
    if mesh.size == 0 or AxisType.Manual in mesh.axis_types:
        raise ValueError(
            f"`mesh` must have devices, and Auto or Explicit axes, got {mesh!r}."
        )


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


# What to plan for: a number of owners, 0 for the placement's own, or a mesh; None
# outside of `only_layouts`.
_planned: ContextVar[int | Mesh | None] = ContextVar("planned", default=None)


@contextlib.contextmanager
def only_layouts(owners: int | Mesh = 0) -> Iterator[None]:
    """Within it, `init` of our transforms returns a `Layout` in place of a state.

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


def layouts_wanted() -> bool:
    """Whether we are within :func:`only_layouts`."""
    return _planned.get() is not None


def owners_of(placement: Placement | None) -> int:
    """The number of devices that blocks are divided over."""
    planned = _planned.get()
    if planned and not isinstance(planned, Mesh):
        return planned
    if placement is None:
        return 1
    mesh = planned if placement.mesh is None else placement.mesh
    if isinstance(mesh, Mesh):
        return _size_of(mesh, placement.axes)
    if not all(map(_is_bound, placement.axes)):
        raise ValueError(
            "`placement` without a mesh must be used inside a jax.shard_map over the "
            f"axes {placement.axes}, `init` too; outside of one give a mesh, or a "
            f"number of `devices`, got {placement!r}."
        )
    return jax.lax.axis_size(placement.axes)


def _size_of(mesh: Mesh, axes: tuple[str, ...]) -> int:
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(f"`axes` must be among {mesh.axis_names}, got {axes}.")
    return math.prod(mesh.shape[axis] for axis in axes)


def _is_bound(axis: str) -> bool:
    """Whether we are inside a `shard_map` (or `vmap`) over an axis of that name."""
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def check_outside(placement: Placement | None) -> None:
    """Refuses the form with a mesh inside a `shard_map`."""
    if placement is None or placement.mesh is None:
        return
    bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if bound:
        raise ValueError(
            "`placement` with a mesh must be used outside of jax.shard_map, got a call "
            f"inside one over {bound}: for parameters that are whole on every device "
            f"use Placement(axes={bound!r}) there; for shards no placement at all, "
            "which is local mode."
        )
