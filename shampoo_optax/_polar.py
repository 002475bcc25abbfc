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

from shampoo_optax._checks import (
    Precision,
    check_choice,
    check_integer,
    check_number,
    check_precision,
)
from shampoo_optax._stacks import contract, norms, per_slot

Scale = Callable[[jax.Array, jax.Array], ArrayLike]  # of the rows and the columns
Polynomial = tuple[float, ...]

MOST_STEPS = 100

# A last polynomial that is repeated has to bring singular values from the first of
# these to 1, in so many steps more than are taken; a schedule that fills the steps,
# those from the second, and must not let smaller ones grow beyond.
SMALLEST, MORE_STEPS, SMALLEST_SCHEDULED = 1e-3, 100, 1e-2


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
        100 times more; with several, one for each of the `steps`, those from 1e-2 to
        1 have to end there, and smaller ones below 1.5. Default
        `(3.4445, -4.775, 2.0315)`.
      steps: number of steps, an integer from 1 to 100, and not below the number of
        polynomials. Default 5.
      eps: the norm is taken to be at least this, >= 0; above 0, blocks with smaller
        gradients move less. Default 0. The official package has 1e-8.
      scale: maps the numbers of rows and columns of a block, two float scalars, to
        the factor that its direction is multiplied by; written with `jax.numpy`.
        Default `None`: 1.
      precision: what the products of the polynomial keep of float32, `"highest"`,
        `"high"` or `"default"`, as in :class:`CoupledNewton`. No residual is found,
        and nothing is computed again: operands rounded to the nearest bfloat16 moved
        singular values by 4e-2 and the direction by 3e-2 of its norm in a block of
        [12, 7], by 5e-3 and 1.4e-2 in one of [256, 256], and by 7e-3 and 1.6e-2 in one
        of [1024, 256], less than the polynomial of Muon leaves singular values from 1.
        Default `"highest"`.

    Raises:
      ValueError: if a field has a value other than those above.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_spectral_descent(method=so.NewtonSchulz(steps=6))
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
    precision: Precision = "highest"

    def __post_init__(self):
        self._check_steps()
        object.__setattr__(self, "coefficients", _checked(self.coefficients))
        self._check_polynomials()
        check_number("eps", self.eps)
        object.__setattr__(self, "eps", float(self.eps))
        _check_scale_of_sides(self.scale)
        check_precision(self.precision)

    def _check_steps(self):
        check_integer("steps", self.steps)
        if self.steps > MOST_STEPS:
            raise ValueError(
                f"`steps` must be at most {MOST_STEPS}, got {self.steps!r}."
            )
        object.__setattr__(self, "steps", int(self.steps))

    def _check_polynomials(self):
        number = len(_polynomials(self.coefficients))
        if number > self.steps:
            raise ValueError(
                f"`steps` must be at least the number of polynomials, {number}, got "
                f"{self.steps!r}."
            )
        fills = number == self.steps > 1
        steps = self.steps if fills else self.steps + MORE_STEPS
        given = np.geomspace(SMALLEST, 1, 257)
        values = _iterated(given, _schedule(self.coefficients, steps))
        smallest = SMALLEST_SCHEDULED if fills else SMALLEST
        near = np.abs(values - 1) <= 0.5
        small = (given < smallest) & (np.abs(values) <= 1.5)
        if not np.all(near | small):
            raise ValueError(
                "`coefficients` must bring singular values near 1, but take those from "
                f"{SMALLEST} to 1 to {values.min():.3g} … {values.max():.3g}, got "
                f"{self.coefficients!r}."
            )


