"""The examples of MIGRATION.md, run as they stand there, against dense float64 NumPy.

Also what its neighbours in the newest optax are said to do: the oldest lacks them.
"""

import dataclasses
import re
from pathlib import Path

import golden
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import soap_oracle
from helpers import quick_jit

import shampoo_optax as so

MIGRATION = Path(__file__).parents[1] / "shampoo_optax" / "MIGRATION.md"
LABELS = {"w": "hidden", "k": "hidden", "b": "other"}
# Above and below 8192 entries: a matrix, and vectors after merging.
SHAPES = {"w": (91, 91), "k": (2, 2, 3), "b": (3,)}
STEPS = 210

SHARED = dict(eps=1e-12, every=100, start=100, b3=0.9, b1=0.9, b2=0.999)
SHAMPOO = SHARED | dict(relative_eps=0.0, exponents={}, size=8192, target=1)
SHAMPOO |= dict(leading=False, correct=True, graft_b2=0.999, graft_eps=1e-8)
SUMS = dict(b1=0.0, b3=0.0)
# How the directions of each example come from its gradients.
DIRECTIONS = [
    SHAMPOO | SUMS | dict(graft="sgd"),
    SHAMPOO | dict(graft="adam"),
    SHAMPOO | SUMS | dict(b2=1.0, graft="adagrad", graft_eps=1e-10),
    SHAMPOO | dict(graft="adam"),
    "soap",
    "muon",
    "plain",
    "plain",
    SHAMPOO | dict(graft="adam"),
    "plain",
]
RATES = [0.01, 0.001, 0.01, 0.001, 0.001, None, 0.01, 0.1, 0.001, 0.1]


def examples() -> list:
    """What the blocks of the section, run in their order, call `tx`."""
    section = MIGRATION.read_text().partition("### The seven examples")[2]
    section = section.partition("\n## ")[0]
    spaces = dict(so=so, optax=optax, jnp=jnp, labels=LABELS)
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S):
        spaces.pop("tx", None)
        exec(compile(block, str(MIGRATION), "exec"), spaces)
        found += [spaces["tx"]] if "tx" in spaces else []
    return found


def test_the_recorded_trajectories_are_followed():
    """Those that are named beside the examples are among those of `test_golden.py`."""
    table = MIGRATION.read_text().partition("| example | recorded as |")[2]
    named = re.findall(r"`([a-z0-9-]+)`", table.partition("\n\n")[0])
    assert len(named) >= 7
    assert set(named) <= {path.stem for path in golden.DATA.glob("*.npz")}


def random_tree(seed, *time):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal((*time, *s)) for n, s in SHAPES.items()}


def run_all(transforms, params, grads):
    """The parameters before and after every step, and those to evaluate, of each."""

    def run(tx, averages):
        def step(carry, grad):
            params, state = carry
            updates, state = tx.update(grad, state, params)
            moved = optax.apply_updates(params, updates)
            evaluated = so.eval_params(state, moved) if averages else moved
            return (moved, state), (params, moved, evaluated)

        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    def is_average(tx):
        state = jax.eval_shape(tx.init, params)
        return "IterateAveragingState" in str(state)

    flags = [is_average(tx) for tx in transforms]
    return quick_jit(
        lambda: [run(tx, flag) for tx, flag in zip(transforms, flags, strict=True)]
    )()


@pytest.fixture(scope="module")
def runs():
    params, grads = random_tree(0), random_tree(1, STEPS)
    with helpers.enable_x64():
        found = run_all(examples(), *jax.tree.map(jnp.asarray, (params, grads)))
        return grads, jax.tree.map(np.asarray, found)


