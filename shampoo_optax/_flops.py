"""Floating-point operations of a traced step, counted equation by equation."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# What an eigendecomposition with vectors counts for, in units of d^3: about the time
# it takes, as the products that could be done meanwhile. No compiler counts it.
EIGH = 28

# Likewise a QR decomposition, of which CPUs do from 1.4 to 2 in the same time.
QR = 17

# Likewise a Cholesky decomposition, and in units of m d^2 a triangular system with m
# rows: from 2.6 and 4.8 on.
CHOLESKY, TRIANGULAR = 3, 5

DECOMPOSITIONS = {"eigh": EIGH, "qr": QR, "cholesky": CHOLESKY}

# Likewise a thin singular value decomposition of [m, n], in units of m n min(m, n): on
# CPU 31 to 55 by shape, where an eigendecomposition takes 24 to 43.
SVD = 48

# The compiled function of `_retry.py`: a second attempt where the first has failed.
_SELDOM = "retry"

# These move or name numbers, and compute none.
_MOVES = frozenset(
    "broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice gather iota "
    "pad reshape rev scatter slice split squeeze stop_gradient transpose".split()
)


@dataclass(frozen=True)
class Flops:
    """Operations of one device, a multiplication and an addition counted as two.

    Attributes:
      products: of matrix products and singular value decompositions, 48 m n min(m, n)
        each, at every step.
      entrywise: of all else, at every step; one for each number that is computed.
      refresh: what a refresh adds, without what follows and without second attempts at
        what has failed; of a loop that runs until it has converged, one turn.
      decompositions: of the eigendecompositions of a refresh, 28 d^3 each, of the QR
        decompositions, 17 d^3, of the Cholesky decompositions, 3 d^3, and of the
        triangular systems with m rows, 5 m d^2.
    """

    products: int = 0
    entrywise: int = 0
    refresh: int = 0
    decompositions: int = 0

    @property
    def step(self) -> int:
        """Of every step, without what a refresh adds."""
        return self.products + self.entrywise

    def __add__(self, other: "Flops") -> "Flops":
        pairs = zip(_numbers(self), _numbers(other), strict=True)
        return Flops(*(a + b for a, b in pairs))

    def __mul__(self, times: int) -> "Flops":
        return Flops(*(times * number for number in _numbers(self)))


def _numbers(flops: Flops) -> list[int]:
    return [getattr(flops, field.name) for field in fields(flops)]


def count_flops(jaxpr: Jaxpr) -> Flops:
    """Counts the operations of a step.

    A refresh is a branch of a conditional, and what it costs more than the other one
    is what it adds. What is computed twice from the same counts once, as compilers
    do it.
    """
    total, results, same = Flops(), {}, {}
    for eqn in jaxpr.eqns:
        key = _identity(eqn, same)
        first = results.setdefault(key, eqn.outvars)
        same.update(zip(eqn.outvars, first, strict=True))
        if first is eqn.outvars:
            total += _count_equation(eqn)
    return total


def _identity(eqn: Any, same: dict) -> Hashable:
    """A key that equations with equal results share; one of its own where in doubt."""
    inputs = (
        (x.val, x.aval.dtype) if isinstance(x, Literal) else same.get(x, x)
        for x in eqn.invars
    )
    key = (eqn.primitive.name, *inputs, *eqn.params.items())
    try:
        hash(key)
    except TypeError:
        return id(eqn)
    return key


def _count_equation(eqn: Any) -> Flops:
    name = eqn.primitive.name
    if eqn.params.get("name") == _SELDOM:
        return Flops()
    inner = [count_flops(jaxpr) for jaxpr in _subjaxprs(eqn.params)]
    if name == "cond":
        often, seldom = min(inner, key=_all), max(inner, key=_all)
        added = seldom.step + seldom.refresh - often.step
        extra = Flops(refresh=added, decompositions=seldom.decompositions)
        return extra + Flops(often.products, often.entrywise)
    if inner:
        return sum(inner, Flops()) * eqn.params.get("length", 1)
    return _count_primitive(name, eqn)


def _all(flops: Flops) -> int:
    return sum(_numbers(flops))


def _subjaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _count_primitive(name: str, eqn: Any) -> Flops:
    if name in _MOVES:
        return Flops()
    given, result = eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(given.shape[axis] for axis in contracted)
        return Flops(products=2 * result.size * depth)
    if name == "triangular_solve":
        return Flops(decompositions=TRIANGULAR * result.size * given.shape[-1])
    if name in ("svd", *DECOMPOSITIONS):
        return _count_decomposition(name, given.shape)
    reduces = name.startswith("reduce_") and name != "reduce_precision"
    return Flops(entrywise=given.size if reduces else result.size)


def _count_decomposition(name: str, shape: tuple[int, ...]) -> Flops:
    size = math.prod(shape) * min(shape[-2:])
    if name == "svd":
        return Flops(products=SVD * size)
    return Flops(decompositions=DECOMPOSITIONS[name] * size)
