"""Runs every recipe, and holds what comes out to what the text says."""

import re
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shampoo_optax as so

RECIPES = (Path(so.__file__).parent / "RECIPES.md").read_text()
HEAD, *PARTS = re.split(r"^## ", RECIPES, flags=re.M)
SECTIONS = {title: body for title, _, body in (part.partition("\n") for part in PARTS)}
PRINT = re.compile(r"^print\(.*\)(?:  # (.*))?\n((?:# .*\n)*)", re.M)


def printed(text):
    """The lines that are said to be printed: beside the call, or below it."""
    for beside, below in PRINT.findall(text):
        yield from [beside] if beside else re.findall("^# (.*)$", below, re.M)


def entries_of(state, name):
    """How many numbers are kept under a name."""
    return sum(leaf.size for leaf in jax.tree.leaves(helpers.field(state, name)))


def linen_learned(names):
    """The network by hand puts the labels right; the memory of the start was reused."""
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(names["params"]))
    layers = jax.tree.map(np.asarray, names["state"].params)
    last, first = layers["Dense_0"], layers["Dense_1"]
    hidden = np.tanh(names["inputs"] @ first["kernel"] + first["bias"][None])
    logits = hidden @ last["kernel"] + last["bias"][None]
    assert np.mean(np.argmax(logits, 1) == names["labels"]) > 0.95


def nnx_holds_parameters_only(names):
    """Two layers and the scale and shift between them; no running mean or variance."""
    state = nnx.as_pure(names["optimizer"].opt_state)
    assert entries_of(state, "filtered") == 9 * 8 + 2 * 8 + 9 * 4
    state = nnx.as_pure(names["scaled_optimizer"].opt_state)
    assert entries_of(state, "filtered") == 9 * 4 + 1


def modules_hold_arrays_only(names):
    assert entries_of(names["state"], "filtered") == 9 * 8 + 8 * 4
    assert names["trained"][1].bias is None


def states_stay_divided(names):
    factors = helpers.field(names["resumed"].opt_state, "factors")
    for leaf in jax.tree.leaves(factors):
        assert leaf.addressable_shards[0].data.shape[0] * 8 == leaf.shape[0]
    assert int(names["resumed"].step) == 15


def rates_follow_the_schedule(names):
    np.testing.assert_allclose(names["rates"], 0.1 - 0.005 * np.arange(10), rtol=1e-5)


def losses_are_those_of_least_squares(names):
    inputs, targets = (np.asarray(names[x], np.float64) for x in ("inputs", "targets"))
    solution = np.linalg.lstsq(inputs, targets)[0]
    least = np.mean(np.square(inputs @ solution - targets))
    for kind in ("", "half_", "master_", "lean_", "small_"):
        weights = np.asarray(names[f"{kind}params"]["w"], np.float64)
        reached = np.mean(np.square(inputs @ weights - targets))
        assert least <= reached <= 1.02 * least


def evaluated_is_the_mean_of_the_formula(names):
    trained, evaluated = names["trained"]["w"], names["evaluated"]["w"]
    fast = helpers.field(names["state"], "fast")["w"]
    mean = np.asarray(trained) + (1 - 1 / 0.8) * np.asarray(fast - trained)
    np.testing.assert_allclose(evaluated, mean, rtol=1e-5, atol=1e-6)


def presets_are_what_they_print(names):
    again = eval(repr(names["tx"]), {"so": so, "optax": optax})
    params = helpers.structs({"mlp": (4, 3)})
    first, second = (jax.eval_shape(tx.init, params) for tx in (names["tx"], again))
    assert jax.tree.structure(first) == jax.tree.structure(second)


CHECKS = {
    "Presets": presets_are_what_they_print,
    "Flax linen": linen_learned,
    "Flax nnx": nnx_holds_parameters_only,
    "Equinox and other modules": modules_hold_arrays_only,
    "Checkpoints with Orbax": states_stay_divided,
    "Clipping, guards and schedules": rates_follow_the_schedule,
    "Mixed precision": losses_are_those_of_least_squares,
    "Averages of the iterates": evaluated_is_the_mean_of_the_formula,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_recipe_runs(title, capsys):
    names = helpers.run_blocks(SECTIONS[title], title)
    assert capsys.readouterr().out.splitlines() == list(printed(SECTIONS[title]))
    if title in CHECKS:
        CHECKS[title](names)


def test_checks_have_a_recipe():
    assert set(CHECKS) <= set(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_block_says_what_comes_out(title):
    blocks = helpers.blocks_of(SECTIONS[title])
    assert blocks
    for block in blocks:
        assert re.search(r"^(assert |print\(|np\.testing\.)", block, re.M)


def test_head_is_a_title_and_a_sentence():
    assert re.fullmatch(r"# \w+\n\n[A-Z][^.]*\.\n\n", HEAD)


def test_names_are_there():
    named = set(re.findall(r"\bso\.([A-Za-z]\w*)", RECIPES))
    assert named and named <= set(so.__all__)


@pytest.mark.parametrize("coefficient, nesterov", [(1.0, False), (0.9, True)])
def test_primal_averaging_is_the_momentum_that_the_text_says(coefficient, nesterov):
    def path(tx):
        def step(carry, offset):
            params, state = carry
            updates, state = tx.update(jnp.sin(3 * params) + offset, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        start = jnp.array([1.0, -2.0])
        offsets = jnp.linspace(0, 1, 12)
        return jax.lax.scan(step, (start, tx.init(start)), offsets)[1]

    averages = so.primal_averaging(
        0.05, eval_coefficient=0.9, train_coefficient=coefficient
    )
    momentum = optax.sgd(0.05 * (1 - 0.9), 0.9, nesterov)
    np.testing.assert_allclose(path(averages), path(momentum), rtol=1e-5)
