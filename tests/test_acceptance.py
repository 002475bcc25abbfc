"""The acceptance list: every public transform goes through all of it, on one device.

C24 throughout; other cases are named where they are checked. Eager steps run without
any compilation, next to which they cost nothing.
"""

import functools
import inspect
import io

import acceptance
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from acceptance import (
    STEPS,
    build,
    gradients,
    names,
    one_round,
    starts,
    strong,
)

import shampoo_optax as so

every = pytest.mark.parametrize("name", names())
programs = pytest.mark.parametrize("name", names("program"))


def where(check):
    return pytest.mark.parametrize("name", names(check))


def test_no_public_transform_is_missing():
    """A newcomer needs a line in `acceptance.SUBJECTS`."""
    functions = {n: getattr(so, n) for n in so.__all__ if n.islower()}
    returned = {n: inspect.signature(f).return_annotation for n, f in functions.items()}
    public = {n for n, kind in returned.items() if "GradientTransform" in str(kind)}
    assert set(acceptance.SUBJECTS) == public
    for subject in acceptance.SUBJECTS.values():
        assert set(subject.no_sense) <= set(acceptance.CHECKS)


# ---- eager runs


def loop(tx, params, steps):
    """Updates and states after each step, the parameters as they are; no jit."""
    updates, states = [], [tx.init(params)]
    with jax.disable_jit():
        for grads in steps:
            update, state = tx.update(grads, states[-1], params)
            updates.append(update)
            states.append(state)
    return updates, states[1:]


@functools.lru_cache
def plain(name):
    """The run that others are compared with."""
    return loop(build(name), starts(name), gradients(name))


def descend(tx, params, steps):
    """The parameters at each step; no jit."""
    state, trail = tx.init(params), []
    with jax.disable_jit():
        for grads in steps:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            trail.append(params)
    return trail


@functools.lru_cache
def injected_trail(name):
    return descend(acceptance.optimizer(name), starts(name), gradients(name))


def unstacked(trail):
    return [jax.tree.map(lambda x, t=t: x[t], trail) for t in range(STEPS)]


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def traced_types(tx, params, grads):
    """The types of the state and the update, the step in one branch of a `cond`."""

    def step(taken, grads, state, params):
        skip = helpers.zeros_like(grads), state
        return jax.lax.cond(
            taken, lambda: tx.update(grads, state, params), lambda: skip
        )

    before = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(step, True, grads, before, params)
    assert kinds(after) == kinds(before)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, grads)
    return before, updates


# ---- what is made


@every
def test_making_makes_no_array(name):
    before = {id(array) for array in jax.live_arrays()}
    tx = build(name)
    assert not [array for array in jax.live_arrays() if id(array) not in before]
    assert isinstance(tx, optax.GradientTransformationExtraArgs)


@every
def test_init_jitted_and_traced(name):
    """C11, C19: the same state; only arrays, none of which is empty."""
    tx, params = build(name), starts(name)
    state = tx.init(params)
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array) and leaf.size and not leaf.weak_type
    helpers.assert_equal(jax.jit(tx.init)(params), state)
    assert kinds(jax.eval_shape(tx.init, params)) == kinds(state)


@where("abstract init")
def test_init_on_shapes(name):
    """A state of arrays, as from the parameters, of which the values do not matter."""
    tx, params = build(name), starts(name)
    helpers.assert_equal(tx.init(jax.eval_shape(lambda: params)), tx.init(params))


# ---- C11, C12: compiled


@programs
def test_scan_equals_a_loop(name):
    """C11: steps in a `cond` in a `scan` in a `fori_loop`, and eager ones."""
    *_, trail = one_round(name, pushes=gradients(name))
    assert helpers.worst_of_steps(unstacked(trail), injected_trail(name)) <= 1e-5


@programs
def test_one_compilation_and_donation(name):
    """C12: other numbers, states from a jitted `init` and from disk; all is donated."""
    _, start = acceptance.program(name)
    one_round(name)
    params, state = start()
    states = [state, strong(jax.jit(acceptance.optimizer(name).init)(params))]
    states += [from_disk(state), start(**changed(name))[1]]
    for state in states:
        params = starts(name)
        with helpers.compilations() as found:
            out = acceptance.rounds(name, None, params, state)
        assert found == [0]
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
        helpers.assert_finite(out)


