"""Iterations with products of few digits, and what is computed again at the highest."""

import dataclasses
from functools import partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import QUINTIC, newton_schulz

import shampoo_optax as so
from shampoo_optax import _newton, _polar
from shampoo_optax._roots import inverse_roots

PRECISIONS = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "default": jax.lax.Precision.DEFAULT,
}
CASES = {
    "coupled": (so.CoupledNewton(), 1 / 4),
    "eighth": (so.CoupledNewton(), 1 / 8),
    "power": (so.CoupledNewton(), 2 / 3),
    "order 3": (so.HigherOrderNewton(), 1 / 2),
    "NewtonDB": (so.NewtonDB(), 1 / 4),
    "warm": (so.CoupledNewton(warm_start=True), 1.0),
}
cases = pytest.mark.parametrize("root, exponent", CASES.values(), ids=CASES)
SIDE = 16


def lowered(root, precision="default", **fields):
    return dataclasses.replace(root, precision=precision, **fields)


def compute(batch, exponent, root, previous=None, measured=False):
    """Roots, condition numbers if they are asked for, residuals and turns."""
    powers = np.full(len(batch), exponent)
    return inverse_roots(batch, powers, root, 0.0, 0.0, None, previous, measured)


# ---- what is traced


def products(call, *args):
    """Of every product its precision, and the primitives that it is inside of."""
    found = [
        (eqn, tuple(p for p in path if p not in ("jit", "pjit")))
        for eqn, path in helpers.equations(jax.make_jaxpr(call)(*args).jaxpr)
    ]
    dots = [(e.params["precision"], p) for e, p in found if "dot" in e.primitive.name]
    assert all(len(set(both)) == 1 for both, _ in dots)
    conditionals = [path for e, path in found if e.primitive.name == "cond"]
    return [(both[0], path) for both, path in dots], conditionals


@pytest.mark.parametrize("precision", PRECISIONS)
@cases
def test_products_of_the_loop_have_the_precision_asked_for(root, exponent, precision):
    eye = jnp.eye(3)[None]

    def call(batch, previous):
        return compute(batch, exponent, lowered(root, precision), previous, True)

    others = "float32" if precision == "default" else "bfloat16"
    with jax.default_matmul_precision(others):
        found, conditionals = products(call, eye, eye)
    looped = {p for p, path in found if "while" in path and "cond[1]" not in path}
    others = {p for p, path in found if "while" not in path or "cond[1]" in path}
    assert looped == {PRECISIONS[precision]}
    assert others == {jax.lax.Precision.HIGHEST}
    # The highest precision needs no second attempt: the program is what it was.
    plain = precision == "highest" and exponent != 1
    assert conditionals == ([] if plain else [()])


def test_attempts_are_nested_from_low_to_wide(x64):
    def call(batch):
        return compute(batch, 1 / 4, lowered(so.NewtonDB()))

    _, conditionals = products(call, jnp.eye(3, dtype=jnp.float32)[None])
    assert conditionals == [(), ("cond[1]",)]
    _, conditionals = products(call, jnp.eye(3, dtype=jnp.float64)[None])
    assert conditionals == [()]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_of_newton_schulz_have_the_precision_asked_for(precision):
    method = so.NewtonSchulz(precision=precision)

    def call(blocks):
        return _polar.orthogonalize(blocks, jnp.ones(1), jnp.ones(1), method)

    others = "float32" if precision == "default" else "bfloat16"
    with jax.default_matmul_precision(others):
        found, _ = products(call, jnp.ones((1, 4, 3)))
    looped = [p for p, path in found if "scan" in path]
    assert looped == 3 * [PRECISIONS[precision]]  # G Gᵀ, its square, and times G


@pytest.mark.parametrize(
    "tx, loop",
    [
        (so.scale_by_shampoo(root=lowered(so.NewtonDB())), "while"),
        (so.scale_by_spectral_descent(method=lowered(so.NewtonSchulz())), "scan"),
    ],
    ids=["Shampoo", "spectral"],
)
def test_the_rest_of_an_update_keeps_the_highest_precision(tx, loop):
    found = helpers.update_equations(tx, {"w": jnp.ones((8, 6))})
    inside = {
        loop in path
        for eqn, path in found
        if eqn.primitive.name == "dot_general"
        and eqn.params["precision"] != 2 * (jax.lax.Precision.HIGHEST,)
    }
    assert inside == {True}


# ---- numbers


