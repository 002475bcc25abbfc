"""Acceptance cases of the arithmetic: rank one, exponents, scale, EMA, precision."""

import contextlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import BARE, TRANSFORMS

import shampoo_optax as so

# ---- C3: a gradient of rank one, with the default ridge


@pytest.mark.parametrize("side", [2, 3, 8, 16, 32, 33, 64, 100, 128])
def test_rank_one_gradient_keeps_its_direction(side):
    u, v = helpers.normals(side, 2, 5, side)
    grads = {str(seed): jnp.outer(u[seed], v[seed]) for seed in range(5)}
    updates, _ = helpers.trace(so.scale_by_shampoo(**BARE), grads, 5 * [grads])
    for seed, gradient in grads.items():
        g = np.asarray(gradient, np.float64)
        p = np.asarray(updates[-1][seed], np.float64)
        norm = np.linalg.norm(p)
        assert np.sum(p * g) / (norm * np.linalg.norm(g)) >= 0.9999
        assert abs(norm - 5**-0.5) <= 0.01 * 5**-0.5


# ---- C4: the exponent


@pytest.mark.parametrize("order", [2, 3])
def test_super_diagonal_tensors(order):
    def tensor(*diagonal):
        full = np.zeros((2,) * order, np.float32)
        for index, value in enumerate(diagonal):
            full[(index,) * order] = value
        return jnp.asarray(full)

    blocking = so.Blocking(merge_to=None)
    tx = so.scale_by_shampoo(**BARE, blocking=blocking)
    steps = [tensor(3, 5), tensor(4, 12)]
    updates, _ = helpers.trace(tx, steps[0], steps)
    np.testing.assert_allclose(updates[1], tensor(0.8, 0.923077), atol=1e-4)


FULL = [[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [1.0, 1.0]]]
PUBLISHED = [
    (
        dict(b2=1.0),
        [[-0.514496, 0.857493], [0.857493, 0.514496]],
        [[-0.526049, 0.601848], [0.410947, -0.015651]],
    ),
    (
        dict(b2=0.9),
        [[-0.514496, 0.857493], [0.857493, 0.514496]],
        [[-0.730137, 0.845553], [0.581490, -0.012083]],
    ),
    (
        dict(b2=0.9, bias_correction=False),
        None,
        [[-1.675049, 1.939831], [1.334030, -0.027721]],
    ),
]


def oracle_of(steps, kwargs, blocking=None):
    """Directions of one parameter by the oracle, with the case's settings."""
    blocking = blocking or so.Blocking()
    arguments = dict(
        b1=0.0,
        b2=1.0,
        b3=0.0,
        eps=0.0,
        relative_eps=0.0,
        every=1,
        start=1,
        correct=kwargs.pop("bias_correction", True),
        exponents={},
        graft=None,
        graft_b2=0.5,
        graft_eps=0.0,
        size=blocking.block_size,
        target=blocking.merge_to,
        leading=True,
    )
    shape = next(np.shape(g) for g in steps if g is not None)
    return oracle.shampoo(shape, steps, **(arguments | kwargs))


@pytest.mark.parametrize("kwargs, first, second", PUBLISHED)
def test_full_matrices_float32(kwargs, first, second):
    steps = [jnp.asarray(g) for g in FULL]
    tx = so.scale_by_shampoo(**(BARE | kwargs))
    updates, _ = helpers.trace(tx, steps[0], steps)
    assert updates[0].dtype == jnp.float32
    if first is not None:
        np.testing.assert_allclose(updates[0], first, atol=1e-4)
    np.testing.assert_allclose(updates[1], second, atol=1e-4)


@pytest.mark.parametrize("kwargs, first, second", PUBLISHED)
def test_full_matrices_float64(x64, kwargs, first, second):
    steps = [jnp.asarray(g) for g in FULL]
    tx = so.scale_by_shampoo(**(BARE | kwargs), relative_eps=0.0)
    updates, _ = helpers.trace(tx, steps[0], steps)
    assert updates[0].dtype == jnp.float64
    expected = oracle_of(FULL, dict(kwargs))
    np.testing.assert_allclose(expected[1], second, atol=1e-6)
    for got, want in zip(updates, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 5), (7, 2), (4, 3, 2), (6,), (2, 3, 2, 3)])
def test_rectangular_blocks(shape, double):
    """A ridge far above rounding: a rectangular factor may be rank-deficient."""
    blocking, ridge = so.Blocking(merge_to=None), 1e-2
    with helpers.enable_x64() if double else contextlib.nullcontext():
        dtype = jnp.float64 if double else jnp.float32
        steps = [helpers.normals(seed, *shape, dtype=dtype) for seed in range(3)]
        kwargs = dict(eps=ridge, relative_eps=0.0)
        tx = so.scale_by_shampoo(**BARE, **kwargs, blocking=blocking)
        updates, _ = helpers.trace(tx, steps[0], steps)
        expected = oracle_of([np.asarray(g) for g in steps], kwargs, blocking)
        for got, want in zip(updates, expected, strict=True):
            assert got.dtype == dtype
            tolerance = 1e-9 if double else 1e-4
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


# ---- C5: scale, with the default ridge


