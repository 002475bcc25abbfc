"""Every method that gives a direction, and which acceptance cases hold for it.

A case holds for a method unless `METHODS` gives a reason why it makes no sense there.
The references say what a method does to a diagonal gradient: each of its entries is
multiplied by a number. To a gradient U diag(x) Vᵀ a method that does not depend on the
coordinates does the same in the bases U and V.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from oracle import QUINTIC

import shampoo_optax as so
from shampoo_optax import _eigen, _inverse_free, _roots

partial = functools.partial

# ---- references, float64: diagonals [t, d] to the scales [t, d] of their entries


def weight_of(b2):
    return 1 if b2 == 1 else 1 - b2


def correction_of(b2, t):
    return 1 if b2 == 1 else 1 - b2**t


def shampoo(xs, *, b2, refresh_every, b1=0.0, exponents=(1 / 4, 1 / 4),
            relative_eps=1e-6, trace_scaling=0.0, whitened=False):  # fmt: skip
    """Kronecker factors of a matrix, diagonal as it is."""
    factors, roots = np.zeros((2, xs.shape[1])), np.ones((2, xs.shape[1]))
    for t, x in enumerate(xs, 1):
        seen = x * roots[::-1] if whitened else np.stack([x, x])
        factors = b2 * factors + weight_of(b2) * seen**2
        if t % refresh_every == 0:
            means = factors / correction_of(b2, t)
            means = means * means.sum(axis=1, keepdims=True) ** -trace_scaling
            ridged = means + relative_eps * means.max(axis=1, keepdims=True)
            powers = -np.asarray(exponents)[:, None]
            roots = np.where(ridged > 0, np.where(ridged > 0, ridged, 1) ** powers, 0)
        yield roots[0] * roots[1]


def adam(xs, *, b2, eps, b1=0.0, refresh_every=1, relative_eps=0.0):
    """What SOAP is on diagonal gradients, whatever its period."""
    moments = 0.0
    for t, x in enumerate(xs, 1):
        moments = b2 * moments + weight_of(b2) * x**2
        scale = np.sqrt(moments / correction_of(b2, t)) + eps
        yield 1 / np.where(scale > 0, scale, 1)


def root_free(xs, *, b2, eps, batch_size, b1=0.0):
    moments = 1.0
    for x in xs:
        moments = b2 * moments + weight_of(b2) * batch_size * x**2
        yield 1 / (moments + eps)


def inverse_free(xs, *, b2, eps, root_momentum, batch_size, refresh_every=1, b1=0.0,
                 sides=None):  # fmt: skip
    """Roots of both sides, diagonal as the gradient."""
    sides = sides or 2 * (xs.shape[1],)
    roots, momenta = [np.ones(d) for d in sides], [np.zeros(d) for d in sides]
    for x in xs:
        left, right = (root[: len(x)] for root in roots)
        seen = batch_size * (x * left * right) ** 2
        means = [np.mean(root**2) for root in roots]
        for k, side in enumerate(sides):
            outer = np.pad(seen, (0, side - len(x))) * side / np.prod(sides)
            excess = outer + eps * means[1 - k] * roots[k] ** 2 - 1
            momenta[k] = root_momentum * momenta[k] + (1 - root_momentum) * excess / 2
            shrink = max(1, np.linalg.norm(momenta[k]))
            roots[k] = roots[k] * (1 - (1 - b2) / shrink * momenta[k])
        left, right = (root[: len(x)] for root in roots)
        yield left**2 * right**2


def orthogonal(xs, *, polynomials=(), b1=0.0):
    """Singular values of 1, or what polynomials make of them after a division."""
    for x in xs:
        value = x / np.linalg.norm(x) if polynomials else np.sign(x)
        for polynomial in polynomials:
            value = sum(a * value ** (2 * k + 1) for k, a in enumerate(polynomial))
        yield value / np.where(x == 0, 1, x)


# ---- C3: the norm of the direction, where it is not that of a diagonal gradient


def inverse_free_of_sides(gradient, steps, **numbers):
    """The sides enter the step of the roots."""
    xs = np.zeros((steps, min(gradient.shape)))
    xs[:, 0] = np.linalg.norm(gradient)
    *_, scales = inverse_free(xs, sides=gradient.shape, **numbers)
    return xs[0, 0] * scales[0]


def in_bases_of_before(gradient, steps, *, eps, **_):
    """SOAP in the form of the paper: the first square enters D in the first basis.

    The singular vectors take the places of the unit vectors that they are nearest to,
    which are those of the gradient's largest entry; in large blocks it is no matter.
    """
    size = np.linalg.norm(gradient)
    moment = np.max(np.abs(gradient)) ** 2 + (steps - 1) * size**2
    return size / (np.sqrt(moment) + eps)


# ---- the table


class Method(NamedTuple):
    """A method, and what the cases need to know of it."""

    make: Callable  # of the numbers
    numbers: (
        dict  # arguments that the compiled program is given, as the cases have them
    )
    reference: Callable
    routine: tuple | None = None  # (module, name) of what may fail at a refresh
    derived: tuple[str, ...] = ()  # fields that only change at a refresh
    of_case: dict = {}  # {case: other numbers}
    published: bool = False  # whether the published 2x2 numbers of C4 are its own
    rank_one: Callable | None = None  # of gradient and number of steps: the norm of C3
    spoilt: tuple[str, ...] = ("0", "1")  # the axes with what the routine gives
    scales: tuple[float, ...] = (1e-15, 1e-7, 1e7, 1e15)  # those of C5
    no_sense: dict = {}  # {case: reason}


CASES = {
    "C1": "zero first",
    "C2": "one dead layer",
    "C3": "rank one",
    "C4": "the exponent",
    "C5": "scale",
    "C7": "a failed root",
    "C8": "the order of a basis",
    "C9": "no silent no-op",
    "C10": "precision",
    "C13": "program size",
}

SUMS = dict(b1=0.0, b2=1.0, refresh_every=1)

NO_BASIS = {"C8": "keeps no basis"}
NO_REFRESH = {"C7": "derives nothing at a refresh"} | NO_BASIS
ENTRYWISE = {
    "C3": "divides entry by entry: a direction in another basis is not its own",
    "C10": "multiplies no matrices",
}
NOT_SCALE_FREE = {
    "C5": "directions are in units of the inverse gradient, and the state starts at 1"
}
HALF_PRECISION = {
    "C3": "roots of 8 bits: rounding of 1/512 times the root of the ridge",
    "C4": "roots of 8 bits: to 1/128, not to 1e-4",
    "C5": "roots of 8 bits, which are rounded anew at every scale",
}

roots_fail, bases_fail = (_roots, "inverse_roots"), (_eigen, "eigenbases")
EIGENDECOMPOSED = dict(routine=bases_fail, derived=("bases", "eigenvalues"))


def of_shampoo(make=so.scale_by_shampoo, no_sense=NO_BASIS, numbers=SUMS,
               reference=shampoo, **kwargs):  # fmt: skip
    known = dict(routine=roots_fail, derived=("roots",), published=True)
    known |= {key: kwargs.pop(key) for key in Method._fields if key in kwargs}
    make = partial(make, graft=None, **kwargs)
    return Method(make, numbers, reference, no_sense=no_sense, **known)


def of_kl(no_sense=NO_BASIS, other=(), **kwargs):
    return of_shampoo(
        so.scale_by_kl_shampoo,
        no_sense,
        numbers=SUMS | dict(relative_eps=1e-5),  # the default
        reference=partial(shampoo, whitened=True, exponents=(1 / 2, 1 / 2)),
        published=False,
        # Without memory factors have one unit, if another at every second step; sums
        # add both. Kept eigenvalues of 1 have the ridge too before the first refresh.
        of_case={
            "C5": dict(b2=0.0, relative_eps=1e-2),
            "C9": dict(relative_eps=0.0),
        }
        | dict(other),
        **kwargs,
    )


def of_soap(make=so.scale_by_soap, derived=("bases",), routine=bases_fail, **kwargs):
    known = {key: kwargs.pop(key) for key in Method._fields if key in kwargs}
    return Method(
        partial(make, **kwargs),
        SUMS | dict(eps=1e-8),
        adam,
        routine=routine,
        derived=derived,
        # Entries that are 0 but for rounding are divided by the root of their squares.
        of_case={"C3": dict(eps=1e-2), "C5": dict(eps=0.0)},
        **known,
    )


def of_kl_soap(**kwargs):
    method = of_soap(so.scale_by_kl_soap, derived=("bases", "eigenvalues"), **kwargs)
    return method._replace(
        numbers=method.numbers | dict(relative_eps=1e-6),  # the default
        of_case=method.of_case | {"C9": dict(relative_eps=0.0)},
    )


def of_inverse_free(no_sense=NOT_SCALE_FREE | NO_BASIS, **kwargs):
    numbers = dict(b2=0.8, eps=1e-4, root_momentum=0.5, batch_size=1.0)
    return Method(
        partial(so.scale_by_inverse_free_shampoo, **kwargs),
        SUMS | numbers,
        inverse_free,
        routine=(_inverse_free, "_move"),
        derived=("roots", "momenta"),
        rank_one=inverse_free_of_sides,
        no_sense=no_sense,
    )


def of_spectral(reference=orthogonal, **kwargs):
    make = partial(so.scale_by_spectral_descent, **kwargs)
    return Method(make, dict(b1=0.0), reference, no_sense=NO_REFRESH)


NEWTON_SCHULZ = partial(orthogonal, polynomials=5 * (QUINTIC,))
ONE_SIDE = dict(reference=partial(shampoo, exponents=(1 / 2, 0)), published=False)
DIAGONAL = dict(axes=so.Axes(diagonal_above=20), blocking=so.Blocking(block_size=20))
# Where moments or products are taken in a basis of what the factors still lack, or in
# one that a few iterations have left unfinished, it rests with rounding, to which
# powers of two make no difference.
FEW_QR = so.QRBasis(max_iterations=5, tolerance=1e-4)
POWERS = (2.0**-50, 2.0**-25, 2.0**25, 2.0**50)
PAPER = dict(rank_one=in_bases_of_before, scales=POWERS)
QR = so.QRBasis(max_iterations=100, tolerance=1e-5)
ITERATION = dict(  # the default ridge, but for the numbers of C4, which have none
    numbers=SUMS | dict(relative_eps=1e-5), of_case={"C4": dict(relative_eps=1e-7)}
)

METHODS = {
    # Shampoo, by its roots
    "eigh": of_shampoo(root=so.Eigh()),
    "eigh, ridge after": of_shampoo(root=so.Eigh(ridge="after")),
    "pseudo-inverse": of_shampoo(
        root=so.PseudoInverse(), reference=partial(shampoo, relative_eps=0.0)
    ),
    "coupled Newton": of_shampoo(root=so.CoupledNewton(), **ITERATION),
    "higher-order Newton": of_shampoo(root=so.HigherOrderNewton(), **ITERATION),
    "Newton DB": of_shampoo(root=so.NewtonDB(), **ITERATION),
    "eigendecomposed": of_shampoo(
        root=so.Eigendecomposed(so.EighBasis()), no_sense={}, **EIGENDECOMPOSED
    ),
    "eigendecomposed, tolerance": of_shampoo(
        root=so.Eigendecomposed(so.EighBasis(0.1)),
        no_sense={},
        **EIGENDECOMPOSED | dict(published=False),  # to its tolerance
    ),
    "eigendecomposed, QR": of_shampoo(
        root=so.Eigendecomposed(QR), no_sense={}, **EIGENDECOMPOSED
    ),
    "eigendecomposed, Cholesky": of_shampoo(
        root=so.Eigendecomposed(so.CholeskyBasis(100, 1e-5)),
        no_sense={},
        **EIGENDECOMPOSED,
    ),
    # Shampoo, by its factors
    "packed": of_shampoo(storage=so.Storage(packed=True)),
    "packed bfloat16 roots": of_shampoo(
        storage=so.Storage(roots="bfloat16", packed=True),
        no_sense=HALF_PRECISION | NO_BASIS,
    ),
    "input side": of_shampoo(axes=so.Axes(sides="input"), **ONE_SIDE),
    "output side": of_shampoo(axes=so.Axes(sides="output"), **ONE_SIDE),
    "diagonal axes": of_shampoo(
        **DIAGONAL, spoilt=("1",), no_sense={"C3": ENTRYWISE["C3"]} | NO_BASIS
    ),
    "trace scaling": of_shampoo(
        trace_scaling=0.5,
        reference=partial(shampoo, trace_scaling=0.5),
        published=False,
    ),
    # KL-Shampoo
    "KL": of_kl(root=so.Eigh()),
    "KL, eigendecomposed, QR": of_kl(
        {},
        {"C8": dict(relative_eps=0.0)},
        root=so.Eigendecomposed(QR),
        **EIGENDECOMPOSED,
    ),
    # SOAP
    "SOAP": of_soap(basis=so.EighBasis()),
    "SOAP, tolerance": of_soap(basis=so.EighBasis(0.1)),
    "SOAP, QR": of_soap(basis=FEW_QR, scales=POWERS),
    "SOAP, Cholesky": of_soap(basis=so.CholeskyBasis(5), scales=POWERS),
    "SOAP, paper, Cholesky": of_soap(form="paper", basis=so.CholeskyBasis(), **PAPER),
    "SOAP, paper": of_soap(form="paper", **PAPER),
    "KL-SOAP": of_kl_soap(**PAPER),
    "KL-SOAP, official, QR": of_kl_soap(form="official", basis=FEW_QR, scales=POWERS),
    # without a root of statistics, or without statistics
    "root-free": Method(
        so.scale_by_root_free_rms,
        dict(b1=0.0, b2=1.0, eps=1e-4, batch_size=1.0),
        root_free,
        no_sense=ENTRYWISE | NOT_SCALE_FREE | NO_REFRESH,
    ),
    "inverse-free": of_inverse_free(),
    "inverse-free, diagonal": of_inverse_free(
        ENTRYWISE | NOT_SCALE_FREE | NO_BASIS, structure="diagonal"
    ),
    "inverse-free, bfloat16": of_inverse_free(
        HALF_PRECISION | NOT_SCALE_FREE | NO_BASIS, dtype="bfloat16"
    ),
    "spectral, Newton–Schulz": of_spectral(NEWTON_SCHULZ, method=so.NewtonSchulz()),
    "spectral, SVD": of_spectral(method=so.Svd()),
    "sign": Method(
        so.scale_by_sign_descent,
        dict(b1=0.0),
        orthogonal,
        no_sense=ENTRYWISE | NO_REFRESH,
    ),
}


def numbers_of(name, case):
    method = METHODS[name]
    return method.numbers | method.of_case.get(case, {})


HOLDS = [
    (name, case)
    for name, method in METHODS.items()
    for case in CASES
    if case not in method.no_sense
]
