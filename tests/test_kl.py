"""KL-Shampoo against a dense NumPy implementation, and over many steps."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so
from shampoo_optax import _eigen, _roots

SHAPES = {"wide": (4, 16), "cube": (2, 3, 4), "vector": (5,)}
KEPT = dict(b1=0.0, b2=0.9, graft=None, refresh_every=3, relative_eps=1e-3)


def along(block, matrix, axis):
    return np.moveaxis(np.tensordot(matrix, block, axes=(1, axis)), 0, axis)


def dense_kl(gradients, first=1.0, refused=()):
    """Directions and factors of one block, the factors as the formulas leave them.

    Before the first refresh roots are `first` times the identity. At the `refused`
    steps the old ones stay.
    """
    order = gradients[0].ndim
    factors = [np.zeros((side, side)) for side in gradients[0].shape]
    roots = [first * np.eye(side) for side in gradients[0].shape]
    directions = []
    for t, gradient in enumerate(gradients, 1):
        for k in range(order):
            white = gradient
            for j in set(range(order)) - {k}:
                white = along(white, roots[j], j)
            flat = np.moveaxis(white, k, 0).reshape(len(factors[k]), -1)
            factors[k] = 0.9 * factors[k] + 0.1 * flat @ flat.T
        if t % 3 == 0 and t not in refused:
            for k in range(order):
                values, vectors = np.linalg.eigh(factors[k] / (1 - 0.9**t))
                values = values + 1e-3 * values[-1] - min(values[0], 0)
                roots[k] = (vectors * values**-0.5) @ vectors.T
        direction = gradient
        for k in range(order):
            direction = along(direction, roots[k], k)
        directions.append(direction)
    return directions, factors


@pytest.mark.parametrize(
    "kept",
    [{}, dict(root=so.Eigendecomposed()), dict(storage=so.Storage(packed=True))],
    ids=["roots", "bases", "packed"],
)
def test_directions_are_those_of_the_formulas(kept, x64):
    """Balancing moves the factors of a block, and no direction."""
    steps = jax.tree.map(
        lambda g: g.astype(jnp.float64), helpers.normal_steps(SHAPES, 40)
    )
    tx = so.scale_by_kl_shampoo(**KEPT, **kept, blocking=so.Blocking(merge_to=None))
    updates, states = helpers.trace(tx, steps[0], steps, jit=helpers.quick_jit)
    # Eigenvalues are 1 at first, and the ridge comes on top.
    first = (1 + KEPT["relative_eps"]) ** -0.5 if "root" in kept else 1.0
    for name in SHAPES:
        wanted, _ = dense_kl([np.asarray(step[name]) for step in steps], first)
        for got, want in zip(updates, wanted, strict=True):
            scale = np.max(np.abs(want))
            np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-9 * scale)
    assert helpers.total(states[-1].failures) == 0


@pytest.mark.parametrize(
    "module, routine, root",
    [
        (_roots, "inverse_roots", so.Eigh()),
        (_eigen, "eigenbases", so.Eigendecomposed()),
    ],
    ids=["roots", "bases"],
)
def test_roots_that_stay_are_balanced_with_their_factors(
    monkeypatch, x64, module, routine, root
):
    """Without jit, so that the routine can see which refresh it is called at."""
    refused, step = range(12, 30), 0
    genuine = getattr(module, routine)

    def fails(*args, **kwargs):
        found, *rest = genuine(*args, **kwargs)
        return (jnp.nan * found if step in refused else found), *rest

    monkeypatch.setattr(module, routine, fails)
    gradients = [helpers.normals(t, 2, 32, dtype=jnp.float64) for t in range(30)]
    tx = so.scale_by_kl_shampoo(**KEPT, root=root)
    state, updates, moved, before = tx.init({"w": gradients[0]}), [], 0, 0
    first = (1 + KEPT["relative_eps"]) ** -0.5 if routine == "eigenbases" else 1.0
    for step, gradient in enumerate(gradients, 1):
        update, state = tx.update({"w": gradient}, state)
        updates.append(update["w"])
        _, wanted = dense_kl([np.asarray(g) for g in gradients[:step]], first, refused)
        trace = np.trace(np.asarray(state.factors["2x32_float64"]["0"][0]))
        power = round(np.log2(trace / np.trace(wanted[0])) / 2)
        if step in refused:
            moved += power != before
        before = power
    assert moved and int(state.failures["2x32_float64"][0]) == 6
    wanted, _ = dense_kl([np.asarray(g) for g in gradients], first, refused)
    for got, want in zip(updates, wanted, strict=True):
        scale = np.max(np.abs(want))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 * scale)


def test_factors_are_balanced_by_powers_of_four(x64):
    steps = jax.tree.map(
        lambda g: g.astype(jnp.float64), helpers.normal_steps({"w": (4, 16)}, 39)
    )
    tx = so.scale_by_kl_shampoo(**KEPT)
    _, states = helpers.trace(tx, steps[0], steps, jit=helpers.quick_jit)
    _, wanted = dense_kl([np.asarray(step["w"]) for step in steps])
    held = states[-1].factors["4x16_float64"]
    ratios = [
        np.trace(np.asarray(held[str(k)][0])) / np.trace(wanted[k]) for k in (0, 1)
    ]
    powers = np.log2(ratios) / 2
    np.testing.assert_allclose(powers, np.round(powers), atol=1e-6)
    assert abs(np.sum(powers)) < 1e-6 and abs(powers[0]) > 0.5


@pytest.mark.parametrize("injected, eps", [(False, 0.0), (True, 0.0), (False, 1e-8)])
def test_factors_stay_in_range(injected, eps):
    """Without balance the trace of one factor reaches 1e37 within 1,300 steps."""
    make = so.scale_by_kl_shampoo
    if injected:  # every number becomes an array
        make = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)
    tx = make(**KEPT | dict(refresh_every=10, eps=eps))
    gradients = helpers.normals(0, 200, 4, 16)

    def step(state, t):
        update, state = tx.update({"w": gradients[t % 200]}, state)
        return state, jnp.linalg.norm(update["w"])

    state = tx.init({"w": gradients[0]})
    state, sizes = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(2000)))(state)
    factors = helpers.field(state, "factors")["4x16"]
    traces = [np.trace(np.asarray(factors[axis][0])) for axis in "01"]
    assert 1e-3 < min(traces) < max(traces) < 1e3
    sizes = np.asarray(sizes)
    assert np.median(sizes[-500:]) == pytest.approx(np.median(sizes[100:600]), rel=0.05)
