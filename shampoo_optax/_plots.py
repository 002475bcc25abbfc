"""Figures of the spectra of factors and of the health of a run."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shampoo_optax._checks import check_integer
from shampoo_optax._diagnose import (
    MEASURES,
    Diagnosis,
    Health,
    simple_paths,
    states_of,
)
from shampoo_optax._plotting import OTHERS, add_legend, colors, new_figure
from shampoo_optax._slots import region_slots
from shampoo_optax._stacks import Region
from shampoo_optax._storage import is_diagonal, is_packed, side_of, unpack
from shampoo_optax._transform import Layout

# What an axis says of each measure, with the unit.
_LABELS = {
    "condition": "condition number (1)",
    "residual": "residual of roots (1)",
    "age": "age of roots (steps)",
    "failures": "refused roots (number)",
    "skipped": "skipped steps (number)",
    "grafting": "grafting ratio (1)",
    "rms": "RMS of the direction (1)",
    "cosine": "cosine to gradient (1)",
}
_LOGARITHMIC = ("condition", "residual", "grafting")
_MOST = 40  # parameters in one figure


# ---- spectra


class _Block(NamedTuple):
    """One block of a parameter."""

    region: Region
    stack: str
    slot: int


def plot_spectra(
    state: optax.OptState,
    params: optax.Params,
    tx: optax.GradientTransformation,
    path: str,
    *,
    block: int | None = None,
    mesh: Mesh | None = None,
) -> Any:
    r"""Draws the eigenvalues of the factors of one block, largest first.

    Each curve is one axis of the block: :math:`\lambda_i / \lambda_1` against i, from a
    decomposition in float64 on the host. Only this block's factors are read. Where a
    curve falls below the machine epsilon of the factors, rounding is all that is left,
    and what the relative ridge of the transform exceeds is flattened by it.

    Args:
      state: the state of `tx`, outside of `jax.jit`.
      params: the parameters, arrays or `jax.ShapeDtypeStruct`s of any shapes.
      tx: the transform, with ours anywhere inside.
      path: the path of a parameter, as the rows of :func:`diagnose` have it.
      block: the number of a block, from 0. Default `None`: the one with the largest
        condition number where the state has metrics, else 0.
      mesh: as in :func:`state_shardings`. Default `None`.

    Returns:
      A `matplotlib.figure.Figure`, not known to `pyplot`: save it by `savefig`, or
      let a notebook show it, after `%matplotlib inline`.

    Raises:
      ValueError: if there is no such parameter with factors, or no such block, or
        `state` is not that of `tx` and `params`.
      ImportError: if there is no matplotlib.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx, params = so.shampoo(0.1, refresh_every=1), {"w": jnp.ones((4, 3))}
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> figure = so.plot_spectra(state, params, tx, "w")
      >>> figure.axes[0].get_title()
      'w, block 0 of 1: 4x3'
    """
    if block is not None:
        check_integer("block", block, low=0)
    held, blocks = _find_blocks(state, params, tx, path, mesh)
    block = _worst(held, blocks) if block is None else block
    if block >= len(blocks):
        raise ValueError(
            f"`block` must be below {len(blocks)}, the number of blocks of {path!r}, "
            f"got {block!r}."
        )
    region, stack, slot = blocks[block]
    figure, [[axes]] = new_figure(1, 1, 6, 4)
    for axis, factor in held.factors[stack].items():
        values = _eigenvalues(_read_slot(factor, slot), region.stacked[int(axis)])
        rank = np.arange(1, len(values) + 1)
        label = f"axis {region.axes[int(axis)]}, side {len(values)}"
        axes.semilogy(rank, values, marker=".", label=label)
        epsilon = float(jax.numpy.finfo(factor.dtype).eps)
    axes.axhline(epsilon, color=OTHERS, linestyle=":", label="machine epsilon")
    axes.set(
        title=f"{path}, block {block} of {len(blocks)}: "
        + "x".join(map(str, region.block)),
        xlabel="rank of the eigenvalue (1 is the largest)",
        ylabel="eigenvalue / largest (1)",
    )
    axes.legend(frameon=False)
    return figure


def _find_blocks(
    state: Any, params: Any, tx: Any, path: str, mesh: Mesh | None
) -> tuple[Any, list[_Block]]:
    """The state that has the factors of a parameter, and its blocks."""
    names, known = simple_paths(params), []
    for _, layout, held in states_of(state, params, tx, mesh):
        factors = getattr(held, "factors", {})
        for leaf, own in enumerate(layout.paths):
            blocks = list(_blocks(layout, leaf))
            if not blocks or blocks[0].stack not in factors:
                continue
            known.append(names.get(own, own))
            if known[-1] == path:
                return held, blocks
    raise ValueError(
        f"`path` must be that of a parameter with factors, one of {known}, "
        f"got {path!r}."
    )


def _blocks(layout: Layout, leaf: int) -> Iterator[_Block]:
    for region, parts in region_slots(layout):
        if region.leaf == leaf:
            for stack, (first, *_) in parts:
                for slot in first.tolist():
                    yield _Block(region, stack, slot)


def _worst(held: Any, blocks: list[_Block]) -> int:
    """The block with the largest condition number, the first without any."""
    conditions = getattr(held, "metrics", {}).get("conditions", {})
    if not conditions:
        return 0
    largest = [
        max(float(_read_slot(x, slot)) for x in conditions[stack].values())
        for _, stack, slot in blocks
    ]
    return int(np.argmax(largest))


def _read_slot(array: jax.Array, slot: int) -> np.ndarray:
    """One slot of an array that may be divided over devices."""
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        if start <= slot < start + len(shard.data):
            return np.asarray(shard.data[slot - start])
    raise ValueError("`block` must be held by a device of this process, got another.")


def _eigenvalues(stored: np.ndarray, side: int) -> np.ndarray:
    """The eigenvalues of a stored factor without its padding, over the largest."""
    stored = stored.astype(np.float64)[None]
    if is_packed(stored):
        stored = unpack(stored, side_of(stored))
    own = stored[0][tuple(slice(side) for _ in stored[0].shape)]
    values = np.sort(own) if is_diagonal(stored) else np.linalg.eigvalsh(own)
    values = values[::-1] / max(values[-1], np.finfo(np.float64).tiny)
    return np.where(values > 0, values, np.nan)  # rounding has no place on a log axis


# ---- health


def plot_health(history: Diagnosis | Sequence[Diagnosis]) -> Any:
    r"""Draws what :func:`diagnose` found, once or from time to time.

    One diagnosis gives a mark for each parameter, a red cross where there is a remark.
    Several give a curve for each parameter over the steps; the ten that are most in
    need of one have colours. Each known measure has axes of its own.

    Args:
      history: a :class:`Diagnosis`, or a sequence of them in the order of their steps.

    Returns:
      A `matplotlib.figure.Figure`, not known to `pyplot`: save it by `savefig`, or
      let a notebook show it, after `%matplotlib inline`.

    Raises:
      ValueError: if `history` is neither, or empty.
      ImportError: if there is no matplotlib.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx, params = so.shampoo(0.1, metrics=True), {"w": jnp.ones((4, 3))}
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> figure = so.plot_health(so.diagnose(state, params, tx))
      >>> [axes.get_xlabel() for axes in figure.axes][-2:]
      ['RMS of the direction (1)', 'cosine to gradient (1)']
    """
    history = _checked(history)
    last = sorted(history[-1].rows, key=lambda row: -len(row.remarks))
    if len(history) == 1:
        return _draw_rows(last[:_MOST], len(last))
    return _draw_curves(history, [_name(row) for row in last])


def _checked(history: Any) -> Sequence[Diagnosis]:
    items = [history] if isinstance(history, Diagnosis) else history
    known = isinstance(items, Sequence) and len(items) > 0
    if not (known and all(isinstance(x, Diagnosis) and x.rows for x in items)):
        raise ValueError(
            "`history` must be a Diagnosis of some parameters, or a sequence of them, "
            f"got {history!r:.200}."
        )
    return items


def _name(row: Health) -> str:
    return f"{row.transform}/{row.path}"


def _known(rows: Sequence[Health]) -> list[str]:
    return [m for m in MEASURES if any(getattr(row, m) is not None for row in rows)]


def _draw_rows(rows: list[Health], total: int) -> Any:
    measures = _known(rows)
    height = 1.5 + 0.22 * len(rows)
    figure, [line] = new_figure(1, len(measures), 2 + 2.2 * len(measures), height)
    places = np.arange(len(rows))
    marked = np.array([bool(row.remarks) for row in rows])
    for axes, measure in zip(line, measures, strict=True):
        values = _values(rows, measure)
        axes.plot(values[~marked], places[~marked], "o", color="C0")
        axes.plot(values[marked], places[marked], "x", color="C3")
        _scale(axes, "x", measure, values)
        axes.set(xlabel=_LABELS[measure], ylim=(len(rows) - 0.5, -0.5), yticks=places)
        axes.set_yticklabels([] if axes is not line[0] else map(_name, rows))
        axes.grid(axis="y", color="0.9")
    line[0].set_ylabel("parameter")
    figure.suptitle(
        f"step {rows[0].step}: {len(rows)} of {total} parameters, with remarks in red"
    )
    return figure


def _draw_curves(history: Sequence[Diagnosis], names: list[str]) -> Any:
    curves = {name: [] for name in names}
    for row in (row for item in history for row in item.rows):
        curves.setdefault(_name(row), []).append(row)
    measures = _known([row for rows in curves.values() for row in rows])
    columns = 2 if len(measures) <= 4 else 4
    lines = math.ceil(len(measures) / columns)
    figure, grid = new_figure(lines, columns, 3.2 * columns, 1 + 2.6 * lines)
    for axes in grid.flat[len(measures) :]:
        axes.set_visible(False)
    chosen, handles = colors(curves), {}
    for axes, measure in zip(grid.flat, measures, strict=False):
        drawn = _draw_measure(axes, measure, curves, chosen)
        for name, curve in drawn.items():
            handles["others" if chosen[name] == OTHERS else name] = curve
    add_legend(figure, handles)
    return figure


def _draw_measure(
    axes: Any, measure: str, curves: dict[str, list[Health]], chosen: dict[str, str]
) -> dict[str, Any]:
    """A curve for each parameter, the first ones on top; returns their handles."""
    handles, seen = {}, []
    for place, (name, rows) in enumerate(curves.items()):
        values, steps = _values(rows, measure), [row.step for row in rows]
        style = dict(color=chosen[name], zorder=3 - place / len(curves))
        (handles[name],) = axes.plot(steps, values, ".-", **style)
        seen.append(values)
    _scale(axes, "y", measure, np.concatenate(seen))
    axes.set(xlabel="step", ylabel=_LABELS[measure])
    return handles


def _values(rows: Sequence[Health], measure: str) -> np.ndarray:
    values = np.array([getattr(row, measure) for row in rows], np.float64)
    return np.where(values > 0, values, np.nan) if measure in _LOGARITHMIC else values


def _scale(axes: Any, which: str, measure: str, values: np.ndarray) -> None:
    """Whole decades on a logarithmic axis; counts from 0 to 1 or more."""
    known = values[np.isfinite(values)]
    if measure in _LOGARITHMIC and known.size:
        decades = np.log10([known.min(), known.max()])
        low, high = np.floor(decades[0] - 0.1), np.ceil(decades[1] + 0.1)
        axes.set(**{f"{which}scale": "log", f"{which}lim": (10.0**low, 10.0**high)})
        axes.tick_params(which="minor", labelbottom=False, labelleft=False)
    if measure in ("age", "failures", "skipped"):
        high = max(1.0, known.max(initial=0))
        axes.set(**{f"{which}lim": (-0.05 * high, 1.05 * high)})
    if measure == "cosine":
        draw = axes.axvline if which == "x" else axes.axhline
        draw(0, color=OTHERS, linewidth=0.8)
