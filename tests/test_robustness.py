"""Odd numbers, states and arguments: what is computed, refused and counted."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BARE, TRANSFORMS

import shampoo_optax as so

names = pytest.mark.parametrize("name", TRANSFORMS)
PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones(5)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        so.scale_by_shampoo,
        so.scale_by_soap,
        lambda: so.scale_by_shampoo(root=so.CoupledNewton()),
        lambda: so.shampoo(1e-2, weight_decay=0.1, momentum=0.9, nesterov=True),
        lambda: so.schedule_free(1e-2, weight_decay=0.1),
    ],
)
def test_strict_dtype_promotion(make, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    with jax.numpy_dtype_promotion("strict"):
        tx = make()
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("graft", [None, "adam"])
def test_direction_that_overflows_is_zero_and_counted(graft):
    """Small factors to a large negative power: every root is finite, P is not."""
    kwargs = dict(exponents={2: 1.25}, refresh_every=1, graft=graft)
    tx = so.scale_by_shampoo(**kwargs, relative_eps=1e-2)
    steps = helpers.normal_steps({"w": (6, 4)}, 3, scale=1e-11)
    updates, states = helpers.trace(tx, steps[0], steps)
    helpers.assert_finite((updates, states))
    assert not np.any(updates[-1]["w"])
    assert helpers.total(states[-1].skipped) == 3
    assert helpers.total(states[-1].failures) == 0


def test_grafted_norm_of_a_direction_whose_square_overflows():
    """Roots of gradients of 1e-10, then one of 1e10: the direction is about 1e20."""
    tx = so.scale_by_shampoo(refresh_every=2, b1=0.0, relative_eps=1e-3)
    small = helpers.normal_steps({"w": (6, 4)}, 2, scale=1e-10)
    large = helpers.normal_steps({"w": (6, 4)}, 1, seed=1, scale=1e10)
    updates, _ = helpers.trace(tx, small[0], small + large)
    adam = optax.scale_by_adam(b1=0.0, b2=0.99)
    wanted, _ = helpers.trace(adam, small[0], small + large)
    norms = [np.linalg.norm(np.asarray(u[-1]["w"])) for u in (updates, wanted)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


def test_float16_updates_stay_in_range():
    steps = helpers.normal_steps({"w": (4, 4)}, 3, scale=1e-4)
    steps[-1] = jax.tree.map(lambda x: 1e8 * x, steps[-1])
    steps = [jax.tree.map(lambda x: x.astype(jnp.float16), step) for step in steps]
    tx = so.scale_by_shampoo(graft=None, b1=0.0, refresh_every=2)
    updates, _ = helpers.trace(tx, steps[0], steps)
    limit = np.finfo(np.float16).max
    assert np.max(np.abs(updates[-1]["w"])) == limit


@pytest.mark.parametrize("eps, scale", [(1e-2, 1.0), (8.0, 1e-19), (1e30, 1.0)])
def test_absolute_ridge_holds_where_factors_are_tiny_or_zero(eps, scale):
    """Two zero gradients, then one that is small beside the ridge."""
    zero = {"w": jnp.zeros((4, 4))}
    gradient = {"w": scale * helpers.normals(0, 4, 4)}
    tx = so.scale_by_shampoo(**BARE | dict(refresh_every=2), eps=eps, relative_eps=0.0)
    updates, states = helpers.trace(tx, zero, [zero, zero, gradient])
    # The roots of step 2, at eps ** -1/4 for each of the two axes.
    np.testing.assert_allclose(updates[-1]["w"], eps**-0.5 * gradient["w"], rtol=1e-5)
    assert helpers.total(states[-1].failures) == 0


def test_zero_factor_without_a_ridge_keeps_the_identity():
    zero, gradient = {"w": jnp.zeros((4, 4))}, {"w": helpers.normals(0, 4, 4)}
    tx = so.scale_by_shampoo(**BARE | dict(refresh_every=2))
    updates, states = helpers.trace(tx, zero, [zero, zero, gradient])
    np.testing.assert_array_equal(updates[-1]["w"], gradient["w"])
    assert helpers.total(states[-1].failures) == 0


# ---- injected hyperparameters

SCHEDULE = optax.linear_schedule(1.0, 0.1, 3)


def injected(make, **kwargs):
    return optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(**kwargs)


def test_injected_b3_counts_for_nothing_without_b1():
    steps = helpers.normal_steps({"w": (4, 4)}, 3)
    kwargs = dict(b1=0.0, b3=0.5, refresh_every=4)
    plain, _ = helpers.trace(so.scale_by_shampoo(**kwargs), steps[0], steps)
    traced, _ = helpers.trace(injected(so.scale_by_shampoo, **kwargs), steps[0], steps)
    for one, other in zip(traced, plain, strict=True):
        assert helpers.worst(one, other) <= 1e-6


@pytest.mark.parametrize("decay", ["corrected", "independent"])
def test_decay_under_a_schedule_needs_its_peak(decay):
    with pytest.raises(ValueError, match="`peak_learning_rate`"):
        so.shampoo(SCHEDULE, decay=decay)
    tx = injected(so.shampoo, learning_rate=SCHEDULE, decay=decay)
    with pytest.raises(ValueError, match="`peak_learning_rate`"):
        tx.init(PARAMS)


def test_injected_corrected_decay_follows_the_schedule():
    kwargs = dict(learning_rate=SCHEDULE, weight_decay=0.1, decay="corrected")
    tx = injected(so.shampoo, **kwargs, peak_learning_rate=1.0)
    state, zeros = tx.init(PARAMS), helpers.zeros_like(PARAMS)
    for step in range(3):
        updates, state = jax.jit(tx.update)(zeros, state, PARAMS)
        rate = 1.0 - 0.3 * step
        np.testing.assert_allclose(updates["w"], -0.1 * rate**2, rtol=1e-5)


def test_injected_coefficient_reaches_the_evaluated_parameters():
    tx = injected(so.schedule_free, learning_rate=1.0, train_coefficient=0.9)
    state = tx.init(PARAMS)
    state.hyperparams["train_coefficient"] = jnp.float32(0.5)
    params = PARAMS
    for _ in range(2):
        updates, state = jax.jit(tx.update)(PARAMS, state, params)
        params = optax.apply_updates(params, updates)
    # The fast iterates are 0 and -1, whose mean does not depend on the coefficient.
    evaluated = so.eval_params(state, params)
    np.testing.assert_allclose(evaluated["w"], -0.5, atol=1e-6)


# ---- states


def averaged():
    return so.primal_averaging(1.0, eval_coefficient=0.5, train_coefficient=0.5)


def test_averages_of_masked_and_partitioned_parameters():
    labels = {"w": "first", "b": "second"}
    groups = {"first": averaged(), "second": averaged()}
    tx = helpers.partition(groups, labels)
    alone = averaged()
    grads = helpers.normal_steps({"w": (6, 4), "b": (5,)}, 1)[0]
    whole = tx.update(grads, tx.init(PARAMS), PARAMS)
    wanted = alone.update(grads, alone.init(PARAMS), PARAMS)
    moved = optax.apply_updates(PARAMS, whole[0])
    helpers.assert_equal(
        so.eval_params(whole[1], moved), so.eval_params(wanted[1], moved)
    )
    masked = optax.masked(averaged(), {"w": True, "b": False})
    evaluated = so.eval_params(masked.init(PARAMS), moved)
    np.testing.assert_array_equal(evaluated["b"], moved["b"])
    assert np.any(evaluated["w"] != moved["w"])


@names
@pytest.mark.parametrize(
    "other",
    [
        lambda: optax.scale_by_adam().init(PARAMS),
        lambda: None,
        lambda: so.scale_by_shampoo(b1=0.0).init(PARAMS),
        lambda: so.scale_by_soap(graft="rmsprop", b1=0.0).init(PARAMS),
        lambda: so.scale_by_shampoo().init({"w": PARAMS["w"]}),
        lambda: so.scale_by_soap().init({}),
        lambda: so.scale_by_shampoo().init(PARAMS)._asdict(),
    ],
)
def test_state_of_another_transform_is_named(name, other):
    tx = TRANSFORMS[name]()
    with pytest.raises(ValueError, match="`state` must"):
        tx.update(PARAMS, other(), PARAMS)


@pytest.mark.parametrize("argument", ["start", "refresh_every"])
def test_steps_beyond_the_counter_are_refused(argument):
    with pytest.raises(ValueError, match=f"`{argument}`.*{2**40}"):
        so.scale_by_shampoo(**{argument: 2**40})


@pytest.mark.parametrize("mask", [{"w": True}, {"w": True, "b": {"c": True}}])
def test_mask_of_another_tree_is_named(mask):
    tx = so.decay_weights(0.1, mask=mask)
    with pytest.raises(ValueError, match="`mask` must"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_without_jit_nothing_is_compiled_again():
    tx = so.scale_by_shampoo(refresh_every=2)
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = tx.update(PARAMS, state, PARAMS)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event)
    )
    for _ in range(2):
        _, state = tx.update(PARAMS, state, PARAMS)
    assert not [event for event in compiled if "backend_compile" in event]
