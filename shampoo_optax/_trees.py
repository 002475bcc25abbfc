"""Trees of updates, parameters and buffers, leaf by leaf."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import dtypes
from jax.typing import ArrayLike


def is_none(leaf: Any) -> bool:
    """Whether a leaf is absent."""
    return leaf is None


def tree_map(function, updates: optax.Updates, *trees: Any) -> optax.Updates:
    """Maps over a tree of updates in which absent gradients are `None` and stay so."""
    return jax.tree.map(
        lambda update, *leaves: None if update is None else function(update, *leaves),
        updates,
        *trees,
        is_leaf=is_none,
    )


def advance(function, buffers: Any, updates: optax.Updates) -> Any:
    """Maps over a tree of buffers; a buffer whose update is absent stays as it is."""
    return jax.tree.map(
        lambda update, buffer: buffer if update is None else function(buffer, update),
        updates,
        buffers,
        is_leaf=is_none,
    )


def next_count(count: jax.Array) -> jax.Array:
    """The count of one more step; it stays at the largest int32."""
    return count + (count < jnp.iinfo(count.dtype).max).astype(count.dtype)


def when_due(due: jax.Array, recompute: Callable, *held: Any) -> tuple:
    """What `recompute` makes of the values held, or these; no compilation eagerly."""
    if isinstance(due, jax.core.Tracer):
        return jax.lax.cond(due, recompute, lambda *kept: kept, *held)
    return recompute(*held) if due else held


def repeated(times: jax.Array, advance: Callable, held: Any) -> Any:
    """What becomes of the values held in so many turns; no compilation eagerly.

    Args:
      times: the number of turns.
      advance: maps the number of a turn, from 0, and what is held to the new of that.
      held: a tree of arrays.
    """
    if isinstance(times, jax.core.Tracer):
        return jax.lax.fori_loop(0, times, advance, held)
    return functools.reduce(lambda held, turn: advance(turn, held), range(times), held)


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype of what is kept for a leaf: float64 for float64, else float32."""
    dtype = dtypes.canonicalize_dtype(dtype)
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def wide(leaf: ArrayLike) -> jax.Array:
    """The leaf in float32, or as it is where it has 64 bits."""
    leaf = jnp.asarray(leaf)
    return leaf.astype(wide_dtype(leaf.dtype))


def narrow(leaf: jax.Array, dtype: np.dtype) -> jax.Array:
    """Casts; numbers beyond the range of the dtype become its largest."""
    limit = float(jnp.finfo(dtype).max)
    if limit < float(jnp.finfo(leaf.dtype).max):
        leaf = jnp.clip(leaf, -limit, limit)
    return leaf.astype(dtype)


def require_params(params: Any, purpose: str) -> None:
    """Refuses an update without parameters."""
    if params is None:
        raise ValueError(f"`params` must be passed to `update` {purpose}, got None.")
