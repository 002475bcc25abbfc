"""Random trees and arguments against the naive oracle."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shampoo_optax as so

# Among all that hypothesis finds is a tree of unmerged scalars, which have no axis.
pytestmark = pytest.mark.filterwarnings("ignore:no parameter is preconditioned")

# A relative ridge bounds the condition number of a factor, and with it how far a
# rounding error moves a root: by about eps * condition.
CONDITIONS = [1e2, 1e3]

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
betas = st.sampled_from([0.0, 0.5, 0.9])
overrides = st.fixed_dictionaries(
    {},
    optional={
        1: st.sampled_from([0, 0.25, 1]),
        2: st.sampled_from([0.5, {0: 0}, {1: 0.4}, {0: 0.125, 1: 0}]),
        3: st.sampled_from([0.25, {1: 0}, {0: 0.5, 2: 0.3}]),
    },
)


@st.composite
def arguments(draw):
    every = draw(st.integers(1, 3))
    b2 = draw(st.sampled_from([0.5, 0.99, 1.0]))
    return dict(
        b1=draw(betas),
        b2=b2,
        b3=draw(st.none() | betas),
        eps=draw(st.sampled_from([0.0, 0.1])),
        relative_eps=1 / draw(st.sampled_from(CONDITIONS)),
        refresh_every=every,
        start=draw(st.none() | st.integers(every, 6)),
        bias_correction=draw(st.booleans()),
        exponents=draw(st.none() | overrides),
        graft=draw(st.sampled_from([None, "sgd", "adagrad", "rmsprop", "adam"])),
        graft_b2=draw(st.sampled_from([0.5, 0.98])),
        graft_eps=draw(st.sampled_from([1e-8, 0.1])),
        root=so.Eigh(ridge=draw(st.sampled_from(["before", "after"]))),
        blocking=so.Blocking(
            block_size=draw(st.sampled_from([None, 2, 3, 5])),
            merge_to=draw(st.sampled_from([None, 1, 2, 3])),
            merge_from=draw(st.sampled_from(["leading", "trailing"])),
        ),
    )


def gradients(seed, shape, steps, dtype):
    """Random gradients, rounded to the dtype in which both sides read them."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(-1, 1, (steps, *shape)), dtype)


def wanted(grads, kwargs):
    """The oracle's directions for one parameter, time first."""
    kwargs = dict(kwargs)
    blocking, b1 = kwargs.pop("blocking"), kwargs["b1"]
    every = kwargs.pop("refresh_every")
    kwargs |= dict(
        every=every,
        start=kwargs["start"] or every,
        b3=b1 if kwargs["b3"] is None else kwargs["b3"],
        correct=kwargs.pop("bias_correction"),
        exponents=kwargs["exponents"] or {},
        ridge=kwargs.pop("root").ridge,
        size=blocking.block_size,
        target=blocking.merge_to,
        leading=blocking.merge_from == "leading",
    )
    steps = np.asarray(grads, np.float64)
    return np.array(oracle.shampoo(grads.shape[1:], steps, **kwargs))


def scanned(tx, grads):
    """The directions of all steps, in one compiled scan."""
    params = jax.tree.map(lambda g: g[0], grads)

    @jax.jit
    def run(grads):
        def step(state, g):
            update, state = tx.update(g, state, params)
            return state, update

        return jax.lax.scan(step, tx.init(params), grads)[1]

    return run(grads)


def assert_follows(dtype, tree_shapes, kwargs, seed, steps=7):
    """Compares every step of every leaf with the oracle.

    The allowed error, relative to the largest entry of the leaf at that step, is
    16 eps * condition in the precision of the factors, and one rounding of the
    update to the gradient's dtype.
    """
    grads = {
        f"w{index}": gradients(seed + index, shape, steps, dtype)
        for index, shape in enumerate(tree_shapes)
    }
    nested = {"first": grads.pop("w0"), "rest": grads}
    got = scanned(so.scale_by_shampoo(**kwargs), nested)
    expected = jax.tree.map(functools.partial(wanted, kwargs=kwargs), nested)
    working = jnp.finfo(jnp.promote_types(dtype, jnp.float32))
    rounding = jnp.finfo(dtype).eps if jnp.finfo(dtype).bits < 32 else 0
    tolerance = 16 * float(working.eps) / kwargs["relative_eps"] + float(rounding)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == dtype
        axes = tuple(range(1, g.ndim))
        error = np.max(np.abs(np.asarray(g, np.float64) - e), axis=axes)
        scale = np.max(np.abs(e), axis=axes)
        assert np.all(error <= tolerance * scale), (error / scale, tolerance)