@pytest.fixture
def few_digits(monkeypatch):
    """Rounds the operands of products as accelerators do, which a CPU does not."""
    digits, genuine = {"high": 10, "default": 7}, _newton.contract

    def rounded(left, right, subscripts, precision="highest"):
        if precision in digits:
            left, right = (
                jax.lax.reduce_precision(x, 8, digits[precision]) for x in (left, right)
            )
        return genuine(left, right, subscripts, precision)

    for module in (_newton, _polar):
        monkeypatch.setattr(module, "contract", rounded)


def matrices_of(conditions):
    """Symmetric `[n, d, d]`, float32, with geometric spectra from 1 down."""
    spectra = np.array([c ** -np.linspace(0, 1, SIDE) for c in conditions])
    rng = np.random.default_rng(0)
    vectors, _ = np.linalg.qr(rng.standard_normal((len(spectra), SIDE, SIDE)))
    half = vectors * np.sqrt(spectra)[:, None]
    return (half @ half.transpose(0, 2, 1)).astype(np.float32)


def exact_roots(matrices, exponent):
    values, vectors = np.linalg.eigh(matrices.astype(np.float64))
    return (vectors * values[:, None] ** -exponent) @ vectors.transpose(0, 2, 1)


def relative_errors(roots, want):
    return np.max(np.abs(roots - want), (1, 2)) / np.max(np.abs(want), (1, 2))


def attempts(matrices, root, exponent):
    """Without a second attempt, with it, and at the highest precision from the start.

    One program makes them all, so that equal ones have equal bits.
    """
    before = matrices + 0.05 * np.diag(np.linspace(0, 1, SIDE))
    previous = jnp.asarray(exact_roots(before, exponent), jnp.float32)
    once = dataclasses.replace(root, max_residual=1e30)
    exact = lowered(root, "highest")

    def call(batch):
        return (
            compute(batch, exponent, once, previous, measured=True),
            compute(batch, exponent, root, previous, measured=True),
            compute(batch, exponent, exact, None, measured=True),
        )

    return jax.tree.map(np.asarray, helpers.quick_jit(call)(jnp.asarray(matrices)))


@cases
def test_only_roots_that_fail_are_computed_again(root, exponent, few_digits):
    conditions = np.array([1.5, 1e3, 5, 1e4])
    matrices = matrices_of(conditions)
    once, twice, exact = attempts(matrices, lowered(root), exponent)
    failed = ~(once[2] <= root.max_residual)
    np.testing.assert_array_equal(failed, conditions > 100)
    assert np.all(once[2][~failed] >= 1e-3)  # so many digits are lost
    for got, low, high in zip(twice, once, exact, strict=True):
        np.testing.assert_array_equal(got[failed], high[failed])
        np.testing.assert_array_equal(got[~failed], low[~failed])
    errors = relative_errors(twice[0], exact_roots(matrices, exponent))
    rounding = np.finfo(np.float32).eps * np.sqrt(SIDE)
    bounds = 5 * rounding * (1 + conditions * exponent)  # that of test_roots
    assert np.all(errors[failed] <= bounds[failed])
    assert np.all(errors[~failed] <= 0.03)


@pytest.mark.parametrize(
    "root, exponent", list(CASES.values())[:4], ids=list(CASES)[:4]
)
def test_noise_ends_the_iteration(root, exponent, few_digits):
    """Few digits end it about when all would have, not at the last turn allowed."""
    matrices = matrices_of([1.1, 3, 10, 30, 300, 1e4])
    scales = np.trace(matrices, axis1=1, axis2=2)[:, None, None]

    def call(batch):
        methods = [lowered(root, precision) for precision in PRECISIONS]
        return [_newton.iterate_roots(batch, exponent, method) for method in methods]

    exact, *others = helpers.quick_jit(call)(jnp.asarray(matrices / scales))
    want = exact_roots(matrices / scales, exponent)
    # Up to so many of these conditions they pass, with these errors.
    passing_of = (4, 2) if exponent == 1 / 8 else (5, 4)
    for result, passing, error in zip(others, passing_of, (7e-3, 2.5e-2), strict=True):
        roots, residuals, turns = (np.asarray(x) for x in result)
        assert np.all(turns <= exact[2] + 4)
        assert np.all(residuals[:passing] <= root.max_residual)
        assert np.all(relative_errors(roots, want)[:passing] <= error)


