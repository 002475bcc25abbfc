"""States that outlive a job: a form that fits any mesh."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shampoo_optax._shardings import abstract, find_ours, is_ours, mesh_of, shardings_of
from shampoo_optax._slots import region_slots
from shampoo_optax._stacks import Region
from shampoo_optax._storage import is_packed, pack, side_of, unpack
from shampoo_optax._transform import Layout


def to_portable(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    params: optax.Params,
    mesh: Mesh | None = None,
) -> dict[str, np.ndarray]:
    """A state by parameter path, without padding: one form for every mesh.

    A run saved on 8 devices goes on on 1, 4 or 16: :func:`from_portable` puts the
    same numbers into the slots of another :class:`Placement`. With several
    processes each of them gets the whole. Parameters that local mode cuts apart
    (:func:`describe` names them) are here as a :class:`Batch` has them that splits
    them into their shards, and go on with such a one, or with the same shards.

    Args:
      tx: the transform that the state belongs to.
      state: its state.
      params: the parameters, or `jax.ShapeDtypeStruct`s.
      mesh: as in :func:`state_shardings`. Default `None`.

    Returns:
      `{name: array}` on the host. The arrays of a block have names such as
      `"[0].factors/['w']/0,512/1"`: the field of the state, the path of the
      parameter, where in the merged parameter the first of these blocks begins, the
      axis; they hold one entry a block, `[blocks, ...]`.

    Raises:
      ValueError: if the state is not one of this transform and these parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx, params = so.scale_by_shampoo(), {"w": jnp.ones((3, 2))}
      >>> portable = so.to_portable(tx, tx.init(params), params)
      >>> sorted(portable)[:3]
      ['.count', ".factors/['w']/0,0/0", ".factors/['w']/0,0/1"]
    """
    tree = find_ours(tx, params, mesh)
    _check_structure(state, tree)
    portable = {}

    def read(path: tuple, node: Any, held: Any) -> None:
        name = jax.tree_util.keystr(path)
        if not is_ours(node):
            portable[name] = _on_host(held)
            return
        held = _map_matrices(_unpacked, jax.tree.map(_on_host, held))
        portable[f"{name}.count"] = held.count
        for key, parts, order in _entries(name, node.layout, held):
            blocks = np.concatenate([part.read() for part in parts])
            portable[key] = blocks.transpose(order)

    jax.tree_util.tree_map_with_path(read, tree, state, is_leaf=is_ours)
    return portable


def from_portable(
    tx: optax.GradientTransformation,
    portable: dict[str, np.ndarray],
    params: optax.Params,
    mesh: Mesh | None = None,
) -> optax.OptState:
    """The state of a transform from what :func:`to_portable` returned.

    The transform may have another :class:`Placement` than the one whose state was
    saved, or none; in local mode, for parameters that it cuts apart, only with the
    same shards. All else that shapes the state, such as `blocking`, must be the
    same, but for `storage` and `metrics`, which may be switched on or off: what is
    missing starts at 0. What only pads a state becomes 0, or the identity.

    Args:
      tx: the transform that goes on.
      portable: `{name: array}`.
      params: the parameters, or `jax.ShapeDtypeStruct`s with their shardings.
      mesh: as in :func:`state_shardings`. Default `None`.

    Returns:
      The state, placed.

    Raises:
      ValueError: if an array is missing, left over, or of another shape.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx, params = so.scale_by_shampoo(), {"w": jnp.ones((3, 2))}
      >>> portable = so.to_portable(tx, tx.init(params), params)
      >>> placement = so.Placement(jax.make_mesh((1,), ("data",)))
      >>> tx = so.scale_by_shampoo(placement=placement)
      >>> state = so.from_portable(tx, portable, params)
    """
    tree = find_ours(tx, params, mesh)
    unused = dict(portable)

    def take(key: str, shape: tuple[int, ...]) -> np.ndarray:
        array = unused.pop(key, None)
        if array is None or np.shape(array) != tuple(shape):
            found = "none" if array is None else f"one of {list(np.shape(array))}"
            raise ValueError(
                f"`portable` must have an array {list(shape)} named {key!r}, got "
                f"{found}; `blocking` and the other options that shape the state must "
                "be those with which it was saved, and in local mode the shards of "
                "what it cuts apart (`cut_apart` of `describe`)."
            )
        return np.asarray(array)

    def write(path: tuple, node: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if not is_ours(node):
            return _cast(take(name, node.shape), node.dtype)
        state = _blank(node.state)
        entries = list(_entries(name, node.layout, state))
        _settle_metrics(unused, f"{name}.metrics.", entries)
        for key, parts, order in entries:
            shapes = [part.read().shape for part in parts]
            shape = (sum(n for n, *_ in shapes), *shapes[0][1:])
            blocks = take(key, tuple(shape[axis] for axis in order))
            stops = np.cumsum([n for n, *_ in shapes])[:-1]
            given = np.split(blocks.transpose(np.argsort(order)), stops)
            for part, new in zip(parts, given, strict=True):
                part.write(_cast(new, part.array.dtype))
        count = _cast(take(f"{name}.count", ()), state.count.dtype)
        return _map_matrices(_as_stored, state._replace(count=count), node.state)

    state = jax.tree_util.tree_map_with_path(write, tree, is_leaf=is_ours)
    if unused:
        raise ValueError(
            "`portable` must be the state of this transform and these parameters, got "
            f"also {', '.join(map(repr, sorted(unused)[:4]))}."
        )
    mesh = mesh_of(tree, mesh)
    if mesh is None:
        return jax.tree.map(jnp.asarray, state)
    return jax.tree.map(_placed, state, shardings_of(tree, params, mesh))


def _settle_metrics(
    portable: dict[str, np.ndarray], start: str, entries: list[tuple]
) -> None:
    """Drops the metrics that a state does not have, and adds what it lacks as 0."""
    wanted = {key: parts for key, parts, _ in entries if key.startswith(start)}
    found = {key for key in portable if key.startswith(start)}
    for key in found - wanted.keys():
        del portable[key]
    for key in wanted.keys() - found:
        portable[key] = np.concatenate([part.read() for part in wanted[key]])


def _check_structure(state: Any, tree: Any) -> None:
    """Refuses a state of another transform, saying where it first differs."""

    def shapes(tree: Any) -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [
            f"{jax.tree_util.keystr(path)} {list(np.shape(leaf))}"
            for path, leaf in leaves
        ]

    pairs = itertools.zip_longest(shapes(state), shapes(abstract(tree)))
    for held, wanted in pairs:
        if held != wanted:
            raise ValueError(
                "`state` must be the state of this transform (with its placement) and "
                f"of these parameters, got {held} for {wanted}."
            )


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts; `np.load` gives dtypes that NumPy does not know as raw bytes.

    Raw bytes of another size are those of the one such dtype that `Storage` has.
    """
    if array.dtype.kind == "V":
        same = array.dtype.itemsize == np.dtype(dtype).itemsize
        array = array.view(dtype if same else jnp.bfloat16)
    return array.astype(dtype)


