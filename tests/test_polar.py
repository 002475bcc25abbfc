"""Polar factors against NumPy in float64 and the reference matrices."""

import json

import golden
import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import QUINTIC, newton_schulz, polynomials

import shampoo_optax as so

spectral = so.scale_by_spectral_descent
WHOLE = so.Blocking(block_size=None, merge_to=None)


def array(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def first_direction(gradient, method, **kwargs):
    """The direction of one gradient as it is, in float64."""
    tx = spectral(0.0, method=method, **kwargs)
    update, state = helpers.quick_jit(tx.update)(gradient, tx.init(gradient))
    assert helpers.total(state.skipped) == 0 and update.dtype == gradient.dtype
    return np.asarray(update, np.float64)


# ---- the reference

with np.load(golden.DATA / "matrix-functions.npz") as data:
    MATRICES = dict(data)
ENTRIES = [
    entry
    for entry in json.loads(str(MATRICES["meta_json"]))["entries"]
    if entry["op"] == "matrix_orthogonalization"
]


def test_every_orthogonalization_of_the_reference_is_there():
    kinds = [entry["config"]["type"] for entry in ENTRIES]
    assert (kinds.count("NewtonSchulz"), kinds.count("SVD")) == (16, 6)
    assert len(kinds) == 22


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"c{entry['id']}")
def test_polar_factor_follows_the_reference(entry, x64):
    matrix, expected = (MATRICES[f"c{entry['id']}_{name}"] for name in "AX")
    method = golden.polar_of(entry["config"])
    got = first_direction(jnp.asarray(matrix), method, blocking=WHOLE)
    tolerance = max(1000 * entry["sensitivity"], 1e-9) * np.max(np.abs(expected))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


# ---- the oracle

SHAPES = [(6, 4), (4, 9), (5, 5), (1, 3)]
POLYNOMIALS = {
    "quintic": (QUINTIC, 5),
    "cubic": ((1.5, -0.5), 12),
    "of degree 7": ((2.1875, -2.1875, 1.3125, -0.3125), 8),
    "two, the last repeated": (((1.5, -0.5, 0.0), (1.875, -1.25, 0.375)), 6),
}


def polar(matrix, rank=None):
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] @ right[:rank]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_newton_schulz_is_its_polynomial_on_singular_values(name, shape, x64):
    coefficients, steps = POLYNOMIALS[name]
    matrix = array(1, *shape)
    method = so.NewtonSchulz(coefficients, steps)
    got = first_direction(jnp.asarray(matrix), method, blocking=WHOLE)
    expected = newton_schulz(matrix, coefficients, steps)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "dtype, tolerance",
    [("bfloat16", 2**-8), ("float16", 2**-11), ("float32", 3e-6), ("float64", 3e-14)],
)
@pytest.mark.parametrize("method", [so.NewtonSchulz(), so.Svd()], ids=repr)
def test_directions_are_as_exact_as_their_dtype(method, dtype, tolerance, x64):
    gradient = jnp.asarray(array(2, 12, 7), dtype)
    matrix = np.asarray(gradient, np.float64)
    newton = isinstance(method, so.NewtonSchulz)
    expected = newton_schulz(matrix, QUINTIC, 5) if newton else polar(matrix)
    error = np.max(np.abs(first_direction(gradient, method) - expected))
    assert error <= tolerance


