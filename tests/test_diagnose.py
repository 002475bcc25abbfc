"""What `diagnose` reads of a state, how it is put together, and what it remarks."""

import functools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so

SHAPES = {"dense": {"kernel": (9, 7), "bias": (7,)}, "head": (4, 4)}
PARAMS = jax.tree.map(lambda x: jnp.zeros(x.shape), helpers.structs(SHAPES))
PATHS = ["dense/bias", "dense/kernel", "head"]
KEYS = ["['dense']['bias']", "['dense']['kernel']", "['head']"]
# The metrics, and which block of a parameter is its worst.
WORST = {
    "condition": ("metrics.conditions", np.max),
    "residual": ("residuals", np.max),
    "failures": ("failures", np.max),
    "skipped": ("skipped", np.max),
    "grafting": ("metrics.grafting", lambda x: x[np.argmax(np.abs(np.log(x)))]),
    "rms": ("metrics.rms", np.max),
    "cosine": ("metrics.cosines", np.min),
}


@functools.lru_cache
def run():
    """Five steps on eight devices; the kernel has six blocks and the bias two."""
    tx = optax.chain(
        optax.scale(2.0),
        so.shampoo(
            0.1,
            refresh_every=2,
            metrics=True,
            blocking=so.Blocking(block_size=4),
            placement=helpers.placement_of(8),
        ),
    )
    rng = np.random.default_rng(0)
    update, state = helpers.quick_jit(tx.update), tx.init(PARAMS)
    for step in range(5):
        grads = jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), PARAMS
        )
        if step == 3:
            grads["head"] = jnp.full((4, 4), jnp.nan)
        _, state = update(grads, state, PARAMS)
    return tx, state


def test_rows_hold_the_worst_of_the_blocks():
    tx, state = run()
    diagnosis = so.diagnose(state, PARAMS, tx)
    portable = so.to_portable(tx, state, PARAMS)
    assert [row.path for row in diagnosis.rows] == PATHS
    assert [row.blocks for row in diagnosis.rows] == [2, 6, 1]
    for key, row in zip(KEYS, diagnosis.rows, strict=True):
        assert (row.transform, row.step) == ("shampoo", 5)
        assert row.age == {"head": 3}.get(row.path, 1)
        for name, (field, pick) in WORST.items():
            held = [v for k, v in portable.items() if f".{field}/{key}/" in k]
            want = pick(np.concatenate(held)).item()
            assert getattr(row, name) == want, (row.path, name)
    assert len({row.condition for row in diagnosis.rows}) == 3
    loose = so.diagnose(state, PARAMS, tx, max_condition=1e8, min_cosine=-1)
    assert [row.remarks for row in loose.rows] == [(), (), ("skipped 1", "stale")]


def test_no_matrix_is_read():
    """There is none in what is given here."""
    tx, state = run()
    small = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if x.ndim > 1 else x, state
    )
    assert any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(small))
    structs = helpers.structs(SHAPES)
    assert so.diagnose(small, structs, tx) == so.diagnose(state, PARAMS, tx)


def test_scalars_go_to_any_writer():
    tx, state = run()
    diagnosis, written = so.diagnose(state, PARAMS, tx), {}

    class Writer:
        def add_scalar(self, tag, value, step):
            written[tag, step] = value

    for tag, value in diagnosis.scalars().items():
        Writer().add_scalar(tag, value, diagnosis.rows[0].step)
    assert all(type(value) is float for value in written.values())
    names = ["age", *WORST]
    assert set(written) == {(f"shampoo/{p}/{n}", 5) for p in PATHS for n in names}
    for row in diagnosis.rows:
        for name in names:
            assert written[f"shampoo/{row.path}/{name}", 5] == getattr(row, name)


# ---- by hand