trees = st.lists(shapes, min_size=1, max_size=3)
seeds = st.integers(0, 2**16)
many = settings(max_examples=25, deadline=None, derandomize=True)
few = settings(max_examples=10, deadline=None, derandomize=True)


@many
@given(trees, arguments(), seeds)
def test_float64(tree_shapes, kwargs, seed):
    with helpers.enable_x64():
        assert_follows(jnp.float64, tree_shapes, kwargs, seed)


@few
@given(trees, arguments(), seeds)
def test_float32(tree_shapes, kwargs, seed):
    assert_follows(jnp.float32, tree_shapes, kwargs, seed)


@few
@given(trees, arguments(), seeds)
def test_bfloat16(tree_shapes, kwargs, seed):
    assert_follows(jnp.bfloat16, tree_shapes, kwargs, seed)


PLAIN = dict(
    b1=0.9,
    b2=0.9,
    b3=None,
    eps=0.0,
    relative_eps=1e-3,
    refresh_every=2,
    start=None,
    bias_correction=True,
    exponents=None,
    graft="adam",
    graft_b2=0.98,
    graft_eps=1e-8,
    root=so.Eigh(),
    blocking=so.Blocking(4),
)


@pytest.mark.parametrize(
    "change",
    [
        {"b1": 0.0},
        {"b2": 1.0},
        {"b3": 0.5},
        {"eps": 0.3},
        {"relative_eps": 1e-2},
        {"refresh_every": 3},
        {"start": 5},
        {"bias_correction": False},
        {"exponents": {2: 0.5}},
        {"exponents": {2: {0: 0}}},
        {"graft": None},
        {"graft": "sgd"},
        {"graft": "adagrad"},
        {"graft": "rmsprop"},
        {"graft_b2": 0.5},
        {"graft_eps": 0.1},
        {"blocking": so.Blocking(3)},
        {"blocking": so.Blocking(30, 1)},
        {"blocking": so.Blocking(30, 2, "trailing")},
    ],
    ids=str,
)
def test_each_argument_matters_and_is_right(change):
    tree_shapes = [(3, 3, 5), (6, 4), (5,)]
    assert_follows(jnp.float32, tree_shapes, PLAIN | change, seed=1)
    changed, plain = (
        [wanted(gradients(1, s, 7, jnp.float32), kw) for s in tree_shapes]
        for kw in (PLAIN | change, PLAIN)
    )
    moved = [np.max(np.abs(a - b)) for a, b in zip(changed, plain, strict=True)]
    assert max(moved) > 0.01, "the oracle cannot tell this argument"


def test_pseudo_inverse_of_rank_deficient_factors():
    """Three steps of a [7, 3] parameter: the first factor has rank 3, then more."""
    with helpers.enable_x64():
        grads = gradients(3, (7, 3), 3, jnp.float64)
        root = so.PseudoInverse(rtol=1e-9)
        tx = so.scale_by_shampoo(**helpers.BARE, root=root)
        got = scanned(tx, grads)
    arguments = dict(helpers.BARE, b3=0.0, eps=0.0, relative_eps=0.0, every=1, start=1)
    arguments.pop("refresh_every")
    arguments |= dict(correct=True, exponents={}, graft_b2=0.5, graft_eps=0.0)
    arguments |= dict(size=None, target=2, leading=True, ridge="pseudo", rtol=1e-9)
    expected = oracle.shampoo((7, 3), np.asarray(grads), **arguments)
    assert helpers.worst(list(got), expected) < 1e-9
