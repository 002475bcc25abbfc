"""SOAP, KL-SOAP and KL-Shampoo: guards, absent gradients, jit, padded stacks."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import placement_of, plan_of, quick_jit, scanned

import shampoo_optax as so

QR = so.QRBasis()
METHODS = {
    "SOAP": functools.partial(so.scale_by_soap, form="paper", basis=QR),
    "KL-SOAP": functools.partial(so.scale_by_kl_soap, form="official"),
    "KL-Shampoo": functools.partial(
        so.scale_by_kl_shampoo, root=so.Eigendecomposed(QR), relative_eps=1e-3
    ),
}
methods = pytest.mark.parametrize("method", METHODS)
TREE = {"v": (4, 3), "w": (4, 3), "x": (3, 4)}


def slot(state, stack, index):
    """All that a state has for one slot."""
    fields = {name: getattr(state, name) for name in state._fields[1:]}
    held = {name: stacks[stack] for name, stacks in fields.items() if stack in stacks}
    return jax.tree.map(lambda array: array[index], held)


@methods
def test_zero_bad_and_absent_gradients(method):
    """Two steps of zeros; a NaN in `w` at the fifth; `x` absent at a refresh."""
    steps = helpers.normal_steps(TREE, 8)
    steps[:2] = 2 * [helpers.zeros_like(steps[0])]
    steps[5] = steps[5] | {"x": None}
    spoilt = list(steps)
    spoilt[4] = steps[4] | {"w": steps[4]["w"].at[1, 2].set(jnp.nan)}
    tx = METHODS[method](b2=0.9, refresh_every=2)
    update, params = quick_jit(tx.update), steps[0]

    def run(steps):
        state, found = tx.init(params), []
        for grads in steps:
            updates, state = jax.block_until_ready(update(grads, state, params))
            found.append((updates, state))
        return found

    got, want = run(spoilt), run(steps)
    helpers.assert_finite(got)
    for t, ((updates, state), (wanted, _)) in enumerate(zip(got, want, strict=True)):
        assert helpers.total(state.failures) == 0
        for name in ("v", "x"):
            if updates[name] is not None:
                np.testing.assert_array_equal(updates[name], wanted[name])
                assert np.all(updates[name] != 0) == (t >= 2)
        assert np.all(updates["w"] != 0) == (t >= 2 and t != 4)
    states = [state for _, state in got]
    assert [helpers.total(state.skipped) for state in states] == 4 * [0] + 4 * [1]
    helpers.assert_equal(slot(states[5], "3x4", 0), slot(states[4], "3x4", 0))
    bases = [state.bases["4x3"]["0"][0] for state in states]
    assert np.any(bases[5] != bases[4])
    for name in ("factors", "bases", "filtered", "moments"):
        held = [getattr(state, name, {}).get("4x3", {}) for state in states]
        kept = [jax.tree.map(lambda array: array[1], one) for one in held]
        helpers.assert_equal(kept[4], kept[3])


def test_without_jit():
    """A step with a refresh and two without, op by op and compiled."""
    steps = helpers.normal_steps({"w": (3, 3)}, 3)
    tx = so.scale_by_kl_soap(b2=0.9, refresh_every=2)
    want, last = scanned(tx, steps)
    got, states = helpers.trace(tx, steps[0], steps, jit=lambda function: function)
    assert helpers.worst(got, want) <= 1e-4
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (states[-1], last)]
    assert kinds[0] == kinds[1]


MIXED = {"a": (4, 3), "b": (3, 4), "c": (4, 4), "d": (4,)}


@methods
def test_padded_stacks_on_a_mesh(x64, method):
    steps = [
        jax.tree.map(lambda x: x.astype(jnp.float64), step)
        for step in helpers.normal_steps(MIXED, 10)
    ]
    make = functools.partial(
        METHODS[method], b2=0.9, refresh_every=4, blocking=so.Blocking(merge_to=None)
    )
    want, single = scanned(make(), steps)
    tx = make(placement=placement_of(8))
    plan = plan_of(tx, steps[0])
    shapes = [(region.stacked, region.pieces[0].stack) for region in plan.regions]
    assert any(shape != plan.stacks[stack].block for shape, stack in shapes)
    got, state = scanned(tx, steps)
    assert helpers.total(state.failures) == helpers.total(single.failures) == 0
    assert helpers.worst_of_steps(got, want) <= 1e-9
    kept, wanted = (
        so.to_portable(t, s, steps[0]) for t, s in ((tx, state), (make(), single))
    )
    assert kept.keys() == wanted.keys()
    for key in kept:
        if key.split("/")[0] in (".factors", ".eigenvalues", ".moments"):
            assert helpers.worst(kept[key], wanted[key]) <= 1e-9, key
