"""Aliases pass all that they are told on to the transforms they chain."""

import inspect

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shampoo_optax as so

PARAMS = {"w": jnp.ones((12, 4)), "b": jnp.ones(5)}

# A value other than the default for every keyword of a transform.
STATISTICS = dict(b1=0.8, b2=0.7, eps=1e-4, b3=0.6, refresh_every=2, start=3)
STATISTICS |= dict(bias_correction=False, blocking=so.Blocking(8))
STATISTICS |= dict(statistics_every=2, stagger=True, metrics=True)
STATISTICS |= dict(axes=so.Axes(skip_above=8), placement=helpers.placement_of(2))
STATISTICS |= dict(storage=so.Storage("float32", "bfloat16", "bfloat16", True))
GRAFT = dict(graft="rmsprop", graft_b2=0.6, graft_eps=1e-5)
ROOT = dict(relative_eps=1e-3, trace_scaling=0.5, exponents={2: 0.3})
ROOT |= dict(root=so.Eigh(ridge="after"))
BASIS = dict(basis=so.QRBasis(2), ignored_axes={1: (0,)}, exponents={2: 0.3})
DROP = dict(drop_weighting=True, graft_drop_weighting=True)
MOMENTUM = dict(momentum=0.5, dampening=0.25, nesterov=True)
DECAY = dict(weight_decay=0.1, decay="corrected", peak_learning_rate=0.2)

# By alias: its transform, the transform's keywords, and whether it has momentum.
ALIASES = {
    "shampoo": (so.scale_by_shampoo, STATISTICS | GRAFT | ROOT, True),
    "soap": (so.scale_by_soap, STATISTICS | BASIS | dict(form="paper"), False),
    "kl_shampoo": (so.scale_by_kl_shampoo, STATISTICS | GRAFT | DROP | ROOT, True),
    "kl_soap": (
        so.scale_by_kl_soap,
        STATISTICS | GRAFT | DROP | BASIS | dict(relative_eps=0.1, form="official"),
        True,
    ),
}
aliases = pytest.mark.parametrize("name", ALIASES)


MASK = {"w": True, "b": False}


def program(tx):
    state = jax.eval_shape(tx.init, PARAMS)
    return str(jax.make_jaxpr(tx.update)(PARAMS, state, PARAMS)), state


@aliases
def test_alias_is_the_chain(name):
    """The same program, with a value of its own for every keyword."""
    make, keywords, heavy = ALIASES[name]
    alias = getattr(so, name)
    momentum = MOMENTUM if heavy else {}
    given = keywords | momentum | DECAY | dict(learning_rate=0.1, mask=MASK)
    given |= dict(rms=0.3, max_rms=0.25)
    parameters = inspect.signature(alias).parameters
    assert given.keys() == parameters.keys()
    assert all(given[key] != parameters[key].default for key in given)
    chain = [make(**keywords), so.match_rms(0.3), so.cap_rms(0.25)]
    rates = dict(learning_rate=0.1, peak_learning_rate=0.2)
    chain.append(so.decay_weights(0.1, decay="corrected", mask=MASK, **rates))
    if heavy:
        mu = momentum["momentum"]
        rest = dict(dampening=0.25, nesterov=True, dtype="bfloat16")
        chain.append(so.scale_by_momentum(mu, **rest))
    chain += [optax.scale(-0.1), so.fill_absent()]
    (text, state), (wanted, other) = (
        program(alias(**given)),
        program(optax.chain(*chain)),
    )
    assert text == wanted
    assert jax.tree.structure(state) == jax.tree.structure(other)


@aliases
def test_defaults_are_those_of_the_transform(name):
    make, _, _ = ALIASES[name]
    parameters = inspect.signature(make).parameters
    alias = inspect.signature(getattr(so, name)).parameters
    shared = parameters.keys() & alias.keys()
    assert {"b1", "eps", "blocking", "storage"} <= shared
    for key in shared:
        assert parameters[key].default == alias[key].default, key


def test_dtype_of_the_momentum():
    """Computed in float32, rounded once a step."""
    steps = [{"w": g} for g in helpers.normals(0, 5, 4, 3)]
    got, wanted = [], []
    buffer = np.zeros((4, 3), jnp.bfloat16)
    tx = so.scale_by_momentum(0.75, dtype="bfloat16")
    state = tx.init(steps[0])
    for grads in steps:
        update, state = tx.update(grads, state)
        assert state.momentum["w"].dtype == jnp.bfloat16
        assert update["w"].dtype == jnp.float32
        wide = np.float32(0.75) * buffer.astype(np.float32) + np.asarray(grads["w"])
        buffer = wide.astype(jnp.bfloat16)
        got.append(state.momentum["w"])
        wanted.append(buffer)
    np.testing.assert_array_equal(np.stack(got), np.stack(wanted))


@pytest.mark.parametrize("dtype", ["float16", "int32", 32])
def test_bad_dtype_of_the_momentum(dtype):
    with pytest.raises(ValueError, match=f"`dtype` must be .* got {dtype!r}"):
        so.scale_by_momentum(0.9, dtype=dtype)