def by_hand(**metrics):
    """A state after ten steps of four vectors of lengths 1, 2, 3 and 4."""
    tx = so.scale_by_shampoo(metrics=True)
    params = {name: jnp.zeros(n) for n, name in enumerate("abcd", 1)}
    state = tx.init(params)

    def column(values, like):
        return {str(n): like["1"].at[0].set(x) for n, x in enumerate(values, 1)}

    healthy = dict(
        conditions=[10.0] * 4, refreshed=[10] * 4, rms=[1.0] * 4,
        cosines=[0.5] * 4, grafting=[2.0] * 4,
    )  # fmt: skip
    fields = {name: metrics.pop(name) for name in list(metrics) if name not in healthy}
    held = {
        name: column(values, dict.fromkeys("1", jnp.zeros(1, dtype)))
        for name, values in (healthy | metrics).items()
        for dtype in [jnp.int32 if name == "refreshed" else jnp.float32]
    }
    held["conditions"] = {n: {"0": x} for n, x in held["conditions"].items()}
    fields = {k: column(v, getattr(state, k)) for k, v in fields.items()}
    return state._replace(count=jnp.int32(10), metrics=held, **fields), params, tx


def remarks(limits, **fields):
    diagnosis = so.diagnose(*by_hand(**fields), **limits)
    assert diagnosis.suspicious == tuple(r for r in diagnosis.rows if r.remarks)
    return {row.path: list(row.remarks) for row in diagnosis.suspicious}


@pytest.mark.parametrize(
    "fields, limits, expected",
    [
        ({}, {}, {}),
        (dict(conditions=[1.1e6, 9e5, 1, 1]), {}, {"a": ["ill-conditioned"]}),
        (dict(conditions=[99, 101, 1, 0]), dict(max_condition=100),
         {"b": ["ill-conditioned"]}),
        (dict(residuals=[0.011, 0.009, 0, 0]), {}, {"a": ["large residual"]}),
        (dict(residuals=[0.2, 0.3, 0, 0]), dict(max_residual=0.25),
         {"b": ["large residual"]}),
        (dict(failures=[0, 3, 0, 1], skipped=[0, 0, 2, 1]), {},
         {"b": ["refused 3"], "c": ["skipped 2"], "d": ["refused 1", "skipped 1"]}),
        (dict(refreshed=[8, 5, 0, 8]), {}, {"b": ["stale"], "c": ["no refresh"]}),
        (dict(refreshed=[0, 0, 0, 0]), {}, {}),
        (dict(refreshed=[8, 5, 6, 8]), dict(max_age=4), {"b": ["stale"]}),
        (dict(rms=[0, 1, 1, 1], cosines=[0, -0.5, 0.009, 0.011]), {},
         {"a": ["still"], "b": ["not along the gradient"],
          "c": ["not along the gradient"]}),
        (dict(cosines=[-0.5, -0.7, 0, 1]), dict(min_cosine=-0.6),
         {"b": ["not along the gradient"]}),
    ],
)  # fmt: skip
def test_remarks(fields, limits, expected):
    assert remarks(limits, **fields) == expected


def test_table():
    fields = dict(
        conditions=[0, 2e7, 3.14159, 1], residuals=[0, 1e-6, 0, 0],
        refreshed=[0, 10, 8, 10], skipped=[0, 0, 4, 0],
        rms=[0, 1.5, 1, 1], cosines=[0, 0.25, -1, 1],
    )  # fmt: skip
    assert str(so.diagnose(*by_hand(**fields))).splitlines() == [
        "shampoo: step 10, parameters 4, suspicious 3",
        "",
        "parameter  blocks  condition  residual  age  skipped  grafting  rms  cosine"
        "  remarks",
        "a               1          -         0   10        0         -    0       -"
        "  no refresh, still",
        "b               1      2e+07     1e-06    0        0         2  1.5    0.25"
        "  ill-conditioned",
        "c               1       3.14         0    2        4         2    1      -1"
        "  skipped 4, stale, not along the gradient",
        "d               1          1         0    0        0         2    1       1",
    ]


# ---- anywhere


