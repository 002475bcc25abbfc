"""What figures share; matplotlib, which is optional, is imported here alone."""

import importlib
from collections.abc import Iterable
from typing import Any

OTHERS = "0.75"  # the grey of what has no colour of its own


def new_figure(
    rows: int, columns: int, width: float, height: float, **kwargs: Any
) -> tuple[Any, Any]:
    """A figure that `pyplot` knows nothing of, and its axes, `[rows, columns]`.

    Args:
      rows: of axes.
      columns: of axes.
      width: in inches.
      height: in inches.
      **kwargs: for `Figure.subplots`.
    """
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib: python -m pip install 'shampoo-optax[plots]'"
        ) from error
    figure = module.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def colors(names: Iterable[str], most: int = 10) -> dict[str, str]:
    """Colours for the first names; the others are grey."""
    return {
        name: f"C{place}" if place < most else OTHERS
        for place, name in enumerate(dict.fromkeys(names))
    }


def add_legend(figure: Any, handles: dict[str, Any]) -> None:
    """A legend below all axes."""
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(4, max(1, len(handles))),
        fontsize="small",
        frameon=False,
    )
