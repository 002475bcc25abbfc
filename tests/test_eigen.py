"""Eigenbases: reference matrices, dense NumPy, padding, scale, order of columns."""

import json
import subprocess
import sys
from functools import lru_cache, partial

import golden
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shampoo_optax as so
from shampoo_optax import _eigen, _slotwise
from shampoo_optax._eigen import eigenbases

with np.load(golden.DATA / "matrix-functions.npz") as data:
    MATRICES = dict(data)
ENTRIES = [
    entry
    for entry in json.loads(str(MATRICES["meta_json"]))["entries"]
    if entry["op"] in ("qr_eigendecomposition", "eigh_adaptive")
]
BASES = [so.EighBasis(), so.EighBasis(0.1), so.QRBasis(5, 0.1), so.QRBasis(1, 0.0)]
BASES += [so.CholeskyBasis(), so.CholeskyBasis(3, 0.1)]
each_basis = pytest.mark.parametrize("basis", BASES, ids=repr)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@lru_cache
def compiled(basis):
    return helpers.quick_jit(partial(eigenbases, basis=basis))


def run(matrices, previous, basis, padding=None, dtype=np.float64, build=compiled):
    """Bases, eigenvalues, residuals and iterations as NumPy arrays."""
    compute = build(basis)
    arrays = (jnp.asarray(array, dtype) for array in (matrices, previous))
    found = compute(*arrays, padding=padding)
    assert [array.dtype for array in found] == [dtype, dtype, dtype, np.int32]
    return [np.asarray(array) for array in found]


def assert_columns(got, want, tolerance):
    """Equal up to the sign of each column."""
    signs = np.sign(np.sum(got * want, axis=-2, keepdims=True))
    np.testing.assert_allclose(got * signs, want, rtol=0, atol=tolerance)


# ---- the reference


def test_every_basis_of_the_reference_is_there():
    operations = [entry["op"] for entry in ENTRIES]
    assert operations.count("qr_eigendecomposition") == 8
    assert operations.count("eigh_adaptive") == 3


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"c{entry['id']}")
def test_basis_follows_the_reference(entry, x64):
    matrix, start, values, vectors = (
        MATRICES[f"c{entry['id']}_{name}"]
        for name in ("A", "Q0", "eigenvalues", "eigenvectors")
    )
    config, is_qr = entry["config"], entry["config"]["type"] == "QR"
    tolerance = config["tolerance"]
    basis = so.EighBasis(tolerance)
    if is_qr:
        basis = so.QRBasis(config["max_iterations"], tolerance)
    matrix = matrix + entry["epsilon"] * np.eye(len(matrix))
    bases, estimates, residuals, iterations = run(matrix[None], start[None], basis)
    bound = max(1000 * (entry["sensitivity"] or 0), 1e-9)
    assert np.max(np.abs(estimates[0] - values)) <= bound * np.max(np.abs(values))
    assert_columns(bases[0], vectors, bound)
    assert iterations[0] == entry["qr_iterations" if is_qr else "recomputed"]
    assert residuals[0] <= 1e-13


# ---- dense NumPy


def off_diagonal(matrix):
    return np.linalg.norm(matrix - np.diag(np.diag(matrix))) / np.linalg.norm(matrix)


def dense_qr(matrix, vectors, basis):
    rotated, iterations = vectors.T @ matrix @ vectors, 0
    while iterations < basis.max_iterations and off_diagonal(rotated) > basis.tolerance:
        turn, rest = np.linalg.qr(rotated)
        rotated, vectors, iterations = rest @ turn, vectors @ turn, iterations + 1
    order = np.argsort(np.diag(rotated))
    return vectors[:, order], np.diag(rotated)[order], iterations


def dense_descending(matrix, vectors, basis):
    """Orthogonal iteration with the largest eigenvalues first, each in its place."""
    iterations = 0
    for _ in range(basis.max_iterations):
        rotated = vectors.T @ matrix @ vectors
        if off_diagonal(rotated) > basis.tolerance:
            order = np.argsort(-np.diag(rotated))
            vectors = np.linalg.qr(matrix @ vectors[:, order])[0][:, np.argsort(order)]
            iterations += 1
    return vectors, np.diag(vectors.T @ matrix @ vectors), iterations


def dense_eigh(matrix, vectors, basis):
    rotated = vectors.T @ matrix @ vectors
    if basis.tolerance and off_diagonal(rotated) <= basis.tolerance:
        return vectors, np.diag(rotated), 0
    return *np.linalg.eigh(matrix)[::-1], 1


DENSE = {
    so.QRBasis: dense_qr,
    so.CholeskyBasis: dense_descending,
    so.EighBasis: dense_eigh,
}


