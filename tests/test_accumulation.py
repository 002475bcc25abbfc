"""Accumulated gradients (C22): calls whose result is discarded do no work on roots."""

import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so
from shampoo_optax import _roots

EVERY, STEPS, PERIOD = 4, 12, 3
SHAPES = {"w": (6, 4), "b": (3,)}
# A ridge that rounding is small against, whatever the rank of a factor.
WELL = dict(b1=0.9, relative_eps=1e-2)
METHODS = {
    "shampoo": lambda **k: so.scale_by_shampoo(refresh_every=PERIOD, **k),
    "kl_shampoo": lambda **k: so.scale_by_kl_shampoo(refresh_every=PERIOD, **k),
    "soap": lambda **k: so.scale_by_soap(refresh_every=PERIOD, **k),
    "kl_soap": lambda **k: so.scale_by_kl_soap(refresh_every=PERIOD, **k),
    "inverse_free": lambda **k: so.scale_by_inverse_free_shampoo(batch_size=4.0, **k),
    "root_free": lambda **k: so.scale_by_root_free_rms(batch_size=4.0, **k),
    "spectral": lambda **k: so.scale_by_spectral_descent(**k),
    "sign": lambda **k: so.scale_by_sign_descent(**k),
}


def mini_steps(count=STEPS * EVERY, shapes=SHAPES):
    return helpers.normal_steps(shapes, count)


def means(steps):
    groups = [steps[i : i + EVERY] for i in range(0, len(steps), EVERY)]
    return [jax.tree.map(lambda *x: sum(x) / EVERY, *group) for group in groups]


@pytest.mark.parametrize("sizes", [(), (8,)], ids=["one device", "8 devices"])
def test_accumulated_steps_are_those_of_the_mean(sizes):
    placement = helpers.placement_of(*sizes)
    tx = so.shampoo(0.1, refresh_every=PERIOD, placement=placement, **WELL)
    steps = mini_steps()
    params = helpers.zeros_like(steps[0])
    want, _ = helpers.trace(tx, params, means(steps))
    got, _ = helpers.trace(so.multi_steps(tx, EVERY), params, steps)
    for index, update in enumerate(got):
        step, rest = divmod(index + 1, EVERY)
        if rest:
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(update))
        else:
            assert helpers.worst(update, want[step - 1]) <= 1e-5


def refreshes(monkeypatch, make, steps):
    """How often a compiled program computed roots, on one device."""
    seen = []
    real = _roots.inverse_roots

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: seen.append(1))
        return real(*args, **kwargs)

    monkeypatch.setattr(_roots, "inverse_roots", counted)
    tx = make(so.scale_by_shampoo(refresh_every=PERIOD))
    params = helpers.zeros_like(steps[0])
    _, states = helpers.trace(tx, params, steps)
    jax.block_until_ready(states[-1])
    jax.effects_barrier()
    return len(seen)


def test_roots_are_computed_once_a_period_of_real_steps(monkeypatch):
    """12 real steps with a period of 3: 4 refreshes, where plain MultiSteps has 16."""
    steps = mini_steps(shapes={"w": (4, 4)})
    aware = refreshes(monkeypatch, lambda tx: so.multi_steps(tx, EVERY), steps)
    assert aware == STEPS // PERIOD
    plain = refreshes(monkeypatch, lambda tx: optax.MultiSteps(tx, EVERY), steps)
    assert plain == aware * EVERY


def test_the_number_of_mini_steps_may_follow_a_schedule():
    """One mini-step in the first step, then two; the last of an odd number waits."""
    steps = mini_steps(5)
    params = helpers.zeros_like(steps[0])
    tx = so.scale_by_shampoo(refresh_every=1, **WELL)

    def every(step):
        return jnp.where(step == 0, 1, 2)

    got, _ = helpers.trace(so.multi_steps(tx, every), params, steps)
    pairs = [
        steps[0],
        *(
            jax.tree.map(lambda a, b: (a + b) / 2, one, other)
            for one, other in ((steps[1], steps[2]), (steps[3], steps[4]))
        ),
    ]
    want, _ = helpers.trace(tx, params, pairs)
    for index, wanted in zip((0, 2, 4), want, strict=True):
        assert helpers.worst(got[index], wanted) <= 1e-5


ON_DEVICES = [(name, ()) for name in METHODS] + [("shampoo", (8,)), ("soap", (8,))]


