"""Inverse roots: reference matrices, and spectra whose roots are known."""

import json

import golden
import helpers
import jax.numpy as jnp
import numpy as np
import pytest

import shampoo_optax as so
from shampoo_optax._roots import inverse_roots

with np.load(golden.DATA / "matrix-functions.npz") as data:
    MATRICES = dict(data)
ENTRIES = [
    entry
    for entry in json.loads(str(MATRICES["meta_json"]))["entries"]
    if entry["op"] == "matrix_inverse_root"
]


def test_every_inverse_root_of_the_reference_is_there():
    kinds = [entry["config"]["type"] for entry in ENTRIES]
    assert [kinds.count(kind) for kind in ("CoupledNewton", "CoupledHigherOrder")] == [
        5,
        19,
    ]
    assert len(kinds) == kinds.count("Eigen") + 24 > 40


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"c{entry['id']}")
def test_root_follows_the_reference(entry, x64):
    matrix, expected = (MATRICES[f"c{entry['id']}_{name}"] for name in "AX")
    arguments = {"eps": entry["epsilon"]} | golden.root_of(entry["config"])
    exponents = np.array([1 / entry["root_float"]])
    roots, residual, _ = inverse_roots(jnp.asarray(matrix)[None], exponents, **arguments)
    error = np.max(np.abs(roots[0] - expected)) / np.max(np.abs(expected))
    assert error <= max(1000 * entry["sensitivity"], 1e-9)
    assert residual[0] <= 1e-3 or "stopped early" in entry["note"]


# ---- named spectra

RIDGE = 1e-4  # relative to the largest eigenvalue


def spectra(side, rng):
    """Eigenvalues `[side]` by name; the largest is 1."""
    index = np.linspace(0, 1, side) if side > 1 else np.zeros(1)
    samples = rng.standard_normal((side, 4 * side))
    gram = np.linalg.eigvalsh(samples @ samples.T)
    return {
        "identity": np.ones(side),
        "linear, condition 1e2": 1 - 0.99 * index,
        "linear, condition 1e12": 1 - (1 - 1e-12) * index,
        "geometric, condition 1e2": 1e-2**index,
        "geometric, condition 1e6": 1e-6**index,
        "geometric, condition 1e12": 1e-12**index,
        "clustered": np.where(index < 0.5, 1.0, 1e-3),
        "rank-deficient": np.where(index < 0.5, 1.0, 0.0),
        "Gaussian Gram": gram / gram[-1],
    }


def known_roots(side, powers, seed=0):
    """Matrices `[n, d, d]` and their exact inverse roots with the ridge, float64.

    One for every spectrum and every p of `powers`; and the exponents `[n]`.
    """
    rng = np.random.default_rng(seed)
    matrices, roots, exponents = [], [], []
    for values in spectra(side, rng).values():
        vectors, _ = np.linalg.qr(rng.standard_normal((side, side)))
        for power in powers:
            half = vectors * np.sqrt(values)
            matrices.append(half @ half.T)
            roots.append((vectors * (values + RIDGE) ** (-1 / power)) @ vectors.T)
            exponents.append(1 / power)
    return np.array(matrices), np.array(roots), np.array(exponents)


def assert_known_roots(side, powers, dtype, root):
    matrices, expected, exponents = known_roots(side, powers)
    roots, residuals = inverse_roots(
        jnp.asarray(matrices, dtype), exponents, root, eps=RIDGE, relative_eps=0.0
    )
    assert roots.dtype == dtype
    # An eigenvalue moves by at most eps * sqrt(d) * lambda_max, so that its root
    # moves by that times e * condition, relative to the largest entry of the root.
    bound = 20 * np.finfo(dtype).eps * np.sqrt(side) / RIDGE
    for got, want in zip(np.asarray(roots, np.float64), expected, strict=True):
        assert np.max(np.abs(got - want)) <= bound * np.max(np.abs(want))
    assert np.max(residuals) <= root.max_residual


POWERS = (1, 2, 4, 6, 8, 3 / 2)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@dtypes
@pytest.mark.parametrize("side", [1, 2, 3, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("ridge", ["before", "after"])
def test_decomposed_roots_of_named_spectra(ridge, side, dtype):
    with helpers.enable_x64():
        assert_known_roots(side, POWERS, dtype, so.Eigh(ridge=ridge))


@dtypes
@pytest.mark.parametrize("side", [3, 33])
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("order", [2, 3])
def test_iterated_roots_of_named_spectra(order, power, side, dtype):
    root = so.HigherOrderNewton(order=order, tolerance=0.0)
    with helpers.enable_x64():
        assert_known_roots(side, [power], dtype, root)


@dtypes
@pytest.mark.parametrize("power", [1, 2, 4, 6, 8])
def test_newton_roots_of_named_spectra(power, dtype):
    with helpers.enable_x64():
        assert_known_roots(33, [power], dtype, so.CoupledNewton(tolerance=0.0))


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize(
    "root", [so.Eigh(), so.CoupledNewton(), so.HigherOrderNewton()], ids=repr
)
def test_roots_do_not_depend_on_scale(root, scale):
    matrices, _, exponents = known_roots(8, [4])
    plain, _, _ = inverse_roots(
        jnp.asarray(matrices, jnp.float32), exponents, root, 0.0, RIDGE
    )
    scaled, _, _ = inverse_roots(
        jnp.asarray(scale * matrices, jnp.float32), exponents, root, 0.0, RIDGE
    )
    error = np.abs(np.asarray(scaled, np.float64) * scale**0.25 - plain)
    assert np.max(error) <= 1e-3 * np.max(np.abs(plain))


def test_a_root_that_has_not_converged_is_refused():
    gradient = {"w": helpers.normals(0, 6, 4)}
    tx = so.scale_by_shampoo(
        **helpers.BARE, root=so.CoupledNewton(max_iterations=1, max_residual=1e-3)
    )
    update, state = tx.update(gradient, tx.init(gradient), gradient)
    assert helpers.total(state.failures) == 1
    np.testing.assert_array_equal(update["w"], gradient["w"])  # identity roots
