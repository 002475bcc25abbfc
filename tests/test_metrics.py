"""The metrics in the state, against NumPy in float64, and no cost where they are off.

Factors, roots and directions themselves are held to references elsewhere.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import shampoo_optax as so
from shampoo_optax import _roots
from shampoo_optax._powers import condition_numbers

SHAPES = {"a": (3, 2, 4), "b": (5,)}  # a is merged into (6, 4)
EPSILON = float(np.finfo(np.float32).eps)
TRANSFORMS = {
    "shampoo": so.scale_by_shampoo,
    "kl_shampoo": functools.partial(so.scale_by_kl_shampoo, root=so.Eigendecomposed()),
    "soap": so.scale_by_soap,
    "kl_soap": functools.partial(so.scale_by_kl_soap, form="paper", graft="sgd"),
}
STACKS = ("6x4", "5")
ALIASES = [so.shampoo, so.soap, so.kl_shampoo, so.kl_soap]


def run(tx, steps):
    """The directions and states of all steps."""
    params = helpers.zeros_like(steps[0])
    return helpers.trace(tx, params, steps, jit=helpers.quick_jit)


@functools.lru_cache
def run_of(name):
    """The gradients, directions and states of seven steps with a period of three."""
    steps = helpers.normal_steps(SHAPES, 7)
    return steps, *run(TRANSFORMS[name](refresh_every=3, metrics=True), steps)


def flat(tree):
    return {name: np.asarray(x, np.float64).ravel() for name, x in tree.items()}


def by_parameter(stacks):
    """The metric of each parameter of `SHAPES`, one block each."""
    return {key: float(stacks[name][0]) for key, name in zip("ab", STACKS, strict=True)}


def numbers(stacks):
    return {name: array.item() for name, array in stacks.items()}


def condition(matrix):
    """In float64; of float32 factors no more than 1 / eps can be told."""
    values = np.linalg.eigvalsh(np.asarray(matrix, np.float64))
    return min(values[-1] / max(values[0], 1e-300), 1 / EPSILON)


def conditions(factors):
    """The condition numbers of `{stack: {axis: [n, d, d]}}`."""
    return jax.tree.map(lambda x: np.stack([condition(m) for m in x]), factors)


# ---- at a refresh


@pytest.mark.parametrize("name", TRANSFORMS)
def test_conditions_are_those_of_the_factors_of_the_last_refresh(name):
    _, _, states = run_of(name)
    for state, at in zip(states, [None] * 2 + [2] * 3 + [5] * 2, strict=True):
        got = state.metrics["conditions"]
        if at is None:
            assert not any(np.any(x) for x in jax.tree.leaves(got))
            continue
        want = conditions(states[at].factors)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-3), got, want
        )
        refreshed = jax.tree.leaves(state.metrics["refreshed"])
        assert all(np.all(step == at + 1) for step in refreshed)


def test_conditions_of_known_spectra_and_what_does_not_move():
    """A diagonal, zeros beside it, rank 1, which leaves rounding, and an Inf."""
    diagonal = np.diag([3.0, 2.0, 1.0, 0.5])
    outer = np.outer([1.0, 2.0, 3.0], [1.0, -1.0])
    grads = [diagonal, np.zeros((4, 4)), outer, np.full(5, np.inf)]
    tx = so.scale_by_shampoo(refresh_every=1, metrics=True)
    _, (state,) = run(tx, [list(map(jnp.float32, grads))])
    got = state.metrics["conditions"]
    for axis in "01":
        np.testing.assert_allclose(got["4x4"][axis], [36.0, 0.0], rtol=1e-5)
    assert 1e6 <= got["3x2"]["0"].item() <= 1 / EPSILON
    assert got["5"]["0"].item() == 0
    np.testing.assert_array_equal(state.metrics["refreshed"]["4x4"], [1, 0])
    for metric in ("rms", "cosines", "grafting"):
        first, second = state.metrics[metric]["4x4"]
        assert second == state.metrics[metric]["5"].item() == 0 < first


@pytest.mark.parametrize(
    "root", [so.CoupledNewton(), so.HigherOrderNewton(), so.NewtonDB()]
)
def test_iterations_estimate_the_condition_with_the_ridge(root):
    """By power iterations, so from below; the ridge is in units of a row sum."""
    rng, ridge = np.random.default_rng(0), 1e-3
    factors = rng.standard_normal((3, 6, 4))
    factors[2] *= [1, 1e-1, 1e-2, 1e-4]
    factors = np.float64(np.float32(factors.mT @ factors))
    largest = np.abs(factors).sum(axis=2).max(axis=1)
    ridged = factors + ridge * largest[:, None, None] * np.eye(4)
    want = np.array([condition(matrix) for matrix in ridged])

    @helpers.quick_jit
    def estimate(batch):
        powers = np.full(3, 1 / 4)
        return _roots.inverse_roots(batch, powers, root, 0.0, ridge, measured=True)[1]

    got = np.asarray(estimate(jnp.float32(factors)))
    assert np.all(got <= 1.001 * want) and np.all(got >= 0.9 * want)
    assert want.max() > 50 * want.min()


@pytest.mark.parametrize("root", [so.Eigh(), so.Eigendecomposed()])
def test_diagonal_factors_have_condition_numbers(root):
    tx = so.scale_by_shampoo(
        refresh_every=1,
        root=root,
        axes=so.Axes(diagonal_above=4),
        blocking=so.Blocking(block_size=4),
        metrics=True,
    )
    (grads,) = helpers.normal_steps({"a": (7, 3)}, 1)
    _, (state,) = run(tx, [grads])
    (found,) = state.metrics["conditions"].values()
    gradient = np.asarray(grads["a"], np.float64)
    squares = np.sum(gradient**2, axis=1)
    np.testing.assert_allclose(found["0"], squares.max() / squares.min(), rtol=1e-4)
    np.testing.assert_allclose(found["1"], condition(gradient.T @ gradient), rtol=1e-3)


def test_blocks_keep_what_belongs_to_the_roots_in_use():
    """`a` has a NaN at the second refresh, `b` no gradient but at the second one."""
    steps = helpers.normal_steps({"a": (4, 3), "b": (5,)}, 3)
    steps[1]["a"] = steps[1]["a"].at[0, 0].set(jnp.nan)
    for step in (steps[0], steps[2]):
        step["b"] = jnp.zeros(5)
    tx = so.scale_by_shampoo(refresh_every=1, b2=1.0, graft=None, metrics=True)
    _, states = run(tx, steps)
    refreshed = [numbers(state.metrics["refreshed"]) for state in states]
    # The sum of b is not 0 at the third refresh, whose gradient is.
    assert refreshed == [{"4x3": 1, "5": 0}, {"4x3": 1, "5": 2}, {"4x3": 3, "5": 3}]
    found = [state.metrics["conditions"] for state in states]
    helpers.assert_equal(found[1]["4x3"], found[0]["4x3"])
    assert found[0]["5"]["0"] == 0
    assert np.any(found[2]["4x3"]["0"] != found[1]["4x3"]["0"])


def test_a_refused_root_is_no_refresh(monkeypatch):
    genuine = _roots.inverse_roots

    def refused(factors, *args, **kwargs):
        roots, *conditions, residuals, turns = genuine(factors, *args, **kwargs)
        large = jnp.trace(factors, axis1=1, axis2=2) > 2.5
        return roots, *conditions, jnp.where(large, 1.0, residuals), turns

    monkeypatch.setattr(_roots, "inverse_roots", refused)
    unit = {"a": jnp.eye(4, 3) / jnp.sqrt(3), "b": jnp.ones(5) / jnp.sqrt(500)}
    tx = so.scale_by_shampoo(refresh_every=1, b2=1.0, graft=None, metrics=True)
    _, states = run(tx, [unit] * 3)
    state = states[-1]
    assert numbers(state.failures) == {"4x3": 1, "5": 0}
    assert numbers(state.metrics["refreshed"]) == {"4x3": 2, "5": 3}


def test_condition_numbers_of_edges():
    """Zeros, a value that rounding has made negative, a ridge, and padding."""
    values = jnp.array([[0, 0, 0], [-1e-9, 1, 2], [3, 5, 4], [0, 2, 6]], jnp.float32)
    added = jnp.array([0, 0, 1, 0], jnp.float32)
    padding = jnp.array([[False] * 3] * 3 + [[True, False, False]])
    got = condition_numbers(values, added, padding)
    np.testing.assert_allclose(got, [1, 1 / EPSILON, 2, 3], rtol=1e-6)


# ---- at every step


@pytest.mark.parametrize("name", TRANSFORMS)
def test_rms_and_cosines_are_those_of_update_and_gradient(name):
    for grads, update, state in zip(*run_of(name), strict=True):
        update, grads = flat(update), flat(grads)
        rms, cosines = (by_parameter(state.metrics[m]) for m in ("rms", "cosines"))
        for key, direction in update.items():
            norm, other = map(np.linalg.norm, (direction, grads[key]))
            cosine = direction @ grads[key] / (norm * other)
            np.testing.assert_allclose(rms[key], norm / direction.size**0.5, rtol=1e-5)
            np.testing.assert_allclose(cosines[key], cosine, rtol=1e-5, atol=1e-6)


def test_grafting_ratios_are_those_of_grafted_to_plain_updates():
    """From the start on; a plain update is one without grafting, all else equal."""
    steps, grafted, states = run_of("shampoo")
    tx = so.scale_by_shampoo(refresh_every=3, graft=None, metrics=True)
    plain, others = run(tx, steps)
    assert not any("grafting" in state.metrics for state in others)
    for one, other, state in zip(grafted[2:], plain[2:], states[2:], strict=True):
        one, other, ratios = flat(one), flat(other), state.metrics["grafting"]
        for key, ratio in by_parameter(ratios).items():
            want = np.linalg.norm(one[key]) / np.linalg.norm(other[key])
            np.testing.assert_allclose(ratio, want, rtol=1e-4)


# ---- anywhere


def test_devices_have_the_metrics_of_one():
    """In padded slots too: all three blocks share a stack on eight devices."""
    steps = helpers.normal_steps({"b": (5, 3), "d": (9, 7), "e": (6, 4)}, 4)
    steps[3]["d"] = jnp.zeros((9, 7))
    params, found = helpers.zeros_like(steps[0]), []
    for placement in (None, helpers.placement_of(8)):
        tx = so.scale_by_shampoo(refresh_every=2, metrics=True, placement=placement)
        _, states = run(tx, steps)
        portable = so.to_portable(tx, states[-1], params)
        found.append({k: v for k, v in portable.items() if ".metrics." in k})
    one, eight = found
    assert one.keys() == eight.keys()
    found = [metric for key, metric in one.items() if ".conditions/" in key]
    assert len(found) == 6 and np.max(found) < 1e4
    for key, want in one.items():
        np.testing.assert_allclose(eight[key], want, rtol=1e-4, atol=1e-6)
    still = [key for key, metric in one.items() if not np.any(metric)]
    assert still == [".metrics.cosines/['d']/0,0"]


def test_portable_states_keep_them_and_go_on_without_them():
    params = {"a": jnp.zeros((6, 4)), "b": jnp.zeros(5)}
    on, off = (so.shampoo(0.1, refresh_every=1, metrics=x) for x in (True, False))
    _, (state,) = run(on, helpers.normal_steps({"a": (6, 4), "b": (5,)}, 1))
    portable = so.to_portable(on, state, params)
    helpers.assert_equal(so.from_portable(on, portable, params), state)
    plain = so.from_portable(off, portable, params)
    helpers.assert_equal(plain[0], state[0]._replace(metrics={}))
    again = so.from_portable(on, so.to_portable(off, plain, params), params)
    helpers.assert_equal(again[0].factors, state[0].factors)
    helpers.assert_equal(again[0].metrics, helpers.zeros_like(state[0].metrics))


# ---- the switch


def is_metric(path):
    return any(getattr(key, "name", None) == "metrics" for key in path)


@pytest.mark.parametrize("make", ALIASES)
def test_no_cost_where_they_are_off(make):
    """With what only metrics need left out, the step with them is the one without."""
    params = helpers.structs(SHAPES)
    texts = []
    for metrics in (False, True):
        tx = make(0.1, metrics=metrics)
        state = jax.eval_shape(tx.init, params)
        closed, shapes = jax.make_jaxpr(tx.update, return_shape=True)(
            params, state, params
        )
        paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(shapes)]
        assert any(map(is_metric, paths)) == metrics
        wanted = [not is_metric(path) for path in paths]
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, wanted)
        inputs = jax.tree_util.tree_leaves_with_path((params, state, params))
        assert not any(
            u and is_metric(p) for u, (p, _) in zip(used, inputs, strict=True)
        )
        texts.append(str(jaxpr))
    assert texts[0] == texts[1]


def test_no_leaf_where_they_are_off():
    for make in ALIASES:
        state = make(0.1).init({"a": jnp.zeros((6, 4))})
        assert helpers.field(state, "metrics") == {}


@pytest.mark.parametrize("value", [None, 1.5, "yes"])
def test_the_switch_is_a_boolean(value):
    for make in ALIASES:
        with pytest.raises(ValueError, match=f"`metrics` .*{value}"):
            make(0.1, metrics=value)