@pytest.mark.parametrize("shape", [(8, 6), (6, 8)], ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_svd_makes_up_no_direction(rank, shape):
    rows, columns = shape
    matrix = array(3, rows, rank) @ array(4, rank, columns)
    got = first_direction(jnp.asarray(matrix, jnp.float32), so.Svd())
    np.testing.assert_allclose(got, polar(matrix, rank), rtol=0, atol=1e-5)


def test_nuclear_scaling_multiplies_by_the_sum_of_singular_values():
    matrix = array(5, 7, 4)
    nuclear = np.sum(np.linalg.svd(matrix, compute_uv=False))
    method = so.Svd(nuclear_scaling=True)
    got = first_direction(jnp.asarray(matrix, jnp.float32), method)
    np.testing.assert_allclose(got, nuclear * polar(matrix), rtol=0, atol=1e-4)


def test_scale_is_a_function_of_the_rows_and_columns_of_each_block():
    gradient = jnp.asarray(array(6, 5, 7), jnp.float32)
    plain = first_direction(gradient, so.Svd(), blocking=so.Blocking(4))
    method = so.Svd(scale=lambda rows, columns: 10 * rows + columns)
    scaled = first_direction(gradient, method, blocking=so.Blocking(4))
    factors = np.repeat([[44, 43], [14, 13]], [4, 3], axis=1)
    factors = np.repeat(factors, [4, 1], axis=0)
    np.testing.assert_allclose(scaled, factors * plain, rtol=1e-6)


def test_blocks_are_orthogonalized_each_on_its_own():
    matrix = array(7, 6, 8)
    gradient = jnp.asarray(matrix, jnp.float32)
    cut = first_direction(gradient, so.Svd(), blocking=so.Blocking(4))
    whole = first_direction(gradient, so.Svd(), blocking=so.Blocking(None))
    expected = np.block(
        [[polar(matrix[:4, :4]), polar(matrix[:4, 4:])],
         [polar(matrix[4:, :4]), polar(matrix[4:, 4:])]]
    )  # fmt: skip
    np.testing.assert_allclose(cut, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(whole, polar(matrix), rtol=0, atol=1e-5)


def test_convolution_kernels_are_merged_to_matrices():
    kernel = array(8, 3, 2, 4, 5)
    got = first_direction(jnp.asarray(kernel, jnp.float32), so.Svd())
    expected = polar(kernel.reshape(24, 5)).reshape(kernel.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e-15, 1e6, 1e15])
@pytest.mark.parametrize("method", [so.NewtonSchulz(), so.Svd()], ids=repr)
def test_directions_do_not_depend_on_the_size_of_gradients(method, size):
    matrix = array(9, 16, 24)
    plain = first_direction(jnp.asarray(matrix, jnp.float32), method)
    scaled = first_direction(jnp.asarray(size * matrix, jnp.float32), method)
    np.testing.assert_allclose(scaled, plain, rtol=0, atol=1e-4)


def test_gradients_below_eps_move_less():
    matrix = array(10, 4, 3)
    matrix *= 0.25 / np.linalg.norm(matrix)
    # From a norm of a quarter of eps on, singular values start at a quarter.
    values = np.linalg.svd(matrix, compute_uv=False)
    for a, b, c in polynomials(QUINTIC, 5):
        values = a * values + b * values**3 + c * values**5
    method = so.NewtonSchulz(eps=1e-3)
    got = first_direction(jnp.asarray(1e-3 * matrix, jnp.float32), method)
    found = np.linalg.svd(got, compute_uv=False)
    np.testing.assert_allclose(np.sort(found), np.sort(values), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)], ids=str)
def test_newton_schulz_squares_the_shorter_side(shape):
    found = helpers.update_equations(spectral(), {"w": jnp.ones(shape)})
    dots = [eqn for eqn, _ in found if eqn.primitive.name == "dot_general"]
    sizes = sorted(eqn.outvars[0].aval.size for eqn in dots)
    assert sizes == [9, 9, 21]


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_the_work_of_a_decomposition_is_counted(shape):
    params = helpers.structs({"v": shape, "w": shape})
    (part,) = so.describe(params, spectral(method=so.Svd())).parts
    # 48 m n min(m, n) for each, and the product of its singular vectors.
    assert part.flops["application"] == 2 * (48 * 24 * 4 + 2 * 24 * 4)
    assert part.flops["refresh"] == part.flops["decompositions"] == 0


# ---- arguments


def test_schedules_are_judged_as_they_are_used():
    # Again and again, the last step would take everything to 0.
    shrunk = (*[QUINTIC] * 5, (0.96, 0.0, 0.0))
    matrix = array(12, 9, 6)
    method = so.NewtonSchulz(shrunk, steps=6)
    got = first_direction(jnp.asarray(matrix, jnp.float32), method)
    expected = 0.96 * newton_schulz(matrix, QUINTIC, 5)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="`coefficients` must bring .* got"):
        so.NewtonSchulz(shrunk, steps=7)