def problems(side=7, seed=0):
    """Matrices `[n, d, d]` and old bases whose off-diagonal shares differ widely.

    The eigenvalues of the matrices lie apart, so that rounding moves vectors little.
    """
    rng = np.random.default_rng(seed)
    matrices, previous = [], []
    for distance in (0.0, 0.01, 0.3, 0.6, 3.0):
        exact, _ = np.linalg.qr(rng.standard_normal((side, side)))
        values = 2.0 ** -rng.permutation(side)
        near = exact + distance * rng.standard_normal((side, side)) / side
        matrices.append((exact * values) @ exact.T)
        previous.append(np.linalg.qr(near)[0] if distance else exact)
    return np.array(matrices), np.array(previous)


def dense(matrices, previous, basis):
    compute = DENSE[type(basis)]
    slots = [compute(*slot, basis) for slot in zip(matrices, previous, strict=True)]
    return [np.array(parts) for parts in zip(*slots, strict=True)]


@dtypes
@each_basis
def test_bases_are_those_of_dense_numpy(basis, dtype, x64):
    matrices, previous = problems()
    # Rounded first: what is compared is the computation alone.
    matrices, previous = (x.astype(dtype).astype(float) for x in (matrices, previous))
    vectors, values, iterations = dense(matrices, previous, basis)
    got = run(matrices, previous, basis, dtype=dtype)
    bound = 500 * np.finfo(dtype).eps  # the closest eigenvalues are 1/64 apart
    assert_columns(got[0], vectors, bound)
    np.testing.assert_allclose(got[1], values, rtol=0, atol=bound)
    assert np.max(got[2]) <= bound
    if basis.tolerance:  # else the exact start stops by rounding
        np.testing.assert_array_equal(got[3], iterations)
        assert iterations.min() == (0 if got[3].min() == 0 else 1)


def test_settings_of_the_dense_comparison_reach_every_branch():
    matrices, previous = problems()
    counts = [list(dense(matrices, previous, basis)[2]) for basis in BASES[:3]]
    assert counts[0] == [1] * 5
    assert counts[1] == [0, 0, 1, 1, 1]
    assert counts[2][:2] == [0, 0] and 0 < counts[2][2] < counts[2][4] == 5


@pytest.mark.parametrize("basis", [*BASES[1:4], BASES[5]], ids=repr)
def test_a_good_basis_is_kept_bit_for_bit(basis):
    values = np.float32(2.0) ** np.arange(6)
    found = run(np.diag(values)[None], np.eye(6)[None], basis, dtype=np.float32)
    np.testing.assert_array_equal(found[0][0], np.eye(6))
    np.testing.assert_array_equal(found[1][0], values)
    assert found[2] == 0 and found[3] == 0


def test_only_qr_sorts_a_basis_that_it_keeps():
    values = np.array([4.0, 1.0, 2.0])
    arrays = (np.diag(values)[None], np.eye(3)[None])
    kept = run(*arrays, so.EighBasis(0.1), dtype=np.float32)
    np.testing.assert_array_equal(kept[1][0], values)
    ascending = run(*arrays, so.QRBasis(3, 0.1), dtype=np.float32)
    np.testing.assert_array_equal(ascending[1][0], np.sort(values))
    np.testing.assert_array_equal(ascending[0][0], np.eye(3)[:, [1, 2, 0]])
    assert kept[3] == ascending[3] == 0


def test_share_off_the_diagonal_is_exact_in_float32():
    # sqrt(|B|^2 - |diag B|^2) would be rounding here.
    matrix = np.array([[[1.0, 1e-5], [1e-5, 0.5]]])
    share = off_diagonal(matrix[0])
    for tolerance, count in ((0.99 * share, 1), (1.01 * share, 0)):
        found = run(matrix, np.eye(2)[None], so.EighBasis(tolerance), dtype=np.float32)
        assert found[3] == count


@pytest.mark.parametrize(
    "basis, bound",
    [
        (so.QRBasis(1, 0.0), 2e-6),
        (so.QRBasis(1, 1e-30), 2e-6),
        (so.CholeskyBasis(), 2e-5),  # straightened from 100 roundings on
    ],
)
def test_bases_that_are_followed_for_long_stay_orthogonal(basis, bound):
    side, steps = 8, 1000

    def advance(carry, key):
        factors, bases = carry
        blocks = jax.random.normal(key, (2, side, side))
        factors = 0.9 * factors + jnp.einsum("nij,nkj->nik", blocks, blocks)
        bases, *_, iterations = eigenbases(factors, bases, basis)
        return (factors, bases), iterations

    start = jnp.zeros((2, side, side)), jnp.tile(jnp.eye(side), (2, 1, 1))
    keys = jax.random.split(jax.random.key(0), steps)
    (_, bases), iterations = jax.jit(partial(jax.lax.scan, advance))(start, keys)
    assert np.min(iterations) == 1
    gram = np.einsum("nij,nik->njk", *2 * [np.asarray(bases, float)])
    # Without care, QR adds up to 5e-5 over so many.
    assert np.max(np.abs(gram - np.eye(side))) <= bound


