"""Schedules for the period of refreshes, and statistics on fewer steps."""

import functools

import helpers
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import soap_oracle

import shampoo_optax as so
from shampoo_optax._config import Options
from shampoo_optax._periods import period_at

SHAPES = {"w": (4, 3), "b": (2,)}
STEPS = [
    {name: np.asarray(g, np.float64) for name, g in step.items()}
    for step in helpers.normal_steps(SHAPES, 12)
]
COMMON = dict(b1=0.9, b2=0.9, graft_b2=0.95, graft_eps=1e-3)
ROOTS = dict(COMMON, eps=0.0, relative_eps=1e-2, graft="adam")
BASES = dict(COMMON, eps=1e-3, graft=None)
KL = dict(BASES, relative_eps=1e-2, form="paper")
TRANSFORMS = {
    "shampoo": functools.partial(so.scale_by_shampoo, **ROOTS),
    "soap": functools.partial(so.scale_by_soap, **BASES),
    "kl_soap": functools.partial(so.scale_by_kl_soap, **KL),
}
FACTORED = [so.scale_by_shampoo, so.scale_by_soap]
FACTORED += [so.scale_by_kl_shampoo, so.scale_by_kl_soap]


def wanted(name, start, due=None, seen=None, steps=STEPS):
    """The directions by the oracle, with refreshes and statistics at these steps."""
    when = dict(every=1, start=start, due=due, seen=seen, b3=0.9)
    shapes = {key: np.shape(g) for key, g in steps[0].items()}
    if name == "shampoo":
        rest = dict(correct=True, exponents={}, size=None, target=2, leading=True)
        oracle_of = functools.partial(oracle.shampoo, **ROOTS, **rest)
        columns = {
            key: oracle_of(shape, [g[key] for g in steps], **when)
            for key, shape in shapes.items()
        }
    else:
        kl = name == "kl_soap"
        rest = KL if kl else dict(BASES, relative_eps=0.0, form="official")
        rest = dict(rest, kl=kl, ignored=(), power=0.5, drop=False)
        columns = {
            key: soap_oracle.soap(
                [np.asarray(g[key], np.float64) for g in steps], **rest, **when
            )
            for key in shapes
        }
    return [{key: columns[key][t] for key in shapes} for t in range(len(steps))]


def directions(tx):
    """In one compiled scan."""
    return helpers.scanned(
        tx, [{n: jnp.asarray(g) for n, g in s.items()} for s in STEPS]
    )[0]


# ---- schedules

# The periods 1, 1, 1, then 2 for three steps, then 5.
THREE = optax.piecewise_constant_schedule(1, {3: 2, 6: 2.5})
DUE = {1, 2, 3, 4, 6, 10}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_schedule_says_which_steps_refresh(x64, name):
    got = directions(TRANSFORMS[name](refresh_every=THREE))
    assert helpers.worst_of_steps(got, wanted(name, 1, DUE)) <= 1e-9
    for wrong in (DUE - {10}, DUE | {8}, DUE | {5}):
        assert helpers.worst_of_steps(wanted(name, 1, wrong), got) > 1e-3


def test_the_first_period_is_the_start(x64):
    """Until then grafting alone moves, also where the period shrinks afterwards."""
    tx = TRANSFORMS["shampoo"](refresh_every=lambda t: jnp.where(t < 6, 4, 2))
    want = wanted("shampoo", 4, {4, 8, 10, 12})
    assert helpers.worst_of_steps(directions(tx), want) <= 1e-9
    assert helpers.worst(want[:3], wanted("shampoo", 1, {4, 8, 10, 12})[:3]) > 0.1


def test_a_schedule_may_give_what_is_no_period():
    """Numbers are rounded, and below 1 they are 1."""
    periods = {0: 0.3, 1: -2.0, 2: 2.6, 3: 7}
    for taken, want in zip(periods, (1, 1, 3, 7), strict=True):
        options = Options(
            **dict.fromkeys(("b3", "start", "graft", "graft_b2")),
            **dict(b1=0.0, bias_correction=True, graft_eps=0.0),
            graft_drop_weighting=False,
            blocking=so.Blocking(),
            refresh_every=lambda t: periods[int(t)],
        )
        got = period_at(options, jnp.int32(taken + 1))
        assert (got, got.dtype) == (want, jnp.int32)


