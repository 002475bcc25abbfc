"""What is said of parameters: one value for all, rules by path, or a function."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Rules = tuple[tuple[str, Any], ...]  # regular expressions, the first counts
Chooser = Callable[[str, jax.ShapeDtypeStruct], Any]


class Kind(NamedTuple):
    """An argument whose values are said for all parameters at once."""

    name: str  # of the argument
    values: str  # what these are, for messages
    read: Callable[[Any], Any]  # a value or None as it is kept; TypeError for others


def checked(kind: Kind, said: Any) -> Any:
    """What is said, in the form in which it is kept: a value, `Rules` or a `Chooser`.

    Raises:
      ValueError: if it is none of these.
    """
    if callable(said):
        return said
    try:
        return _checked(kind, said)
    except TypeError:
        raise ValueError(
            f"`{kind.name}` must be {kind.values}, a mapping from regular expressions "
            f"to these, or a function of a path and an array, got {said!r}."
        ) from None


def _checked(kind: Kind, said: Any) -> Any:
    try:
        return kind.read(said)
    except TypeError:
        if not isinstance(said, Mapping | tuple | list):
            raise
        rules = said.items() if isinstance(said, Mapping) else said
        return tuple(_checked_rule(kind, *rule) for rule in rules)


def _checked_rule(kind: Kind, path: str, value: Any) -> tuple[str, Any]:
    try:
        re.compile(path, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f"`{kind.name}` must have regular expressions, got {path!r}: {error}."
        ) from None
    try:
        return path, kind.read(value)
    except TypeError:
        raise ValueError(
            f"`{kind.name}` must have {kind.values} or None for each regular "
            f"expression, got {value!r} for {path!r}."
        ) from None


def name_of(path: tuple) -> str:
    """A path of `jax.tree_util`, as rules and functions see it.

    Variables of nnx are their own `value`: that is in the path of parameters, and in
    that of their gradients it is not.
    """
    if len(path) > 1 and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def chosen(kind: Kind, said: Any, path: str, leaf: Any) -> Any:
    """What is said of one parameter; None where no rule is found in its path.

    Raises:
      ValueError: if a function returns something else than a value or None.
    """
    if isinstance(said, tuple):
        matching = (one for rule, one in said if re.search(rule, path, re.IGNORECASE))
        return next(matching, None)
    if not callable(said):
        return said
    answer = said(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    try:
        return kind.read(answer)
    except TypeError:
        what = f"return {kind.values} or None"
        raise unfit(kind, what, answer, path, leaf) from None


def unfit(kind: Kind, what: str, value: Any, path: str, leaf: Any) -> ValueError:
    """The error that says what a value for this parameter must do."""
    return ValueError(
        f"`{kind.name}` must {what}, got {value!r} for {list(leaf.shape)} at {path!r}."
    )
