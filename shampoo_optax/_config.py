"""Records that shape the state and the trace, and the checks of arguments."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax.typing import ArrayLike

Graft = Literal["sgd", "adagrad", "rmsprop", "adam"]
MergeFrom = Literal["leading", "trailing"]
Ridge = Literal["before", "after"]
Decay = Literal["decoupled", "corrected", "independent"]

Schedule = Callable[[jax.Array], ArrayLike]
ScalarOrSchedule = ArrayLike | Schedule
Exponents = Mapping[int, float | Mapping[int, float]]
Mask = Any | Callable[[Any], Any]  # booleans like the parameters, or a prefix


def _is_known(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Refuses a value that is none of the choices."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")


def check_number(
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = math.inf,
    positive: bool = False,
) -> None:
    """Refuses what is not a finite real scalar in [low, high]; lets tracers pass."""
    if not _is_known(value):
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
    if not _is_known(value):
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


@dataclass(frozen=True)
class Blocking:
    """How a parameter is merged and cut into blocks.

    Dimensions of 1 are dropped, neighbouring dimensions are multiplied together
    while their product is at most `block_size` and more than `merge_to`
    dimensions remain, and every dimension is then cut into pieces of
    `block_size`, the last one smaller. With the defaults a convolution kernel
    `[3, 3, 64, 128]` becomes one block `[576, 128]`, and a matrix `[3000, 512]`
    becomes three blocks `[1024, 512], [1024, 512], [952, 512]`.

    Args:
      block_size: the largest side of a block, an integer >= 1; `None` cuts
        nothing. Default 1024.
      merge_to: merging stops at this number of dimensions, an integer >= 1;
        `None` merges nothing and keeps dimensions of 1. Default 2.
      merge_from: the side from which dimensions are merged, `"leading"` (suits
        Flax kernels, whose output features come last) or `"trailing"` (the
        official PyTorch package). Default `"leading"`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.Blocking(block_size=512)
      Blocking(block_size=512, merge_to=2, merge_from='leading')

    References:
      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497,
      section 3.1.
    """

    block_size: int | None = 1024
    merge_to: int | None = 2
    merge_from: MergeFrom = "leading"

    def __post_init__(self):
        if self.block_size is not None:
            check_integer("block_size", self.block_size)
        if self.merge_to is not None:
            check_integer("merge_to", self.merge_to)
        check_choice("merge_from", self.merge_from, get_args(MergeFrom))


@dataclass(frozen=True)
class Eigh:
    r"""Inverse roots by eigendecomposition, with a ridge.

    With :math:`L = Q \Lambda Q^\top` and the ridge
    :math:`\rho = \max(\varepsilon, \varepsilon_{rel} \lambda_{max})` the root is
    :math:`Q (\Lambda + \rho)^{-e} Q^\top`. Negative eigenvalues, which rounding
    makes, are shifted to 0 first.

    Args:
      ridge: whether the absolute part of the ridge is added to the diagonal
        `"before"` the decomposition or to the eigenvalues `"after"` it; the two
        differ by rounding alone. Default `"before"`.
      max_residual: a decomposition is refused when
        :math:`\|(L - Q \Lambda Q^\top) v\| > r \lambda_{max} \|v\|` or
        :math:`\|(I - Q Q^\top) v\| > r \|v\|` for a fixed probe v; r > 0, default
        1e-2.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.Eigh(ridge="after")
      Eigh(ridge='after', max_residual=0.01)
    """

    ridge: Ridge = "before"
    max_residual: float = 1e-2

    def __post_init__(self):
        check_choice("ridge", self.ridge, get_args(Ridge))
        check_number("max_residual", self.max_residual, positive=True)


@dataclass(frozen=True)
class PseudoInverse:
    r"""Inverse roots on the range of the factor, nothing outside of it.

    Eigenvalues at or below :math:`\max(rtol \cdot \max(\lambda_{max}, 0), atol)`
    count as 0 and stay 0 in the root; the others become :math:`\lambda^{-e}`. No
    ridge is added: `eps` and `relative_eps` must be 0.

    Args:
      rtol: relative rank tolerance >= 0; `None` stands for the side of the factor
        times the machine epsilon of its dtype. Default `None`.
      atol: absolute rank tolerance >= 0. Default 0.
      max_residual: as in :class:`Eigh`. Default 1e-2.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.PseudoInverse(rtol=1e-6)
      PseudoInverse(rtol=1e-06, atol=0.0, max_residual=0.01)
    """

    rtol: float | None = None
    atol: float = 0.0
    max_residual: float = 1e-2

    def __post_init__(self):
        if self.rtol is not None:
            check_number("rtol", self.rtol)
        check_number("atol", self.atol)
        check_number("max_residual", self.max_residual, positive=True)


@dataclass(frozen=True)
class CoupledNewton:
    r"""Inverse roots by a coupled Newton iteration: matrix products alone.

    From :math:`z = (p + 1) / (2 \|A\|_F)`, :math:`X = z^{1/p} I` and
    :math:`M = z A`, with A the factor and its ridge,

    .. math::
      S = (1 + 1/p) I - M / p, \qquad X \leftarrow X S, \qquad
      M \leftarrow S^p M

    until M is the identity; X then is :math:`A^{-1/p}`. It stops early where the
    error :math:`\max |M - I|` grows by more than a fifth, or stands still below
    1e-3. The relative ridge is in units of the largest row sum of |L|, a bound of
    the largest eigenvalue. Exponents q/p other than 1/p are powers of the root.

    Args:
      max_iterations: an integer >= 1. Default 100.
      tolerance: a factor is done when no entry of :math:`|M - I|` is above it,
        >= 0. Default 1e-6.
      max_residual: a root is refused when an entry of :math:`|A X^p - I|` is above
        it, > 0. Default 0.1.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.CoupledNewton(max_iterations=20)
      CoupledNewton(max_iterations=20, tolerance=1e-06, max_residual=0.1)

    References:
      Guo and Higham, A Schur-Newton Method for the Matrix pth Root and its Inverse,
      2006, https://doi.org/10.1137/050643374.
    """

    max_iterations: int = 100
    tolerance: float = 1e-6
    max_residual: float = 0.1

    def __post_init__(self):
        _check_iteration(self)


@dataclass(frozen=True)
class HigherOrderNewton:
    r"""Inverse roots by a coupled iteration of any order: matrix products alone.

    As :class:`CoupledNewton` with :math:`z = 1 / \mathrm{tr} A` and, after one
    Newton step, the first `order` terms of the series of
    :math:`(I - (I - M))^{-1/p}` as S.

    Args:
      order: number of terms, an integer >= 2. Default 3.
      max_iterations: an integer >= 1. Default 100.
      tolerance: a factor is done when no entry of :math:`|M - I|` is above it,
        >= 0. Default 1e-8.
      max_residual: a root is refused when an entry of :math:`|A X^p - I|` is above
        it, > 0. Default 0.1.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.HigherOrderNewton(order=4)
      HigherOrderNewton(order=4, max_iterations=100, tolerance=1e-08, max_residual=0.1)

    References:
      Lakić, On the Computation of the Matrix k-th Root, 1998,
      https://doi.org/10.1002/(SICI)1521-4001(199803)78:3%3C167::AID-ZAMM167%3E3.0.CO;2-R.
    """

    order: int = 3
    max_iterations: int = 100
    tolerance: float = 1e-8
    max_residual: float = 0.1

    def __post_init__(self):
        check_integer("order", self.order, low=2)
        _check_iteration(self)


def _check_iteration(record: CoupledNewton | HigherOrderNewton) -> None:
    check_integer("max_iterations", record.max_iterations)
    check_number("tolerance", record.tolerance, high=1.0)
    check_number("max_residual", record.max_residual, positive=True)


Iteration = CoupledNewton | HigherOrderNewton
Root = Eigh | PseudoInverse | Iteration


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that all transforms on blocks share, checked.

    The defaults are for transforms without factors, which leave these out.
    """

    b1: ArrayLike
    b2: ArrayLike = 1.0
    b3: ArrayLike | None
    eps: ArrayLike = 0.0
    refresh_every: ArrayLike = 1
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

    def __post_init__(self):
        self._check_records()
        self._check_betas()
        for name in ("eps", "relative_eps", "graft_eps"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        self._check_refresh()
        check_exponents(self.exponents)
        self._check_graft()
        self._check_ridge()

    def _check_records(self):
        if not isinstance(self.root, Root):
            raise ValueError(
                f"`root` must be a root record such as Eigh(), got {self.root!r}."
            )
        if not isinstance(self.blocking, Blocking):
            raise ValueError(f"`blocking` must be a Blocking, got {self.blocking!r}.")
        for name in ("bias_correction", "drop_weighting", "graft_drop_weighting"):
            check_choice(name, getattr(self, name), (True, False))

    def _check_betas(self):
        for name in ("b1", "b2", "b3", "graft_b2"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), high=1.0)
        for name in ("b1", "b3"):
            value = getattr(self, name)
            if value is not None and _is_known(value) and value == 1:
                raise ValueError(f"`{name}` must be below 1, got {value!r}.")

    def _check_refresh(self):
        check_integer("refresh_every", self.refresh_every)
        if self.start is None:
            return
        check_integer("start", self.start)
        known = _is_known(self.start) and _is_known(self.refresh_every)
        if known and self.start < self.refresh_every:
            raise ValueError(
                "`start` must be at least `refresh_every` "
                f"({self.refresh_every!r}), got {self.start!r}."
            )

    def _check_graft(self):
        check_choice("graft", self.graft, (None, *get_args(Graft)))
        name = "b2" if self.graft_b2 is None else "graft_b2"
        value = getattr(self, name)
        never = self.graft in ("rmsprop", "adam") and not self.graft_drop_weighting
        if never and _is_known(value) and value == 1:
            raise ValueError(
                f"`{name}` must be below 1 for {self.graft!r} grafting, which would "
                f"never accumulate, got {value!r}; set `graft_b2`, or take 'adagrad'."
            )

    def _check_ridge(self):
        if not isinstance(self.root, PseudoInverse):
            return
        for name in ("eps", "relative_eps"):
            value = getattr(self, name)
            if value is not None and _is_known(value) and value != 0:
                raise ValueError(
                    f"`{name}` must be 0 with a PseudoInverse, got {value!r}."
                )

    def exponent(self, order: int, axis: int) -> float:
        """The exponent e of the inverse root of one axis; 0 means no factor."""
        override = (self.exponents or {}).get(order, {})
        if isinstance(override, Mapping):
            return override.get(axis, 1 / (2 * order))
        return override


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