@dataclass(frozen=True)
class Svd:
    r"""Polar factors by singular value decompositions, to rounding.

    With the singular values :math:`\sigma_1 \ge \sigma_2 \ge \cdots` of a gradient G
    of m rows and n columns, and the machine epsilon u,

    .. math::
      P = \nu \sum_{i \in I} u_i v_i^\top, \qquad
      I = \{i : \sigma_i > u \max(m, n)\, \sigma_1\}, \qquad
      \nu = \sum_{i \in I} \sigma_i \text{ or } 1

    Directions that a gradient does not have are not made up.

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
        _check_scale_of_sides(self.scale)


Polar = NewtonSchulz | Svd


def _polynomials(coefficients: Any) -> tuple:
    """Several as they are, one as a tuple of one."""
    is_list = isinstance(coefficients, tuple | list) and len(coefficients) > 0
    several = is_list and isinstance(coefficients[0], tuple | list)
    return coefficients if several else (coefficients,)


def _schedule(coefficients: tuple, steps: int) -> list[Polynomial]:
    """The polynomial of each of so many steps."""
    polynomials = _polynomials(coefficients)
    return [polynomials[min(k, len(polynomials) - 1)] for k in range(steps)]


def _checked(coefficients: Any) -> tuple:
    """One polynomial or several, as tuples of floats."""
    polynomials = _polynomials(coefficients)
    lengths = {len(p) if _is_polynomial(p) else 0 for p in polynomials}
    if 0 in lengths or len(lengths) > 1:
        raise ValueError(
            "`coefficients` must be two or more finite numbers, or tuples of such of "
            f"one length, got {coefficients!r}."
        )
    found = tuple(tuple(map(float, polynomial)) for polynomial in polynomials)
    return found if polynomials is coefficients else found[0]


def _is_polynomial(numbers: Any) -> bool:
    if not isinstance(numbers, tuple | list) or len(numbers) < 2:
        return False
    return all(isinstance(x, Real) and math.isfinite(x) for x in numbers)


def _iterated(values: np.ndarray, schedule: Any) -> np.ndarray:
    """What becomes of singular values."""
    with np.errstate(over="ignore", invalid="ignore"):
        for polynomial in schedule:
            values = sum(a * values ** (2 * k + 1) for k, a in enumerate(polynomial))
    return values


def check_scale(scale: Callable, *arguments: jax.ShapeDtypeStruct) -> None:
    """Refuses a function that does not map such arrays to a real number."""
    cause = None
    try:
        found = jax.eval_shape(scale, *arguments)
        gives = f"gives {found}"
    except Exception as error:  # of any kind: the function is the user's
        found, gives, cause = None, f"raises {type(error).__name__}: {error}", error
    if not _is_real_number(found):
        shown = " and ".join(f"{x.dtype}{list(x.shape)}" for x in arguments)
        raise ValueError(
            "`scale` must be a function, written with jax.numpy, that maps "
            f"{shown} to one real number, but it {gives}, got {scale!r}."
        ) from cause


def _is_real_number(found: Any) -> bool:
    kinds = jnp.integer, jnp.floating
    return getattr(found, "shape", None) == () and any(
        jnp.issubdtype(found.dtype, kind) for kind in kinds
    )


def _check_scale_of_sides(scale: Scale | None) -> None:
    if scale is not None and not callable(scale):
        raise ValueError(
            f"`scale` must be a function of rows and columns, or None, got {scale!r}."
        )
    if scale is not None:
        side = jax.ShapeDtypeStruct((), jnp.float32)
        check_scale(scale, side, side)


def signs_of_scales(scales: jax.Array) -> jax.Array:
    """What grafting leaves of scales: their signs, and what is not finite.

    The grafted norm takes their size away, but not from norms near the smallest
    numbers, which it does not divide by as they are.
    """
    return jnp.where(jnp.isfinite(scales), jnp.sign(scales), scales)


def orthogonalize(
    blocks: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    method: Polar,
    grafted: bool = False,
) -> jax.Array:
    """Replaces the singular values of every block by 1, and scales.

    Args:
      blocks: `[n, r, c]`, finite; smaller ones have zeros behind.
      rows: `[n]`, the numbers of rows without those zeros.
      columns: `[n]`, likewise.
      method: how.
      grafted: whether the norms are replaced afterwards; then scales only give signs.

    Returns:
      `[n, r, c]`, zero for a zero block.
    """
    if isinstance(method, NewtonSchulz):
        factors = _newton_schulz(blocks, method)
    else:
        factors, nuclear = _svd(blocks, jnp.maximum(rows, columns))
        if method.nuclear_scaling and not grafted:
            factors *= per_slot(nuclear, factors)
    if method.scale is None:
        return factors
    sides = (side.astype(blocks.dtype) for side in (rows, columns))
    scales = jnp.asarray(jax.vmap(method.scale)(*sides), blocks.dtype)
    return per_slot(signs_of_scales(scales) if grafted else scales, factors) * factors


def _over(blocks: jax.Array, sizes: jax.Array) -> jax.Array:
    return blocks / per_slot(jnp.where(sizes > 0, sizes, 1), blocks)


def _newton_schulz(blocks: jax.Array, method: NewtonSchulz) -> jax.Array:
    sizes = norms(blocks)
    unit = _over(blocks, jnp.maximum(sizes, jnp.asarray(method.eps, sizes.dtype)))
    flipped = unit.shape[1] > unit.shape[2]  # products of the shorter side are smaller
    start, precision = unit.mT if flipped else unit, method.precision

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return contract(left, right, "nij,njk->nik", precision)

    def step(x: jax.Array, polynomial: jax.Array) -> tuple[jax.Array, None]:
        square = contract(x, x, "nij,nkj->nik", precision)
        total = polynomial[-1] * square
        for index in range(len(polynomial) - 2, 0, -1):
            total = product(total, square) + polynomial[index] * square
        return polynomial[0] * x + product(total, x), None

    schedule = jnp.asarray(_schedule(method.coefficients, method.steps), unit.dtype)
    factors, _ = jax.lax.scan(step, start, schedule)
    return factors.mT if flipped else factors


def _svd(blocks: jax.Array, sides: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The polar factors, and the nuclear norms `[n]`."""
    sizes = norms(blocks)
    unit = _over(blocks, sizes)
    left, values, right = jnp.linalg.svd(unit, full_matrices=False)
    floor = jnp.finfo(unit.dtype).eps * sides.astype(unit.dtype) * values[:, 0]
    kept = jnp.where(values > per_slot(floor, values), values, 0)
    left = jnp.where((kept > 0)[:, None, :], left, 0)
    return contract(left, right, "nir,nrj->nij"), sizes * jnp.sum(kept, axis=1)
