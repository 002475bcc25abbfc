"""Inverse roots: reference matrices, and spectra whose roots are known."""

import contextlib
import functools
import json

import golden
import helpers
import jax
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
    compute = helpers.quick_jit(
        lambda matrix: inverse_roots(matrix[None], exponents, **arguments)
    )
    roots, residual, turns = compute(matrix)
    error = np.max(np.abs(roots[0] - expected)) / np.max(np.abs(expected))
    assert error <= max(1000 * entry["sensitivity"], 1e-9)
    assert residual[0] <= 1e-3 or "stopped early" in entry["note"]
    if entry.get("termination") == "CONVERGED":
        assert turns[0] == entry["iterations"]
    elif entry.get("termination") == "EARLY_STOP":
        # It goes on until rounding errors grow, which is up to their order of summing.
        assert abs(turns[0] - entry["iterations"]) <= 2
    elif entry.get("termination") == "REACHED_MAX_ITERS":
        assert turns[0] == entry["config"]["max_iterations"]
    elif entry["config"]["type"] == "Eigen":
        assert turns[0] == 0


# ---- named spectra

POWERS = (1, 2, 4, 6, 8, 3 / 2)
SIDES = (1, 2, 3, 31, 32, 33, 64, 100, 257)
RIDGE = {"float32": 1e-4, "float64": 1e-9}  # relative to the largest eigenvalue
# Of these the pseudo-inverse can tell the range by RANK.
CLEAR = ("identity", "linear 1e2", "clustered", "rank-deficient", "Gaussian Gram")
RANK = 3e-4


def spectra(side):
    """Eigenvalues `[side]` by name; the largest is 1."""
    rng = np.random.default_rng(side)
    index = np.linspace(0, 1, side) if side > 1 else np.zeros(1)
    samples = rng.standard_normal((side, 4 * side))
    gram = np.linalg.eigvalsh(samples @ samples.T)
    conditions = (1e2, 1e4, 1e6, 1e8, 1e12)
    return {
        "identity": np.ones(side),
        **{f"linear {c:.0e}".replace("e+0", "e"): 1 - (1 - 1 / c) * index
           for c in (1e2, 1e12)},
        **{f"geometric {c:.0e}": c**-index for c in conditions},
        "clustered": np.where(index < 0.5, 1.0, 1e-3),
        "rank-deficient": np.where(index < 0.5, 1.0, 0.0),
        "Gaussian Gram": gram / gram[-1],
    }  # fmt: skip


@functools.cache
def known_matrices(side):
    """Eigenvalues `[n, d]`, eigenvectors and matrices `[n, d, d]`, float64."""
    rng, values = np.random.default_rng(0), list(spectra(side).values())
    vectors, _ = np.linalg.qr(rng.standard_normal((len(values), side, side)))
    half = vectors * np.sqrt(values)[:, None]
    return np.array(values), vectors, half @ half.transpose(0, 2, 1)


def assert_known(results, values, vectors, powers, eps, max_residual):
    """The roots are those of these eigenvalues, as far as rounding lets one know.

    Rounding moves an eigenvalue by about eps * sqrt(d) * lambda_max, so that its root
    moves by that times e * condition, relative to the largest entry of the root.
    """
    roots, residuals, _ = results
    for got, residual, w, q, power in zip(
        roots.astype(float), residuals, values, vectors, powers, strict=True
    ):
        weights = np.zeros_like(w)
        np.power(w, -1 / power, out=weights, where=w > 0)
        want = (q * weights) @ q.T
        condition = np.max(w) / np.min(w[w > 0])
        bound = 5 * eps * np.sqrt(len(w)) * (1 + condition / power)
        error = np.max(np.abs(got - want)) / np.max(np.abs(want))
        assert error <= bound
        assert residual <= max_residual


def run(compute, matrices, dtype):
    """The results as NumPy arrays."""
    wide = dtype == "float64"
    with helpers.enable_x64() if wide else contextlib.nullcontext():
        results = helpers.quick_jit(compute)(jnp.asarray(matrices, dtype))
        return jax.tree.map(np.asarray, results)


dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


