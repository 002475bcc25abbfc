"""Checks of arguments, and the types that arguments have."""

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, get_args

import jax
from jax.typing import ArrayLike

Graft = Literal["sgd", "adagrad", "rmsprop", "adam"]
Decay = Literal["decoupled", "corrected", "independent"]
Precision = Literal["highest", "high", "default"]

Schedule = Callable[[jax.Array], ArrayLike]
ScalarOrSchedule = ArrayLike | Schedule
Period = ArrayLike | Schedule
Exponents = Mapping[int, float | Mapping[int, float]]
Mask = Any | Callable[[Any], Any]  # booleans like the parameters, or a prefix


def is_known(value: Any) -> bool:
    """Whether a value can be looked at while tracing."""
    return not isinstance(value, jax.core.Tracer)


def is_number(value: Any, number: float) -> bool:
    """Whether a number that can be looked at, also an array, is equal to another."""
    return value is not None and is_known(value) and float(value) == number


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Refuses a value that is none of the choices."""
    if not isinstance(value, Hashable) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")


def check_precision(value: Any) -> None:
    """Refuses what names no precision of products."""
    check_choice("precision", value, get_args(Precision))


def check_number(
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = math.inf,
    positive: bool = False,
) -> None:
    """Refuses what is not a finite real scalar in [low, high]; lets tracers pass."""
    if not is_known(value):
        return
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    inside = low <= number <= high and not (positive and number == 0)
    if not (math.isfinite(number) and inside):
        bound = "above 0" if positive else f"of at least {low:g}"
        bound += "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"`{name}` must be a finite number {bound}, got {value!r}.")


def check_integer(name: str, value: Any, *, low: int = 1) -> None:
    """Refuses what is not an int32 of at least `low`; lets tracers pass."""
    if not is_known(value):
        return
    try:
        valid = not isinstance(value, bool) and low <= operator.index(value) < 2**31
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(
            f"`{name}` must be an integer of at least {low} and below 2**31, "
            f"got {value!r}."
        )


def check_period(name: str, value: Any) -> None:
    """Refuses a period that is neither a schedule nor an integer of at least 1."""
    if not callable(value):
        check_integer(name, value)


def check_rate(name: str, value: Any) -> None:
    """Refuses a rate that is neither a schedule nor a finite number >= 0."""
    if not callable(value):
        check_number(name, value)


def is_static(value: Any, number: float) -> bool:
    """Whether a hyperparameter is a Python number equal to `number`.

    An array (`optax.inject_hyperparams` makes every number one) never is, so that
    the shape of the state does not depend on its value.
    """
    return isinstance(value, int | float) and value == number


def check_exponents(exponents: Any, per_axis: bool = True) -> None:
    """Refuses what does not map orders to exponents, or to exponents of axes."""
    if exponents is None:
        return
    if not isinstance(exponents, Mapping):
        raise ValueError(
            f"`exponents` must be a mapping from orders, got {exponents!r}."
        )
    for order, override in exponents.items():
        check_integer("exponents", order)
        if per_axis and isinstance(override, Mapping):
            for axis, exponent in override.items():
                if isinstance(axis, bool) or axis not in range(order):
                    raise ValueError(
                        f"`exponents` must name axes below the order {order}, "
                        f"got {axis!r}."
                    )
                check_number("exponents", exponent)
        else:
            check_number("exponents", override)
