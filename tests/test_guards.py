"""Acceptance cases of zero, dead and non-finite gradients and of failed roots."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BARE

import shampoo_optax as so
from shampoo_optax import _eigen

# (transform, grafting)
VARIANTS = [
    ("shampoo", None),
    ("shampoo", "sgd"),
    ("shampoo", "rmsprop"),
    ("shampoo", "adam"),
    ("soap", None),
    ("soap", "adam"),
]
variants = pytest.mark.parametrize("name, graft", VARIANTS)
# Where the acceptance list has every transform.
few = pytest.mark.parametrize("name, graft", [("shampoo", "adam"), ("soap", None)])


def build(name, graft, **kwargs):
    """The settings of the cases, with a grafting whose moments are averages."""
    return helpers.make(name, **(BARE | dict(graft=graft, graft_b2=0.99) | kwargs))


# ---- C1: zero first


@variants
@pytest.mark.parametrize("b2", [1.0, 0.9])
def test_zero_gradients_first(name, graft, b2):
    params = {"a": jnp.ones((4, 3)), "b": jnp.ones(5)}
    fourth = {"a": helpers.normals(0, 4, 3), "b": helpers.normals(1, 5)}
    steps = 3 * [helpers.zeros_like(params)] + [fourth]
    updates, states = helpers.trace(build(name, graft, b2=b2), params, steps)
    helpers.assert_finite((updates, states))
    for update in updates[:3]:
        helpers.assert_equal(update, helpers.zeros_like(params))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(updates[3]))
    assert helpers.total(states[-1].failures) == 0
    weight = 1.0 if b2 == 1 else 1 - b2
    a, b = (np.asarray(fourth[key], np.float64) for key in "ab")
    factors = states[-1].factors
    close = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(factors["4x3"]["0"][0], weight * a @ a.T, **close)
    np.testing.assert_allclose(factors["4x3"]["1"][0], weight * a.T @ a, **close)
    np.testing.assert_allclose(factors["5"]["0"][0], weight * np.outer(b, b), **close)


@pytest.mark.parametrize("alias", [so.shampoo, so.soap])
def test_zero_gradients_through_the_alias(alias):
    params = {"a": jnp.ones((4, 3)), "b": jnp.ones(5)}
    zeros = helpers.zeros_like(params)
    updates, states = helpers.trace(alias(1.0), params, 12 * [zeros])
    helpers.assert_finite(states)
    for update in updates:
        helpers.assert_equal(jax.tree.map(jnp.abs, update), zeros)


# ---- C2: one dead layer

SHAPES = [{"w1": (6, 4), "w2": (8, 8)}, {"w1": (6, 4), "w2": (6, 4)}]
shapes = pytest.mark.parametrize("shapes", SHAPES, ids=["two stacks", "one stack"])


@few
@shapes
def test_dead_layer(name, graft, shapes):
    alive = helpers.normal_steps(shapes, 10)
    dead = [g | {"w2": jnp.zeros(shapes["w2"])} for g in alive]
    tx = build(name, graft, b2=0.9, b1=0.9)
    with_dead, states = helpers.trace(tx, alive[0], dead)
    with_alive, _ = helpers.trace(tx, alive[0], alive)
    helpers.assert_finite(states)
    for one, other in zip(with_dead, with_alive, strict=True):
        assert not np.any(one["w2"])
        assert np.any(other["w2"])
        np.testing.assert_array_equal(one["w1"], other["w1"])


@variants
@shapes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_touches_one_block(name, graft, shapes, bad):
    good = helpers.normal_steps(shapes, 10)
    spoilt = list(good)
    spoilt[4] = good[4] | {"w2": good[4]["w2"].at[1, 2].set(bad)}
    tx = build(name, graft, b2=0.9, b1=0.9)
    updates, states = helpers.trace(tx, good[0], spoilt)
    wanted, _ = helpers.trace(tx, good[0], good)
    helpers.assert_finite((updates, states))
    for one, other in zip(updates, wanted, strict=True):
        np.testing.assert_array_equal(one["w1"], other["w1"])
    assert not np.any(updates[4]["w2"])
    assert np.all(updates[5]["w2"] != 0)
    assert [helpers.total(state.skipped) for state in states] == 4 * [0] + 6 * [1]


# ---- C6: non-finite gradients


@few
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_step_is_an_absent_gradient(name, graft, bad):
    """Three good steps, a bad one, three good ones: the next steps are right."""
    good = helpers.normal_steps({"w": (6, 4), "b": (2,)}, 7)
    spoilt, absent = list(good), list(good)
    spoilt[3] = good[3] | {"w": good[3]["w"].at[0, 0].set(bad)}
    absent[3] = good[3] | {"w": None}
    steady = dict(relative_eps=1e-3) if name == "shampoo" else {}
    tx = build(name, graft, b2=0.9, b1=0.9, refresh_every=2, **steady)
    updates, states = helpers.trace(tx, good[0], spoilt)
    wanted, states_wanted = helpers.trace(tx, good[0], absent)
    helpers.assert_finite((updates, states))
    assert not np.any(updates[3]["w"])
    assert wanted[3]["w"] is None
    for index in (0, 1, 2, 4, 5, 6):
        assert helpers.worst(updates[index], wanted[index]) <= 1e-5
    factors = [state.factors for state in (states[-1], states_wanted[-1])]
    assert helpers.worst(*factors) <= 1e-6
    assert helpers.total(states_wanted[-1].skipped) == 0


@few
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_under_apply_if_finite(name, graft, dtype):
    """Also with float32 gradients and bfloat16 parameters."""
    params = {"w": jnp.ones((6, 4), dtype), "b": jnp.ones(5, dtype)}
    good = helpers.normal_steps({"w": (6, 4), "b": (5,)}, 7)
    steps = list(good)
    steps[3] = good[3] | {"w": good[3]["w"].at[0, 0].set(np.inf)}
    steady = dict(relative_eps=1e-2) if name == "shampoo" else {}
    inner = build(name, graft, b2=0.9, b1=0.9, **steady)
    tx = optax.apply_if_finite(inner, 5)
    updates, states = helpers.trace(tx, params, steps)
    helpers.assert_finite((updates, states))
    helpers.assert_equal(states[3].inner_state, states[2].inner_state)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates[3]))
    without = good[:3] + good[4:]
    wanted, _ = helpers.trace(inner, params, without)
    assert helpers.worst(updates[:3] + updates[4:], wanted) <= 1e-4


@pytest.mark.parametrize("alias", [so.shampoo, so.soap])
def test_bad_step_through_the_alias(alias):
    """The block stays where it is; the parameters stay finite."""
    good = helpers.normal_steps({"w": (6, 4), "b": (5,)}, 7)
    steps = list(good)
    steps[3] = good[3] | {"w": good[3]["w"].at[0, 0].set(np.inf)}
    updates, states = helpers.trace(alias(0.1, refresh_every=2), good[0], steps)
    helpers.assert_finite((updates, states))
    assert not np.any(updates[3]["w"])
    assert np.all(updates[3]["b"] != 0)


# ---- C7: a failed root


def fail_once(monkeypatch, spoil):
    """Spoils the roots of factors whose trace lies in (low, high): one refresh."""
    from shampoo_optax import _roots

    genuine = _roots.inverse_roots

    def inverse_roots(factors, *args, **kwargs):
        roots, residual, turns = genuine(factors, *args, **kwargs)
        traces = jnp.trace(factors, axis1=1, axis2=2)
        chosen = (traces > 2.5) & (traces < 3.5)
        return *spoil(chosen, roots, residual), turns

    monkeypatch.setattr(_roots, "inverse_roots", inverse_roots)


def nan_root(chosen, roots, residual):
    return jnp.where(chosen[:, None, None], jnp.nan, roots), residual


def one_inf(chosen, roots, residual):
    corner = roots.at[:, 0, 0].set(jnp.inf)
    return jnp.where(chosen[:, None, None], corner, roots), residual


def large_residual(chosen, roots, residual):
    return 2 * roots, jnp.where(chosen, 1.0, residual)


def nan_residual(chosen, roots, residual):
    return roots, jnp.where(chosen, jnp.nan, residual)


def unit_steps(shapes, count):
    """Gradients whose squared norm is 1 for `w`, and 100 for all others."""
    steps = helpers.normal_steps(shapes, count)
    return [
        {
            name: g / jnp.linalg.norm(g) * (1.0 if name == "w" else 10.0)
            for name, g in step.items()
        }
        for step in steps
    ]


def on_devices(tree, count):
    """A copy of the tree on each of the devices."""
    mesh = jax.sharding.Mesh(jax.devices()[:count], ("devices",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.device_put(tree, replicated)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    "spoil", [nan_root, one_inf, nan_residual], ids=lambda f: f.__name__
)
def test_failed_root_keeps_the_previous_one(monkeypatch, spoil, devices):
    """The factor of `w` has the trace t at step t; refreshes at 1, 2, 3, …: the
    third one fails, for `w` alone, although `v` lies in the same stack."""
    shapes = {"w": (6, 4), "v": (6, 4), "x": (5, 3)}
    steps = on_devices(unit_steps(shapes, 5), devices)
    tx = so.scale_by_shampoo(**BARE)
    wanted, sound = helpers.trace(tx, steps[0], steps)
    fail_once(monkeypatch, spoil)
    updates, states = helpers.trace(so.scale_by_shampoo(**BARE), steps[0], steps)
    helpers.assert_finite((updates, states))
    counts = [np.asarray(state.failures["6x4"]).tolist() for state in states]
    slot_v, slot_w = 0, 1  # the order of the tree's keys
    assert [count[slot_w] for count in counts] == [0, 0, 1, 1, 1]
    assert [count[slot_v] for count in counts] == 5 * [0]
    assert helpers.total(states[-1].failures) == 1
    for axis in ("0", "1"):
        roots = [np.asarray(state.roots["6x4"][axis][slot_w]) for state in states]
        np.testing.assert_array_equal(roots[2], roots[1])
        assert np.any(roots[3] != roots[2])
    # The third direction, by hand: the new gradient and the roots of step 2.
    left, right = (np.asarray(sound[1].roots["6x4"][k][slot_w]) for k in ("0", "1"))
    by_hand = left @ np.asarray(steps[2]["w"]) @ right
    np.testing.assert_allclose(updates[2]["w"], by_hand, rtol=1e-4, atol=1e-6)
    for index in range(5):
        for name in ("v", "x"):
            np.testing.assert_array_equal(updates[index][name], wanted[index][name])
    for index in (0, 1, 3, 4):
        np.testing.assert_array_equal(updates[index]["w"], wanted[index]["w"])


def test_large_residual_counts_as_a_failure(monkeypatch):
    """All roots come out doubled; only those with a small residual are taken."""
    steps = unit_steps({"w": (6, 4)}, 4)
    wanted, _ = helpers.trace(so.scale_by_shampoo(**BARE), steps[0], steps)
    fail_once(monkeypatch, large_residual)
    updates, states = helpers.trace(so.scale_by_shampoo(**BARE), steps[0], steps)
    assert [helpers.total(state.failures) for state in states] == [0, 0, 1, 1]
    residuals = [float(state.residuals["6x4"][0]) for state in states]
    assert residuals[2] == 1 and max(residuals[:2] + residuals[3:]) < 1e-5
    for axis in ("0", "1"):
        kept, before = (states[t].roots["6x4"][axis] for t in (2, 1))
        np.testing.assert_array_equal(kept, before)
    for index in (0, 1, 3):  # two axes, each doubled
        scaled = jax.tree.map(lambda x: 4 * x, wanted[index])
        assert helpers.worst(updates[index], scaled) <= 1e-6


def test_threshold_of_the_residual_is_the_users(monkeypatch):
    fail_once(monkeypatch, large_residual)
    steps = unit_steps({"w": (6, 4)}, 4)
    tx = so.scale_by_shampoo(**BARE, root=so.Eigh(max_residual=2.0))
    _, states = helpers.trace(tx, steps[0], steps)
    assert helpers.total(states[-1].failures) == 0


@pytest.mark.parametrize("strict", ["basis", "root"])
def test_the_smaller_threshold_of_kept_eigenvalues_counts(strict):
    limits = {"basis": so.EighBasis(), "root": so.Eigh()}
    limits[strict] = dataclasses.replace(limits[strict], max_residual=1e-30)
    tx = so.scale_by_shampoo(**BARE, root=so.Eigendecomposed(**limits))
    gradient = {"w": helpers.normals(0, 6, 4)}
    _, state = tx.update(gradient, tx.init(gradient))
    assert helpers.total(state.failures) == 1


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(so.scale_by_soap, 0.0, eps=0.1, refresh_every=1),
        functools.partial(so.scale_by_shampoo, **BARE, root=so.Eigendecomposed()),
    ],
    ids=["soap", "shampoo"],
)
def test_bases_that_fail_in_float32_are_those_of_float64(make, monkeypatch, x64):
    gradient = {"w": helpers.normals(0, 4, 4)}  # of full rank
    wanted, _ = make().update(gradient, make().init(gradient))
    genuine, used = _eigen.eigenbases, []

    def fails_in_float32(matrices, *args):
        bases, *rest = genuine(matrices, *args)
        used.append(str(matrices.dtype))
        return (jnp.nan * bases if used[-1] == "float32" else bases), *rest

    monkeypatch.setattr(_eigen, "eigenbases", fails_in_float32)
    got, state = make().update(gradient, make().init(gradient))
    assert set(used) == {"float32", "float64"}
    assert helpers.total(state.failures) == 0
    assert helpers.worst(got, wanted) <= 1e-4