@dtypes
@pytest.mark.parametrize("side", SIDES)
def test_decomposed_roots_of_named_spectra(side, dtype):
    values, vectors, matrices = (
        np.repeat(array, len(POWERS), axis=0) for array in known_matrices(side)
    )
    powers = np.tile(POWERS, len(values) // len(POWERS))
    clear = np.repeat([name in CLEAR for name in spectra(side)], len(POWERS))
    ridge, eps = RIDGE[dtype], np.finfo(dtype).eps

    def compute(batch):
        methods = (so.Eigh("before"), so.Eigh("after"))
        range_alone = so.PseudoInverse(rtol=RANK)
        return [
            *(inverse_roots(batch, 1 / powers, how, ridge, 0.0) for how in methods),
            inverse_roots(batch[clear], 1 / powers[clear], range_alone, 0.0, 0.0),
        ]

    before, after, inside = run(compute, matrices, dtype)
    for results in (before, after, inside):
        assert results[0].dtype == dtype and not np.any(results[2])
    for results in (before, after):
        assert_known(results, values + ridge, vectors, powers, eps, 1e-3)
    assert_known(inside, values[clear], vectors[clear], powers[clear], eps, 1e-3)


ITERATIONS = {  # as far as rounding lets them
    "CoupledNewton": so.CoupledNewton(tolerance=0.0),
    "HigherOrderNewton": so.HigherOrderNewton(tolerance=0.0),
    "NewtonDB": so.NewtonDB(tolerance=0.0),
}


def powers_of(name):
    return (1, 2, 4, 8) if name == "NewtonDB" else POWERS


def padded_matrices(sides):
    """All spectra of these sides in one batch: matrices `[n, d, d]` and padding."""
    most, matrices, padding = max(sides), [], []
    for side in sides:
        for matrix in known_matrices(side)[2]:
            matrices.append(np.pad(matrix, (0, most - side)))
            padding.append(np.arange(most) >= side)
    return np.array(matrices), np.array(padding)


def assert_iterated(root, power, sides, dtype):
    matrices, padding = padded_matrices(sides)
    exponents, eps = np.full(len(matrices), 1 / power), np.finfo(dtype).eps
    results = run(
        lambda batch: inverse_roots(
            batch, exponents, root, RIDGE[dtype], 0.0, jnp.asarray(padding)
        ),
        matrices,
        dtype,
    )
    assert results[0].dtype == dtype and results[2].dtype == jnp.int32
    parts = [np.split(result, len(sides)) for result in results]
    for side, roots, residuals, turns in zip(sides, *parts, strict=True):
        values, vectors, _ = known_matrices(side)
        own, values = roots[:, :side, :side], values + RIDGE[dtype]
        powers = np.full(len(values), power)
        found = own, residuals, turns
        assert_known(found, values, vectors, powers, eps, root.max_residual)


@dtypes
@pytest.mark.parametrize("sides", [SIDES[:-1], SIDES[-1:]], ids=["small", "large"])
@pytest.mark.parametrize(
    "name, power", [(name, power) for name in ITERATIONS for power in powers_of(name)]
)
def test_iterated_roots_of_named_spectra(name, power, sides, dtype):
    """All sides but the largest share a call, padded to one size."""
    assert_iterated(ITERATIONS[name], power, sides, dtype)


@pytest.mark.parametrize(
    "root", [so.CoupledNewton(), so.HigherOrderNewton(), so.NewtonDB()], ids=repr
)
def test_no_spectrum_is_refused_with_the_default_ridge(root):
    """In float32, also those whose condition it cannot tell."""
    matrices, padding = padded_matrices(SIDES[:-1])
    results = run(
        lambda batch: inverse_roots(
            batch, np.full(len(batch), 1 / 4), root, 0.0, 1e-5, jnp.asarray(padding)
        ),
        matrices,
        "float32",
    )
    assert np.isfinite(results[0]).all()
    assert np.max(results[1]) <= root.max_residual


SCALES = np.array([1e-30, 1e-15, 1e15, 1e30])


@pytest.mark.parametrize(
    "root",
    [so.Eigh(), so.CoupledNewton(), so.HigherOrderNewton(), so.NewtonDB()],
    ids=lambda root: type(root).__name__,
)
def test_roots_of_very_small_and_very_large_factors(root):
    clear = [name in CLEAR[:3] for name in spectra(8)]
    values, vectors, matrices = (array[clear] for array in known_matrices(8))
    results = run(
        lambda batch: inverse_roots(batch, np.full(12, 1 / 4), root, 0.0, 0.0),
        np.kron(SCALES[:, None, None], matrices),
        "float32",
    )
    scaled, vectors = np.kron(SCALES[:, None], values), np.tile(vectors, (4, 1, 1))
    eps = np.finfo("float32").eps
    assert_known(results, scaled, vectors, 12 * [4], eps, root.max_residual)


def test_a_root_that_has_not_converged_is_refused():
    gradient = {"w": helpers.normals(0, 6, 4)}
    tx = so.scale_by_shampoo(
        **helpers.BARE, root=so.CoupledNewton(max_iterations=1, max_residual=1e-3)
    )
    (update,), (state,) = helpers.trace(tx, gradient, [gradient], jit=helpers.quick_jit)
    assert helpers.total(state.failures) == 1
    np.testing.assert_array_equal(update["w"], gradient["w"])  # identity roots