def test_states_are_found_at_any_depth():
    """Two of one kind in a partition, another one behind, hyperparameters injected."""
    make = optax.inject_hyperparams(so.scale_by_shampoo)
    tx = optax.chain(
        helpers.partition(
            {"first": make(b2=0.9), "rest": so.shampoo(0.1, metrics=True)},
            {"dense": "first", "head": "rest"},
        ),
        optax.masked(so.scale_by_sign_descent(), {"dense": False, "head": True}),
    )
    rows = so.diagnose(tx.init(PARAMS), PARAMS, tx).rows
    assert [(row.transform, row.path) for row in rows] == [
        ("shampoo-1", "dense/bias"),
        ("shampoo-1", "dense/kernel"),
        ("shampoo-2", "head"),
        ("sign_descent", "head"),
    ]
    assert [row.age for row in rows] == [None, None, 0, None]
    assert [row.residual for row in rows] == [0, 0, 0, None]
    assert [row.skipped for row in rows] == [0] * 4
    assert str(so.diagnose(tx.init(PARAMS), PARAMS, tx)).count("\n\n") == 5


def test_a_mesh_of_ones_own():
    tx = so.scale_by_soap(metrics=True, placement=so.Placement(axes="x"))
    mesh = helpers.mesh_of(8)
    abstract = so.abstract_state(tx, PARAMS, mesh)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
    rows = so.diagnose(state, PARAMS, tx, mesh=mesh).rows
    assert [row.path for row in rows] == PATHS
    with pytest.raises(ValueError, match="`state` must be the state of `tx`"):
        so.diagnose(state, PARAMS, tx, mesh=helpers.mesh_of(4))


TX = so.scale_by_shampoo(metrics=True)


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        ((so.scale_by_shampoo().init(PARAMS), PARAMS, TX), {}, "`state` must be the"),
        ((so.scale_by_soap(metrics=True).init(PARAMS), PARAMS, TX), {}, "`state` must"),
        ((TX.init(PARAMS["dense"]), PARAMS, TX), {}, "`state` must be the state"),
        ((None, PARAMS, TX), {}, "`state` must be the state.*NoneType"),
        (((), PARAMS, optax.sgd(0.1)), {}, "`tx` must hold a transform that works on"),
        (((), PARAMS, None), {}, "`tx` must be an optax transform, got None"),
        (((), PARAMS, TX), dict(mesh=8), "`mesh` must be a jax.sharding.Mesh, got 8"),
        (((), PARAMS, TX), dict(max_condition=0), "`max_condition` .*, got 0"),
        (((), PARAMS, TX), dict(max_residual=-1), "`max_residual` .*, got -1"),
        (((), PARAMS, TX), dict(max_age=0), "`max_age` .*, got 0"),
        (((), PARAMS, TX), dict(min_cosine=2), "`min_cosine` .*, got 2"),
    ],
)
def test_errors_name_the_argument(args, kwargs, message):
    with pytest.raises(ValueError) as error:
        so.diagnose(*args, **kwargs)
    assert re.match(message, str(error.value))


def test_blocks_that_take_turns_are_stale_when_they_have_missed_one():
    """Four blocks and three steps; `b` has no gradient, and `c` misses its turn at 5.

    That is seen at step 6, when others have had theirs.
    """
    keys = "abcd"
    tx = so.scale_by_shampoo(refresh_every=3, stagger=True, metrics=True)
    params = {key: jnp.zeros((4, 3)) for key in keys}
    steps = helpers.normal_steps({key: (4, 3) for key in keys}, 8)
    steps = [step | {"b": jnp.zeros((4, 3))} for step in steps]
    steps[4]["c"] = steps[4]["c"].at[0, 0].set(jnp.nan)
    _, states = helpers.trace(tx, params, steps, jit=helpers.quick_jit)
    found = [
        {row.path: set(row.remarks) & {"stale", "no refresh"} for row in rows}
        for rows in (so.diagnose(state, params, tx).rows for state in states)
    ]
    quiet = dict.fromkeys(keys, set())
    assert found[:2] == [quiet, quiet]
    dead = quiet | {"b": {"no refresh"}}
    late = dead | {"c": {"stale"}}
    assert found[2:] == [dead, dead, dead, late, late, dead]