@pytest.mark.parametrize("turns", [1, 3])
def test_without_a_test_qr_takes_the_same_turns_from_products_alone(turns, x64):
    matrices, old = problems()
    matrices[0] = 0
    padding = np.zeros((5, 7), bool)
    padding[3:, 5:] = True
    matrices[3:], old[3:] = 0, np.eye(7)
    matrices[3:, :5, :5], old[3:, :5, :5] = (x[2:4] for x in problems(side=5))

    got = run(matrices, old, so.QRBasis(turns, 0.0), padding)
    want = run(matrices, old, so.QRBasis(turns, 1e-30), padding)
    assert_columns(got[0], want[0], 1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-13)
    np.testing.assert_array_equal(got[3], [0] + [turns] * 4)
    np.testing.assert_array_equal(got[0][0], old[0])  # of zeros, bit for bit
    rotated = np.einsum("nji,njk,nki->ni", got[0], matrices, got[0])
    inside = ~padding
    np.testing.assert_allclose(got[1][inside], rotated[inside], rtol=0, atol=1e-14)


@pytest.mark.parametrize("turns", [1, 3])
def test_without_a_test_qr_is_the_q_of_products(turns, x64):
    matrices, previous = (array[1:] for array in problems())
    want = previous
    for _ in range(turns):
        want = np.linalg.qr(matrices @ want)[0]
    values = np.einsum("nji,njk,nki->ni", want, matrices, want)
    order = np.argsort(values, axis=1)
    want = np.take_along_axis(want, order[:, None], axis=2)
    bases, estimates, residuals, _ = run(matrices, previous, so.QRBasis(turns, 0.0))
    assert_columns(bases, want, 1e-12)
    np.testing.assert_allclose(estimates, np.sort(values, axis=1), rtol=0, atol=1e-14)
    assert np.max(residuals) <= 1e-14


# ---- what surrounds the mathematics


@each_basis
def test_padding_changes_nothing(basis, x64):
    matrices, previous = problems(side=5)
    full, old = (array[3] for array in problems())
    size, side = len(matrices), len(full)
    padded, starts = np.zeros((size + 1, side, side)), np.tile(np.eye(side), (6, 1, 1))
    padded[:size, :5, :5], starts[:size, :5, :5] = matrices, previous
    padded[size], starts[size] = full, old
    padding = np.zeros((size + 1, side), bool)
    padding[:size, 5:] = True

    *got, last = zip(*run(padded, starts, basis, padding), strict=True)
    bases, values, residuals, iterations = map(np.array, zip(*got, strict=True))
    want = run(matrices, previous, basis)
    assert_columns(bases[:, :5, :5], want[0], 1e-13)
    np.testing.assert_allclose(values[:, :5], want[1], rtol=0, atol=1e-14)
    np.testing.assert_allclose(residuals, want[2], rtol=0, atol=1e-14)
    np.testing.assert_array_equal(iterations, want[3])
    np.testing.assert_array_equal(bases[:, 5:], starts[:size, 5:])
    np.testing.assert_array_equal(bases[:, :, 5:], starts[:size, :, 5:])
    means = np.trace(matrices, axis1=1, axis2=2) / 5
    np.testing.assert_allclose(values[:, 5:], np.tile(means, (2, 1)).T, rtol=1e-14)
    # Beside them, one without padding.
    vectors, estimates, count = (x[0] for x in dense(full[None], old[None], basis))
    assert_columns(last[0], vectors, 1e-13)
    np.testing.assert_allclose(last[1], estimates, rtol=0, atol=1e-14)
    assert last[3] == count


def test_padding_has_unit_vectors_whatever_the_decomposition_gives_it(monkeypatch):
    def mixed(matrices):  # equal eigenvalues leave the choice of their vectors
        values, vectors = jnp.linalg.eigh(matrices)
        return values, vectors.at[:, :, 2:].set(vectors[:, :, :1:-1])

    monkeypatch.setattr(_eigen, "_eigh_one_by_one", mixed)
    padded, padding = np.zeros((1, 4, 4)), np.array([[False, False, True, True]])
    padded[:, :2, :2] = [[2.0, 1.0], [1.0, 2.0]]
    arguments = (padded, np.eye(4)[None], so.EighBasis(), padding, np.float32)
    bases, values, residuals, _ = run(*arguments, build=compiled.__wrapped__)
    np.testing.assert_array_equal(bases[0, :, 2:], np.eye(4)[:, 2:])
    np.testing.assert_allclose(values, [[1, 3, 2, 2]], rtol=1e-6)
    assert residuals <= 1e-6


