"""Presets: their settings, what they print, and that it makes the same transform."""

import copy
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so
from shampoo_optax._presets import POINTS

NAMES = {"so": so, "optax": optax}
SHAPES = {"embed": (9, 4), "mlp": (4, 5), "norm_scale": (5,), "bias": (4,)}
PRESETS = {
    "replace_adamw": lambda: so.replace_adamw(1e-3, 0.95, 0.98, 1e-7),
    "replace_sgd": lambda: so.replace_sgd(0.1, 0.8, True, weight_decay=1e-3),
    "replace_adamw_by_soap": lambda: so.replace_adamw_by_soap(3e-3, b1=0.95, b2=0.95),
    "llm_pretraining": lambda: so.llm_pretraining(2e-3, 100, hidden="soap"),
} | {
    f"algoperf_winner, {p}": lambda p=p: so.algoperf_winner(1000, point=p)
    for p in range(1, 6)
}


def first_update(tx):
    steps = helpers.normal_steps(SHAPES, 2)
    params = jax.tree.map(jnp.ones_like, steps[0])

    @helpers.quick_jit
    def run(params):
        state = tx.init(params)
        for grads in steps:
            updates, state = tx.update(grads, state, params)
        return updates

    return run(params)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_makes_the_same_transform(name):
    """It is a call, evaluated with the names of the package and optax."""
    tx = PRESETS[name]()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    again = eval(repr(tx), dict(NAMES))
    assert repr(again) != repr(tx)  # a plain transform, no preset
    helpers.assert_equal(first_update(again), first_update(tx))


def with_adamw(make):
    """The update of AdamW, or of what takes its numbers, before the first refresh."""
    mask = {"embed": True, "mlp": True, "norm_scale": False, "bias": False}
    return first_update(make(0.01, 0.8, 0.9, 1e-3, weight_decay=0.3, mask=mask))


@pytest.mark.parametrize("make", [so.replace_adamw, so.replace_adamw_by_soap])
def test_the_numbers_of_adamw_are_carried_over(make):
    """Before the first refresh both are AdamW."""
    assert helpers.worst(with_adamw(make), with_adamw(optax.adamw)) <= 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_numbers_of_sgd_are_carried_over(nesterov):
    numbers = dict(momentum=0.7, nesterov=nesterov)
    got = first_update(so.replace_sgd(0.02, weight_decay=0.3, **numbers))
    plain = optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.02, **numbers))
    assert helpers.worst(got, first_update(plain)) <= 1e-6


def test_settings_of_the_submission():
    """Those of `tuning_search_space.json`, typed again from its rounded values."""
    rates = [0.0017486, 0.0014382, 4.19945, 0.0012, 0.0013082]
    decays = [0.0812162, 0.000197166, 6.40424e-05, 0.00040350, 0.163753]
    np.testing.assert_allclose([p.learning_rate for p in POINTS], rates, rtol=1e-4)
    np.testing.assert_allclose([p.weight_decay for p in POINTS], decays, rtol=1e-4)
    firsts = [0.0673393, 0.0253375, 1.0, 0.0166107, 0.0268666]
    seconds = [0.00448403, 0.0250802, 0.00237017, 0.00588822, 0.00187671]
    np.testing.assert_allclose([p.one_minus_b1 for p in POINTS], firsts, rtol=1e-4)
    np.testing.assert_allclose([p.one_minus_b2 for p in POINTS], seconds, rtol=1e-4)
    assert [p.warmup for p in POINTS] == [0.02, 0.05, 0.02, 0.02, 0.1]
    assert [p.steps for p in POINTS] == [1.0, 0.6, 1.0, 1.0, 1.0]
    momenta = [p.momentum for p in POINTS if p.momentum is not None]
    np.testing.assert_allclose(momenta, [0.968498, 0.5], rtol=1e-5)
    shown = {point: str(so.algoperf_winner(1000, point)) for point in range(1, 6)}
    for point, text in shown.items():
        assert text.count("refresh_every=100") == 2
        assert "Blocking(block_size=1024" in text
        assert ("b3=" in text) == (point != 3)  # b1 is 0 there: no filter
        assert ("graft='sgd'" in text) == (point == 3)
        assert ("nesterov=True" in text) == (point in (3, 4))
        assert ("{1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5}" in text) == (point == 4)
    assert "steps=600" in shown[2] and "warmup_steps=100" in shown[5]


