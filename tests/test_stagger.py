"""Staggered refreshes (C25): the work of a step, and what follows from the phases."""

import functools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_periods import BASES, FACTORED, KL, ROOTS, wanted

import shampoo_optax as so
from benchmarks.shapes import MODELS
from shampoo_optax import _roots, _turns

PERIOD = 3
# Five slots in one stack, which leaves two over, and one in another.
SHAPES = {**{f"w{k}": (4, 3) for k in range(5)}, "b": (2,)}
STEPS = helpers.normal_steps(SHAPES, 10)
STAGGERED = dict(refresh_every=PERIOD, stagger=True, metrics=True)
TRANSFORMS = {
    "shampoo": functools.partial(
        so.scale_by_shampoo, **ROOTS, start=5, storage=so.Storage(packed=True)
    ),
    "soap": functools.partial(so.scale_by_soap, **BASES),
    "kl_soap": functools.partial(so.scale_by_kl_soap, **KL),
}
STARTS = dict(shampoo=5, soap=3, kl_soap=3)


def columns(steps):
    """The steps in float64 where there is that."""
    return [{n: jnp.asarray(np.asarray(g, float)) for n, g in s.items()} for s in steps]


@functools.partial(helpers.quick_jit, static_argnums=0)
def _run(tx, stacked):
    params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), stacked)

    def step(state, grads):
        update, state = tx.update(grads, state, params)
        return state, (update, helpers.field(state, "metrics"))

    return jax.lax.scan(step, tx.init(params), stacked)[1]


def run(tx, steps):
    """The directions, and the metrics of all steps, in one compiled scan."""
    updates, metrics = _run(tx, jax.tree.map(lambda *x: jnp.stack(x), *steps))
    each = [jax.tree.map(lambda x, t=t: x[t], updates) for t in range(len(steps))]
    return each, metrics


def of_stack(metrics, block):
    """The steps of refreshes `[t, n]` of the one stack of such blocks."""
    found = metrics["refreshed"].items()
    (refreshed,) = (x for name, x in found if re.split("[@_]", name)[0] == block)
    return refreshed


def refreshes(refreshed):
    """The steps at which each slot was refreshed, by its metric `[t, n]`."""
    return [set(np.unique(column).tolist()) - {0} for column in np.asarray(refreshed).T]


# ---- work


