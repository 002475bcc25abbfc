"""Records that say how roots and bases are computed."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from shampoo_optax._checks import (
    Precision,
    check_choice,
    check_integer,
    check_number,
    check_precision,
)

Ridge = Literal["before", "after"]


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

    References:
      Shi et al., `A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer <https://arxiv.org/abs/2309.06497>`_, 2023, 3.2
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

    References:
      Shi et al., `A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer <https://arxiv.org/abs/2309.06497>`_, 2023, whose
      code has it
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


@dataclass(frozen=True)
class EighBasis:
    r"""Eigenvectors by eigendecomposition, or the old ones while they are good.

    An old basis Q of a factor L is good while the off-diagonal part of
    :math:`B = Q^\top L Q` has :math:`\|B - \mathrm{diag} B\|_F \le t \|B\|_F`.

    Args:
      tolerance: the t up to which an old basis is kept, in [0, 1]; 0 keeps none.
        Default 0.
      max_residual: as in :class:`Eigh`. Default 1e-2.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.EighBasis(tolerance=0.1)
      EighBasis(tolerance=0.1, max_residual=0.01)

    References:
      Eschenhagen et al., `Purifying Shampoo
      <https://arxiv.org/abs/2506.03595>`_, 2025, for the criterion
    """

    tolerance: float = 0.0
    max_residual: float = 1e-2

    def __post_init__(self):
        check_number("tolerance", self.tolerance, high=1.0)
        check_number("max_residual", self.max_residual, positive=True)


@dataclass(frozen=True)
class QRBasis:
    r"""Eigenvectors by QR iteration from the old ones.

    From :math:`B = Q^\top L Q`, with :math:`B = Q' R` each time,

    .. math:: B \leftarrow R Q', \qquad Q \leftarrow Q Q'

    until :math:`\|B - \mathrm{diag} B\|_F \le t \|B\|_F`; then the columns are put
    in the ascending order of their estimated eigenvalues, :math:`\mathrm{diag} B`.

    With t = 0 nothing is tested, and the next Q is the Q' of :math:`L Q = Q' R`, which
    is the same but for signs of columns, and for rounding where L lacks rank. That is
    the iteration of SOAP's paper, whose columns descend. It costs one product and a
    decomposition each time, and one product more: for a single iteration a third of
    the products. Only a Q with :math:`L Q = Q \, \mathrm{diag} B` bit for bit stays.

    Args:
      max_iterations: an integer >= 1. Default 1.
      tolerance: the t at which the iteration stops, in [0, 1]; 0 takes all
        iterations. Default 0.01.
      max_residual: a basis is refused where :math:`\|(I - Q Q^\top) v\| > r \|v\|`
        for a fixed probe v; r > 0. Default 1e-2.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.QRBasis(max_iterations=5)
      QRBasis(max_iterations=5, tolerance=0.01, max_residual=0.01)

    References:
      Vyas et al., `SOAP: Improving and Stabilizing Shampoo using Adam
      <https://arxiv.org/abs/2409.11321>`_, 2024; Eschenhagen et al., `Purifying Shampoo
      <https://arxiv.org/abs/2506.03595>`_, 2025, for the criterion
    """

    max_iterations: int = 1
    tolerance: float = 0.01
    max_residual: float = 1e-2

    def __post_init__(self):
        check_integer("max_iterations", self.max_iterations)
        check_number("tolerance", self.tolerance, high=1.0)
        check_number("max_residual", self.max_residual, positive=True)


Basis = EighBasis | QRBasis


def check_basis(basis: Basis) -> None:
    """Refuses what is no record of a basis."""
    if not isinstance(basis, Basis):
        raise ValueError(
            f"`basis` must be an EighBasis or a QRBasis record, got {basis!r}."
        )


@dataclass(frozen=True)
class Eigendecomposed:
    r"""Keeps eigenvectors and eigenvalues; the root is formed when it is applied.

    The gradient is rotated into the basis of every axis, scaled by the powers of
    their eigenvalues, and rotated back: twice the products of a stored root at each
    step, for bases that may be warm-started at a refresh.

    Args:
      basis: how the eigenvectors are computed, an :class:`EighBasis` or
        :class:`QRBasis`. Default `EighBasis()`.
      root: what becomes of the eigenvalues, an :class:`Eigh` (a ridge) or
        :class:`PseudoInverse`; the smaller `max_residual` of the two counts. Default
        `Eigh()`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> root = so.Eigendecomposed(so.QRBasis(max_iterations=2))
      >>> tx = so.scale_by_shampoo(root=root)

    References:
      Eschenhagen et al., `Purifying Shampoo
      <https://arxiv.org/abs/2506.03595>`_, 2025
    """

    basis: Basis = EighBasis()
    root: Eigh | PseudoInverse = Eigh()

    def __post_init__(self):
        check_basis(self.basis)
        if not isinstance(self.root, Eigh | PseudoInverse):
            raise ValueError(
                f"`root` must be an Eigh or a PseudoInverse here, got {self.root!r}."
            )

    @property
    def max_residual(self) -> float:
        """The largest residual of a basis that is not refused."""
        return min(self.basis.max_residual, self.root.max_residual)


Root = Eigh | PseudoInverse | Iteration | Eigendecomposed
