"""Bad input: a `ValueError` that names the argument and shows the value."""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMS

import shampoo_optax as so

names = pytest.mark.parametrize("name", TRANSFORMS)

# Arguments that scale_by_* and the aliases share: keywords, named argument, value.
SHARED = [
    (dict(b1=-0.1), "b1", "-0.1"),
    (dict(b1=1.5), "b1", "1.5"),
    (dict(b1=math.nan), "b1", "nan"),
    (dict(b2=-0.25), "b2", "-0.25"),
    (dict(b2=1.01), "b2", "1.01"),
    (dict(b3=2.0), "b3", "2.0"),
    (dict(eps=-1e-6), "eps", "-1e-06"),
    (dict(eps=math.inf), "eps", "inf"),
    (dict(eps=None), "eps", "None"),
    (dict(b1=None), "b1", "None"),
    (dict(bias_correction=jnp.ones(2)), "bias_correction", "[1., 1.]"),
    (dict(refresh_every=0), "refresh_every", "0"),
    (dict(refresh_every=-3), "refresh_every", "-3"),
    (dict(refresh_every=2.5), "refresh_every", "2.5"),
    (dict(refresh_every=5, start=4), "start", "4"),
    (dict(refresh_every=1, start=0), "start", "0"),
    (dict(blocking=1024), "blocking", "1024"),
    (dict(blocking=None), "blocking", "None"),
]
SHAMPOO = [
    (dict(relative_eps=-1.0), "relative_eps", "-1.0"),
    (dict(relative_eps=math.nan), "relative_eps", "nan"),
    (dict(graft_b2=1.5), "graft_b2", "1.5"),
    (dict(graft_eps=-1.0), "graft_eps", "-1.0"),
    (dict(graft_eps=None), "graft_eps", "None"),
    (dict(graft_eps=math.inf), "graft_eps", "inf"),
    (dict(graft="nadam"), "graft", "nadam"),
    (dict(graft="adam", b2=1.0), "b2", "1.0"),
    (dict(graft="rmsprop", b2=1.0), "b2", "1.0"),
    (dict(graft="adam", graft_b2=1), "graft_b2", "1"),
    (dict(graft="rmsprop", graft_b2=1.0), "graft_b2", "1.0"),
    (dict(root="eigh"), "root", "eigh"),
    (dict(trace_scaling=-0.5), "trace_scaling", "-0.5"),
    (dict(trace_scaling=None), "trace_scaling", "None"),
    (dict(root=so.Eigh), "root", "Eigh"),
    (dict(root=so.PseudoInverse(), eps=1e-6), "eps", "1e-06"),
    (dict(root=so.PseudoInverse(), relative_eps=1e-4), "relative_eps", "0.0001"),
    (dict(exponents={2: -0.5}), "exponents", "-0.5"),
    (dict(exponents={2: {1: math.inf}}), "exponents", "inf"),
    (dict(exponents={2: {3: 0.5}}), "exponents", "3"),
    (dict(exponents={0: 0.5}), "exponents", "0"),
    (dict(exponents=0.5), "exponents", "0.5"),
    (dict(exponents={2: {True: 0.5}}), "exponents", "True"),
]
RATES = [
    ((-0.1,), dict(), "learning_rate", "-0.1"),
    ((math.nan,), dict(), "learning_rate", "nan"),
    ((math.inf,), dict(), "learning_rate", "inf"),
    (("0.1",), dict(), "learning_rate", "0.1"),
    ((None,), dict(), "learning_rate", "None"),
    ((0.1,), dict(weight_decay=-1.0), "weight_decay", "-1.0"),
    ((0.1,), dict(weight_decay=math.inf), "weight_decay", "inf"),
    ((0.1,), dict(decay="l1"), "decay", "l1"),
    ((0.1,), dict(peak_learning_rate=-2.0), "peak_learning_rate", "-2.0"),
    ((0.1,), dict(mask="matrices"), "mask", "matrices"),
    ((0.1,), dict(mask={"w": 1.0}), "mask", "1.0"),
    ((jnp.float32(1),), dict(decay="independent"), "peak_learning_rate", "1."),
]
MOMENTUM = [
    ((0.1,), dict(momentum=-0.5), "momentum", "-0.5"),
    ((0.1,), dict(momentum=1.5), "momentum", "1.5"),
    ((0.1,), dict(dampening=1.5), "dampening", "1.5"),
    ((0.1,), dict(momentum=0.9, dampening=math.nan), "dampening", "nan"),
    ((0.1,), dict(nesterov="yes"), "nesterov", "yes"),
]
GPA = dict(eval_coefficient=0.9, train_coefficient=0.8)
OTHERS = [
    (so.Blocking, (0,), {}, "block_size", "0"),
    (so.Blocking, (-4,), {}, "block_size", "-4"),
    (so.Blocking, (2.5,), {}, "block_size", "2.5"),
    (so.Blocking, (8, 0), {}, "merge_to", "0"),
    (so.Blocking, (8, 2, "middle"), {}, "merge_from", "middle"),
    (so.Eigh, ("during",), {}, "ridge", "during"),
    (so.Eigh, (), dict(max_residual=-1.0), "max_residual", "-1.0"),
    (so.PseudoInverse, (), dict(rtol=-1.0), "rtol", "-1.0"),
    (so.CoupledNewton, (), dict(max_iterations=0), "max_iterations", "0"),
    (so.CoupledNewton, (), dict(tolerance=2.0), "tolerance", "2.0"),
    (so.HigherOrderNewton, (), dict(order=1), "order", "1"),
    (so.HigherOrderNewton, (), dict(max_residual=0.0), "max_residual", "0.0"),
    (so.PseudoInverse, (), dict(atol=math.nan), "atol", "nan"),
    (so.NewtonDB, (), dict(power_iterations=0), "power_iterations", "0"),
    (so.NewtonDB, (), dict(tolerance=1.5), "tolerance", "1.5"),
    (so.EighBasis, (), dict(tolerance=1.5), "tolerance", "1.5"),
    (so.EighBasis, (), dict(max_residual=0), "max_residual", "0"),
    (so.CholeskyBasis, (), dict(max_iterations=0), "max_iterations", "0"),
    (so.CholeskyBasis, (), dict(tolerance=2.0), "tolerance", "2.0"),
    (so.CholeskyBasis, (), dict(max_residual=0), "max_residual", "0"),
    (so.QRBasis, (), dict(max_iterations=0), "max_iterations", "0"),
    (so.QRBasis, (), dict(tolerance=-0.1), "tolerance", "-0.1"),
    (so.Eigendecomposed, ("qr",), {}, "basis", "qr"),
    (so.Eigendecomposed, (), dict(root=so.NewtonDB()), "root", "NewtonDB"),
    (so.scale_by_soap, (), dict(basis="qr"), "basis", "qr"),
    (so.scale_by_momentum, (-0.5,), {}, "momentum", "-0.5"),
    (so.scale_by_momentum, (0.5,), dict(dampening=2.0), "dampening", "2.0"),
    (so.decay_weights, (-0.5,), {}, "weight_decay", "-0.5"),
    (so.decay_weights, (math.inf,), {}, "weight_decay", "inf"),
    (so.decay_weights, (0.5,), dict(decay="l3"), "decay", "l3"),
    (so.decay_weights, (0.5,), dict(decay="corrected"), "learning_rate", "None"),
    (so.decay_weights, (0.5,), dict(decay="independent"), "peak_learning_rate", "None"),
    (so.primal_averaging, (-1.0,), GPA, "learning_rate", "-1.0"),
    (so.primal_averaging, (0.1,), GPA | dict(eval_coefficient=1.5),
     "eval_coefficient", "1.5"),
    (so.primal_averaging, (0.1,), GPA | dict(train_coefficient=-0.5),
     "train_coefficient", "-0.5"),
    (so.primal_averaging, (0.1,), GPA | dict(train_coefficient=0.0),
     "train_coefficient", "0.0"),
    (so.schedule_free, (math.nan,), {}, "learning_rate", "nan"),
    (so.schedule_free, (0.1,), dict(train_coefficient=1.5),
     "train_coefficient", "1.5"),
    (so.schedule_free, (0.1,), dict(train_coefficient=0.0),
     "train_coefficient", "0.0"),
    (so.schedule_free, (0.1,), dict(power=-1.0), "power", "-1.0"),
    (so.schedule_free, (0.1,), dict(weight_decay=-1.0), "weight_decay", "-1.0"),
]  # fmt: skip
CALLS = [
    *((so.scale_by_shampoo, (), *rest) for rest in SHARED + SHAMPOO),
    *((so.scale_by_soap, (), *rest) for rest in SHARED),
    *((so.shampoo, (0.1,), *rest) for rest in SHARED + SHAMPOO),
    *((so.soap, (0.1,), *rest) for rest in SHARED),
    *((so.shampoo, *rest) for rest in RATES + MOMENTUM),
    *((so.soap, *rest) for rest in RATES),
    *OTHERS,
]


