"""Records of what is computed from eigendecompositions: roots and bases."""

from dataclasses import dataclass
from typing import Literal, get_args

from shampoo_optax._checks import check_choice, check_integer, check_number

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


@dataclass(frozen=True)
class CholeskyBasis:
    r"""Eigenvectors by orthogonal iteration from the old ones, in fast operations.

    The Q' of :math:`L Q = Q' R`, columns of Q in the descending order of their
    estimated eigenvalues, is found from :math:`B = Q^\top L Q` by two Cholesky
    decompositions and a triangular system,

    .. math::
      B = C C^\top, \qquad C^\top C = D D^\top, \qquad Q' = Q\, C D^{-\top}

    since :math:`R^\top = C D` and :math:`B^2 = R^\top R`. The squared norms of the
    columns of D are the new estimates. This keeps small eigenvalues apart where a
    Cholesky decomposition of :math:`B^2` itself would drown them in rounding, and is
    done in matrix products but for parts of 256 rows. A ridge of 16 times the machine
    epsilon times the trace lets a factor lack rank; it is part of B but not of the
    estimates, and eigenvalues below it are not told from each other.

    An iteration in descending order brings each vector nearer to its own eigenvector;
    one whose columns do not descend, as those of :class:`QRBasis` need not, turns
    vectors away from theirs, so that one at a refresh does not settle.

    The first basis, one that rounding has spoilt, and one that would be refused is
    decomposed as in :class:`EighBasis`; its vectors go to the places of the old ones
    with a |cos| of at least 0.71, the others to the places that are left.

    Args:
      max_iterations: an integer >= 1. Default 1.
      tolerance: the t up to which an old basis is kept, as in :class:`EighBasis`, in
        [0, 1]. Default 0.
      max_residual: a basis is decomposed where
        :math:`\|(I - Q Q^\top) v\| > r \|v\|` for a fixed probe v, and refused
        where that fails as in :class:`EighBasis`; r > 0. Default 1e-2.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> tx = so.soap(3e-3, form="paper", basis=so.CholeskyBasis())

    References:
      Rutishauser, `Solution of eigenvalue problems with the LR-transformation`,
      National Bureau of Standards Applied Mathematics Series 49, 1958, for the two
      Cholesky decompositions; Vyas et al., `SOAP: Improving and Stabilizing Shampoo
      using Adam <https://arxiv.org/abs/2409.11321>`_, 2024, for the iteration
    """

    max_iterations: int = 1
    tolerance: float = 0.0
    max_residual: float = 1e-2

    def __post_init__(self):
        check_integer("max_iterations", self.max_iterations)
        check_number("tolerance", self.tolerance, high=1.0)
        check_number("max_residual", self.max_residual, positive=True)


Basis = EighBasis | QRBasis | CholeskyBasis


def check_basis(basis: Basis) -> None:
    """Refuses what is no record of a basis."""
    if not isinstance(basis, Basis):
        raise ValueError(
            f"`basis` must be an EighBasis, QRBasis or CholeskyBasis record, "
            f"got {basis!r}."
        )


@dataclass(frozen=True)
class Eigendecomposed:
    r"""Keeps eigenvectors and eigenvalues; the root is formed when it is applied.

    The gradient is rotated into the basis of every axis, scaled by the powers of
    their eigenvalues, and rotated back: twice the products of a stored root at each
    step, for bases that may be warm-started at a refresh.

    Args:
      basis: how the eigenvectors are computed, an :class:`EighBasis`,
        :class:`QRBasis` or :class:`CholeskyBasis`. Default `EighBasis()`.
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
