"""Transforms that print as the calls that make them."""

import textwrap
from collections.abc import Callable
from typing import Any

import optax

WIDTH = 88


class Preset(optax.GradientTransformationExtraArgs):
    """A transform that prints as the call that makes it."""

    def __new__(cls, tx: optax.GradientTransformation, text: str):
        """Takes both functions of the transform."""
        self = super().__new__(cls, *optax.with_extra_args_support(tx))
        self.text = text
        return self

    def __repr__(self) -> str:
        return self.text


def call(function: Callable, *args: Any, name: str = "", **kwargs: Any) -> Preset:
    """What a function makes of its arguments, and how the call is written."""
    name = name or function.__name__
    shown = [*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in kwargs.items())]
    return Preset(function(*args, **kwargs), _lines(f"{name}(", shown, ")"))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return _lines("{", [f"{k!r}: {_shown(v)}" for k, v in value.items()], "}")
    return getattr(value, "shown", None) or repr(value)


def _lines(head: str, parts: list[str], tail: str) -> str:
    """One line where there is room, else a line for each part."""
    line = head + ", ".join(parts) + tail
    if len(line) <= WIDTH and "\n" not in line:
        return line
    body = textwrap.indent("".join(f"{part},\n" for part in parts), "    ")
    return f"{head}\n{body}{tail}"
