"""Records of roots by Newton iterations."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shampoo_optax._checks import (
    Precision,
    check_choice,
    check_integer,
    check_number,
    check_precision,
)


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
      warm_start: whether an inverse (exponent 1) is iterated from the previous one
        where that is nearer, as :math:`X = c X', M = c A X'`; it then takes 3 to 5
        turns in the place of 7 to 24. Roots start from the identity all the same: X
        goes to :math:`A^{-1/p}` for p > 1 only from a start that commutes with A, which
        the previous root does not. Default `False`.
      precision: by its name, what the products of the iteration keep of float32. On a
        TPU `"highest"` keeps all, `"high"` takes three passes of bfloat16 and
        `"default"` one; on GPUs that have TensorFloat-32 both of these take it; on CPU,
        and in float64 on a GPU, the products are the same with all. A lower precision
        ends the iteration where an error below 0.1 does not fall, and makes the root
        symmetric. Residuals, and the power that makes q/p of 1/p, are at the highest. A
        root whose residual is refused is computed again at the highest, and one
        ill-conditioned factor makes all of its side be iterated again. Operands rounded
        to the nearest bfloat16, of sides 16 and 256, passed the default `max_residual`
        up to conditions of 30 to 300 for exponents 1 and 1/2, of 30 for 1/4 and of 3 to
        30 for 1/8, with errors of the root of 4e-3 to 6e-2; to TensorFloat-32, up to
        100 to 1000, with 5e-4 to 4e-2. That was rounded on a CPU, not measured on an
        accelerator. So a lower precision is for fast hardware and ridges far above
        the default ones, with a `max_residual` that one is content with. Default
        `"highest"`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_shampoo(root=so.CoupledNewton(max_iterations=20))

    References:
      Guo and Higham, A Schur-Newton Method for the Matrix pth Root and its Inverse,
      2006, https://doi.org/10.1137/050643374.
    """

    max_iterations: int = 100
    tolerance: float = 1e-6
    max_residual: float = 0.1
    warm_start: bool = False
    precision: Precision = "highest"

    def __post_init__(self):
        _check_iteration(self)
        check_choice("warm_start", self.warm_start, (True, False))


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
      warm_start: as in :class:`CoupledNewton`. Default `False`.
      precision: as in :class:`CoupledNewton`. Default `"highest"`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_shampoo(root=so.HigherOrderNewton(order=4))

    References:
      Lakić, On the Computation of the Matrix k-th Root, 1998,
      https://doi.org/10.1002/(SICI)1521-4001(199803)78:3%3C167::AID-ZAMM167%3E3.0.CO;2-R.
    """

    order: int = 3
    max_iterations: int = 100
    tolerance: float = 1e-8
    max_residual: float = 0.1
    warm_start: bool = False
    precision: Precision = "highest"

    def __post_init__(self):
        check_integer("order", self.order, low=2)
        _check_iteration(self)
        check_choice("warm_start", self.warm_start, (True, False))


def _check_iteration(record) -> None:
    check_integer("max_iterations", record.max_iterations)
    check_number("tolerance", record.tolerance, high=1.0)
    check_number("max_residual", record.max_residual, positive=True)
    check_precision(record.precision)


@dataclass(frozen=True)
class NewtonDB:
    r"""Inverse square roots, halved again and again: matrix products alone.

    With A the factor and its ridge, divided by an estimate of its largest
    eigenvalue, the coupled iteration

    .. math::
      E = (3 I - Z Y) / 2, \qquad Y \leftarrow Y E, \qquad Z \leftarrow E Z

    from :math:`Y = A, Z = I` goes to :math:`Y = A^{1/2}` and
    :math:`Z = A^{-1/2}`. It is run again on :math:`A^{1/2}` for
    :math:`A^{-1/4}`, and once more for :math:`A^{-1/8}`. Only the exponents 1, 1/2,
    1/4 and 1/8 can be had. It stops early where :math:`\|ZY - I\|_F` grows by more
    than a fifth, or no longer halves below 1/2.

    The product with A shows the errors of Z as far as A is ill-conditioned: in float32
    a factor that lacks rank needs a `relative_eps` of about 1e-5, or its roots are
    refused.

    Args:
      max_iterations: for each square root, an integer >= 1. Default 40.
      tolerance: a factor is done when :math:`\|ZY - I\|_F` is not above it, >= 0.
        Default 1e-6.
      power_iterations: matrix-vector products in the estimate of the largest
        eigenvalue, an integer >= 1. Default 10.
      max_residual: a root is refused when an entry of :math:`|A X^p - I|` is above
        it, > 0. Default 0.1.
      precision: as in :class:`CoupledNewton`. Default `"highest"`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_shampoo(root=so.NewtonDB(max_iterations=12))

    References:
      Higham, Stable Iterations for the Matrix Square Root, 1997,
      https://doi.org/10.1023/A:1019150005407; Modoranu et al., DASH: Faster Shampoo
      via Batched Block Preconditioning and Efficient Inverse-Root Solvers, 2026,
      https://arxiv.org/abs/2602.02016.
    """

    max_iterations: int = 40
    tolerance: float = 1e-6
    power_iterations: int = 10
    max_residual: float = 0.1
    precision: Precision = "highest"

    def __post_init__(self):
        check_integer("power_iterations", self.power_iterations)
        _check_iteration(self)


Iteration = CoupledNewton | HigherOrderNewton | NewtonDB


def fraction_of(exponent: float) -> Fraction:
    """The q/p that an exponent e stands for, with q at most 64."""
    return 1 / Fraction(1 / exponent).limit_denominator(64)


def check_exponent(root: Any, exponent: float, order: int) -> None:
    """Refuses an exponent e > 0 that an iteration cannot do."""
    if getattr(root, "warm_start", False):
        possible, rule = exponent == 1, "1 with `warm_start`"
    elif isinstance(root, NewtonDB):
        possible, rule = exponent in (1, 1 / 2, 1 / 4, 1 / 8), "1, 1/2, 1/4 or 1/8"
    elif isinstance(root, Iteration):
        possible, rule = _is_fraction(exponent), "a fraction q/p with q <= 64"
    else:
        return
    if not possible:
        raise ValueError(
            f"`exponents`, or their default, must be {rule} for a "
            f"{type(root).__name__}, got {exponent!r} for order {order}."
        )


def _is_fraction(exponent: float) -> bool:
    return exponent <= 64 and abs(fraction_of(exponent) / exponent - 1) < 1e-6
