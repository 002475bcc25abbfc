"""Applying roots, stored or formed from bases and eigenvalues, to blocks."""

import jax
import jax.numpy as jnp

from shampoo_optax._config import Options
from shampoo_optax._eigen_methods import Eigendecomposed
from shampoo_optax._factors import apply_axes
from shampoo_optax._powers import added_before, diagonal_powers
from shampoo_optax._refresh import Derived
from shampoo_optax._stacks import AxisStacks, Stacks
from shampoo_optax._trees import wide_dtype


def precondition(
    blocks: Stacks,
    derived: Derived,
    sides: dict[str, dict[str, jax.Array]],
    exponents: dict[str, dict[str, float]],
    options: Options,
    left_out: str | None = None,
    back: bool = True,
) -> Stacks:
    """Multiplies blocks by the roots of their axes.

    Args:
      blocks: `{stack: [n, *block]}`.
      derived: `roots`, or `bases` and `eigenvalues`.
      sides: `{stack: {axis: [n]}}`, before padding, where there is any.
      exponents: `{stack: {axis: e}}`.
      options: the transform's arguments.
      left_out: an axis that is left alone. Default `None`: none.
      back: whether blocks are rotated back from the bases. Default `True`.
    """
    if not isinstance(options.root, Eigendecomposed):
        return apply_axes(derived["roots"], blocks, left_out=left_out)
    bases, values = derived["bases"], derived["eigenvalues"]
    scales = eigenvalue_scales(values, sides, exponents, options)
    blocks = apply_axes(bases, blocks, transpose=True, left_out=left_out)
    blocks = apply_axes(scales, blocks, left_out=left_out)
    return apply_axes(bases, blocks, left_out=left_out) if back else blocks


def eigenvalue_scales(
    values: AxisStacks,
    sides: dict[str, dict[str, jax.Array]],
    exponents: dict[str, dict[str, float]],
    options: Options,
) -> AxisStacks:
    """The eigenvalues of roots, `{stack: {axis: [n, d]}}`, from those of factors."""

    def scale(name: str, axis: str, kept: jax.Array) -> jax.Array:
        kept = kept.astype(wide_dtype(kept.dtype))
        padding = None
        if name in sides:
            places = jnp.arange(kept.shape[1])[None]
            padding = places >= jnp.asarray(sides[name][axis])[:, None]
        exponent, added = exponents[name][axis], added_before(options)
        return diagonal_powers(kept, exponent, padding, options, added)

    return {
        name: {axis: scale(name, axis, kept) for axis, kept in axes.items()}
        for name, axes in values.items()
    }
