"""Balancing the factors of KL-Shampoo, which say nothing of their single scales.

With exponents of 1/2 a block's factors may be multiplied by numbers whose product is
1, if their roots are too: statistics and directions stay the same, up to an absolute
ridge. Left alone, the scales of sides of different lengths drift apart from step to
step until they overflow, or a ridge outweighs one of them. Powers of 4 are used, so
that nothing is rounded. Where exponents are given, as in the official package, a ridge
is left to mean what it means there.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from shampoo_optax._config import Options
from shampoo_optax._eigen_methods import PseudoInverse
from shampoo_optax._powers import eigenvalue_root
from shampoo_optax._refresh import Derived
from shampoo_optax._stacks import AxisStacks, per_slot
from shampoo_optax._storage import side_of, stored_traces

# Of two, to multiply factors, eigenvalues and roots by, for one step of balance.
_POWERS = {"factors": 2, "eigenvalues": 2, "roots": -1}

Balance = dict[str, dict[str, jax.Array]]  # {stack: {axis: int32 [n]}}


def balance_of(
    factors: AxisStacks,
    moved: dict[str, jax.Array],
    sides: dict[str, dict[str, jax.Array]],
    exponents: dict[str, dict[str, float]],
    options: Options,
) -> Balance:
    """By how many powers of 4 each factor of a block of two or more is multiplied.

    Args:
      factors: as stored.
      moved: `{stack: bool [n]}`; other slots stay as they are.
      sides: `{stack: {axis: [n]}}`, before padding, where there is any.
      exponents: `{stack: {axis: e}}`.
      options: the transform's arguments.
    """
    breaking = [options.trace_scaling]
    if options.exponents is not None:
        breaking += [options.eps, _atol(options)]
    if any(isinstance(number, int | float) and number for number in breaking):
        return {}
    found, allowed = {}, jnp.ones((), bool)
    for number in breaking:
        allowed &= jnp.asarray(number) == 0
    for name, axes in factors.items():
        if len(axes) > 1 and set(exponents[name].values()) == {1 / 2}:
            known, slots = sides.get(name, {}), allowed & moved[name]
            found[name] = _balance_block(axes, known, slots)
    return found


def _atol(options: Options) -> float:
    root = eigenvalue_root(options)
    return root.atol if isinstance(root, PseudoInverse) else 0.0


def _balance_block(
    factors: dict[str, jax.Array], known: dict[str, jax.Array], moved: jax.Array
) -> dict[str, jax.Array]:
    """The powers of 4 for each factor of a block, whose sum is 0."""

    def size(axis: str, factor: jax.Array) -> jax.Array:
        trace = stored_traces(factor)
        sides = jnp.asarray(known.get(axis, side_of(factor)), trace.dtype)
        return jnp.log2(trace / jnp.maximum(sides, 1)) / 2

    sizes = {axis: size(axis, factor) for axis, factor in factors.items()}
    mean = functools.reduce(operator.add, sizes.values()) / len(sizes)
    moved &= jnp.isfinite(mean)
    *first, last = sizes
    powers = {
        axis: jnp.where(moved, jnp.round(mean - sizes[axis]), 0).astype(jnp.int32)
        for axis in first
    }
    return powers | {last: -functools.reduce(operator.add, powers.values())}


def balanced(field: str, arrays: AxisStacks, balance: Balance) -> AxisStacks:
    """A field of the state, multiplied as its factors are."""

    def multiply(name: str, axis: str, array: jax.Array) -> jax.Array:
        if name not in balance or field not in _POWERS:
            return array
        power = _POWERS[field] * balance[name][axis]
        one = jnp.ones((), np.promote_types(array.dtype, jnp.float32))
        factor = per_slot(jnp.ldexp(one, power), array)
        return (array.astype(one.dtype) * factor.astype(one.dtype)).astype(array.dtype)

    return {
        name: {axis: multiply(name, axis, array) for axis, array in axes.items()}
        for name, axes in arrays.items()
    }


def balanced_fields(derived: Derived, balance: Balance) -> Derived:
    """What is derived from factors, multiplied as they are."""
    return {
        field: balanced(field, arrays, balance) for field, arrays in derived.items()
    }
