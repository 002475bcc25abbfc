"""The root mean square of updates: capped (C26), or the same for all parameters."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so

ALIASES = {
    "shampoo": so.shampoo,
    "soap": so.soap,
    "kl_shampoo": so.kl_shampoo,
    "kl_soap": so.kl_soap,
    "root_free_rmsprop": lambda rate, **k: so.root_free_rmsprop(
        rate, batch_size=1.0, **k
    ),
    "inverse_free_shampoo": lambda rate, **k: so.inverse_free_shampoo(
        rate, batch_size=1.0, **k
    ),
}
SHAPES = {"w": (6, 4), "b": (5,)}
SPIKE = 10


def rms(leaf):
    return float(np.sqrt(np.mean(np.square(np.asarray(leaf, np.float64)))))


def with_spike():
    steps = helpers.normal_steps(SHAPES, SPIKE + 4)
    steps[SPIKE] = jax.tree.map(lambda g: 1e4 * g, steps[SPIKE])
    return steps


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_a_spike_moves_no_parameter_beyond_the_cap(name):
    """Below the cap nothing changes; what is above it is turned nowhere."""
    steps = with_spike()
    free, _ = helpers.scanned(ALIASES[name](1.0), steps)
    cap = 0.9 * max(rms(free[SPIKE]["w"]), rms(free[SPIKE]["b"]))
    held, _ = helpers.scanned(ALIASES[name](1.0, max_rms=cap), steps)
    seen = []
    for one, other in zip(free, held, strict=True):
        for key in SHAPES:
            assert rms(other[key]) <= cap * (1 + 1e-6)
            scale = min(1.0, cap / rms(one[key]))
            wanted = scale * np.asarray(one[key], np.float64)
            np.testing.assert_allclose(other[key], wanted, rtol=1e-4, atol=1e-5 * cap)
            seen.append(scale < 1)
    assert any(seen) and not all(seen)


def test_momentum_adds_up_capped_directions():
    options = dict(max_rms=1.0, graft="sgd", b1=0.0)
    updates, _ = helpers.scanned(so.shampoo(1.0, momentum=0.9, **options), with_spike())
    directions, _ = helpers.scanned(so.shampoo(1.0, **options), with_spike())
    buffer = 0.0
    for update, direction in zip(updates, directions, strict=True):
        assert rms(direction["w"]) <= 1 + 1e-6
        buffer = 0.9 * buffer + np.asarray(direction["w"], np.float64)
        np.testing.assert_allclose(update["w"], buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALIASES)
def test_all_aliases_have_both(name):
    """One first step: where it is longer than the cap, and of the length asked for."""
    params = {key: 1e-3 * helpers.normals(1, *shape) for key, shape in SHAPES.items()}
    for options, size in ((dict(max_rms=1e-6), 1e-6), (dict(rms=0.2), 0.2)):
        tx = ALIASES[name](0.5, **options)  # the first buffer is the direction
        update, _ = helpers.quick_jit(tx.update)(params, tx.init(params), params)
        for leaf in jax.tree.leaves(update):
            assert rms(leaf) == pytest.approx(0.5 * size, rel=1e-5)


def test_decay_and_momentum_come_after():
    """The decay of a capped direction is whole: without a gradient it is all."""
    params = {"w": jnp.full((2, 2), 3.0)}
    tx = so.shampoo(1.0, weight_decay=0.1, max_rms=1e-3)
    updates, _ = tx.update(helpers.zeros_like(params), tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.3, rtol=1e-6)
    tx = so.shampoo(1.0, b1=0.0, momentum=0.5, rms=1.0, graft=None, refresh_every=1)
    steps = [{"w": jnp.eye(2)}] * 2
    updates, _ = helpers.trace(tx, steps[0], steps)
    assert rms(updates[1]["w"]) == pytest.approx(1.5, rel=1e-5)


EXTREME = [(jnp.float32, 8e37), (jnp.float32, 1e-30), (jnp.float16, 6e4)]


@pytest.mark.parametrize("dtype, size", EXTREME, ids=str)
def test_squares_out_of_range(dtype, size):
    updates = {"w": jnp.full((3, 2), size, dtype), "none": None, "e": jnp.ones((0, 2))}
    for tx in (so.cap_rms(1e-32), so.match_rms(0.25)):
        scaled, state = jax.jit(tx.update)(updates, tx.init(updates))
        assert state == optax.EmptyState()
        assert scaled["none"] is None and scaled["e"].shape == (0, 2)
        assert scaled["w"].dtype == dtype
    np.testing.assert_allclose(scaled["w"], 0.25, rtol=1e-3)
    capped, _ = so.cap_rms(size / 2).update(updates, optax.EmptyState())
    np.testing.assert_allclose(capped["w"], size / 2, rtol=1e-3)


def test_updates_of_zero_stay_zero():
    updates = {"w": jnp.zeros((2, 3))}
    for tx in (so.cap_rms(1.0), so.match_rms()):
        scaled, _ = tx.update(updates, tx.init(updates))
        assert not np.any(scaled["w"])


def test_numbers_may_be_injected():
    updates = {"w": jnp.full((2, 2), 8.0)}
    for make, field in ((so.cap_rms, "max_rms"), (so.match_rms, "rms")):
        tx = optax.inject_hyperparams(make)(**{field: 0.5})
        scaled, _ = jax.jit(tx.update)(updates, tx.init(updates))
        np.testing.assert_allclose(scaled["w"], 0.5, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "1", True])
@pytest.mark.parametrize(
    "make, field", [(so.cap_rms, "max_rms"), (so.match_rms, "rms")]
)
def test_bad_values_are_refused(make, field, value):
    with pytest.raises(ValueError, match=f"`{field}` must be .* got"):
        make(value)
    with pytest.raises(ValueError, match=f"`{field}` must be .* got"):
        so.shampoo(0.1, **{field: value})