@each_basis
def test_scale_changes_nothing_but_the_eigenvalues(basis):
    matrices, previous = problems()
    plain = run(matrices, previous, basis, dtype=np.float32)
    for scale in (2.0**-100, 2.0**100):  # 8e-31 and 1e30
        scaled = run(matrices * scale, previous, basis, dtype=np.float32)
        np.testing.assert_array_equal(scaled[1], plain[1] * np.float32(scale))
        for index in (0, 2, 3):
            np.testing.assert_array_equal(scaled[index], plain[index])


@each_basis
def test_a_factor_of_zeros_has_an_orthogonal_basis(basis):
    _, previous = problems()
    zeros = np.zeros_like(previous)
    bases, values, residuals, _ = run(zeros, previous, basis, dtype=np.float32)
    gram = np.einsum("nij,nik->njk", bases, bases)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(7), gram.shape), atol=2e-6)
    np.testing.assert_array_equal(values, 0)
    assert np.max(residuals) <= 2e-6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@each_basis
def test_a_factor_that_is_not_finite_spoils_its_own_slot_alone(basis, bad):
    matrices, previous = problems()
    good = run(matrices, previous, basis, dtype=np.float32)
    spoilt = matrices.copy()
    spoilt[2, 1, 1] = bad
    got = run(spoilt, previous, basis, dtype=np.float32)
    sound = np.isfinite(got[0]).all(axis=(1, 2)) & (got[2] <= basis.max_residual)
    np.testing.assert_array_equal(sound, [True, True, False, True, True])
    for array, want in zip(got, good, strict=True):
        np.testing.assert_array_equal(array[sound], want[sound])


@each_basis
def test_batches_on_accelerators_give_what_single_matrices_give(basis, monkeypatch):
    matrices, previous = problems()
    single = run(matrices, previous, basis, dtype=np.float32)
    for module in (_eigen, _slotwise):
        monkeypatch.setattr(module, "by_platform", lambda cpu, other, *a: other(*a))
    together = run(
        matrices, previous, basis, dtype=np.float32, build=compiled.__wrapped__
    )
    for array, want in zip(together, single, strict=True):
        np.testing.assert_allclose(array, want, atol=1e-6)


@pytest.mark.parametrize(
    "basis, name, place",
    [
        (so.EighBasis(), "eigh", ["scan"]),
        (so.EighBasis(0.1), "eigh", ["scan", "cond"]),
        (so.QRBasis(), "qr", ["while", "scan", "cond"]),
        (so.QRBasis(2, 0.0), "qr", ["scan", "scan", "cond"]),
    ],
)
def test_decompositions_are_single_and_only_where_needed(basis, name, place):
    arrays = 2 * [jnp.zeros((3, 4, 4))]
    closed = jax.make_jaxpr(partial(eigenbases, basis=basis))(*arrays)
    found = [
        (eqn.invars[0].aval.ndim, [outer.split("[")[0] for outer in inside])
        for eqn, inside in helpers.equations(closed.jaxpr)
        if eqn.primitive.name == name
    ]
    ((ndim, inside),) = found
    assert ndim == 2
    assert [outer for outer in inside if outer in ("while", "scan", "cond")] == place


PROGRAM = """
import functools, jax, jax.numpy as jnp
import shampoo_optax as so
from shampoo_optax._eigen import eigenbases

sides = (64, 96, 128)
spec = jax.sharding.PartitionSpec("x")

@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=jax.sharding.Mesh(jax.devices(), "x"),
    in_specs=spec,
    out_specs=spec,
    check_vma=False,
)
def follow(matrices):
    counts = jnp.zeros(4, jnp.int32)
    for matrix in matrices:
        eyes = jnp.broadcast_to(jnp.eye(matrix.shape[-1]), matrix.shape)
        counts += eigenbases(matrix, eyes, so.QRBasis(3, 0.0))[3]
    return counts

print(follow([jnp.ones((32, side, side)) for side in sides]).sum())
"""


def test_devices_do_not_wait_for_each_other():
    done = subprocess.run(  # with the 8 devices of conftest.py
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "288", done.stderr  # 96 matrices, 3 iterations
