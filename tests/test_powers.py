"""Roots from eigenvalues that are kept, and which matrix functions are tested."""

import ast
import collections
import json
import pathlib

import golden
import jax.numpy as jnp
import numpy as np
import pytest

import shampoo_optax as so
from shampoo_optax._powers import eigenvalue_powers

with np.load(golden.DATA / "matrix-functions.npz") as data:
    MATRICES = dict(data)
ENTRIES = json.loads(str(MATRICES["meta_json"]))["entries"]
FROM_EIGENVALUES = "inverse_root_from_eigendecomposition"

# The operations of the reference data, and the files that follow them.
COVERED = {
    "matrix_inverse_root": (42, "test_roots"),
    FROM_EIGENVALUES: (4, "test_powers"),
    "qr_eigendecomposition": (8, "test_eigen"),
    "eigh_adaptive": (3, "test_eigen"),
    "matrix_orthogonalization": (22, "test_polar"),
}


def test_every_operation_is_covered():
    found = collections.Counter(entry["op"] for entry in ENTRIES)
    assert found == {name: size for name, (size, _) in COVERED.items()}
    for name, (_, file) in COVERED.items():
        source = (pathlib.Path(__file__).parent / f"{file}.py").read_text()
        words = (
            n.value for n in ast.walk(ast.parse(source)) if type(n) is ast.Constant
        )
        assert name in words, f"{name} is not read in {file}"


@pytest.mark.parametrize(
    "entry",
    [entry for entry in ENTRIES if entry["op"] == FROM_EIGENVALUES],
    ids=lambda entry: f"c{entry['id']}",
)
def test_root_from_eigenvalues_follows_the_reference(entry, x64):
    values, vectors, expected = (MATRICES[f"c{entry['id']}_{name}"] for name in "LQX")
    root = golden.root_of(
        {"type": "Eigh", "rank_deficient_stability": entry["stability"]}
    )["root"]
    before = isinstance(root, so.Eigh) and root.ridge == "before"
    powers = eigenvalue_powers(
        jnp.asarray(values)[None],
        1 / entry["root_float"],
        root,
        eps=entry["epsilon"],
        relative_eps=0.0,
        added=entry["epsilon"] if before else 0.0,
        sides=len(values),
    )
    got = (vectors * np.asarray(powers[0])) @ vectors.T
    assert np.max(np.abs(got - expected)) <= 1e-9 * np.max(np.abs(expected))
