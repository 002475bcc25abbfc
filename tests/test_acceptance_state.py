"""The acceptance list, continued: numbers in the state, dtypes and odd trees."""

import functools

import acceptance
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from acceptance import STEPS, build, gradients, inject, names, needs, starts
from test_acceptance import descend, every, loop, plain, traced_types, where

of_a_rate = [name for name in names("inject") if needs(name, "learning_rate")]


# ---- numbers in the state


@where("inject")
def test_inject_hyperparams(name):
    """C21, C24: no argument is static, and all numbers are arrays in the state."""
    subject = acceptance.SUBJECTS[name]
    tx = inject(name)
    got, states = loop(tx, starts(name), gradients(name))
    want, plain_states = plain(name)
    assert helpers.worst_of_steps(got, want) <= 1e-5
    assert set(subject.numbers) <= set(states[-1].hyperparams)
    inner = states[-1].inner_state
    if jax.tree.structure(inner) == jax.tree.structure(plain_states[-1]):
        assert_near(inner, plain_states[-1])  # else it decays by an array that is 0
    traced_types(tx, starts(name), gradients(name)[0])


def assert_near(tree, expected):
    for got, want in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


RATES = np.array([1.0, 0.25, 2.0, 0.0], np.float32)


def schedule(count):
    return jnp.asarray(RATES)[count]


@pytest.mark.parametrize("name", of_a_rate)
def test_schedule(name):
    """The rates of a schedule are those set by hand; they can be read in the state."""
    steps = gradients(name)
    scheduled = descend(build(name, learning_rate=schedule), starts(name), steps)
    tx, params = inject(name), starts(name)
    state, by_hand = tx.init(params), []
    with jax.disable_jit():
        for rate, grads in zip(RATES, steps, strict=True):
            state = acceptance.with_numbers(state, learning_rate=rate)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            by_hand.append(params)
            assert optax.tree_utils.tree_get(state, "learning_rate") == rate
    assert helpers.worst_of_steps(scheduled, by_hand) <= 1e-5
    _, states = loop(inject(name, learning_rate=schedule), starts(name), steps[:2])
    read = [state.hyperparams["learning_rate"] for state in states]
    np.testing.assert_array_equal(read, RATES[:2])


@where("count")
def test_count(name):
    _, states = plain(name)
    counts = [optax.tree_utils.tree_get(state, "count") for state in states]
    np.testing.assert_array_equal(counts, np.arange(1, STEPS + 1))


@where("mirror")
def test_map_params(name, monkeypatch):
    """Finds what mirrors the parameters, and nothing else."""
    # The oldest optax calls it by a name that jax has given up.
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)
    tx, params = build(name), starts(name)
    state = tx.init(params)
    seen, rest = [], []

    def note(found):
        """Adds 1 to an array, or to all in what mirrors nothing."""

        def add(part):
            found.extend(leaf.shape for leaf in jax.tree.leaves(part))
            return jax.tree.map(lambda leaf: leaf + 1, part)

        return add

    after = optax.tree_utils.tree_map_params(
        tx, note(seen), state, transform_non_params=note(rest)
    )
    copies = acceptance.SUBJECTS[name].copies
    assert sorted(seen) == sorted(copies * [x.shape for x in jax.tree.leaves(params)])
    assert len(seen) + len(rest) == len(jax.tree.leaves(state))
    helpers.assert_equal(after, jax.tree.map(lambda x: x + 1, state))


@every
def test_extra_arguments_change_nothing(name):
    """The traced program is the same."""
    tx, params = build(name), starts(name)
    state = tx.init(params)
    extra = functools.partial(tx.update, value=1.0, unknown="x", other=jnp.ones(3))
    programs = [
        jax.make_jaxpr(update)(params, state, params) for update in (tx.update, extra)
    ]
    assert str(programs[0]) == str(programs[1])


# ---- C21, C23: dtypes and odd trees

PAIRS = [
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.bfloat16),
    (jnp.float16, jnp.float16),
    (jnp.float32, jnp.float32),
]


def assert_dtypes(name, of_params, of_grads, wide, **others):
    params, (grads,) = starts(name, of_params), gradients(name, steps=1, dtype=of_grads)
    state, updates = traced_types(build(name, **others), params, grads)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(of_grads)}
    reports = [field for field in ("residuals",) if field in str(state)]
    state = optax.tree_utils.tree_set(state, **dict.fromkeys(reports, ()))
    arrays = {x.dtype for x in jax.tree.leaves(state) if x.ndim}
    assert arrays <= {jnp.dtype(wide), jnp.dtype(jnp.int32)}


@where("wide")
def test_dtypes(name):
    """C21: updates have the gradient's dtype, the arrays of a state 32 bits."""
    for of_params, of_grads in PAIRS:
        assert_dtypes(name, of_params, of_grads, jnp.float32)


@pytest.mark.parametrize(
    "name, others",
    [
        ("shampoo", dict(weight_decay=0.1, decay="l2")),
        ("shampoo", dict(weight_decay=0.1, momentum=0.9, nesterov=True)),
        ("soap", dict(weight_decay=0.1)),
    ],
    ids=str,
)
def test_dtypes_of_longer_chains(name, others):
    """C21: likewise with decay and momentum."""
    for of_params, of_grads in PAIRS:
        assert_dtypes(name, of_params, of_grads, jnp.float32, **others)


@where("wide")
def test_dtypes_under_x64(name, x64):
    """C21: nothing is promoted."""
    for dtype in (jnp.float32, jnp.float64):
        assert_dtypes(name, dtype, dtype, dtype)


@every
def test_bfloat16_is_rounded_float32(name):
    """C21: the update of float32, rounded once by each transform of a chain."""
    steps = gradients(name, dtype=jnp.bfloat16)[:2]
    got, _ = loop(build(name), starts(name, jnp.bfloat16), steps)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), steps)
    want, _ = loop(build(name), starts(name), wide)
    assert helpers.worst(got, want) <= 4 * 2**-9  # of half a last bit each


@where("wide")
def test_odd_trees(name):
    """C23: absent and empty parameters, and trees of nothing else."""
    column = acceptance.SUBJECTS[name].column
    scalar = jnp.ones((1, 1) if column else ())
    empty = {"nothing": None, "empty": jnp.zeros((0, 3))}
    for params in (empty | {"scalar": scalar}, empty, {}, (None,)):
        tx = build(name)
        updates, states = loop(tx, params, 2 * [params])
        helpers.assert_finite((updates, states))
        assert jax.tree.structure(updates[-1]) == jax.tree.structure(params)
        assert jax.tree.map(jnp.shape, updates[-1]) == jax.tree.map(jnp.shape, params)
        assert all(leaf.size for leaf in jax.tree.leaves(states))
