"""Orbax checkpoints of a state that is divided over devices."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import assert_equal, normal_steps
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shampoo_optax as so

SHAPES = {"bias": (9,), "square": (8, 8), "tall": (12, 5)}
STEPS = normal_steps(SHAPES, 15)


@pytest.fixture(scope="module")
def run():
    """A transform, its parameters, the state after seven steps, and eight more."""
    mesh = Mesh(np.array(jax.devices()), "x")
    whole = NamedSharding(mesh, PartitionSpec())
    tx = so.shampoo(1e-2, refresh_every=4, placement=so.Placement(mesh))
    params, update = jax.device_put(STEPS[0], whole), jax.jit(tx.update)

    def advance(state, steps):
        updates = []
        for grads in steps:
            grads = jax.device_put(grads, whole)
            update_now, state = jax.block_until_ready(update(grads, state, params))
            updates.append(update_now)
        return updates, state

    _, state = advance(tx.init(params), STEPS[:7])
    return tx, params, state, lambda state: advance(state, STEPS[7:])[0]


def test_with_a_target_the_run_goes_on_bit_for_bit(run, tmp_path):
    tx, params, state, go_on = run
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", so.abstract_state(tx, params)
        )
    assert_equal(restored, state)
    assert_equal(go_on(restored), go_on(state))


def test_without_a_target_the_portable_form_comes_back(run, tmp_path):
    tx, params, state, go_on = run
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", so.to_portable(tx, state, params))
        checkpointer.wait_until_finished()
        portable = checkpointer.restore(tmp_path / "state")
    assert_equal(
        go_on(so.from_portable(tx, portable, params)),
        go_on(state),
    )


def test_without_a_target_a_plain_state_is_refused(run, tmp_path):
    tx, params, state, _ = run
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    with pytest.raises(ValueError, match="`state`.*target"):
        so.scale_by_shampoo().update(STEPS[0], restored[0], STEPS[0])