def work_of_phases(params, block_size, owners):
    """What each step of a period of ten does on one device, d^3 for every factor."""
    tx = so.scale_by_shampoo(blocking=so.Blocking(block_size=block_size))
    stacks = helpers.plan_of(tx, params, owners).share
    costs = {name: sum(d**3 for d in stack.block) for name, stack in stacks.items()}
    sizes = {name: stack.size for name, stack in stacks.items()}
    phases, of_side, work = _turns.deal_phases(sizes, costs, 10), {}, np.zeros(10)
    for name, stack in stacks.items():
        for side in stack.block:
            of_side.setdefault(side, []).append(phases[name])
    for side, members in of_side.items():
        counts = np.bincount(np.concatenate(members), minlength=10)
        width = _turns.at_once(counts)
        work += -(-counts // width) * width * side**3
    whole = sum(sizes[name] * costs[name] for name in sizes)
    assert whole <= np.sum(work) <= 1.1 * whole
    return work


@pytest.mark.parametrize("owners", [1, 8])
@pytest.mark.parametrize("model", ["ResNet-50", "ViT-S/16", "GPT-2 small"])
def test_steps_of_models_are_alike(model, owners):
    work = work_of_phases(helpers.structs(MODELS[model]), 256, owners)
    assert np.max(work) <= 1.3 * np.mean(work)


def test_the_largest_step_does_little_more_than_the_mean(monkeypatch):
    """As counted while it runs; all together one step does all."""
    genuine, done = _roots.checked_eigh, []

    def counted(matrices, *rest):
        size = len(matrices) * matrices.shape[-1] ** 3
        jax.debug.callback(lambda: done.append(size))
        return genuine(matrices, *rest)

    monkeypatch.setattr(_roots, "checked_eigh", counted)
    shapes = {"a": (9, 8), "b": (25, 8), "c": (8, 4)}
    (grads,) = helpers.normal_steps(shapes, 1)
    works = {}
    for stagger in (True, False):
        tx = so.scale_by_shampoo(
            refresh_every=2, stagger=stagger, blocking=so.Blocking(block_size=8)
        )
        update, state = helpers.quick_jit(tx.update), tx.init(grads)
        for _ in range(6):
            _, state = jax.block_until_ready(update(grads, state))
            jax.effects_barrier()
            works.setdefault(stagger, []).append(sum(done))
            done.clear()
    apart, together = np.array(works[True]), np.array(works[False])
    assert np.max(apart) <= 1.3 * np.mean(apart)
    assert np.sum(together) <= np.sum(apart) <= 1.1 * np.sum(together)
    assert np.all(apart == np.tile(apart[:2], 3)) and np.all(together[::2] == 0)


@pytest.mark.parametrize("make", FACTORED)
def test_the_program_is_no_larger(make):
    """One decomposition for each side, however many slots and steps there are."""

    def decompositions(**kwargs):
        found = helpers.update_equations(make(refresh_every=4, **kwargs), STEPS[0])
        return sum(eqn.primitive.name == "eigh" for eqn, _ in found)

    assert decompositions(stagger=True) == decompositions() == 3


@pytest.mark.parametrize(
    "counts, width",
    [
        ([1, 0, 1], 1),
        ([2, 2, 2], 2),
        ([10, 10, 9], 10),
        ([4, 3, 3], 1),  # of 4, two would do nothing
        ([10] * 9 + [13], 2),  # of 10, the last step would do 20
    ],
)
def test_so_many_are_done_at_once(counts, width):
    assert _turns.at_once(np.array(counts)) == width


# ---- trajectories


@pytest.mark.parametrize("name", TRANSFORMS)
def test_follows_the_oracle_with_its_phases(x64, name):
    """First turns are in the period that ends with the start."""
    got, metrics = run(TRANSFORMS[name](**STAGGERED), columns(STEPS))
    start, due = STARTS[name], {}
    for stack, keys in {"4x3": [*SHAPES][:5], "2": ["b"]}.items():
        due |= dict(zip(keys, refreshes(of_stack(metrics, stack)), strict=True))
    first = start - PERIOD
    for steps in due.values():
        (phase,) = {t % PERIOD for t in steps}
        assert steps == {t for t in range(first + 1, 11) if t % PERIOD == phase}
    assert len({min(steps) for steps in due.values()}) == PERIOD
    for key, steps in due.items():
        mine = [{"w": g[key]} for g in STEPS]
        want, wrong = (
            wanted(name, start, at, steps=mine)
            for at in (steps, {t + 1 for t in steps})
        )
        alone = [{"w": update[key]} for update in got]
        assert helpers.worst_of_steps(alone, want) <= 1e-8
        assert helpers.worst_of_steps(wrong, want) > 1e-4


def test_equals_transforms_of_their_own(x64):
    """One for each phase, whose schedule says when it is due."""
    keys = {"w0": 0, "w1": 1, "b": 2}
    steps = columns([{key: g[key] for key in keys} for g in STEPS[:8]])
    make = functools.partial(so.scale_by_kl_shampoo, graft=None, relative_eps=1e-2)

    def alone(phase):
        def period(taken):
            now = (taken + 1 - phase) % PERIOD == 0
            return jnp.where(now, taken + 1, taken + 2)

        return make(start=phase or PERIOD, refresh_every=period)

    apart = helpers.partition({phase: alone(phase) for phase in range(3)}, keys)
    got, _ = run(make(**STAGGERED), steps)
    want, _ = helpers.scanned(apart, steps)
    assert helpers.worst_of_steps(got, want) <= 1e-9


def test_eight_devices_follow_the_oracle_with_their_phases():
    """Every device deals its own slots, padded ones among them."""
    shapes = {f"w{k:02}": (4, 3) if k < 20 else (3, 3) for k in range(23)}
    tx = so.scale_by_shampoo(
        **ROOTS,
        refresh_every=2,
        stagger=True,
        metrics=True,
        placement=helpers.placement_of(8),
    )
    steps = helpers.normal_steps(shapes, 6)
    plan = helpers.plan_of(tx, steps[0])
    got, metrics = run(tx, helpers.replicate(steps, helpers.mesh_of(8)))
    found = {name: refreshes(x) for name, x in metrics["refreshed"].items()}
    columns, keys = {}, list(shapes)
    phases = {name: -np.ones(len(x), int) for name, x in found.items()}
    for region in plan.regions:
        (piece,) = region.pieces
        key, due = keys[region.leaf], found[piece.stack][piece.slot]
        assert due in ({1, 3, 5}, {2, 4, 6})
        phases[piece.stack][piece.slot] = min(due) % 2
        columns[key] = wanted("shampoo", 2, due, steps=[{"w": g[key]} for g in steps])
    want = [{key: columns[key][t]["w"] for key in keys} for t in range(6)]
    assert helpers.worst_of_steps(got, want) <= 1e-4
    shares = np.concatenate([x.reshape(8, -1) for x in phases.values()], axis=1)
    counts = [np.sum(shares == phase, axis=1) for phase in (0, 1)]
    assert np.all(counts[0] >= 1) and np.all(counts[1] >= 1)
    assert sum(len(x) for x in phases.values()) > len(keys)  # some are padding


FORMS = {
    "bfloat16, packed": dict(
        storage=so.Storage(factors="bfloat16", roots="bfloat16", packed=True)
    ),
    "iteration": dict(root=so.CoupledNewton(), relative_eps=1e-2),
    "bases": dict(root=so.Eigendecomposed(so.QRBasis())),
    "diagonal": dict(
        axes=so.Axes(diagonal_above=4), blocking=so.Blocking(block_size=4)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_block_has_its_turn_when_all_would(form):
    """A single one has phase 0; its state is that of the others in every form."""
    steps = helpers.normal_steps({"w": (6, 3)}, 6)
    kwargs = dict(refresh_every=2, metrics=True, **FORMS[form])
    apart, together = (
        helpers.scanned(so.scale_by_shampoo(stagger=stagger, **kwargs), steps)
        for stagger in (True, False)
    )
    assert jax.tree.leaves(together[1].metrics["refreshed"])[0][0] == 6
    assert helpers.worst_of_steps(apart[0], together[0]) <= 1e-5
    floats = (
        jax.tree.map(lambda x: np.asarray(x, float), state._asdict())
        for _, state in (apart, together)
    )
    for got, want in zip(*map(jax.tree.leaves, floats), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


# ---- guards


def test_a_block_waits_for_its_next_turn(monkeypatch):
    """Where it has no gradient, where that is NaN, and where its roots are refused."""
    genuine = _roots.inverse_roots

    def refused(factors, *args, **kwargs):
        *found, residuals, turns = genuine(factors, *args, **kwargs)
        large = jnp.trace(factors, axis1=1, axis2=2) > 1e5
        return *found, jnp.where(large, 1.0, residuals), turns

    monkeypatch.setattr(_roots, "inverse_roots", refused)
    steps = helpers.normal_steps({"a": (3, 2), "b": (3, 2), "c": (3, 2)}, 6)
    phases = _turns.deal_phases({"3x2": 3}, {"3x2": 1.0}, 2)["3x2"]
    assert phases.tolist() == [0, 1, 0]  # turns at 2, 4, 6; 1, 3, 5; 2, 4, 6
    steps[1]["a"] = steps[1]["a"].at[0, 0].set(jnp.nan)
    steps[2]["b"] = 1e3 * steps[2]["b"]
    steps[3]["c"] = None
    tx = so.scale_by_shampoo(refresh_every=2, b2=0.1, stagger=True, metrics=True)
    params = helpers.zeros_like(steps[0])
    _, states = helpers.trace(tx, params, steps, jit=helpers.quick_jit)
    last = [state.metrics["refreshed"]["3x2"].tolist() for state in states]
    assert last[:3] == [[0, 1, 0], [0, 1, 2], [0, 1, 2]]
    assert last[3:] == [[4, 1, 2], [4, 5, 2], [6, 5, 6]]
    assert states[-1].failures["3x2"].tolist() == [0, 1, 0]
    for before, after in zip(states, states[1:], strict=False):
        moved = np.any(before.roots["3x2"]["0"] != after.roots["3x2"]["0"], (1, 2))
        ages = [s.metrics["refreshed"]["3x2"] for s in (before, after)]
        assert np.array_equal(moved, ages[0] != ages[1])


def test_first_turns_wait_for_statistics():
    tx = so.scale_by_shampoo(refresh_every=3, statistics_every=2, stagger=True)
    _, states = helpers.trace(tx, STEPS[0], STEPS[:5], jit=helpers.quick_jit)
    refreshed = [
        np.any(state.roots["4x3"]["0"] != np.eye(4)[None], (1, 2)) for state in states
    ]
    assert not np.any(refreshed[0]) and np.all(refreshed[3])
    assert np.sum(refreshed[1]) < np.sum(refreshed[2]) < 5


@pytest.mark.parametrize(
    "kwargs, name, value",
    [
        (dict(stagger="yes"), "stagger", "'yes'"),
        (dict(refresh_every=lambda t: 5), "refresh_every", "<function"),
        (dict(refresh_every=np.float32(4)), "refresh_every", r"np.float32\(4.0\)"),
        (dict(refresh_every=jnp.int32(4)), "refresh_every", "Array"),
        (dict(refresh_every=4, statistics_every=3, start=5), "start", "5"),
        (dict(refresh_every=4, start=3), "start", "3"),
    ],
)
@pytest.mark.parametrize("make", [*FACTORED, functools.partial(so.soap, 0.1)])
def test_errors(make, kwargs, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must.*got {value}"):
        make(**dict(stagger=True) | kwargs)


def test_hyperparameters_may_be_injected_but_the_period():
    make = optax.inject_hyperparams(so.shampoo, static_args=("refresh_every",))
    tx = make(0.1, refresh_every=2, stagger=True)
    steps = [{"w": g["w0"]} for g in STEPS[:3]]
    got, _ = helpers.scanned(tx, steps)
    want, _ = helpers.scanned(so.shampoo(0.1, refresh_every=2, stagger=True), steps)
    assert helpers.worst_of_steps(got, want) <= 1e-5
    with pytest.raises(ValueError, match="`refresh_every` must.*`static_args`"):
        optax.inject_hyperparams(so.shampoo)(0.1, stagger=True).init(steps[0])


def test_described_as_if_all_were_refreshed_together():
    apart, together = (
        so.describe(STEPS[0], so.scale_by_soap(stagger=stagger)).parts[0]
        for stagger in (True, False)
    )
    assert apart == together