def adam(grads, b1=0.9, b2=0.95, eps=1e-10):
    """The directions of Adam."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        yield m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)


def muon(grads, b1=0.9):
    """Of kernels with outputs in columns, which PyTorch has in rows."""
    m = 0.0
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        theirs = (m / (1 - b1**t)).reshape(-1, g.shape[-1]).T
        rows, columns = theirs.shape  # d_out, d_in
        polar = oracle.newton_schulz(theirs, oracle.QUINTIC, 5)
        yield (max(1, rows / columns) ** 0.5 * polar).T.reshape(g.shape)


def directions(method, grads):
    """The directions of one parameter by the formulas alone, time first."""
    if method == "plain":
        return grads
    if method == "soap":
        shape = grads.shape[1:]
        merged = shape if np.prod(shape) > 8192 else (-1,)
        flat = [g.reshape(merged) for g in grads]
        options = dict(form="official", kl=False, relative_eps=0.0, ignored=())
        options |= dict(power=0.5, graft=None, graft_b2=0.5, graft_eps=0.0, drop=False)
        return np.reshape(soap_oracle.soap(flat, **SHARED, **options), grads.shape)
    if callable(method):
        return np.array(list(method(grads)))
    return np.array(oracle.shampoo(grads.shape[1:], list(grads), **method))


def assert_close(got, want, tolerance=1e-9):
    assert got.shape == want.shape
    assert np.max(np.abs(got - want)) <= tolerance * np.max(np.abs(want))


def test_there_are_seven_examples_in_ten_blocks():
    assert len(examples()) == len(DIRECTIONS)


def steps_of(number, name, grads, before):
    """The steps of the examples without averages, from their parameters so far."""
    method, rate, l2 = DIRECTIONS[number], RATES[number], number in (1, 2)
    if method == "muon":
        hidden = LABELS[name] == "hidden"
        method, rate = (muon, 0.02) if hidden else (adam, 3e-4)
    decay = 0.0 if method == "plain" else 1e-5
    if l2:
        return -rate * directions(method, grads + decay * before)
    steps = directions(method, grads) + decay * before
    if number in (0, 6):
        momentum, buffer = [], 0.0
        for step in steps:
            buffer = 0.9 * buffer + step
            momentum.append(buffer)
        steps = np.array(momentum)
    return -rate * steps


def averages_of(number, name, grads, first):
    """The trained and the evaluated parameters, from those of the start."""
    train = {7: 1.0, 8: 0.9, 9: 0.9}[number]
    fast = mean = first
    trained, evaluated = [], []
    for t, direction in enumerate(directions(DIRECTIONS[number], grads), 1):
        old = 1 - 1 / t if number == 8 else 0.9  # schedule-free, at a constant rate
        fast = fast - RATES[number] * direction
        mean = old * mean + (1 - old) * fast
        trained.append((1 - train) * fast + train * mean)
        evaluated.append(mean)
    return np.array(trained), np.array(evaluated)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 6])
def test_example_without_averages(runs, number, name):
    grads, found = runs
    before, after, _ = (tree[name] for tree in found[number])
    assert_close(after - before, steps_of(number, name, grads[name], before))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("number", [7, 8, 9])
def test_example_with_averages(runs, number, name):
    grads, found = runs
    before, after, evaluated = (tree[name] for tree in found[number])
    trained, mean = averages_of(number, name, grads[name], before[0])
    assert_close(after - before[0], trained - before[0])
    assert_close(evaluated - before[0], mean - before[0])


# ---- newer optax


def test_rmsprop_before_the_start_is_that_of_optax_bit_for_bit():
    decay, rate = 0.1, 0.01
    ours = so.shampoo(
        rate,
        b1=0.0,
        weight_decay=decay,
        decay="l2",
        graft="rmsprop",
        graft_b2=0.9,
        start=1000,
    )
    base = optax.rmsprop(rate, decay=0.9, eps=1e-8, eps_in_sqrt=False)
    theirs = optax.chain(optax.add_decayed_weights(decay), base)
    shapes = {"a": (4, 3), "b": (5,), "c": (4, 3)}
    grads = helpers.normal_steps(shapes, 20)
    runs = (helpers.trace(tx, grads[0], grads, jit=quick_jit) for tx in (ours, theirs))
    helpers.assert_equal(*(updates for updates, _ in runs))


# ---- optax.contrib.schedule_free


def ramp(factor):
    """A rate from 1/64 to factor/64 in 12 steps."""
    return lambda count: (1 + (factor - 1) * jnp.minimum(count, 11) / 11) / 64


def ahead(rate):
    """The schedule that optax must be given: it looks one step ahead in its own."""
    return lambda count: rate(count - 1)


def schedule_free_pair(rate, weights, decay=0.0):
    """Ours and that of optax, of the plain gradient."""
    ours = so.schedule_free(rate, train_coefficient=0.875, weight_decay=decay)
    base = [optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)]
    theirs = optax.contrib.schedule_free(optax.chain(*base), weights, b1=0.875)
    return ours, theirs


def test_schedule_free_of_optax_is_ours_while_the_rate_does_not_fall(x64):
    """Given its schedule one step late, and without decay; else they part."""
    pairs = {
        "constant": schedule_free_pair(1 / 64, 1 / 64),
        "constant, decay": schedule_free_pair(1 / 64, 1 / 64, 0.5),
        "rising": schedule_free_pair(ramp(3), ramp(3)),
        "rising, late": schedule_free_pair(ramp(3), ahead(ramp(3))),
        "falling, late": schedule_free_pair(ramp(1 / 3), ahead(ramp(1 / 3))),
    }
    first, data = (helpers.normals(seed, 4, 3, dtype=jnp.float64) for seed in (0, 1))

    def run(tx):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(data * params, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (first, tx.init(first)), length=12)[1]

    @quick_jit
    def all_runs():
        return {name: [run(tx) for tx in pair] for name, pair in pairs.items()}

    apart = {name: helpers.worst(*pair) for name, pair in all_runs().items()}
    equal = {name for name, error in apart.items() if error <= 1e-12}
    assert equal == {"constant", "rising, late"}
    assert min(apart[name] for name in apart if name not in equal) > 1e-4


@pytest.mark.parametrize("kind, equal", [("constant", True), ("varying", False)])
def test_schedule_free_of_optax_against_the_reference(kind, equal, x64):
    """The second trajectory has a rate that rises and falls."""
    case = golden.load(f"schedule-free-{kind}-lr")
    (group,), (rates,) = case.meta["groups"], case.meta["lr_schedule"]
    direction = so.scale_by_shampoo(
        **golden.factored_arguments(group), relative_eps=0.0, graft=None
    )
    rate = golden.schedule(rates)
    theirs = optax.contrib.schedule_free(
        optax.chain(direction, optax.scale_by_learning_rate(rate)),
        rate,
        b1=group["iterate_averaging"]["train_interp_coeff"],
    )
    errors = golden.replay(dataclasses.replace(case, evals={}), theirs)
    if equal:
        assert max(errors) <= case.tolerance
    else:
        assert max(errors) > 1e-3
