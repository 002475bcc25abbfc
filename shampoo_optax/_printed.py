"""Transforms that print as the calls of `so` and `optax` that they stand for."""

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any

import optax

WIDTH = 88


class Preset(optax.GradientTransformationExtraArgs):
    """A transform that prints as the call that it stands for."""

    text = ""

    def __repr__(self) -> str:
        return self.text or super().__repr__()


def call(function: Callable, *args: Any, name: str = "", **kwargs: Any) -> Preset:
    """What a function makes of its arguments, and how the call is written."""
    name = name or f"so.{function.__name__}"
    shown = [*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in kwargs.items())]
    preset = Preset(*optax.with_extra_args_support(function(*args, **kwargs)))
    preset.text = _lines(f"{name}(", shown, ")")
    return preset


def _shown(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        parts = [f"{k}={_shown(v)}" for k, v in fields.items()]
        return _lines(f"so.{type(value).__name__}(", parts, ")")
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