def test_the_submission_looks_ahead_as_nadam_does():
    """The weights of point 1 by hand: b1 = 1 - 0.06733926164, and b3 its square."""
    text = str(so.algoperf_winner(1000))
    found = {
        key: float(re.search(rf"\b{key}=([\d.]+)", text)[1]) for key in ("b1", "b3")
    }
    assert found == pytest.approx({"b1": 0.93266073836, "b3": 0.86985605287}, rel=1e-9)


def test_settings_of_a_language_model():
    """What is printed is what is run: clipped, warmed up, down to a tenth."""
    tx = so.llm_pretraining(2e-3, 100, weight_decay=0.25, max_norm=0.5, warmup_steps=7)
    schedule = "so.WarmupCosine(peak=0.002, warmup_steps=7, steps=100, end=0.1)"
    text = str(tx)
    assert "optax.clip_by_global_norm(max_norm=0.5)" in text
    assert text.count(schedule) == text.count("b1=0.95") == text.count("b2=0.95") == 6
    assert text.count("weight_decay=0.25") == 4  # all but norms and vectors
    assert "warmup_steps=5," in str(so.llm_pretraining(2e-3, 100))


def test_tables_of_the_submission_are_left_to_adam():
    table, matrix = (1_000_001, 1), (4, 3)
    params = helpers.structs({"table": table, "matrix": matrix})
    state = jax.eval_shape(so.algoperf_winner(1000).init, params)
    sides = {
        leaf.shape[-1]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "factors" in jax.tree_util.keystr(path)
    }
    assert sides == {4, 3}


def test_a_preset_is_a_pair_like_any_other():
    """It can be copied, mapped over and replaced; what it prints is lost at most."""
    tx = so.replace_adamw(1e-3)
    for again in (copy.copy(tx), copy.deepcopy(tx), tx._replace(init=tx.init)):
        assert isinstance(repr(again), str) and tuple(again) == tuple(tx)
    assert tuple(jax.tree.map(lambda f: f, tx)) == tuple(tx)


def test_options_are_passed_on():
    assert "refresh_every=7" in repr(
        so.replace_adamw(1e-3, options=dict(refresh_every=7))
    )
    tx = so.llm_pretraining(1e-3, 100, options=dict(blocking=so.Blocking(2)))
    state = jax.eval_shape(tx.init, helpers.structs({"mlp": (4, 6)}))
    shapes = {
        leaf.shape[1:]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "factors" in jax.tree_util.keystr(path)
    }
    assert shapes == {(2, 2)}


def test_schedule_follows_the_closed_form():
    schedule = so.WarmupCosine(0.4, warmup_steps=10, steps=50, end=0.25)
    counts = np.arange(60)
    share = np.clip((counts - 10) / 40, 0, 1)
    fall = 0.25 + 0.75 * 0.5 * (1 + np.cos(np.pi * share))
    wanted = 0.4 * np.where(counts < 10, counts / 10, fall)
    got = jax.vmap(schedule)(jnp.asarray(counts))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
    without = so.WarmupCosine(0.4, warmup_steps=0, steps=5)
    assert float(without(0)) == pytest.approx(0.4)


BAD = [
    ("peak", lambda: so.WarmupCosine(-1.0, 0, 5)),
    ("warmup_steps", lambda: so.WarmupCosine(1.0, 0.5, 5)),
    ("steps", lambda: so.WarmupCosine(1.0, 5, 5)),
    ("end", lambda: so.WarmupCosine(1.0, 0, 5, end=2.0)),
    ("steps", lambda: so.algoperf_winner(3)),
    ("point", lambda: so.algoperf_winner(100, point=6)),
    ("steps", lambda: so.llm_pretraining(1e-3, 0)),
    ("hidden", lambda: so.llm_pretraining(1e-3, 100, hidden="muon")),
    ("learning_rate", lambda: so.llm_pretraining(-1.0, 100)),
    ("warmup_steps", lambda: so.llm_pretraining(1e-3, 100, warmup_steps=100)),
    ("eps", lambda: so.replace_adamw(1e-3, eps=-1.0)),
    ("max_norm", lambda: so.llm_pretraining(1e-3, 100, max_norm=0.0)),
    ("b1", lambda: so.replace_adamw(1e-3, b1=2.0)),
    ("momentum", lambda: so.replace_sgd(0.1, momentum=-1)),
]


@pytest.mark.parametrize("name, make", BAD)
def test_bad_arguments_are_refused(name, make):
    with pytest.raises(ValueError, match=f"`{name}` must be .* got"):
        make()
