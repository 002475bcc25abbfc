"""Polar factors: the matrix of a block's singular vectors, without singular values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shampoo_optax._checks import check_choice, check_integer, check_number
from shampoo_optax._grafting import norms
from shampoo_optax._stacks import contract, per_slot

Scale = Callable[[jax.Array, jax.Array], ArrayLike]  # of the rows and the columns
Polynomial = tuple[float, ...]

# Where singular values between these two are, they have to come close to 1, in so many
# steps after those that are taken.
SMALLEST, MORE_STEPS = 1e-3, 100


@dataclass(frozen=True)
class NewtonSchulz:
    r"""Polar factors by an odd polynomial, again and again: matrix products alone.

    From :math:`X = G / \max(\|G\|_F, \varepsilon)`, with the coefficients a, b, c, …,

    .. math::
      X \leftarrow a X + b\, (X X^\top) X + c\, (X X^\top)^2 X + \cdots

    It brings singular values near 1, and leaves 0 where it is. The default, that of
    Muon, brings those above a hundredth of the norm to between 0.68 and 1.14 in 5
    steps; (3, -3.2, 1.2) brings them to within half a per cent of 1 in 10.

    Args:
      coefficients: two or more numbers, or a tuple of such tuples of one length: the
        polynomial of each step, of which the last is repeated. All singular values
        from 1e-3 to 1 have to end within 0.5 of 1 if the last polynomial is applied
        100 times more. Default (3.4445, -4.775, 2.0315).
      steps: number of steps, an integer >= 1, and not below the number of
        polynomials. Default 5.
      eps: the norm is taken to be at least this, >= 0; above 0, blocks with smaller
        gradients move less. Default 0. The official package has 1e-8.
      scale: maps the numbers of rows and columns of a block, two float scalars, to
        the factor that its direction is multiplied by; written with `jax.numpy`.
        Default `None`: 1.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> so.NewtonSchulz(steps=6)
      NewtonSchulz(coefficients=(3.4445, -4.775, 2.0315), steps=6, eps=0.0, scale=None)
      >>> wide = so.NewtonSchulz(scale=lambda m, n: jnp.sqrt(jnp.maximum(1, n / m)))

    References:
      Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024,
      https://kellerjordan.github.io/posts/muon/.

      Bernstein and Newhouse, Old Optimizer, New Norm: An Anthology, 2024,
      https://arxiv.org/abs/2409.20325.
    """

    coefficients: Polynomial | tuple[Polynomial, ...] = (3.4445, -4.775, 2.0315)
    steps: int = 5
    eps: float = 0.0
    scale: Scale | None = None

    def __post_init__(self):
        check_integer("steps", self.steps)
        object.__setattr__(self, "coefficients", _checked(self.coefficients))
        self._check_polynomials()
        check_number("eps", self.eps)
        check_scale(self.scale, (), ())

    def _check_polynomials(self):
        number = len(_polynomials(self.coefficients))
        if number > self.steps:
            raise ValueError(
                f"`steps` must be at least the number of polynomials, {number}, got "
                f"{self.steps!r}."
            )
        values = np.geomspace(SMALLEST, 1, 257)
        with np.errstate(over="ignore", invalid="ignore"):
            for polynomial in _schedule(self.coefficients, self.steps + MORE_STEPS):
                values = sum(
                    a * values ** (2 * k + 1) for k, a in enumerate(polynomial)
                )
        if not np.all(np.abs(values - 1) <= 0.5):
            raise ValueError(
                "`coefficients` must bring singular values near 1, but take those from "
                f"{SMALLEST} to 1 to {values.min():.3g} … {values.max():.3g}, got "
                f"{self.coefficients!r}."
            )


@dataclass(frozen=True)
class Svd:
    r"""Polar factors by singular value decompositions, to rounding.

    With :math:`G = U \Sigma V^\top` that is :math:`U V^\top`, of the singular values
    above the machine epsilon times the largest side and the largest one: directions
    that a gradient does not have are not made up.

    Args:
      nuclear_scaling: whether it is multiplied by the nuclear norm of G, the sum of
        the singular values; this is steepest descent in the spectral norm. Default
        `False`.
      scale: as in :class:`NewtonSchulz`. Default `None`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import shampoo_optax as so
      >>> so.Svd(nuclear_scaling=True)
      Svd(nuclear_scaling=True, scale=None)

    References:
      Carlson et al., Preconditioned Spectral Descent for Deep Learning, 2015,
      https://papers.nips.cc/paper/2015/hash/f50a6c02a3fc5a3a5d4d9391f05f3efc-Abstract.html.
    """

    nuclear_scaling: bool = False
    scale: Scale | None = None

    def __post_init__(self):
        check_choice("nuclear_scaling", self.nuclear_scaling, (True, False))
        check_scale(self.scale, (), ())


Polar = NewtonSchulz | Svd


def _polynomials(coefficients: tuple) -> tuple[Polynomial, ...]:
    return coefficients if isinstance(coefficients[0], tuple) else (coefficients,)


def _schedule(coefficients: tuple, steps: int) -> list[Polynomial]:
    """The polynomial of each of so many steps."""
    polynomials = _polynomials(coefficients)
    return [polynomials[min(k, len(polynomials) - 1)] for k in range(steps)]


def _checked(coefficients: Any) -> tuple:
    """One polynomial or several, as tuples of floats."""
    is_list = isinstance(coefficients, tuple | list) and len(coefficients) > 0
    several = is_list and isinstance(coefficients[0], tuple | list)
    polynomials = coefficients if several else (coefficients,)
    lengths = {len(p) for p in polynomials if _is_polynomial(p)}
    if len(lengths) != 1 or not all(map(_is_polynomial, polynomials)):
        raise ValueError(
            "`coefficients` must be two or more finite numbers, or tuples of such of "
            f"one length, got {coefficients!r}."
        )
    found = tuple(tuple(map(float, polynomial)) for polynomial in polynomials)
    return found if several else found[0]


def _is_polynomial(numbers: Any) -> bool:
    if not isinstance(numbers, tuple | list) or len(numbers) < 2:
        return False
    return all(isinstance(x, Real) and math.isfinite(x) for x in numbers)


def check_scale(scale: Any, *shapes: tuple[int, ...]) -> None:
    """Refuses what does not map arrays of these shapes to a number, if anything."""
    if scale is None:
        return
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    wrong = None
    try:
        found = jax.eval_shape(scale, *arguments)
        valid = found.shape == () and jnp.issubdtype(found.dtype, jnp.floating)
    except (TypeError, AttributeError) as error:
        valid, wrong = False, error
    if not valid:
        raise ValueError(
            f"`scale` must be a function, written with jax.numpy, of {len(shapes)} "
            f"array(s) that gives a real number, got {scale!r}."
        ) from wrong


def orthogonalize(
    blocks: jax.Array, rows: jax.Array, columns: jax.Array, method: Polar
) -> jax.Array:
    """Replaces the singular values of every block by 1, and scales.

    Args:
      blocks: `[n, r, c]`, finite; smaller ones have zeros behind.
      rows: `[n]`, the numbers of rows without those zeros.
      columns: `[n]`, likewise.
      method: how.

    Returns:
      `[n, r, c]`, zero for a zero block.
    """
    size = norms(blocks)
    if isinstance(method, NewtonSchulz):
        size = jnp.maximum(size, jnp.asarray(method.eps, size.dtype))
    unit = blocks / per_slot(jnp.where(size > 0, size, 1), blocks)
    if isinstance(method, NewtonSchulz):
        factors = _newton_schulz(unit, method)
    else:
        factors, nuclear = _svd(unit, jnp.maximum(rows, columns))
        if method.nuclear_scaling:
            factors *= per_slot(size * nuclear, factors)
    if method.scale is None:
        return factors
    sides = (side.astype(blocks.dtype) for side in (rows, columns))
    scales = jax.vmap(method.scale)(*sides)
    return per_slot(jnp.asarray(scales, blocks.dtype), factors) * factors


def _newton_schulz(unit: jax.Array, method: NewtonSchulz) -> jax.Array:
    flipped = unit.shape[1] > unit.shape[2]  # products of the shorter side are smaller
    start = unit.mT if flipped else unit

    def step(x: jax.Array, polynomial: jax.Array) -> tuple[jax.Array, None]:
        square = contract(x, x, "nij,nkj->nik")
        total = polynomial[-1] * square
        for index in range(len(polynomial) - 2, 0, -1):
            total = contract(total, square, "nij,njk->nik") + polynomial[index] * square
        return polynomial[0] * x + contract(total, x, "nij,njk->nik"), None

    schedule = jnp.asarray(_schedule(method.coefficients, method.steps), unit.dtype)
    factors, _ = jax.lax.scan(step, start, schedule)
    return factors.mT if flipped else factors


def _svd(unit: jax.Array, sides: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The polar factors, and the nuclear norms `[n]`."""
    left, values, right = jnp.linalg.svd(unit, full_matrices=False)
    floor = jnp.finfo(unit.dtype).eps * sides.astype(unit.dtype) * values[:, 0]
    kept = jnp.where(values > per_slot(floor, values), values, 0)
    left = jnp.where((kept > 0)[:, None, :], left, 0)
    return contract(left, right, "nir,nrj->nij"), jnp.sum(kept, axis=1)