def changed(name):
    return dict.fromkeys(acceptance.SUBJECTS[name].numbers, 1) | dict(learning_rate=0.5)


def from_disk(tree):
    file = io.BytesIO()
    leaves, treedef = jax.tree.flatten(tree)
    np.savez(file, *leaves)
    file.seek(0)
    arrays = np.load(file)
    return treedef.unflatten(
        jnp.asarray(arrays[f"arr_{n}"]) for n in range(len(leaves))
    )


@programs
def test_resumed_from_disk(name):
    """C19: in the middle of a period, bit for bit."""
    steps = gradients(name)
    middle = [True, False, False, False]
    params, state, _ = one_round(name, pushes=steps, taken=middle)
    params, state = map(from_disk, (params, state))
    rest = ~np.asarray(middle)
    got = acceptance.rounds(name, None, params, state, pushes=steps, taken=rest)
    helpers.assert_equal(got[:2], one_round(name, pushes=steps)[:2])


@programs
def test_skipped_steps_leave_no_trace(name):
    """C21: the other branch of a `cond` skips the step."""
    first, second, third, other = gradients(name)
    taken = [True, False, True, True]
    got = one_round(name, pushes=[first, other, second, third], taken=taken)
    taken = [True, True, True, False]
    want = one_round(name, pushes=[first, second, third, other], taken=taken)
    helpers.assert_equal(got[:2], want[:2])


# ---- C1, C2, C6: zeros, and gradients that are not finite


@programs
def test_zeros_first(name):
    """C1: nothing moves for three steps, everything at the fourth; all is finite."""
    numbers = dict(weight_decay=0.0) if acceptance.takes(name, "weight_decay") else {}
    zero = helpers.zeros_like(starts(name))
    pushes = 3 * [zero] + gradients(name, steps=1)
    *state, trail = one_round(name, pushes=pushes, **numbers)
    helpers.assert_finite((state, trail))
    third, fourth = unstacked(trail)[2:]
    helpers.assert_equal(third, starts(name))
    moved = jax.tree.map(lambda a, b: np.all(a != b), fourth, third)
    assert all(jax.tree.leaves(moved)) or name == "decay_weights"


def without(trail, key):
    return {other: part for other, part in trail.items() if other != key}


def spoil(steps, key, times, value):
    filled = (g | {key: jnp.full_like(g[key], value)} for g in steps)
    return [
        f if t in times else g
        for t, (f, g) in enumerate(zip(filled, steps, strict=True))
    ]


@programs
def test_a_dead_layer(name):
    """C2: it stays where it is, and the others do not know of it."""
    steps = gradients(name)
    numbers = dict(weight_decay=0.0) if acceptance.takes(name, "weight_decay") else {}
    *state, trail = one_round(
        name, pushes=spoil(steps, "matrix", range(STEPS), 0.0), **numbers
    )
    *_, alive = one_round(name, pushes=steps, **numbers)
    helpers.assert_finite(state)
    helpers.assert_equal(without(trail, "matrix"), without(alive, "matrix"))
    np.testing.assert_array_equal(trail["matrix"], np.zeros_like(trail["matrix"]))


@pytest.mark.parametrize("name", [n for n in names("guard") if n in names("program")])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient(name, bad):
    """C2, C6: counted, all stays finite, and the others do not know of it."""
    steps = gradients(name)
    *state, trail = one_round(name, pushes=spoil(steps, "matrix", [2], bad))
    *_, good = one_round(name, pushes=steps)
    helpers.assert_finite((state, trail))
    helpers.assert_equal(without(trail, "matrix"), without(good, "matrix"))
    assert helpers.total(helpers.field(state, "skipped")) == 1


@every
def test_apply_if_finite(name):
    """C6: a bad step leaves the inner state bit for bit; the next one is right."""
    first, second, *_ = gradients(name)
    bad = spoil([first], "matrix", [0], np.inf)[0]
    tx = optax.apply_if_finite(build(name), 5)
    (_, nothing, after), states = loop(tx, starts(name), [first, bad, second])
    helpers.assert_equal(states[1].inner_state, states[0].inner_state)
    helpers.assert_equal(nothing, helpers.zeros_like(nothing))
    helpers.assert_equal(after, plain(name)[0][1])
    traced_types(tx, starts(name), first)


# ---- composition


