"""Row-wise AdaGrad against dense NumPy in float64."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so

SHAPES = {"table": (7, 5), "kernel": (3, 2, 4), "vector": (6,), "scalar": ()}


def row_wise(gradients, eps, initial):
    """The directions of one parameter, and its last accumulator."""
    rows = gradients[0].shape[:1]
    sums, directions = np.full(rows, initial, float), []
    for gradient in gradients:
        flat = np.asarray(gradient, np.float64).reshape(*rows, -1)
        square = (flat**2).mean(axis=-1)
        sums = sums + np.where(np.isfinite(square), square, 0)
        root = np.sqrt(sums)[..., None] + eps
        scaled = np.where(np.isfinite(square)[..., None], flat / root, 0)
        directions.append(scaled.reshape(gradient.shape))
    return directions, sums


def assert_is_row_wise(steps, updates, state, tolerance, eps=1e-10, initial=0.0):
    for name in steps[0]:
        wanted, sums = row_wise([step[name] for step in steps], eps, initial)
        got = [update[name] for update in updates]
        assert helpers.worst_of_steps(got, wanted) <= tolerance
        assert helpers.worst(state.accumulators[name], sums) <= tolerance


@pytest.mark.parametrize("numbers", [{}, dict(eps=0.5, initial=2.0)], ids=str)
def test_against_dense_numpy(numbers):
    steps = helpers.normal_steps(SHAPES, 5)
    updates, state = helpers.scanned(so.scale_by_row_wise_adagrad(**numbers), steps)
    assert_is_row_wise(steps, updates, state, 1e-6, **numbers)


def test_in_float64(x64):
    steps = [
        {key: jnp.asarray(g, jnp.float64) * 1e3 for key, g in step.items()}
        for step in helpers.normal_steps(SHAPES, 3)
    ]
    updates, state = helpers.scanned(so.scale_by_row_wise_adagrad(), steps)
    assert_is_row_wise(steps, updates, state, 1e-14)


def test_vectors_and_scalars_have_the_adagrad_of_optax():
    steps = helpers.normal_steps({"vector": (6,), "scalar": ()}, 4)
    ours = so.scale_by_row_wise_adagrad(eps=0.0)
    theirs = optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0)
    (got, _), (want, _) = (helpers.scanned(tx, steps) for tx in (ours, theirs))
    assert helpers.worst_of_steps(got, want) <= 1e-6


def test_a_table_has_one_number_for_each_row():
    table = jax.ShapeDtypeStruct((2_000_000, 128), jnp.bfloat16)
    state = jax.eval_shape(so.scale_by_row_wise_adagrad().init, {"table": table})
    assert state.accumulators["table"].shape == (2_000_000,)
    assert state.accumulators["table"].dtype == jnp.float32


@pytest.mark.parametrize("eps", [0.0, 1e-10])
def test_zero_first(eps):
    """C1: and rows that are never looked up do not move."""
    steps = helpers.normal_steps({"table": (7, 5)}, 4)
    steps = [helpers.zeros_like(step) for step in steps[:3]] + [
        {"table": steps[3]["table"].at[2:5].set(0)}
    ]
    updates, state = helpers.scanned(so.scale_by_row_wise_adagrad(eps), steps)
    for update in updates[:3]:
        assert not np.any(update["table"])
    helpers.assert_finite((updates, state))
    moved = np.any(updates[3]["table"], axis=1)
    assert moved.tolist() == [True, True, False, False, False, True, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_bad_row_is_left(bad):
    """The others are, bit for bit, those of a run without it."""
    steps = helpers.normal_steps({"table": (4, 3), "vector": (4,)}, 4)
    spoilt = list(steps)
    spoilt[2] = {
        "table": steps[2]["table"].at[1, 2].set(bad),
        "vector": steps[2]["vector"].at[1].set(bad),
    }
    tx = so.scale_by_row_wise_adagrad()
    (good, kept), (got, state) = (helpers.scanned(tx, run) for run in (steps, spoilt))
    others = np.array([0, 2, 3])
    helpers.assert_finite((got, state))
    for name in steps[0]:
        assert not np.any(got[2][name][1])
        for t in range(4):
            np.testing.assert_array_equal(got[t][name][others], good[t][name][others])
        held, whole = (s.accumulators[name] for s in (state, kept))
        np.testing.assert_array_equal(held[others], whole[others])
        left = [step[name] for t, step in enumerate(steps) if t != 2]
        assert helpers.worst(held[1], row_wise(left, 0.0, 0.0)[1][1]) <= 1e-6


def test_a_full_accumulator_stays_finite():
    tx = so.scale_by_row_wise_adagrad(initial=3e38)
    gradient = jnp.full((2, 1), 1.5e19)  # its square alone is finite
    updates, state = tx.update(gradient, tx.init(gradient))
    np.testing.assert_allclose(updates, 1.5e19 / np.sqrt(3e38), rtol=1e-6)
    np.testing.assert_allclose(state.accumulators, 3e38, rtol=1e-6)


DTYPES = [
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.bfloat16),
    (jnp.float16, jnp.float16),
]


def test_dtypes():
    """C21: all pairs at once, each step in a `cond` that could skip it."""
    base = helpers.normals(0, 7, 5)
    params = {str(k): base.astype(p) for k, (p, _) in enumerate(DTYPES)}
    grads = {str(k): base.astype(g) for k, (_, g) in enumerate(DTYPES)}
    tx = so.scale_by_row_wise_adagrad()

    @helpers.quick_jit
    def step(pred, state):
        def skip(state):
            return helpers.zeros_like(grads), state

        return jax.lax.cond(pred, lambda s: tx.update(grads, s, params), skip, state)

    state = tx.init(params)
    for pred in (True, False, True):
        updates, state = step(pred, state)
    for name, gradient in grads.items():
        assert updates[name].dtype == gradient.dtype
        assert state.accumulators[name].dtype == jnp.float32
        assert not state.accumulators[name].aval.weak_type
        wanted, sums = row_wise(2 * [gradient], 1e-10, 0.0)
        error = float(jnp.finfo(gradient.dtype).eps)
        assert helpers.worst(updates[name], wanted[-1]) <= error
        assert helpers.worst(state.accumulators[name], sums) <= 1e-6


def test_absent_and_empty():
    params = {"a": jnp.ones((4, 3)), "b": jnp.ones((4, 3)), "c": jnp.ones((0, 3))}
    tx = so.scale_by_row_wise_adagrad(initial=1.0)
    state = tx.init(params | {"nothing": None})
    assert all(leaf.size for leaf in jax.tree.leaves(state))
    grads = params | {"b": None, "nothing": None}
    updates, after = helpers.quick_jit(tx.update)(grads, state)
    assert updates["b"] is updates["nothing"] is None
    assert updates["c"].shape == (0, 3)
    np.testing.assert_allclose(updates["a"], 2**-0.5, rtol=1e-6)
    np.testing.assert_array_equal(after.accumulators["b"], np.ones(4))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_rows_may_be_divided_over_devices():
    """Directions and accumulators stay where the rows are."""
    steps = helpers.normal_steps({"table": (16, 3)}, 1)
    tx = so.scale_by_row_wise_adagrad()
    want, _ = tx.update(steps[0], tx.init(steps[0]))
    for kind in ("Auto", "Explicit"):
        mesh = helpers.mesh_of(8, kind=kind)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        gradient = jax.device_put(steps[0], rows)
        state = jax.device_put(tx.init(steps[0]), rows)
        update = jax.jit(tx.update)
        got, state = update(gradient, state)
        assert got["table"].sharding.is_equivalent_to(rows, 2)
        assert state.accumulators["table"].sharding.is_equivalent_to(rows, 1)
        assert helpers.worst(jax.device_get(got), want) <= 1e-6
        assert "all-" not in update.lower(gradient, state).compile().as_text()


@pytest.mark.parametrize("name", ["eps", "initial"])
@pytest.mark.parametrize("value", [-0.5, float("nan"), None, "a"])
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a .* got {value!r}"):
        so.scale_by_row_wise_adagrad(**{name: value})