def call_id(value):
    """The same in every worker: no address of a function."""
    if isinstance(value, tuple):
        return ",".join(map(call_id, value)) or "no"
    return getattr(value, "__name__", None) or str(value)


def assert_names(error, argument, value):
    """The message names the argument in backticks, and shows the value after it."""
    message = str(error.value)
    _, found, rest = message.partition(f"`{argument}`")
    assert found, message
    assert value in rest, message


@pytest.mark.parametrize("make, args, kwargs, argument, value", CALLS, ids=call_id)
def test_constructor(make, args, kwargs, argument, value):
    with pytest.raises(ValueError) as error:
        make(*args, **kwargs)
    assert_names(error, argument, value)


def test_the_limits_themselves_are_accepted():
    grads = {"w": jnp.ones((2, 2))}
    for tx in (
        so.scale_by_shampoo(b1=0.0, b2=1.0, graft=None, refresh_every=1, start=1),
        so.scale_by_shampoo(b1=0.0, b2=0.0, b3=0.0, graft_b2=0.0, eps=0.0),
        so.shampoo(0.0, weight_decay=0.0, momentum=1.0, dampening=1.0),
        so.scale_by_shampoo(blocking=so.Blocking(1, 1), exponents={2: {0: 0}}),
    ):
        helpers.assert_finite(helpers.trace(tx, grads, 2 * [grads]))


