"""Acceptance cases on every method that they make sense for: the table in `methods`.

All runs of a method are steps of one compiled program, on one tree of small blocks;
its numbers are arguments.
"""

import dataclasses
import functools
import inspect
import typing
from collections import Counter
from unittest import mock

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods import CASES, HOLDS, METHODS, numbers_of, weight_of

import shampoo_optax as so
from shampoo_optax import _config, _eigen_methods, _polar
from shampoo_optax._storage import load

SHAPES = {f"pair{k}": (2, 2) for k in range(4)}
SHAPES |= {"v": (33, 16), "w": (33, 16)}
STACK, SECOND = "33x16", 1  # `w` is the second block of this stack, after `v`

DIAGNOSTIC = {"failures", "skipped", "iterations", "residuals", "count"}


@functools.cache
def program(name):
    """The compiled step: of gradients, state, numbers and whether a routine fails."""
    method = METHODS[name]

    def step(grads, state, numbers, fails):
        with failing(method.routine, fails):
            return method.make(**numbers).update(grads, state, grads)

    return helpers.quick_jit(step)


def failing(routine, fails):
    """A context in which the routine gives NaN for `w`, where `fails` is true."""
    if routine is None:
        return mock.patch.dict({})
    module, attribute = routine
    genuine = getattr(module, attribute)

    def spoilt(matrices, *args, **kwargs):
        first, *rest = genuine(matrices, *args, **kwargs)
        if matrices.shape[1] in SHAPES["w"]:
            row = jnp.where(fails, jnp.nan, first[SECOND])
            first = first.at[SECOND].set(row)
        return first, *rest

    return mock.patch.object(module, attribute, spoilt)


@functools.cache
def fresh_state(name):
    tree = {key: jnp.zeros(shape) for key, shape in SHAPES.items()}
    numbers = METHODS[name].numbers | dict(b1=0.9)  # with room for an average
    return METHODS[name].make(**numbers).init(tree)


def run(name, numbers, steps, failing_step=None):
    """Updates and states, gradients of other parameters being 0."""
    state, zeros = fresh_state(name), {k: jnp.zeros(s) for k, s in SHAPES.items()}
    updates, states = [], []
    for t, step in enumerate(steps):
        grads = zeros | {k: jnp.asarray(g, jnp.float32) for k, g in step.items()}
        found = program(name)(grads, state, numbers, t == failing_step)
        update, state = jax.block_until_ready(found)
        updates.append(update)
        states.append(state)
    return updates, states


def scales_of(name, xs, numbers):
    """The reference of a method, on diagonal gradients `[t, d]`."""
    return np.stack(
        list(METHODS[name].reference(np.asarray(xs, np.float64), **numbers))
    )


def normal_steps(count, keys=SHAPES, seed=0):
    return helpers.normal_steps({key: SHAPES[key] for key in keys}, count, seed)