@pytest.mark.parametrize("name, sizes", ON_DEVICES)
def test_a_discarded_call_leaves_the_state(name, sizes):
    """Also one at which roots are due; the next call is as if it had not been."""
    tx = METHODS[name](placement=helpers.placement_of(*sizes))
    steps = mini_steps(PERIOD + 1, {"w": (6, 4)})
    params = helpers.zeros_like(steps[0])
    update = helpers.quick_jit(
        lambda g, s, discard: tx.update(g, s, params, discard=discard)
    )
    state = tx.init(params)
    for grads in steps[: PERIOD - 1]:
        _, state = jax.block_until_ready(update(grads, state, False))
    lost, after = update(steps[-1], state, True)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(lost))
    helpers.assert_equal(after, state)
    kept, _ = update(steps[PERIOD - 1], after, False)
    want, _ = update(steps[PERIOD - 1], state, False)
    helpers.assert_equal(kept, want)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(kept))


def test_flags_that_are_not_traced():
    """`True`, `False` and no flag are seen while tracing; a tree without blocks too."""
    tx = so.scale_by_shampoo(refresh_every=1)
    grads = {"w": helpers.normals(0, 4, 3)}
    state = tx.init(grads)

    def traced(**flag):
        closed = jax.make_jaxpr(lambda g, s: tx.update(g, s, **flag))(grads, state)
        names = [eqn.primitive.name for eqn, _ in helpers.equations(closed.jaxpr)]
        return names.count("eigh"), names.count("cond")

    assert traced(discard=True) == (0, 0)
    assert traced(discard=False) == traced() == (2, 1)
    empty = tx.init({})
    assert int(tx.update({}, empty, discard=True)[1].count) == 0
    assert int(tx.update({}, empty)[1].count) == 1


def test_no_collective_depends_on_the_flag():
    """On a mesh all devices exchange the directions of a discarded call too."""
    tx = so.scale_by_shampoo(placement=helpers.placement_of(8))
    params = {"w": jnp.ones((6, 4))}
    state = jax.eval_shape(tx.init, params)
    closed = jax.make_jaxpr(lambda g, s, d: tx.update(g, s, discard=d))(
        params, state, True
    )
    inside = {
        eqn.primitive.name: within
        for eqn, within in helpers.equations(closed.jaxpr)
        if eqn.primitive.name in ("all_gather", "eigh")
    }
    assert not any(name.startswith("cond") for name in inside["all_gather"])
    assert sum(name.startswith("cond") for name in inside["eigh"]) >= 2


def test_accumulation_compiles_to_no_collective_in_a_branch():
    """What optax puts in a branch that is never left out is compiled away."""
    tx = so.multi_steps(so.scale_by_shampoo(placement=helpers.placement_of(8)), 2)
    params = helpers.replicate({"w": jnp.ones((6, 4))}, helpers.mesh_of(8))
    lowered = jax.jit(tx.update).lower(params, tx.init(params))
    text = lowered.compile().as_text()
    (entry,) = re.findall(r"^ENTRY .*?^}", text, re.M | re.S)
    assert text.count(" all-gather(") == entry.count(" all-gather(") >= 1


def test_nested():
    """Two of two, of which the inner roots are computed in the last of four only."""
    tx = so.scale_by_shampoo(refresh_every=1, **WELL)
    twice = so.multi_steps(so.multi_steps(tx, 2), np.int32(2))
    steps = mini_steps(4, {"w": (6, 4)})
    params = helpers.zeros_like(steps[0])
    got, _ = helpers.trace(twice, params, steps)
    want, _ = helpers.trace(tx, params, means(steps))
    assert helpers.worst(got[-1], want[0]) <= 1e-5
    assert not any(np.any(update["w"]) for update in got[:-1])


def test_a_mini_step_that_is_not_finite_spoils_one_step():
    """Its updates are 0 until the step ends; the next step is as if it had not been."""
    tx = so.multi_steps(optax.sgd(1.0), 2)
    good, bad = jnp.ones(3), jnp.full(3, jnp.nan)
    updates, _ = helpers.trace(tx, good, [bad, good, good, good])
    np.testing.assert_array_equal(updates[0], np.zeros(3))
    assert np.isnan(updates[1]).all()
    np.testing.assert_array_equal(updates[3], -np.ones(3))


@pytest.mark.parametrize(
    "discard", [1, "x", [True], np.ones(2, bool)], ids=["int", "str", "list", "array"]
)
def test_bad_flags_are_refused(discard):
    tx = so.scale_by_shampoo()
    grads = {"w": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match="`discard` must be one boolean, got"):
        tx.update(grads, tx.init(grads), discard=discard)


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("every", dict(every=0)),
        ("every", dict(every=1.5)),
        ("use_grad_mean", dict(every=2, use_grad_mean=3)),
    ],
)
def test_bad_arguments_are_refused(name, kwargs):
    with pytest.raises(ValueError, match=f"`{name}` must be .* got"):
        so.multi_steps(so.shampoo(0.1), **kwargs)