def _blank(abstract: Any) -> Any:
    """A state on the host that is 0, and where it has bases the identity."""
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    state = _map_matrices(_unpacked, state)
    for basis in jax.tree.leaves(getattr(state, "bases", {})):
        if basis.ndim == 3:
            basis[:] = np.eye(basis.shape[-1], dtype=basis.dtype)
    return state


def _map_matrices(function: Callable, *states: Any) -> Any:
    """Maps what a state has for each axis of a stack; the rest stays as it is."""

    def map_part(*parts: Any) -> Any:
        if not isinstance(parts[0], dict):
            return parts[0]
        return {
            name: jax.tree.map(function, axes, *(part[name] for part in parts[1:]))
            if isinstance(axes, dict)
            else axes
            for name, axes in parts[0].items()
        }

    return type(states[0])(*map(map_part, *states))


def _unpacked(stored: np.ndarray) -> np.ndarray:
    return unpack(stored, side_of(stored)) if is_packed(stored) else stored


def _as_stored(whole: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
    return pack(whole) if is_packed(like) else whole


class _Part(NamedTuple):
    """What an array of a state on the host has of some blocks."""

    array: np.ndarray  # [slots, ...]
    slots: np.ndarray  # [copies, n]
    inner: tuple[slice, ...]  # of the other axes, what is no padding

    def read(self) -> np.ndarray:
        return self.array[self.slots[0]][:, *self.inner]

    def write(self, blocks: np.ndarray) -> None:
        self.array[self.slots, *self.inner] = blocks


def _entries(name: str, layout: Layout, state: Any) -> Iterator[tuple]:
    """The arrays of a state on the host, region by region.

    Yields:
      the name of a portable array, the parts of the state that make it up, and the
      axes of these in the order of the portable array.
    """
    for region, slots in region_slots(layout):
        start = ",".join(map(str, region.start))
        end = f"/{layout.paths[region.leaf]}/{start}"
        for field, stacks in _by_stack(state):
            if slots[0][0] not in stacks:
                continue
            held = [(stacks[stack], where) for stack, where in slots]
            if not isinstance(held[0][0], dict):
                yield f"{name}.{field}{end}", *_block_parts(held, region)
                continue
            for axis in held[0][0]:
                dims = range(held[0][0][axis].ndim)
                inner = (slice(region.stacked[int(axis)]),) * (len(dims) - 1)
                parts = [_Part(stack[axis], where, inner) for stack, where in held]
                key = f"{name}.{field}{end}/{region.axes[int(axis)]}"
                yield key, parts, tuple(dims)


def _by_stack(state: Any) -> Iterator[tuple[str, dict]]:
    """The fields that are kept by stack, and so each of the metrics."""
    for field, stacks in state._asdict().items():
        if field == "metrics":
            yield from ((f"metrics.{name}", part) for name, part in stacks.items())
        elif field != "count":
            yield field, stacks


def _block_parts(held: list, region: Region) -> tuple[list[_Part], tuple]:
    """The parts of arrays `[n, *block]` or `[n]`, and the order of their axes."""
    if held[0][0].ndim == 1:
        return [_Part(array, where, ()) for array, where in held], (0,)
    inner = tuple(map(slice, region.stacked))
    order = (0, *(1 + region.axes.index(axis) for axis in range(len(region.axes))))
    return [_Part(array, where, inner) for array, where in held], order


def _on_host(leaf: Any) -> np.ndarray:
    """A leaf on the host; from other processes it comes a slot of each owner a time."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    share = leaf.sharding.shard_shape(leaf.shape)[0]
    whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())

    @functools.partial(jax.jit, out_shardings=whole)
    def slots(leaf: jax.Array, index: int) -> jax.Array:
        shares = leaf.reshape(-1, share, *leaf.shape[1:])
        return jax.lax.dynamic_index_in_dim(shares, index, 1, keepdims=False)

    parts = [
        np.asarray(slots(leaf, index).addressable_data(0)) for index in range(share)
    ]
    return np.stack(parts, axis=1).reshape(leaf.shape)


def _placed(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])
