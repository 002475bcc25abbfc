"""Calls on slots of a stack: one by one on CPU, and only where they are needed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shampoo_optax._stacks import per_slot


def by_platform(cpu: Callable, default: Callable, *arrays):
    """Calls one of two functions of the arrays, by where the program will run."""
    if jax.default_backend() == "cpu":
        return cpu(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=cpu, default=default)


def where_needed(
    decompose: Callable[..., tuple[jax.Array, ...]],
    matrices: jax.Array | tuple[jax.Array, ...],
    needed: jax.Array,
    otherwise: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Decomposes the matrices that need it, `needed` bool `[n]`.

    Nothing is decomposed where none does; on CPU, only those that do, one at a time:
    a batched decomposition there may wait for its own threads for ever.
    """

    def one(arrays):
        matrix, wanted, *rest = arrays
        return jax.lax.cond(wanted, decompose, lambda _: tuple(rest), matrix)

    def one_by_one(*arrays):
        return jax.lax.map(one, arrays)

    def together(matrices, wanted, *rest):
        fresh = jax.lax.cond(
            jnp.any(wanted), decompose, lambda _: tuple(rest), matrices
        )
        return tuple(
            jnp.where(per_slot(wanted, new), new, old)
            for new, old in zip(fresh, rest, strict=True)
        )

    return by_platform(one_by_one, together, matrices, needed, *otherwise)
