"""The acceptance list on 8 devices, with Auto and Explicit axes.

The program is that of `test_acceptance.py`. Transforms that take a placement divide
their blocks; the others run with their parameters on all devices.
"""

import functools

import acceptance
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acceptance import build, gradients, names, one_round, starts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_acceptance import changed, solution, unstacked

KINDS = ["Auto", "Explicit"]
kinds = pytest.mark.parametrize("kind", KINDS)
programs = pytest.mark.parametrize("name", names("program"))
decaying = [n for n in names("program") if acceptance.takes(n, "mask")]


@functools.lru_cache
def on_one_device(name):
    *_, trail = one_round(name, pushes=gradients(name))
    return unstacked(jax.device_get(trail))


@kinds
@programs
def test_as_on_one_device(name, kind):
    """C15, C18: the same steps; parameters stay on all devices."""
    params, _, trail = one_round(name, kind, pushes=gradients(name))
    got = unstacked(jax.device_get(trail))
    assert helpers.worst_of_steps(got, on_one_device(name)) <= 1e-6
    mesh = acceptance.mesh_of(kind)
    for leaf in jax.tree.leaves(params):
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.device_set == set(mesh.devices.flat)


@kinds
@programs
def test_one_compilation_and_donation(name, kind):
    """C12, C18: steps after a first round, also with other numbers; all is donated."""
    params, state, _ = one_round(name, kind)
    types = jax.tree.map(jax.typeof, state)
    for numbers in ({}, changed(name)):
        given = params, acceptance.with_numbers(state, **numbers)
        with helpers.compilations() as found:
            params, state, _ = acceptance.rounds(name, kind, *given)
        assert found == [0]
        assert jax.tree.map(jax.typeof, state) == types
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@kinds
@pytest.mark.parametrize("name", decaying)
def test_decay_is_the_same_on_all_devices(name, kind):
    """C24: twenty zero gradients, decay 0.1, rate 0.1: 0.99^20 of the start."""
    numbers = dict(weight_decay=0.1, learning_rate=0.1)
    if acceptance.takes(name, "momentum"):  # which would delay the decay
        numbers |= dict(momentum=0.0)
    _, start = acceptance.program(name, kind)
    params, state = start(**numbers)
    params, *_ = acceptance.rounds(name, kind, params, state, count=5)
    for first, last in zip(*map(jax.tree.leaves, (starts(name), params)), strict=True):
        shards = [np.asarray(shard.data) for shard in last.addressable_shards]
        assert len(shards) == 8
        for shard in shards:
            np.testing.assert_array_equal(shard, shards[0])
            np.testing.assert_allclose(shard, 0.817907 * first, rtol=1e-5)


@kinds
@programs
def test_parabola(name, kind):
    """C24: within 1,000 steps; all stays finite."""
    subject = acceptance.SUBJECTS[name]
    _, start = acceptance.program(name, kind)
    params, state = start(learning_rate=max(0.02, subject.rate), **subject.solving)
    params, state, _ = acceptance.rounds(
        name, kind, params, state, count=1000 // acceptance.STEPS, solve=["parabola"]
    )
    helpers.assert_finite((params, state))
    found = np.ravel(solution(name, params, state)["parabola"])
    np.testing.assert_allclose(found, [1.0, -1.0], rtol=3e-2, atol=3e-2)


@programs
def test_types_of_the_state(name):
    """C18: those after an update are those of `init`, plain and jitted.

    As optax's sharding test: float16, divided along the second dimension.
    """
    mesh = acceptance.mesh_of("Explicit")
    tx = build(name, "Explicit")
    with helpers.set_mesh(mesh):
        column = acceptance.SUBJECTS[name].column
        zeros = jnp.zeros((2, 8) if column else (2, 8, 4), jnp.float16)
        params = jax.sharding.reshard(zeros, NamedSharding(mesh, P(None, "x")))
        state = tx.init(params)
        updates, after = tx.update(params, state, params)
        types = jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, after) == types
        assert jax.typeof(updates) == jax.typeof(params)
        jitted = jax.eval_shape(tx.init, params)
        traced = jax.eval_shape(tx.update, params, state, params)
    assert of_types(jitted) == of_types(state)
    assert of_types(traced) == of_types((updates, after))


def of_types(tree):
    """Shapes, dtypes and axes; what is on no mesh or on all of it has no axes."""

    def of(leaf):
        kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        axes = [axis for axis in getattr(kind.sharding, "spec", ()) if axis is not None]
        return kind.shape, kind.dtype, kind.weak_type, axes

    return jax.tree.map(of, tree)
