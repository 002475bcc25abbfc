"""Batch axes: dimensions along which a parameter is many parameters."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

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


Rules = tuple[tuple[str, Batch | None], ...]  # regular expressions, the first counts
Chooser = Callable[[str, jax.ShapeDtypeStruct], Any]


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


def _as_batch(value: Any) -> Batch | None:
    if value is None or isinstance(value, Batch):
        return value
    if not _is_axes(value):
        raise TypeError(value)
    return Batch(value)


def _checked_rule(path: str, value: Any) -> tuple[str, Batch | None]:
    re.compile(path, re.IGNORECASE)
    return path, _as_batch(value)


def checked_batch(batch: Any) -> Batch | Rules | Chooser | None:
    """The `batch` of a `Blocking`, in the form in which it is kept."""
    if batch is None or callable(batch):
        return batch
    try:
        if isinstance(batch, Batch) or _is_axes(batch):
            return _as_batch(batch)
        rules = batch.items() if isinstance(batch, Mapping) else batch
        return tuple(_checked_rule(*rule) for rule in rules)
    except (TypeError, re.error):
        raise ValueError(
            "`batch` must be axes, a Batch, a mapping from regular expressions to "
            f"these, or a function of a path and an array, got {batch!r}."
        ) from None


def views_of(
    batch: Batch | Rules | Chooser | None, paths: Sequence[tuple], leaves: Sequence[Any]
) -> tuple[View, ...]:
    """How each parameter is seen.

    Args:
      batch: that of a `Blocking`.
      paths: of the parameters, as `jax.tree_util` has them.
      leaves: arrays or `ShapeDtypeStruct`s; only shapes and dtypes are read.

    Raises:
      ValueError: if a parameter has no such axes.
    """
    if batch is None:
        return tuple(whole_view(leaf.shape) for leaf in leaves)
    return tuple(
        _view_of(batch, jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in zip(paths, leaves, strict=True)
    )


def _view_of(batch: Batch | Rules | Chooser, path: str, leaf: Any) -> View:
    chosen = _chosen(batch, path, leaf)
    if chosen is None:
        return whole_view(leaf.shape)
    axes = _places(chosen, chosen.axes, path, leaf)
    keys = _places(chosen, [axis for axis, _ in chosen.split], path, leaf)
    if len({*axes, *keys}) < len(axes) + len(keys):
        raise _unfit(chosen, path, leaf, "name no axis twice")
    parts = dict(zip(keys, (n for _, n in chosen.split), strict=True))
    if any(leaf.shape[axis] % n for axis, n in parts.items()):
        raise _unfit(chosen, path, leaf, "split axes into equal parts")
    shape, first, last = [], [], []
    for axis, side in enumerate(leaf.shape):
        if axis in parts:
            first.append(len(shape))
            shape.append(parts[axis])
        (first if axis in axes else last).append(len(shape))
        shape.append(side // parts.get(axis, 1))
    return View(tuple(shape), (*first, *last), len(first))


def _chosen(batch: Batch | Rules | Chooser, path: str, leaf: Any) -> Batch | None:
    """What is said of one parameter."""
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, tuple):
        matching = (one for rule, one in batch if re.search(rule, path, re.IGNORECASE))
        return next(matching, None)
    answer = batch(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    try:
        return _as_batch(answer)
    except TypeError:
        raise _unfit(answer, path, leaf, "return axes, a Batch or None") from None


def _places(batch: Batch, axes: Sequence[int], path: str, leaf: Any) -> tuple[int, ...]:
    """The axes, counted from the first."""
    order = len(leaf.shape)
    if not all(-order <= axis < order for axis in axes):
        raise _unfit(batch, path, leaf, "name axes of the parameter")
    return tuple(axis % order for axis in axes)


def _unfit(value: Any, path: str, leaf: Any, what: str) -> ValueError:
    return ValueError(
        f"`batch` must {what}, got {value!r} for {list(leaf.shape)} at {path!r}."
    )