def test_an_error_that_rises_while_it_is_large_does_not_end_a_warm_start():
    rng = np.random.default_rng(23)  # with it the error rises once, from 0.48 to 0.49
    half = rng.standard_normal((12, 12)) * np.logspace(0, -2, 12)
    matrix = half @ half.T
    shift = 1e-2 * np.trace(matrix) * np.diag(np.linspace(0.1, 1, 12))
    batch, previous = (
        jnp.asarray(x[None], jnp.float32)
        for x in (matrix, np.linalg.inv(matrix + shift))
    )

    def call(batch):  # on a CPU the products themselves are the same
        roots = [so.CoupledNewton(warm_start=True, max_residual=1e30)] * 2
        roots[1] = lowered(roots[0])
        return [compute(batch, 1.0, root, previous) for root in roots]

    exact, low = helpers.quick_jit(call)(batch)
    assert low[1] <= 0.1 and low[2] >= exact[2] - 2


@cases
def test_roots_of_few_digits_are_symmetric(root, exponent, few_digits):
    matrices = jnp.asarray(matrices_of([1.5, 5, 1e3]))
    once = lowered(root, max_residual=1e30)
    roots, *_ = helpers.quick_jit(lambda x: compute(x, exponent, once, x))(matrices)
    bound = 1e-6 * np.max(np.abs(roots))
    np.testing.assert_allclose(roots, roots.mT, rtol=0, atol=bound)


def test_a_root_may_need_three_attempts(few_digits):
    """At a low precision, at the highest, and in float64."""
    root, matrices = lowered(so.CoupledNewton()), matrices_of([3, 1e3, 1e9])
    matrices += 1e-8 * np.eye(SIDE, dtype=np.float32)
    *_, narrow = attempts(matrices, root, 1 / 2)
    with helpers.enable_x64():
        once, twice, exact = attempts(matrices, root, 1 / 2)
    np.testing.assert_array_equal(once[2] <= root.max_residual, [True, False, False])
    np.testing.assert_array_equal(narrow[2] <= root.max_residual, [True, True, False])
    for got, high in zip(twice, exact, strict=True):
        np.testing.assert_array_equal(got[1:], high[1:])
    assert twice[0].dtype == np.float32
    errors = relative_errors(twice[0], exact_roots(matrices, 1 / 2))
    assert np.all(errors <= [0.03, 1e-4, 1e-4])


@pytest.mark.parametrize("shape", [(12, 7), (5, 9)], ids=str)
def test_newton_schulz_with_few_digits(shape, few_digits):
    matrix = np.random.default_rng(0).standard_normal(shape)
    gradient, want = jnp.asarray(matrix, jnp.float32), newton_schulz(matrix, QUINTIC, 5)

    def call(gradient):
        methods = [so.NewtonSchulz(precision=precision) for precision in PRECISIONS]
        ones = jnp.ones(1)
        return [
            _polar.orthogonalize(gradient[None], ones, ones, method)[0]
            for method in methods
        ]

    found = helpers.quick_jit(call)(gradient)
    highest, high, default = (np.max(np.abs(x - want)) for x in found)
    assert highest <= 3e-6 and high <= 3e-3 and default <= 2e-2
    assert 10 * highest < high < default / 2
    # As the docstring says, of the direction and of singular values.
    assert np.linalg.norm(found[2] - want) <= 0.05 * np.linalg.norm(want)
    values = [np.linalg.svd(x, compute_uv=False) for x in (found[2], want)]
    assert np.max(np.abs(values[0] - values[1])) <= 0.06


# ---- arguments

RECORDS = [so.CoupledNewton, so.HigherOrderNewton, so.NewtonDB, so.NewtonSchulz]


@pytest.mark.parametrize("record", RECORDS)
def test_the_precision_is_one_of_three_names(record):
    for wrong in ("tf32", "HIGH", None, jax.lax.Precision.HIGH, ["high"]):
        with pytest.raises(ValueError, match="`precision` must be one of") as error:
            record(precision=wrong)
        shown = f"'highest', 'high', 'default', got {wrong!r}."
        assert str(error.value).endswith(shown)


@pytest.mark.parametrize("record", RECORDS)
def test_records_are_still_static(record):
    plain, high = record(), record(precision="high")
    assert plain == record(precision="highest") != high
    assert hash(plain) == hash(record(precision="highest"))
    called = []

    @partial(jax.jit, static_argnums=1)
    def call(x, method):
        called.append(method)
        return x

    for method in (plain, high, record(), record(precision="high")):
        call(jnp.ones(()), method)
    assert called == [plain, high]