def last_direction(scale):
    steps = [scale * helpers.normals(seed, 16, 24) for seed in range(3)]
    tx = helpers.make("shampoo", **BARE)
    updates, states = helpers.trace(tx, steps[0], steps)
    helpers.assert_finite((updates, states))
    assert helpers.total(states[-1].skipped) == 0
    assert helpers.total(states[-1].failures) == 0
    direction = np.asarray(updates[-1], np.float64)
    return direction / np.linalg.norm(direction)


@pytest.mark.parametrize("power", [-15, -9, -3, 3, 9, 15])
def test_direction_does_not_depend_on_scale(power):
    error = np.linalg.norm(last_direction(10.0**power) - last_direction(1.0))
    assert error <= 1e-3


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("power", [20, 25, 37, -21, -25, -35])
def test_beyond_the_range_of_the_gram_product(name, power):
    good = [helpers.normals(seed, 16, 24) for seed in range(4)]
    steps = [*good[:3], good[3] * 10.0**power, good[3]]
    tx = helpers.make(name, **BARE)
    updates, states = helpers.trace(tx, good[0], steps)
    helpers.assert_finite((updates, states))
    assert np.any(updates[4])
    if power > 0:
        assert not np.any(updates[3])
        assert helpers.total(states[3].skipped) == 1
        kept, before = states[3], states[2]
        same = kept._replace(count=before.count, skipped=before.skipped)
        helpers.assert_equal(same, before)


@pytest.mark.parametrize("power", [-25, -35])
def test_a_factor_that_underflows_keeps_the_first_root(power):
    """G Gᵀ is 0 in float32: the identity stays, and nothing counts as a failure."""
    gradient = helpers.normals(0, 16, 24) * 10.0**power
    updates, states = helpers.trace(so.scale_by_shampoo(**BARE), gradient, [gradient])
    np.testing.assert_array_equal(updates[0], gradient)
    assert helpers.total(states[0].failures) == 0


# ---- C9: no silent no-op


@pytest.mark.parametrize("graft", [None, "adagrad", "rmsprop", "adam"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_accumulator_moves_on_every_step(name, graft):
    tx = TRANSFORMS[name](b1=0.9, b2=0.5, refresh_every=10, graft=graft)
    steps = [helpers.normals(seed, 6, 4) for seed in range(9)]
    updates, states = helpers.trace(tx, steps[0], steps)
    assert np.all(np.asarray(updates[0]) != 0)
    roots_or_bases = {"roots", "bases"}
    counters = {"failures", "skipped", "count", "residuals", "iterations"}
    moving = set(states[0]._fields) - roots_or_bases - counters
    assert moving >= {"factors", "filtered"}
    for before, after in zip([tx.init(steps[0]), *states], states, strict=False):
        for field in moving:
            old = jax.tree.leaves(getattr(before, field))
            new = jax.tree.leaves(getattr(after, field))
            assert len(old) == len(new)
            for a, b in zip(old, new, strict=True):
                assert np.all(np.asarray(a) != np.asarray(b)), field
    if graft in ("adagrad", "rmsprop", "adam"):
        assert jax.tree.leaves(states[-1].graft_moments)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_factors_after_nine_steps(name):
    tx = TRANSFORMS[name](b2=0.5, refresh_every=10)
    steps = [helpers.normals(seed, 6, 4) for seed in range(9)]
    _, states = helpers.trace(tx, steps[0], steps)
    grads = [np.asarray(g, np.float64) for g in steps]
    weights = [0.5 * 0.5 ** (8 - t) for t in range(9)]
    factors = {
        "0": sum(w * g @ g.T for w, g in zip(weights, grads, strict=True)),
        "1": sum(w * g.T @ g for w, g in zip(weights, grads, strict=True)),
    }
    for axis, wanted in factors.items():
        got = states[-1].factors["6x4"][axis]
        np.testing.assert_allclose(got[0], wanted, rtol=0, atol=1e-6 * wanted.max())


# ---- C10: precision


@pytest.mark.parametrize("default", [None, "bfloat16", "tensorfloat32", "float32"])
@pytest.mark.parametrize("graft", [None, "adam"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_dot_asks_for_the_highest_precision(name, graft, default):
    params = {"w": jnp.ones((8, 6)), "b": jnp.ones(5), "k": jnp.ones((3, 3, 4, 7))}
    tx = TRANSFORMS[name](graft=graft, blocking=so.Blocking(8))
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    with jax.default_matmul_precision(default):
        found = [
            eqn.params["precision"]
            for eqn, _ in helpers.update_equations(tx, params)
            if eqn.primitive.name == "dot_general"
        ]
    # At least two a matrix stack for the statistics, and two for the direction.
    assert len(found) >= 4
    assert set(found) == {highest}


@pytest.mark.parametrize("b2", [1.0, 0.99])
def test_factors_stay_symmetric_and_positive(b2):
    steps = [helpers.normals(seed, 256, 8) for seed in range(50)]
    tx = so.scale_by_shampoo(b2=b2, refresh_every=50, graft=None)
    _, states = helpers.trace(tx, steps[0], steps)
    for axis, side in (("0", 256), ("1", 8)):
        factor = np.asarray(states[-1].factors["256x8"][axis][0])
        assert factor.shape == (side, side)
        np.testing.assert_array_equal(factor, factor.T)
        values = np.linalg.eigvalsh(factor.astype(np.float64))
        assert values[0] >= -1e-6 * values[-1]