def in_slot(stacks, slot=SECOND):
    """What a field holds of the blocks of the larger stack."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[slot]), stacks.get(STACK, {}))


# ---- the cases


def zero_first(name):
    numbers = numbers_of(name, "C1")
    updates, states = run(name, numbers, [{}, {}, {}, *normal_steps(1)])
    helpers.assert_finite((updates, states))
    for update in updates[:3]:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(update))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(updates[3]))
    assert helpers.total(getattr(states[-1], "failures", {})) == 0


def one_dead_layer(name):
    """`v` beside a `w` that is 0, random, and once NaN: it never sees which."""
    alive = normal_steps(10, "vw")
    dead = [{"v": step["v"]} for step in alive]
    spoilt = [*alive]
    spoilt[4] = alive[4] | {"w": alive[4]["w"].at[2, 1].set(jnp.nan)}
    runs = [run(name, numbers_of(name, "C2"), steps) for steps in (dead, alive, spoilt)]
    for updates, states in runs:
        helpers.assert_finite((updates, states))
        for update, wanted in zip(updates, runs[1][0], strict=True):
            np.testing.assert_array_equal(update["v"], wanted["v"])
    assert not any(np.any(update["w"]) for update in runs[0][0])
    bad, after = (runs[2][0][t]["w"] for t in (4, 5))
    assert not np.any(bad) and np.all(after != 0)
    assert helpers.total(runs[2][1][-1].skipped) == 1


def rank_one(name):
    numbers, method = numbers_of(name, "C3"), METHODS[name]
    rng = np.random.default_rng(5)
    step = {
        key: np.outer(*map(rng.standard_normal, shape)).astype(np.float32)
        for key, shape in SHAPES.items()
    }
    updates, _ = run(name, numbers, 5 * [step])
    for key, gradient in step.items():
        g, p = (np.asarray(x, np.float64) for x in (gradient, updates[-1][key]))
        size, norm = np.linalg.norm(g), np.linalg.norm(p)
        assert np.sum(p * g) / (norm * size) >= 0.9999, key
        if method.rank_one:
            wanted = method.rank_one(g, 5, **numbers)
        else:
            x = np.zeros(len(g))
            x[0] = size
            wanted = size * scales_of(name, 5 * [x], numbers)[-1, 0]
        assert abs(norm - wanted) <= 0.01 * wanted, key


DIAGONALS = [(3.0, 5.0), (4.0, 12.0)]
FULL = [[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [1.0, 1.0]]]
PUBLISHED = [
    [[-0.514496, 0.857493], [0.857493, 0.514496]],
    [[-0.526049, 0.601848], [0.410947, -0.015651]],
]


def exponent(name):
    numbers = numbers_of(name, "C4")
    steps = zip(DIAGONALS, FULL, strict=True)
    steps = [{"pair0": np.diag(x), "pair1": full} for x, full in steps]
    updates, _ = run(name, numbers, steps)
    wanted = np.asarray(DIAGONALS) * scales_of(name, DIAGONALS, numbers)
    for update, diagonal in zip(updates, wanted, strict=True):
        np.testing.assert_allclose(update["pair0"], np.diag(diagonal), atol=1e-4)
    if METHODS[name].published:
        np.testing.assert_allclose(wanted[1], (0.8, 0.923077), atol=1e-5)
        for update, full in zip(updates, PUBLISHED, strict=True):
            np.testing.assert_allclose(update["pair1"], full, atol=1e-4)


def scale(name):
    """`w` has the gradients of `v`, times a number."""
    for number in METHODS[name].scales:
        plain = [np.asarray(step["v"]) for step in normal_steps(3, "v")]
        steps = [{"v": g, "w": number * g} for g in plain]
        updates, states = run(name, numbers_of(name, "C5"), steps)
        helpers.assert_finite((updates, states))
        assert helpers.total(states[-1].skipped) == 0
        last = (np.asarray(updates[-1][key], np.float64) for key in "vw")
        one, other = (p / np.linalg.norm(p) for p in last)
        assert np.linalg.norm(one - other) <= 1e-3, number


def failed_root(name):
    """The routine gives NaN for `w` at the third of five refreshes."""
    steps, numbers = normal_steps(5), numbers_of(name, "C7")
    sound, sound_states = run(name, numbers, steps)
    updates, states = run(name, numbers, steps, failing_step=2)
    helpers.assert_finite((updates, states))
    counts = [np.asarray(state.failures[STACK]).tolist() for state in states]
    assert counts == 2 * [[0, 0]] + 3 * [[0, 1]]
    assert helpers.total(states[-1].failures) == 1
    assert helpers.total(sound_states[-1].failures) == 0
    for field in METHODS[name].derived:
        held = [in_slot(getattr(state, field)) for state in states]
        spoilt = [axis for axis in METHODS[name].spoilt if axis in held[2]]
        assert spoilt
        for axis in spoilt:
            np.testing.assert_array_equal(held[2][axis], held[1][axis])
            assert np.any(held[3][axis] != held[2][axis])
    assert np.any(updates[2]["w"])
    # In the form of the paper bases act from the next step on.
    assert any(np.any(updates[t]["w"] != sound[t]["w"]) for t in (2, 3))
    for update, wanted in zip(updates, sound, strict=True):
        for key in set(SHAPES) - {"w"}:
            np.testing.assert_array_equal(update[key], wanted[key])
    for t in (0, 1):
        np.testing.assert_array_equal(updates[t]["w"], sound[t]["w"])


def order_of_a_basis(name):
    """Diagonal gradients whose order of size is turned round half-way."""
    rng, count = np.random.default_rng(3), 24
    xs = np.where(np.arange(count)[:, None] < count // 2, (1.0, 10.0), (10.0, 1.0))
    xs = (xs * rng.uniform(0.5, 1, xs.shape)).astype(np.float32)
    for every in (1, 3, 7):
        numbers = numbers_of(name, "C8") | dict(b1=0.9, b2=0.9, refresh_every=every)
        updates, _ = run(name, numbers, [{"pair0": np.diag(x)} for x in xs])
        averages = filtered(xs, numbers["b1"])
        wanted = averages * scales_of(name, xs, numbers)
        for t, diagonal in enumerate(wanted):
            error = np.max(np.abs(updates[t]["pair0"] - np.diag(diagonal)))
            assert error <= 1e-5 * max(1, np.max(np.abs(diagonal))), (every, t)


def filtered(gradients, b1):
    """Averages of the gradient, divided by the sum of their weights."""
    average, averages = 0.0, []
    for t, gradient in enumerate(np.asarray(gradients, np.float64), 1):
        average = b1 * average + (1 - b1) * gradient
        averages.append(average / (1 - b1**t))
    return np.stack(averages)


def no_silent_no_op(name):
    """Nine steps of a period of ten."""
    numbers = numbers_of(name, "C9")
    change = dict(b1=0.9, b2=0.5, refresh_every=10)
    numbers = numbers | {key: x for key, x in change.items() if key in numbers}
    steps = normal_steps(9)
    updates, states = run(name, numbers, steps)
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(updates[0]))
    moving = set(states[0]._fields) - DIAGNOSTIC - set(METHODS[name].derived)
    for before, after in zip([fresh_state(name), *states], states, strict=False):
        for field in moving:
            old, new = (jax.tree.leaves(getattr(s, field)) for s in (before, after))
            for a, b in zip(old, new, strict=True):
                # By chance a number of few bits is rounded to what it was.
                still = 1 - np.mean(np.asarray(a) != np.asarray(b))
                assert still <= 20 * jnp.finfo(a.dtype).eps, field
    assert any(jax.tree.leaves(getattr(states[-1], field)) for field in moving)
    gradients = [np.asarray(step["w"], np.float64) for step in steps]
    check_accumulators(states[-1], gradients, numbers)


def check_accumulators(state, gradients, numbers):
    """The closed forms of averages before the first refresh, for `w`."""
    ages = np.arange(len(gradients))[::-1]
    b2 = numbers.get("b2", 0.5)
    weights = weight_of(b2) * b2**ages
    for axis, factor in in_slot(getattr(state, "factors", {}), slice(None)).items():
        flat = [g if axis == "0" else g.T for g in gradients]
        wanted = sum(w * g @ g.T for w, g in zip(weights, flat, strict=True))
        whole = np.asarray(load(jnp.asarray(factor)))[SECOND]
        near(whole, wanted if whole.ndim == 2 else np.diag(wanted))
    moments = in_slot(getattr(state, "moments", {}))
    if len(moments):
        times = numbers.get("batch_size", 1.0)
        start = b2 ** len(gradients) * ("batch_size" in numbers)
        squares = [w * times * g**2 for w, g in zip(weights, gradients, strict=True)]
        near(moments, start + sum(squares))
    weights = (1 - numbers["b1"]) * numbers["b1"] ** ages
    wanted = sum(w * g for w, g in zip(weights, gradients, strict=True))
    near(in_slot(state.filtered), wanted)


def near(got, wanted):
    """Up to nine roundings, which in float32 are 1e-6."""
    error = np.max(np.abs(got.astype(np.float64) - wanted))
    assert error <= 9 * jnp.finfo(got.dtype).eps * np.max(np.abs(wanted))


def precision(name):
    """Products at the highest precision; factors symmetric and positive."""
    method = METHODS[name]
    params = helpers.structs({"w": (8, 6), "k": (3, 3, 4, 7)})
    with jax.default_matmul_precision("bfloat16"):
        found = [
            eqn.params["precision"]
            for eqn, _ in helpers.update_equations(
                method.make(**method.numbers), params
            )
            if eqn.primitive.name == "dot_general"
        ]
    assert len(found) >= 2
    assert set(found) == {2 * (jax.lax.Precision.HIGHEST,)}
    if not hasattr(fresh_state(name), "factors"):
        return
    # 100 directions on the longer side, 2 on the shorter one.
    tall = [helpers.normals(seed, 33, 2) for seed in range(50)]
    steps = [{"w": jnp.pad(g, ((0, 0), (0, 14)))} for g in tall]
    _, states = run(name, numbers_of(name, "C10"), steps)
    for stored in states[-1].factors[STACK].values():
        factor = np.asarray(load(stored)[SECOND])
        if factor.ndim == 2:
            np.testing.assert_array_equal(factor, factor.T)
            values = np.linalg.eigvalsh(factor.astype(np.float64))
            assert values[0] >= -1e-6 * values[-1]


# What it takes to cut a matrix of its own into its slot, and to paste it back.
OF_A_LEAF = {"slice": 2, "reshape": 6, "transpose": 2}


def program_size(name):
    """Of 8 and of 64 equal matrices."""
    method = METHODS[name]

    def counted(matrices):
        params = helpers.structs({str(k): (12, 8) for k in range(matrices)})
        equations = helpers.update_equations(method.make(**method.numbers), params)
        return Counter(eqn.primitive.name for eqn, _ in equations)

    few, many = counted(8), counted(64)
    assert few.total() > 50
    grown = many - few
    # Older versions of jax join 16 arrays at a time.
    assert grown.pop("concatenate", 0) <= 56 // 8
    assert grown == {key: 56 * number for key, number in OF_A_LEAF.items()}
    assert not few - many


CHECKS = {
    "C1": zero_first,
    "C2": one_dead_layer,
    "C3": rank_one,
    "C4": exponent,
    "C5": scale,
    "C7": failed_root,
    "C8": order_of_a_basis,
    "C9": no_silent_no_op,
    "C10": precision,
    "C13": program_size,
}


@pytest.mark.parametrize("name, case", HOLDS)
def test_case_holds(name, case):
    CHECKS[case](name)


# ---- the table is whole

NO_DIRECTION = {"scale_by_momentum", "scale_by_row_wise_adagrad"}
# Arguments whose choices are no methods: of step sizes, of shapes, of what is stored,
# of how products are rounded.
NO_METHOD = {"graft", "merge_from", "dtype", "scale", "axes", "placement", "precision"}


def records_in(value):
    """A record and all records in its fields."""
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from records_in(getattr(value, field.name))


def choices_of(owner):
    """The names of the arguments of a function or record that are a `Literal`."""
    function = owner.__init__ if inspect.isclass(owner) else owner
    hints = typing.get_type_hints(function)
    for key, hint in hints.items():
        if typing.get_origin(hint) is typing.Literal and key not in NO_METHOD:
            yield key, set(typing.get_args(hint))


def described(method):
    """The function of a method, its arguments with their defaults, and its records."""
    make = method.make
    function = make.func if isinstance(make, functools.partial) else make
    given = make.keywords if isinstance(make, functools.partial) else {}
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(function).parameters.items()
    }
    arguments = defaults | given
    records = [record for x in arguments.values() for record in records_in(x)]
    return function, arguments, records


DESCRIBED = [described(method) for method in METHODS.values()]


def test_every_direction_is_in_the_table():
    public = {name for name in so.__all__ if name.startswith("scale_by_")}
    directions = {getattr(so, name) for name in public - NO_DIRECTION}
    assert {function for function, *_ in DESCRIBED} == directions


def test_every_record_of_a_method_is_in_the_table():
    unions = _config.Root, _eigen_methods.Basis, _polar.Polar
    kinds = {kind for union in unions for kind in typing.get_args(union)}
    assert {so.Eigh, so.QRBasis, so.Svd} < kinds
    assert kinds <= {type(record) for *_, records in DESCRIBED for record in records}


def test_every_form_of_a_method_is_in_the_table():
    taken = {}
    for function, arguments, records in DESCRIBED:
        for key, choices in choices_of(function):
            _, found = taken.setdefault((function, key), (choices, set()))
            found.add(arguments[key])
        for record in records:
            for key, choices in choices_of(type(record)):
                _, found = taken.setdefault((type(record), key), (choices, set()))
                found.add(getattr(record, key))
    assert {key for _, key in taken} >= {"ridge", "sides", "structure"}
    missing = {key: choices - found for key, (choices, found) in taken.items()}
    assert not any(missing.values()), missing


def test_every_case_is_checked_or_has_a_reason():
    assert CASES.keys() == CHECKS.keys() == {case for _, case in HOLDS}
    for name, method in METHODS.items():
        assert method.no_sense.keys() <= CASES.keys(), name
        assert method.of_case.keys() <= CASES.keys() - method.no_sense.keys(), name
        assert all(len(reason) > 10 for reason in method.no_sense.values()), name