BAD_LEAVES = {
    "int32": jnp.ones((2, 2), jnp.int32),
    "bool": jnp.ones((2, 2), bool),
    "complex64": jnp.ones((2, 2), jnp.complex64),
    "str": "weights",
}


@names
@pytest.mark.parametrize("kind", BAD_LEAVES)
def test_parameters_that_are_not_real_floats(name, kind):
    tree = {"good": jnp.ones(3), "bad": BAD_LEAVES[kind]}
    with pytest.raises(ValueError) as error:
        TRANSFORMS[name]().init(tree)
    assert_names(error, "params", kind)
    assert "bad" in str(error.value)


@names
@pytest.mark.parametrize("kind", BAD_LEAVES)
def test_gradients_that_are_not_real_floats(name, kind):
    params = {"good": jnp.ones(3), "bad": jnp.ones((2, 2))}
    tx = TRANSFORMS[name]()
    with pytest.raises(ValueError) as error:
        tx.update(params | {"bad": BAD_LEAVES[kind]}, tx.init(params), params)
    assert_names(error, "updates", kind)


PARAMS = {"a": jnp.ones((4, 3)), "b": jnp.ones(5)}
MISMATCHES = {
    "missing leaf": ({"a": PARAMS["a"]}, "b"),
    "extra leaf": (PARAMS | {"c": jnp.ones(2)}, "c"),
    "renamed leaf": ({"a": PARAMS["a"], "d": PARAMS["b"]}, "d"),
    "deeper leaf": (PARAMS | {"b": {"c": jnp.ones(5)}}, "c"),
    "transposed leaf": (PARAMS | {"a": jnp.ones((3, 4))}, "[3, 4]"),
    "flattened leaf": (PARAMS | {"a": jnp.ones(12)}, "[12]"),
    "longer leaf": (PARAMS | {"b": jnp.ones(6)}, "[6]"),
}