def test_the_roots_of_inverse_free_shampoo_follow_a_schedule():
    """They move at the first step, and at multiples of the period after it."""
    make = functools.partial(so.scale_by_inverse_free_shampoo, batch_size=4)
    _, states = helpers.trace(
        make(refresh_every=lambda t: jnp.where(t < 4, 2, 3)),
        STEPS[0],
        STEPS[:8],
        jit=helpers.quick_jit,
    )
    roots = [np.eye(4), *(state.roots["4x3"]["0"][0] for state in states)]
    moved = [np.any(a != b) for a, b in zip(roots, roots[1:], strict=False)]
    assert [t for t, move in enumerate(moved, 1) if move] == [1, 3, 7]


# ---- statistics


@pytest.mark.parametrize("name", TRANSFORMS)
def test_statistics_at_multiples_of_their_period(x64, name):
    got = directions(TRANSFORMS[name](refresh_every=4, statistics_every=3))
    want = functools.partial(wanted, name, 4, {4, 8, 12})
    assert helpers.worst_of_steps(got, want({3, 6, 9, 12})) <= 1e-9
    for wrong in (None, {3, 9, 12}, {1, 4, 7, 10}):
        assert helpers.worst_of_steps(want(wrong), got) > 1e-3


def test_a_traced_period_of_statistics_is_the_same():
    make = optax.inject_hyperparams(so.scale_by_shampoo)
    got = directions(make(refresh_every=4, statistics_every=2, **ROOTS))
    want = wanted("shampoo", 4, {4, 8, 12}, {2, 4, 6, 8, 10, 12})
    assert helpers.worst_of_steps(got, want) <= 1e-6


@pytest.mark.parametrize("make", FACTORED)
def test_steps_without_statistics_have_no_gram_products(make):
    """They are in a branch; the others, and steps with all of them, have the same."""
    params = {"w": jnp.ones((4, 3))}

    def products(**kwargs):
        found = helpers.update_equations(make(refresh_every=4, **kwargs), params)
        inside = [
            [part for part in path if part.startswith("cond")]
            for eqn, path in found
            if eqn.primitive.name == "dot_general"
        ]
        return sum(map(bool, inside)), sum(not path for path in inside)

    seldom, often = products()
    moved, rest = products(statistics_every=2)
    assert moved - seldom == often - rest >= 2
    assert products(statistics_every=1) == (seldom, often)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_before_any_statistics_nothing_is_refreshed(eps):
    tx = so.scale_by_shampoo(
        refresh_every=lambda t: 1 + 0 * t, statistics_every=3, eps=eps
    )
    _, states = helpers.trace(tx, STEPS[0], STEPS[:3], jit=helpers.quick_jit)
    for state, identity in zip(states, (True, True, False), strict=True):
        root = np.asarray(state.roots["4x3"]["0"][0])
        assert np.array_equal(root, np.eye(4)) == identity
        assert helpers.total(state.failures) == 0


def test_described_as_a_step_that_has_all():
    for make in FACTORED:
        whole, thin = (
            so.describe(STEPS[0], make(refresh_every=4, statistics_every=n)).parts[0]
            for n in (1, 2)
        )
        assert thin.flops == whole.flops


@pytest.mark.parametrize(
    "kwargs, name, value",
    [
        (dict(statistics_every=0), "statistics_every", "0"),
        (dict(statistics_every=1.5), "statistics_every", "1.5"),
        (dict(refresh_every=4, statistics_every=5), "statistics_every", "5"),
        (dict(refresh_every="often"), "refresh_every", "'often'"),
    ],
)
@pytest.mark.parametrize("make", [*FACTORED, functools.partial(so.shampoo, 0.1)])
def test_errors(make, kwargs, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must.*got {value}"):
        make(**kwargs)
