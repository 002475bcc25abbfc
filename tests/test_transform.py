"""Transformations of the transform, and what must not change its numbers."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BARE, TRANSFORMS

import shampoo_optax as so

names = pytest.mark.parametrize("name", TRANSFORMS)
SHAPES = {"w": (6, 4), "k": (2, 3, 5), "b": (5,), "s": ()}

# Well-conditioned, so that reordered sums move the result by rounding alone. For SOAP
# that needs factors of full rank at the first refresh too: any basis of a null space
# is an eigenbasis.
STEADY = {
    "shampoo": dict(relative_eps=1e-3, b2=0.9),
    "soap": dict(eps=1e-3, b2=0.9),
}

# ---- jit, scan, vmap, donation, compilation


@names
def test_vmap_over_init_and_update(name):
    """A batch of two models is two independent models."""
    tx = TRANSFORMS[name](**STEADY[name], refresh_every=6)
    one, other = (helpers.normal_steps(SHAPES, 7, seed=seed) for seed in (0, 1))
    wanted = [helpers.trace(tx, steps[0], steps) for steps in (one, other)]
    pairs = zip(one, other, strict=True)
    batched = [jax.tree.map(lambda a, b: jnp.stack([a, b]), *pair) for pair in pairs]
    state = jax.jit(jax.vmap(tx.init))(batched[0])
    assert state.count.shape == (2,)
    update = jax.jit(jax.vmap(tx.update))
    for t, grads in enumerate(batched):
        updates, state = update(grads, state, batched[0])
        for index, (one, states) in enumerate(wanted):
            mine = jax.tree.map(lambda x, i=index: x[i], (updates, state.factors))
            assert helpers.worst(mine, (one[t], states[t].factors)) <= 1e-4


@pytest.mark.parametrize("alias", [so.shampoo, so.soap])
@pytest.mark.parametrize("jit_init", [False, True])
def test_one_compilation(alias, jit_init):
    """Twelve steps, several refreshes, a changing rate: traced and compiled once."""
    tx = alias(lambda count: 0.1 / (1 + count), refresh_every=3, weight_decay=0.1)
    steps = helpers.normal_steps(SHAPES, 12)
    traced = []

    @jax.jit
    def update(grads, state, params):
        traced.append(1)
        return tx.update(grads, state, params)

    state = (jax.jit(tx.init) if jit_init else tx.init)(steps[0])
    for grads in steps:
        _, state = update(grads, state, steps[0])
    assert len(traced) == 1
    assert update._cache_size() == 1


@names
def test_root_work_sits_in_one_branch_of_one_cond(name):
    params = {key: jnp.ones(shape) for key, shape in SHAPES.items()}
    tx = TRANSFORMS[name](refresh_every=4)
    equations = helpers.update_equations(tx, params)
    found = {inside[:1] for eqn, inside in equations if eqn.primitive.name == "eigh"}
    # `lax.cond` puts the branch of a false predicate first.
    assert found == {("cond[1]",)}
    outer = [e for e, inside in equations if e.primitive.name == "cond" and not inside]
    assert [eqn.invars[0].aval.shape for eqn in outer] == [()]


@names
@pytest.mark.parametrize("every, start", [(1, None), (3, None), (3, 5), (4, 6)])
def test_roots_change_at_refreshes_alone(name, every, start):
    tx = TRANSFORMS[name](refresh_every=every, start=start)
    steps = helpers.normal_steps({"w": (6, 4)}, 13)
    _, states = helpers.trace(tx, steps[0], steps)
    field = "roots" if name == "shampoo" else "bases"
    kept = [getattr(state, field) for state in (tx.init(steps[0]), *states)]

    def differ(one, other):
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return [bool(np.any(a != b)) for a, b in leaves]

    changes = [differ(kept[t - 1], kept[t]) for t in range(1, 14)]
    first = start or every
    due = [t == first or (t > first and t % every == 0) for t in range(1, 14)]
    assert changes == [[now, now] for now in due]  # both axes


# ---- metamorphic relations


@names
@pytest.mark.parametrize("graft", [None, "adam", "adagrad"])
def test_blocked_run_is_independent_runs_of_its_blocks(name, graft):
    whole = [helpers.normals(seed, 10, 7) for seed in range(6)]
    parts = [
        {f"{i}{j}": g[i : i + 4, j : j + 4] for i in (0, 4, 8) for j in (0, 4)}
        for g in whole
    ]
    make = functools.partial(
        TRANSFORMS[name], **STEADY[name], graft=graft, refresh_every=2
    )
    blocked, _ = helpers.trace(make(blocking=so.Blocking(4)), whole[0], whole)
    uncut = so.Blocking(None, None)
    single, _ = helpers.trace(make(blocking=uncut), parts[0], parts)
    for one, blocks in zip(blocked, single, strict=True):
        rows = [[blocks[f"{i}{j}"] for j in (0, 4)] for i in (0, 4, 8)]
        assert helpers.worst(one, jnp.block(rows)) <= 1e-4


@names
@pytest.mark.parametrize(
    "shape, merged, blocking",
    [
        ((2, 3, 5), (6, 5), so.Blocking(6)),
        ((2, 3, 5), (30,), so.Blocking(30, 1)),
        ((2, 3, 5), (2, 15), so.Blocking(16, 2, "trailing")),
        ((4, 1, 3), (4, 3), so.Blocking(4)),
        ((1, 1), (1,), so.Blocking(4)),
        ((), (1,), so.Blocking(4)),
    ],
    ids=str,
)
def test_merged_parameter_is_a_reshaped_one(name, shape, merged, blocking):
    steps = [helpers.normals(seed, *shape) for seed in range(5)]
    flat = [g.reshape(merged) for g in steps]
    kwargs = STEADY[name] | dict(refresh_every=2)
    got, _ = helpers.trace(
        TRANSFORMS[name](**kwargs, blocking=blocking), steps[0], steps
    )
    unmerged = so.Blocking(blocking.block_size, None)
    want, _ = helpers.trace(
        TRANSFORMS[name](**kwargs, blocking=unmerged), flat[0], flat
    )
    for one, other in zip(got, want, strict=True):
        assert helpers.worst(one.reshape(merged), other) <= 1e-6


# The grafted method of optax. RMSprop and AdaGrad without epsilon, which optax adds
# under the root.
ALONE = [
    ("adam", 0.9, 1e-3, lambda eps: optax.scale_by_adam(0.9, 0.98, eps)),
    ("adam", 0.0, 1e-3, lambda eps: optax.scale_by_adam(0.0, 0.98, eps)),
    ("rmsprop", 0.0, 0.0, lambda eps: optax.scale_by_rms(0.98, eps)),
    ("adagrad", 0.0, 0.0, lambda eps: optax.scale_by_rss(0.0, eps)),
    ("sgd", 0.9, 0.0, lambda _: optax.ema(0.9)),
    ("sgd", 0.0, 0.0, lambda _: optax.identity()),
]


@names
@pytest.mark.parametrize("graft, b1, eps, same", ALONE)
def test_before_the_start_it_is_the_grafted_method(name, graft, b1, eps, same):
    steps = helpers.normal_steps(SHAPES, 6)
    kwargs = dict(b1=b1, graft=graft, graft_b2=0.98, graft_eps=eps, refresh_every=2)
    tx = TRANSFORMS[name](**kwargs, start=5, blocking=so.Blocking(4))
    updates, _ = helpers.trace(tx, steps[0], steps)
    wanted, _ = helpers.trace(same(eps), steps[0], steps)
    for index in range(4):
        assert helpers.worst(updates[index], wanted[index]) <= 1e-5
    # From the start on the directions differ, and only the norms of blocks agree.
    for index in (4, 5):
        got, want = updates[index]["w"], wanted[index]["w"]
        assert helpers.worst(got, want) > 0.01
        for i in (0, 4):
            norms = [np.linalg.norm(x[i : i + 4]) for x in (got, want)]
            np.testing.assert_allclose(*norms, rtol=1e-5)


@names
def test_order_of_gradients_within_a_period_does_not_matter(name):
    """Sums without filter: the first refresh sees the same factors."""
    steps = helpers.normal_steps(SHAPES, 3)
    kwargs = BARE | dict(refresh_every=3, graft="adagrad")
    tx = TRANSFORMS[name](**kwargs)
    one, _ = helpers.trace(tx, steps[0], steps)
    other, _ = helpers.trace(tx, steps[0], [steps[1], steps[0], steps[2]])
    if name == "shampoo":
        assert helpers.worst(one[2], other[2]) <= 1e-3
    assert helpers.worst(one[0], other[0]) > 0.1


@names
def test_scaling_of_a_block_scales_its_direction_alone(name):
    """Without epsilon a sum-accumulated direction of order 2 is scale-free."""
    steps = helpers.normal_steps({"a": (6, 4), "b": (6, 4)}, 4)
    scaled = [g | {"b": 1024 * g["b"]} for g in steps]
    kwargs = dict(BARE, eps=0.0)
    one, _ = helpers.trace(TRANSFORMS[name](**kwargs), steps[0], steps)
    other, _ = helpers.trace(TRANSFORMS[name](**kwargs), steps[0], scaled)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a["a"], b["a"])
        assert helpers.worst(a["b"], b["b"]) <= 1e-4


@pytest.mark.parametrize("alias", [so.shampoo, so.soap])
def test_updates_are_linear_in_the_learning_rate(alias):
    steps = helpers.normal_steps(SHAPES, 5)
    kwargs = dict(refresh_every=2, weight_decay=0.1)
    one, _ = helpers.trace(alias(0.25, **kwargs), steps[0], steps)
    other, _ = helpers.trace(alias(1.0, **kwargs), steps[0], steps)
    for a, b in zip(one, other, strict=True):
        assert helpers.worst(jax.tree.map(lambda x: 4 * x, a), b) <= 1e-6


@pytest.mark.parametrize(
    "alias, direction",
    [(so.shampoo, so.scale_by_shampoo), (so.soap, so.scale_by_soap)],
)
def test_alias_is_the_direction_times_minus_the_rate(alias, direction):
    steps = helpers.normal_steps(SHAPES, 4)
    got, _ = helpers.trace(alias(0.5, refresh_every=2), steps[0], steps)
    unit, _ = helpers.trace(direction(refresh_every=2), steps[0], steps)
    for a, b in zip(got, unit, strict=True):
        assert helpers.worst(a, jax.tree.map(lambda x: -0.5 * x, b)) <= 1e-6


# ---- hyperparameters that are arrays


def test_injected_hyperparameters_can_be_changed():
    """Betas, ridge and period are read from the state at every step."""
    steps = helpers.normal_steps({"w": (6, 4)}, 3)
    injected = optax.inject_hyperparams(so.scale_by_shampoo)(
        b1=0.5, b2=0.5, refresh_every=3, relative_eps=0.5
    )
    state = injected.init(steps[0])
    changed = dict(b1=0.25, b2=0.75, refresh_every=1, relative_eps=1e-3)
    for key, value in changed.items():
        held = state.hyperparams[key]
        state.hyperparams[key] = jnp.asarray(value, held.dtype)
    wanted, _ = helpers.trace(
        so.scale_by_shampoo(0.25, 0.75, refresh_every=1, relative_eps=1e-3),
        steps[0],
        steps,
    )
    update = jax.jit(injected.update)
    for grads, want in zip(steps, wanted, strict=True):
        updates, state = update(grads, state, steps[0])
        assert helpers.worst(updates, want) <= 1e-4


# ---- absent gradients, and arguments of others


@names
def test_absent_gradient_leaves_the_state_of_its_leaf(name):
    """`w` and `v` share a stack: only the slot of `v` stands still."""
    shapes = {"w": (6, 4), "v": (6, 4), "b": (2,)}
    steps = helpers.normal_steps(shapes, 6)
    absent = [g | {"v": None} if t in (1, 3) else g for t, g in enumerate(steps)]
    tx = TRANSFORMS[name](**STEADY[name], refresh_every=2, graft="adam")
    got, states = helpers.trace(tx, steps[0], absent)
    want, full = helpers.trace(tx, steps[0], steps)
    for t in range(6):
        for key in ("w", "b"):
            assert helpers.worst(got[t][key], want[t][key]) <= 1e-4
        assert (got[t]["v"] is None) == (t in (1, 3))
    assert int(states[-1].count) == 6
    slot_v, slot_w = 0, 1  # the order of the tree's keys
    for t in (1, 3):
        before, after = (
            [
                leaf[slot_v]
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
                if "6x4" in jax.tree_util.keystr(path)
            ]
            for state in (states[t - 1], states[t])
        )
        assert len(before) >= 8  # two factors, two roots, two averages, two counters
        helpers.assert_equal(after, before)
    moved = [
        np.any(
            states[1].factors["6x4"][k][slot_w] != states[0].factors["6x4"][k][slot_w]
        )
        for k in ("0", "1")
    ]
    assert all(moved)
    assert helpers.worst(got[5]["v"], want[5]["v"]) > 1e-3
    assert helpers.total(states[-1].skipped) == helpers.total(full[-1].skipped) == 0


@pytest.mark.parametrize("alias", [so.shampoo, so.soap])
def test_alias_returns_zeros_for_absent_gradients(alias):
    params = {"w": jnp.ones((6, 4)), "b": jnp.ones(5)}
    tx = alias(0.1, weight_decay=0.1)
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(params | {"b": None}, state, params)
    np.testing.assert_array_equal(updates["b"], np.zeros(5))
    assert np.all(updates["w"] != 0)
    moved = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(moved["b"], params["b"])


@names
def test_params_are_needed_for_nothing_but_absent_leaves(name):
    grads = helpers.normal_steps(SHAPES, 1)[0]
    tx = TRANSFORMS[name]()
    want, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    got, _ = jax.jit(tx.update)(grads, tx.init(grads))
    helpers.assert_equal(got, want)


@names
def test_the_direction_keeps_the_sign_of_the_gradient(name):
    steps = helpers.normal_steps(SHAPES, 12)
    updates, _ = helpers.trace(TRANSFORMS[name](b1=0.0), steps[0], steps)
    for update, grads in zip(updates, steps, strict=True):
        for key in SHAPES:
            assert np.sum(np.asarray(update[key]) * np.asarray(grads[key])) > 0


@pytest.mark.parametrize("alias", [so.shampoo, so.soap])
def test_mask_of_the_decay(alias):
    params = {"w": jnp.ones((6, 4)), "b": jnp.ones(5)}
    zeros = helpers.zeros_like(params)
    for mask in ({"w": True, "b": False}, lambda p: {"w": True, "b": False}):
        tx = alias(0.5, weight_decay=0.25, mask=mask)
        (updates,), _ = helpers.trace(tx, params, [zeros])
        np.testing.assert_allclose(updates["w"], np.full((6, 4), -0.125))
        assert not np.any(updates["b"])
