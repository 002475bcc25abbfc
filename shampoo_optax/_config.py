"""Records that shape the state and the trace, and the arguments of a transform."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from shampoo_optax._blocking import Blocking
from shampoo_optax._checks import (
    Exponents,
    Graft,
    Period,
    check_choice,
    check_exponents,
    check_integer,
    check_number,
    check_period,
    is_known,
    is_number,
)
from shampoo_optax._eigen_methods import Eigendecomposed, Eigh, PseudoInverse
from shampoo_optax._newton_methods import Iteration, check_exponent

Sides = Literal["both", "input", "output"]
Stored = Literal["float32", "bfloat16", "float64"]
Root = Eigh | PseudoInverse | Iteration | Eigendecomposed


@dataclass(frozen=True)
class Axes:
    """Which axes of a block have a factor, and of what kind.

    Orders and axes are those of blocks, after merging: with the default `Blocking` a
    convolution kernel is a matrix too. A dimension is as long as it is after merging.
    A diagonal factor has the sums of squares that are on the diagonal of a whole one,
    and its powers, with their ridge, are taken entry by entry.

    Args:
      sides: `"both"` sides of a matrix, or only its `"input"` (axis 0) or `"output"`
        (axis 1); then the default exponent is 1/2. Blocks of other orders are not
        concerned. Default `"both"`.
      min_order: blocks with fewer axes have no factors and are left to grafting: their
        direction is that of the grafted method, or without any the filtered gradient
        (in SOAP Adam's). An integer >= 1. Default 1.
      diagonal_above: longer dimensions are not cut, and have a diagonal factor; an
        integer, at least the block size. Default `None`: there are none.
      skip_above: longer dimensions are not cut, and have no factor; at least the
        block size. The exponents of a block's other axes stay as they are,
        1 / (2 * order) by default, as with an exponent of 0. A block of nothing else
        is left to grafting. It comes before `diagonal_above`. Default `None`: there
        are none.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_shampoo(axes=so.Axes(diagonal_above=10_000))
    """

    sides: Sides = "both"
    min_order: int = 1
    diagonal_above: int | None = None
    skip_above: int | None = None

    def __post_init__(self):
        check_choice("sides", self.sides, get_args(Sides))
        check_integer("min_order", self.min_order)
        for name in ("diagonal_above", "skip_above"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))

    @property
    def limits(self) -> tuple[int, ...]:
        """The lengths above which a dimension is not cut."""
        limits = (self.diagonal_above, self.skip_above)
        return tuple(limit for limit in limits if limit is not None)


@dataclass(frozen=True)
class Storage:
    """In what form the state lies in memory; it is computed in float32 or wider.

    A bfloat16 number takes up no change that is less than about 1/400 of it. Factors
    in bfloat16 stop up to a quarter short of a steady mean with a `b2` of 0.99, at
    about a third of it with 0.999, and then do not forget: larger ones want float32.
    Their eigenvalues below 1/100 of the largest are rounding errors, so that
    `relative_eps` is 1e-2 by default; iterations may refuse them all the same
    (`state.failures` counts), and a :class:`PseudoInverse` needs an `rtol`.

    Args:
      factors: dtype of the factors, `"float32"`, `"bfloat16"`, or, with 64-bit arrays
        enabled, `"float64"`, in which they are also inverted. Default `None`: that
        of the blocks, float32 or wider.
      roots: dtype of the roots or bases, likewise; with bfloat16 roots of float32
        factors, whose small directions rounding hides, take a `relative_eps` of about
        1e-2. Default `None`.
      momentum: dtype of the filtered gradient and the momentum, likewise. Default
        `None`.
      packed: whether factors and roots are kept as one triangle, which halves them.
        Bases are no symmetric matrices, and stay whole. Default `False`.

    Raises:
      ValueError: if a field has a value other than those above; in `init`, if one is
        `"float64"` without 64-bit arrays.

    Examples:
      >>> import shampoo_optax as so
      >>> storage = so.Storage(roots="bfloat16", packed=True)
      >>> tx = so.scale_by_shampoo(storage=storage)
    """

    factors: DTypeLike | None = None
    roots: DTypeLike | None = None
    momentum: DTypeLike | None = None
    packed: bool = False

    def __post_init__(self):
        for name in ("factors", "roots", "momentum"):
            object.__setattr__(self, name, _checked_dtype(name, getattr(self, name)))
        check_choice("packed", self.packed, (True, False))


def _checked_dtype(name: str, dtype: DTypeLike | None) -> str | None:
    try:
        found = None if dtype is None else jnp.dtype(dtype).name
    except (TypeError, ValueError):
        found = dtype
    choices = (None, *get_args(Stored))
    check_choice(name, found if found in choices else dtype, choices)
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that all transforms on blocks share, checked.

    The defaults are for transforms without factors, which leave these out.
    """

    b1: ArrayLike
    b2: ArrayLike = 1.0
    b3: ArrayLike | None
    eps: ArrayLike = 0.0
    refresh_every: Period = 1
    statistics_every: ArrayLike = 1
    stagger: bool = False
    start: ArrayLike | None
    bias_correction: bool
    drop_weighting: bool = False
    graft: Graft | None
    graft_b2: ArrayLike | None
    graft_eps: ArrayLike
    graft_drop_weighting: bool
    blocking: Blocking
    relative_eps: ArrayLike | None = None
    exponents: Exponents | None = None
    root: Root = Eigh()
    default_exponent: float | None = None
    trace_scaling: ArrayLike = 0.0
    axes: Axes = Axes()
    storage: Storage = Storage()
    batch_size: ArrayLike = 1.0
    root_momentum: ArrayLike = 0.0
    metrics: bool = False

    def __post_init__(self):
        self._check_records()
        self._check_betas()
        for name in ("eps", "relative_eps", "graft_eps"):
            self._check_number(name)
        self._check_refresh()
        check_exponents(self.exponents)
        for order, override in (self.exponents or {}).items():
            several = isinstance(override, Mapping)
            self._check_roots(order, override.values() if several else [override])
        check_number("trace_scaling", self.trace_scaling)
        check_number("batch_size", self.batch_size, positive=True)
        self._check_axes()
        self._check_graft()
        self._check_ridge()

    def _check_records(self):
        if not isinstance(self.root, Root):
            raise ValueError(
                f"`root` must be a root record such as Eigh(), got {self.root!r}."
            )
        for name, kind in (
            ("blocking", Blocking),
            ("axes", Axes),
            ("storage", Storage),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"`{name}` must be a {kind.__name__}, got {getattr(self, name)!r}."
                )
        switches = ("bias_correction", "drop_weighting", "graft_drop_weighting")
        for name in (*switches, "metrics", "stagger"):
            check_choice(name, getattr(self, name), (True, False))

    def _check_betas(self):
        for name in ("b1", "b2", "b3", "graft_b2", "root_momentum"):
            self._check_number(name, high=1.0)
        for name in ("b1", "b3", "root_momentum"):
            if is_number(getattr(self, name), 1):
                raise ValueError(
                    f"`{name}` must be below 1, got {getattr(self, name)!r}."
                )

    def _check_number(self, name: str, **bounds: float):
        value = getattr(self, name)
        if value is not None or name not in ("b3", "graft_b2", "relative_eps"):
            check_number(name, value, **bounds)

    def _check_refresh(self):
        check_period("refresh_every", self.refresh_every)
        check_integer("statistics_every", self.statistics_every)
        known = is_known(self.statistics_every) and self._has_known_period
        if known and self.statistics_every > self.refresh_every:
            raise ValueError(
                "`statistics_every` must be at most `refresh_every` "
                f"({self.refresh_every!r}), got {self.statistics_every!r}."
            )
        if self.start is not None:
            self._check_start()
        if self.stagger:
            self._check_stagger()

    def _check_start(self):
        check_integer("start", self.start)
        known = is_known(self.start) and self._has_known_period
        if known and self.start < self.refresh_every:
            raise ValueError(
                "`start` must be at least `refresh_every` "
                f"({self.refresh_every!r}), got {self.start!r}."
            )

    def _check_stagger(self):
        every, seen, start = self.refresh_every, self.statistics_every, self.start
        if not isinstance(every, int | np.integer):
            raise ValueError(
                "`refresh_every` must be a Python integer with `stagger`, which deals "
                "its steps beforehand (for `optax.inject_hyperparams` name it in "
                f"`static_args`), got {every!r}."
            )
        known = start is not None and is_known(start) and is_known(seen)
        if known and start < every + seen - 1:
            raise ValueError(
                f"`start` must be at least {every + seen - 1} with `stagger`, so that "
                f"first turns have statistics, got {start!r}."
            )

    @property
    def at_once(self) -> "Options":
        """The same with statistics at every step, and all slots refreshed together."""
        return replace(self, statistics_every=1, stagger=False)

    @property
    def turns(self) -> int:
        """The steps in which every slot has its turn to be refreshed."""
        return int(self.refresh_every) if self.stagger else 1

    @property
    def _has_known_period(self) -> bool:
        return is_known(self.refresh_every) and not callable(self.refresh_every)

    def _check_graft(self):
        check_choice("graft", self.graft, (None, *get_args(Graft)))
        name = "b2" if self.graft_b2 is None else "graft_b2"
        value = getattr(self, name)
        never = self.graft in ("rmsprop", "adam") and not self.graft_drop_weighting
        if never and is_number(value, 1):
            rounded = getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16)
            remedy = "set `graft_b2`, or take 'adagrad'"
            if rounded:
                remedy = "give `inject_hyperparams` a `hyperparam_dtype=jnp.float32`"
            raise ValueError(
                f"`{name}` must be below 1 for {self.graft!r} grafting, which would "
                f"never accumulate, got {value!r}; {remedy}."
            )

    def _check_axes(self):
        size = self.blocking.block_size
        for name in ("diagonal_above", "skip_above"):
            limit = getattr(self.axes, name)
            if size is not None and limit is not None and limit < size:
                raise ValueError(
                    f"`{name}` must be at least the block size ({size}), got {limit!r}."
                )

    def _check_ridge(self):
        root = getattr(self.root, "root", self.root)
        if not isinstance(root, PseudoInverse):
            return
        for name in ("eps", "relative_eps"):
            value = getattr(self, name)
            known = value is not None and is_known(value)
            if known and not is_number(value, 0):
                raise ValueError(
                    f"`{name}` must be 0 with a PseudoInverse, got {value!r}."
                )

    def _check_roots(self, order: int, exponents: Iterable[float]):
        for exponent in exponents:
            if exponent != 0:
                check_exponent(self.root, exponent, order)

    def factored_axes(self, block: tuple[int, ...]) -> dict[str, float]:
        """The axes of a block that have a factor, and their exponents e."""
        order, side = len(block), self.axes.sides
        if order < self.axes.min_order:
            return {}
        one_sided = order == 2 and side != "both"
        default = self.default_exponent
        if default is None:
            default = 1 / 2 if one_sided else 1 / (2 * order)
        left = {"input": 1, "output": 0}[side] if one_sided else None
        override = (self.exponents or {}).get(order, {})
        if not isinstance(override, Mapping):
            override = dict.fromkeys(range(order), override)
        exponents = {
            str(axis): override.get(axis, default)
            for axis, length in enumerate(block)
            if axis != left and not self._is_skipped(length)
        }
        full = [e for k, e in exponents.items() if not self.is_diagonal(block[int(k)])]
        self._check_roots(order, full)
        return {axis: e for axis, e in exponents.items() if e != 0}

    @property
    def fixed_orders(self) -> frozenset[int]:
        """The orders of the blocks whose axes are told apart."""
        overrides = (self.exponents or {}).items()
        fixed = {order for order, e in overrides if isinstance(e, Mapping)}
        return frozenset(fixed if self.axes.sides == "both" else {2, *fixed})

    def is_left_to_grafting(self, block: tuple[int, ...]) -> bool:
        """Whether `axes` says that no axis of a block has a factor."""
        few = len(block) < self.axes.min_order
        return few or (len(block) > 0 and all(map(self._is_skipped, block)))

    def _is_skipped(self, length: int) -> bool:
        return self.axes.skip_above is not None and length > self.axes.skip_above

    def is_diagonal(self, length: int) -> bool:
        """Whether an axis of this length has a diagonal factor."""
        limit = self.axes.diagonal_above
        return limit is not None and length > limit