@names
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_gradients_unlike_the_parameters(name, kind, jit):
    grads, shown = MISMATCHES[kind]
    tx = TRANSFORMS[name]()
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError) as error:
        update(grads, tx.init(PARAMS), PARAMS)
    assert_names(error, "updates", shown)


@names
@pytest.mark.parametrize("kind", MISMATCHES)
def test_gradients_unlike_the_state_when_params_are_not_passed(name, kind):
    grads, _ = MISMATCHES[kind]
    tx = TRANSFORMS[name]()
    if kind in ("renamed leaf", "deeper leaf"):  # nothing to tell them by
        jax.eval_shape(tx.update, grads, tx.init(PARAMS))
        return
    with pytest.raises(ValueError, match="`updates`"):
        tx.update(grads, tx.init(PARAMS))


@pytest.mark.parametrize(
    "tx",
    [
        so.shampoo(0.1, weight_decay=0.1),
        so.shampoo(0.1, weight_decay=0.1, decay="l2"),
        so.soap(0.1, weight_decay=0.1),
        so.decay_weights(0.1),
        so.primal_averaging(0.1, **GPA),
        so.schedule_free(0.1),
    ],
    ids=["decoupled", "l2", "soap", "decay_weights", "gpa", "schedule_free"],
)
def test_update_without_the_parameters_it_needs(tx):
    with pytest.raises(ValueError) as error:
        tx.update(PARAMS, tx.init(PARAMS))
    assert_names(error, "params", "None")


@pytest.mark.parametrize("make", [so.eval_params, so.train_params])
def test_averaged_parameters_of_a_state_without_an_average(make):
    state = so.shampoo(0.1).init(PARAMS)
    with pytest.raises(ValueError) as error:
        make(state, PARAMS)
    assert_names(error, "state", "tuple")


@names
def test_nothing_is_lost_on_an_error(name):
    """A donated state survives a refused call, and the run goes on unharmed."""
    tx = TRANSFORMS[name](refresh_every=6)  # factors of full rank
    shapes = {key: leaf.shape for key, leaf in PARAMS.items()}
    steps = helpers.normal_steps(shapes, 7)
    wanted, _ = helpers.trace(tx, PARAMS, steps)
    update = jax.jit(tx.update, donate_argnums=1)
    state = tx.init(PARAMS)
    for grads, want in zip(steps, wanted, strict=True):
        with pytest.raises(ValueError, match="`updates`"):
            update(grads | {"a": grads["a"].T}, state, PARAMS)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        updates, state = update(grads, state, PARAMS)
        assert helpers.worst(updates, want) <= 1e-4


def test_an_error_inside_a_chain_names_the_leaf():
    params = {"net": {"kernel": jnp.ones((4, 3)), "steps": jnp.zeros((), jnp.int32)}}
    tx = optax.chain(optax.clip_by_global_norm(1.0), so.scale_by_shampoo())
    with pytest.raises(ValueError, match="steps"):
        tx.init(params)
    floats = functools.partial(
        jax.tree.map, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    )
    masked = optax.masked(so.scale_by_shampoo(), floats)
    (updates,), _ = helpers.trace(masked, params, [params])
    assert np.any(updates["net"]["kernel"])
