"""How parameters are cut into blocks, and which of their axes are batch."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from shampoo_optax._checks import check_choice, check_integer
from shampoo_optax._rules import Chooser, Kind, Rules, checked, chosen, name_of, unfit
from shampoo_optax._stacks import View, whole_view


@dataclass(frozen=True)
class Batch:
    """Which axes of a parameter are batch: every slice along them is cut on its own.

    Of an array `[6, 12, 8]` with the batch axis 0 there are six slices `[12, 8]`. Each
    is merged and cut into blocks as a parameter of its shape is, so that it has its own
    factors, step size and guards. Slices of all parameters share stacks: programs are
    as large as for one.

    Args:
      axes: the batch axes, an integer or a tuple of integers; those below 0 count
        from the last. They are dimensions of the parameter, before any is split or
        merged. Default `()`: none.
      split: a mapping from another axis to the number of equal parts, neighbouring
        entries each, that it is split into; `{1: 3}` makes three slices `[d, d]` of a
        fused kernel `[d, 3 * d]`. Default `()`: none is split.

    Raises:
      ValueError: if a field has a value other than those above; in `init`, if a
        parameter has no such axis, or one that these parts do not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> so.Batch(axes=0, split={2: 3})
      Batch(axes=(0,), split=((2, 3),))
      >>> tx = so.scale_by_shampoo(blocking=so.Blocking(batch=so.Batch(0, {2: 3})))
      >>> state = tx.init({"qkv": jnp.ones((4, 8, 24))})  # of 4 layers
      >>> state.factors["8x8"]["0"].shape
      (12, 8, 8)
    """

    axes: int | tuple[int, ...] = ()
    split: Mapping[int, int] | tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "axes", _checked_axes(self.axes))
        object.__setattr__(self, "split", _checked_split(self.split))


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _checked_axes(axes: Any) -> tuple[int, ...]:
    found = (axes,) if _is_integer(axes) else axes
    if not isinstance(found, tuple | list) or not all(map(_is_integer, found)):
        raise ValueError(
            f"`axes` must be an integer or a tuple of integers, got {axes!r}."
        )
    found = tuple(map(operator.index, found))
    if len(set(found)) < len(found):
        raise ValueError(f"`axes` must name no axis twice, got {axes!r}.")
    return found


def _checked_split(split: Any) -> tuple[tuple[int, int], ...]:
    try:
        pairs = dict(split).items()
        fits = all(_is_integer(x) for pair in pairs for x in pair)
    except (TypeError, ValueError):
        fits = False
    if not fits or any(parts < 1 for _, parts in pairs):
        raise ValueError(
            "`split` must be a mapping from axes to numbers of parts, integers of at "
            f"least 1, got {split!r}."
        )
    return tuple((operator.index(axis), operator.index(n)) for axis, n in pairs)


def _is_axes(value: Any) -> bool:
    several = isinstance(value, tuple | list) and all(map(_is_integer, value))
    return several or _is_integer(value)


def _read(value: Any) -> Batch | None:
    if value is None or isinstance(value, Batch):
        return value
    if not _is_axes(value):
        raise TypeError(value)
    return Batch(value)


_KIND = Kind("batch", "axes, a Batch", _read)


def checked_batch(batch: Any) -> Batch | Rules | Chooser | None:
    """The `batch` of a `Blocking`, in the form in which it is kept."""
    return checked(_KIND, batch)


MergeFrom = Literal["leading", "trailing"]


@dataclass(frozen=True)
class Blocking:
    """How a parameter is merged and cut into blocks.

    Dimensions of 1 are dropped, neighbouring dimensions are multiplied together
    while their product is at most `block_size` and more than `merge_to`
    dimensions remain, and every dimension is then cut into pieces of
    `block_size`, the last one smaller. With the defaults a convolution kernel
    `[3, 3, 64, 128]` becomes one block `[576, 128]`, and a matrix `[3000, 512]`
    becomes three blocks `[1024, 512], [1024, 512], [952, 512]`.

    Scanned layers, experts, heads and the members of an ensemble are often stacked in
    one array. `batch` says along which of its axes: slices along them are parameters
    of their own to what is said above, so that a stack of layers is trained as the
    same layers one by one. It is said for all parameters at once, by path
    (`jax.tree_util.keystr(path, simple=True, separator="/")`, as in
    `"params/layers/mlp/kernel"`, without the `value` that ends paths in nnx) or by a
    function. Paths are those of the tree that the transform is given; behind
    `optax.flatten` there are none.

    Args:
      block_size: the largest side of a block, an integer >= 1; `None` cuts
        nothing. Default 1024.
      merge_to: merging stops at this number of dimensions, an integer >= 1;
        `None` merges nothing and keeps dimensions of 1. Default 2.
      merge_from: the side from which dimensions are merged, `"leading"` (suits
        Flax kernels, whose output features come last) or `"trailing"` (the
        official PyTorch package). Default `"leading"`.
      batch: the batch axes of parameters: an axis, a tuple of axes or a
        :class:`Batch` for all; or a mapping from regular expressions, searched for in
        the path whatever the case of its letters, to one of these or `None`, of which
        the first that is found counts; or a function `(path: str,
        jax.ShapeDtypeStruct)` that returns one of these or `None`. Default `None`:
        there are none.

    Raises:
      ValueError: if a field has a value other than those above; in `init`, if a
        parameter has no such axes.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> so.Blocking(block_size=512)
      Blocking(block_size=512, merge_to=2, merge_from='leading', batch=None)

      A stack of 24 layers:

      >>> blocking = so.Blocking(batch={"^layers/": 0})
      >>> params = {"layers": {"w": jnp.ones((24, 4, 3))}, "head": jnp.ones((3, 2))}
      >>> state = so.scale_by_shampoo(blocking=blocking).init(params)
      >>> {name: roots["0"].shape for name, roots in state.roots.items()}
      {'3x2': (1, 3, 3), '4x3': (24, 4, 4)}

    References:
      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497,
      section 3.1.
    """

    block_size: int | None = 1024
    merge_to: int | None = 2
    merge_from: MergeFrom = "leading"
    batch: (
        int
        | tuple[int, ...]
        | Batch
        | Mapping[str, Any]
        | Rules
        | Callable[[str, jax.ShapeDtypeStruct], Any]
        | None
    ) = None

    def __post_init__(self):
        if self.block_size is not None:
            check_integer("block_size", self.block_size)
        if self.merge_to is not None:
            check_integer("merge_to", self.merge_to)
        check_choice("merge_from", self.merge_from, get_args(MergeFrom))
        object.__setattr__(self, "batch", checked_batch(self.batch))


def views_of(
    batch: Batch | Rules | Chooser | None,
    paths: Sequence[tuple],
    leaves: Sequence[Any],
    shards: Sequence[tuple[int, ...]] | None = None,
    apart: bool = False,
) -> tuple[View, ...]:
    """How each parameter, or a device's shard of it, is seen.

    Args:
      batch: that of a `Blocking`.
      paths: of the parameters, as `jax.tree_util` has them.
      leaves: arrays or `ShapeDtypeStruct`s; only shapes and dtypes are read, the
        global ones.
      shards: of each parameter the numbers of shards along its dimensions, which
        divide them evenly; without them parameters are whole.
      apart: whether all shards are seen, as slices, and not those of one device.

    Raises:
      ValueError: if a parameter has no such axes, or shards do not hold whole parts.
    """
    if shards is None:
        if batch is None:
            return tuple(whole_view(leaf.shape) for leaf in leaves)
        shards = [(1,) * len(leaf.shape) for leaf in leaves]
    return tuple(
        _view_of(batch, name_of(path), leaf, counts, apart)
        for path, leaf, counts in zip(paths, leaves, shards, strict=True)
    )


def _view_of(
    batch: Batch | Rules | Chooser | None,
    path: str,
    leaf: Any,
    shards: tuple[int, ...],
    apart: bool,
) -> View:
    said = chosen(_KIND, batch, path, leaf) or Batch()
    axes, parts = _checked_places(said, path, leaf)
    cut = [axis for axis, n in parts.items() if n % shards[axis]]
    if cut and not apart:
        raise ValueError(
            "`specs` must leave the parts of split axes whole in local mode, got "
            f"{shards} shards of {said!r} for {list(leaf.shape)} at {path!r}."
        )
    shape, first, last = [], [], []
    for axis, (side, count) in enumerate(zip(leaf.shape, shards, strict=True)):
        found = None if axis in cut else parts.get(axis)
        for size, is_batch in _seen(side, count, found, axis in axes, apart):
            (first if is_batch else last).append(len(shape))
            shape.append(size)
    return View(tuple(shape), (*first, *last), len(first))


def _seen(
    side: int, shards: int, parts: int | None, batch: bool, apart: bool
) -> list[tuple[int, bool]]:
    """What an axis is seen as: sizes, and whether they are batch."""
    if parts is not None:
        return [(parts // (1 if apart else shards), True), (side // parts, batch)]
    if not apart:
        return [(side // shards, batch)]
    if batch or shards == 1:
        return [(side, batch)]
    return [(shards, True), (side // shards, False)]


def _checked_places(
    batch: Batch, path: str, leaf: Any
) -> tuple[tuple[int, ...], dict[int, int]]:
    """The batch axes, and the parts of those that are split, counted from the first."""
    axes = _places(batch, batch.axes, path, leaf)
    keys = _places(batch, [axis for axis, _ in batch.split], path, leaf)
    if len({*axes, *keys}) < len(axes) + len(keys):
        raise unfit(_KIND, "name no axis twice", batch, path, leaf)
    parts = dict(zip(keys, (n for _, n in batch.split), strict=True))
    if any(leaf.shape[axis] % n for axis, n in parts.items()):
        raise unfit(_KIND, "split axes into equal parts", batch, path, leaf)
    return axes, parts


def _places(batch: Batch, axes: Sequence[int], path: str, leaf: Any) -> tuple[int, ...]:
    """The axes, counted from the first."""
    order = len(leaf.shape)
    if not all(-order <= axis < order for axis in axes):
        raise unfit(_KIND, "name axes of the parameter", batch, path, leaf)
    return tuple(axis % order for axis in axes)