def test_numbers_of_records_are_python_numbers():
    method = so.NewtonSchulz(steps=np.int64(4), eps=jnp.float32(0.25))
    assert method == so.NewtonSchulz(steps=4, eps=0.25)
    assert hash(method) == hash(so.NewtonSchulz(steps=4, eps=0.25))
    assert (type(method.steps), type(method.eps)) == (int, float)


def test_scales_may_be_integers():
    gradient = helpers.normals(13, 4, 3)
    plain = first_direction(gradient, so.Svd())
    for scale in (lambda m, n: 2, lambda m, n: (m / m + 1).astype(int)):
        scaled = first_direction(gradient, so.Svd(scale=scale))
        np.testing.assert_array_equal(scaled, 2 * plain)


def fails(rows, columns):
    raise KeyError(f"no scale of {rows.shape}")


REAL = "`scale` must be a function.* to one real number, but it"
BAD = {
    "no steps": (lambda: so.NewtonSchulz(steps=0), "`steps` .* got 0"),
    "many steps": (
        lambda: so.NewtonSchulz(steps=101),
        "`steps` must be at most 100, got 101",
    ),
    "eps": (lambda: so.NewtonSchulz(eps=-1.0), "`eps` .* got -1.0"),
    "one coefficient": (lambda: so.NewtonSchulz((1.0,)), r"`coeff.* got \(1.0,\)"),
    "no coefficients": (lambda: so.NewtonSchulz(()), r"`coefficients` .* got \(\)"),
    "a number": (lambda: so.NewtonSchulz(1.5), "`coefficients` .* got 1.5"),
    "a name": (lambda: so.NewtonSchulz("dion"), "`coefficients` .* got 'dion'"),
    "not finite": (
        lambda: so.NewtonSchulz((1.5, np.nan)),
        r"`coefficients` must be two or more finite .* got \(1.5, nan\)",
    ),
    "two lengths": (
        lambda: so.NewtonSchulz(((1.5, -0.5), QUINTIC)),
        r"`coefficients` must be two or more .* of one length, got \(\(1.5, -0.5\), ",
    ),
    "too many polynomials": (
        lambda: so.NewtonSchulz((QUINTIC,) * 3, steps=2),
        "`steps` must be at least the number of polynomials, 3, got 2",
    ),
    "shrinks": (
        lambda: so.NewtonSchulz((0.5, 0.5)),
        r"`coefficients` must bring .* got \(0.5, 0.5\)",
    ),
    "grows": (
        lambda: so.NewtonSchulz((3.4, 1.0)),
        r"`coefficients` must bring .* got \(3.4, 1.0\)",
    ),
    "stops elsewhere": (
        lambda: so.NewtonSchulz((1.2, -0.01)),
        r"to 4.47 … 4.47, got \(1.2, -0.01\)",
    ),
    "a schedule that is too short": (
        lambda: so.NewtonSchulz((QUINTIC,) * 2, steps=2),
        r"`coefficients` must bring .* got \(\(3.4445,",
    ),
    "scale, a number": (
        lambda: so.NewtonSchulz(scale=0.2),
        "`scale` must be a function of rows and columns, or None, got 0.2",
    ),
    "scale, one argument": (
        lambda: so.Svd(scale=lambda rows: rows),
        f"{REAL} raises TypeError.*, got <function",
    ),
    "scale by numpy": (
        lambda: so.Svd(scale=lambda m, n: np.sqrt(m / n)),
        f"(?s){REAL} raises TracerArray.*, got <function",
    ),
    "scale that fails": (
        lambda: so.NewtonSchulz(scale=fails),
        f"{REAL} raises KeyError: 'no scale of .*, got <function fails",
    ),
    "scale, a pair": (
        lambda: so.Svd(scale=lambda m, n: (m, n)),
        rf"{REAL} gives \(Shape.*, got <function",
    ),
    "scale, complex": (
        lambda: so.Svd(scale=lambda m, n: 1j * m),
        f"{REAL} gives Shape.*complex64.*, got <function",
    ),
    "nuclear": (lambda: so.Svd(nuclear_scaling=2), "`nuclear_scaling` .* got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_shown(name):
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()
