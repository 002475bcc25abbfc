"""Roots from eigenvalues that are kept, and which matrix functions are tested."""

import ast
import collections
import json
import pathlib

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shampoo_optax as so
from shampoo_optax import _roots
from shampoo_optax._config import Options
from shampoo_optax._powers import eigenvalue_powers
from shampoo_optax._refresh import Batch

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


@pytest.mark.parametrize("eps", [1.4e-6, 1.8e-6])
def test_a_ridge_on_padding_would_keep_a_bad_basis(eps, x64):
    """Whether a basis is good is said of the matrix before padding, with its ridge."""
    matrix = np.diag(np.linspace(1e-6, 2e-6, 4)) + 2e-7 * (1 - np.eye(4))
    options = Options(
        **dict.fromkeys(("b3", "start", "graft", "graft_b2")),
        **dict.fromkeys(("b1", "graft_eps"), 0.0),
        **dict.fromkeys(("bias_correction", "graft_drop_weighting"), False),
        blocking=so.Blocking(),
        eps=eps,
        root=so.Eigendecomposed(so.EighBasis(0.1)),
    )

    def turns(side):
        factor = np.zeros((1, side, side))
        factor[0, :4, :4] = matrix
        held = {"bases": np.eye(side)[None], "eigenvalues": np.ones((1, side))}
        padding = jnp.arange(side)[None] >= 4 if side > 4 else None
        batch = Batch(jnp.asarray(factor), jax.tree.map(jnp.asarray, held), padding, ())
        return int(_roots._bases(batch.factors, batch, options).iterations[0])

    assert turns(4) == turns(16) == 1