@every
def test_chain(name):
    """Exact, since the factors are powers of 2."""
    tx = optax.chain(optax.scale(2.0), optax.trace(0.0), build(name), optax.scale(0.5))
    steps = gradients(name)[:2]
    got, _ = loop(tx, starts(name), steps)
    doubled = [jax.tree.map(lambda x: 2 * x, grads) for grads in steps]
    want, _ = loop(build(name), starts(name), doubled)
    halved = [jax.tree.map(lambda x: x / 2, update) for update in want]
    helpers.assert_equal(got, halved)
    traced_types(tx, starts(name), steps[0])


def chosen_of(tree):
    return without(tree, "rosenbrock")


@every
def test_masked_and_partitioned(name):
    """C23: as if the chosen parameters were alone; the others hold nothing."""
    params, steps = starts(name), gradients(name)[:2]
    few = [chosen_of(grads) for grads in steps]
    want, alone = loop(build(name), chosen_of(params), few)
    chosen = {key: key in chosen_of(params) for key in params}
    masked = optax.masked(build(name), chosen)
    labels = {key: "train" if chosen[key] else "freeze" for key in params}
    frozen = {"train": build(name), "freeze": optax.set_to_zero()}
    for tx in (masked, helpers.partition(frozen, labels)):
        got, states = loop(tx, params, steps)
        helpers.assert_equal([chosen_of(update) for update in got], want)
        held, wanted = map(jax.tree.leaves, (states[-1], alone[-1]))
        helpers.assert_equal(held, wanted)
        traced_types(tx, params, steps[0])


@every
def test_multi_steps(name):
    """C22: as on the mean of mini-batches; discarded updates are exactly 0."""
    steps = gradients(name)[:2]
    split = [jax.tree.map(lambda x, s=s: s * x, g) for g in steps for s in (0.5, 1.5)]
    tx = optax.MultiSteps(build(name), 2)
    got, _ = loop(tx, starts(name), split)
    for nothing in got[::2]:
        helpers.assert_equal(nothing, helpers.zeros_like(nothing))
    assert helpers.worst_of_steps(got[1::2], plain(name)[0][:2]) <= 1e-5
    traced_types(tx, starts(name), steps[0])


@where("flatten")
def test_flatten(name):
    """As on one vector."""
    vectors = [grads["rosenbrock"] for grads in gradients(name)[:2]]
    pairs = [{"a": x[0], "b": x[1:]} for x in vectors]
    tx = optax.flatten(build(name))
    got, _ = loop(tx, pairs[0], pairs)
    want, _ = loop(build(name), vectors[0], vectors)
    joined = [jnp.concatenate([pair["a"][None], pair["b"]]) for pair in got]
    helpers.assert_equal(joined, want)
    traced_types(tx, pairs[0], pairs[0])


@programs
def test_vmap(name):
    """C11: a batch of two models is two independent models."""
    tx = build(name)
    runs = [[few_of(g) for g in gradients(name, seed)[:2]] for seed in (0, 1)]

    def run(steps):
        def step(state, grads):
            updates, state = tx.update(grads, state, first)
            return state, updates

        first = jax.tree.map(lambda x: x[0], steps)
        return jax.lax.scan(step, tx.init(first), steps)[1]

    stack = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    batch = stack(*(stack(*steps) for steps in runs))
    got = helpers.quick_jit(jax.vmap(run))(batch)
    for index, steps in enumerate(runs):
        want, _ = loop(tx, steps[0], steps)
        mine = jax.tree.map(lambda x, i=index: x[i], got)
        assert helpers.worst(mine, stack(*want)) <= 1e-5


def few_of(tree):
    return {"matrix": tree["matrix"]}


# ---- C24: problems


def solution(name, params, state):
    averaged = name in ("primal_averaging", "schedule_free")
    return so.eval_params(state, params) if averaged else params


@programs
def test_problems(name):
    """Parabola, Rosenbrock, a matrix and mixed targets, in 30,000 steps."""
    subject = acceptance.SUBJECTS[name]
    _, start = acceptance.program(name)
    params, state = start(learning_rate=subject.rate, **subject.solving)
    params, state, _ = acceptance.rounds(
        name, None, params, state, count=30_000 // STEPS, solve=acceptance.GOALS
    )
    helpers.assert_finite((params, state))
    found = solution(name, params, state)
    goals = acceptance.as_parameters(acceptance.GOALS, subject.column)
    for got, want in zip(*map(jax.tree.leaves, (found, goals)), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-2, atol=3e-2)
