"""A figure of what every device holds of a state."""

import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from shampoo_optax._checks import check_integer
from shampoo_optax._diagnose import all_layouts, name_layouts, simple_paths
from shampoo_optax._layouts import layouts_of
from shampoo_optax._plotting import OTHERS, add_legend, colors, new_figure
from shampoo_optax._slots import region_slots
from shampoo_optax._stacks import Region
from shampoo_optax._storage import side_of
from shampoo_optax._tables import human_bytes
from shampoo_optax._transform import Layout


class _Shares(NamedTuple):
    """What the devices hold of one state, in bytes."""

    total: int  # of each device
    own: dict[str, np.ndarray]  # {path: [devices]}, without padding

    @property
    def sizes(self) -> Counter:
        return Counter({path: int(held.sum()) for path, held in self.own.items()})


def plot_placement(
    params: optax.Params,
    tx: optax.GradientTransformation,
    *,
    devices: int | None = None,
) -> Any:
    r"""Draws what every device holds of a state, by parameter, and what is padding.

    As :func:`describe` does, it needs neither the devices nor memory for the state.

    Args:
      params: the parameters, arrays or `jax.ShapeDtypeStruct`s of any shapes.
      tx: a transform with ours anywhere inside.
      devices: the number of devices to divide blocks over, which need not exist.
        Default `None`: as the transform's `placement` says.

    Returns:
      A `matplotlib.figure.Figure`, not known to `pyplot`: save it by `savefig`, or
      let a notebook show it, after `%matplotlib inline`.

    Raises:
      ValueError: if `tx` holds no transform of ours with blocks, or `devices` is not
        an integer >= 1.
      ImportError: if there is no matplotlib.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> params = {"w": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
      >>> figure = so.plot_placement(params, so.shampoo(0.1), devices=4)
      >>> figure.axes[0].get_title()
      'shampoo: 24.0 MiB a device, 0.0% of it padding'
    """
    if devices is not None:
        check_integer("devices", devices)
    layouts = all_layouts(tx, layouts_of(tx, params, devices or 0))
    layouts = [layout for layout in layouts if layout.plan.stacks]
    if not layouts:
        raise ValueError(
            f"`params` must have blocks to draw, got {simple_paths(params)}."
        )
    names = simple_paths(params)
    shares = [_shares(layout, names) for layout in layouts]
    sizes = sum((share.sizes for share in shares), Counter())
    chosen = colors(path for path, _ in sizes.most_common())
    height = sum(1.2 + 0.25 * layout.plan.owners for layout in layouts) + 0.8
    figure, grid = new_figure(len(layouts), 1, 8, min(height, 20))
    handles = {}
    for name, share, [axes] in zip(name_layouts(layouts), shares, grid, strict=True):
        handles |= _draw(axes, name, share, chosen)
    shown = sorted(handles, key=lambda name: (name == "padding", name == "others"))
    add_legend(figure, {name: handles[name] for name in shown})
    return figure


def _shares(layout: Layout, names: dict[str, str]) -> _Shares:
    plan, state = layout.plan, layout.abstract()
    paths = [names.get(path, path) for path in layout.paths]
    own = {path: np.zeros(plan.owners) for path in paths}
    for region, parts in region_slots(layout):
        for stack, slots in parts:
            owners = slots.ravel() // plan.share[stack].size
            held = sum(_own_bytes(x, region, a) for a, x in _of(state, stack))
            count = np.bincount(owners, minlength=plan.owners)
            own[paths[region.leaf]] += count * held
    total = sum(
        leaf.size * leaf.dtype.itemsize // plan.owners
        for leaf in jax.tree.leaves(state._replace(count=()))
    )
    return _Shares(total, own)


def _of(state: Any, stack: str) -> list[tuple[str | None, jax.ShapeDtypeStruct]]:
    """What a state has for a stack, and for which axis of its blocks."""
    metrics = getattr(state, "metrics", {})
    parts = [*state._replace(count={}), *metrics.values()]
    found = []
    for part in parts:
        held = part.get(stack, {})
        found += held.items() if isinstance(held, dict) else [(None, held)]
    return found


def _own_bytes(leaf: jax.ShapeDtypeStruct, region: Region, axis: str | None) -> float:
    """The bytes of a slot that are no padding."""
    slot = leaf.size // leaf.shape[0] * leaf.dtype.itemsize
    if leaf.ndim == 1:
        return slot
    if axis is None:
        return slot * math.prod(region.stacked) / math.prod(leaf.shape[1:])
    return slot * (region.stacked[int(axis)] / side_of(leaf)) ** (leaf.ndim - 1)


def _draw(
    axes: Any, name: str, shares: _Shares, chosen: dict[str, str]
) -> dict[str, Any]:
    """One bar for each device; returns the handles of what is in them, by name."""
    unit, size = _unit(shares.total)
    devices = np.arange(len(next(iter(shares.own.values()))))
    left, handles = np.zeros(len(devices)), {}
    for path, own in shares.own.items():
        color = chosen[path]
        bars = axes.barh(devices, own / size, left=left, color=color, edgecolor="white")
        handles["others" if color == OTHERS else path] = bars
        left += own / size
    rest = np.maximum(shares.total / size - left, 0)
    style = dict(color="white", edgecolor="0.6", hatch="///", linewidth=0)
    handles["padding"] = axes.barh(devices, rest, left=left, **style)
    padding = rest.sum() / max((left + rest).sum(), 1e-30)
    held = f"{human_bytes(shares.total)} a device"
    axes.set(
        title=f"{name}: {held}, {padding:.1%} of it padding",
        xlabel=f"state ({unit})",
        ylabel="device",
        yticks=devices[:: max(1, len(devices) // 16)],
        ylim=(len(devices) - 0.5, -0.5),
    )
    return handles


def _unit(total: int) -> tuple[str, int]:
    """A binary unit for this number of bytes."""
    power = max(0, min(3, int(math.log2(max(total, 1)) // 10)))
    return ("B", "KiB", "MiB", "GiB")[power], 1024**power
