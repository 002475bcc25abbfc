"""Training in Flax and in modules like Equinox's: as in a plain loop, bit for bit."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import shampoo_optax as so

# All sides are equal, so that there are two stacks to compile.
START = {
    "first": {"bias": helpers.normals(0, 6), "kernel": helpers.normals(1, 6, 6)},
    "last": {"bias": helpers.normals(2, 6), "kernel": helpers.normals(3, 6, 6)},
}
BATCHES = helpers.normal_steps({"inputs": (16, 6), "targets": (16, 6)}, 15)


def averaged(*sizes):
    """Trees like the parameters, stacks and counters: a state of each kind."""
    return optax.chain(
        so.scale_by_shampoo(refresh_every=4, placement=helpers.placement_of(*sizes)),
        so.scale_by_momentum(0.5),
        so.schedule_free(0.05, weight_decay=0.1),
    )


def affine(inputs, kernel, bias):
    return inputs @ kernel + bias[None]


def error(outputs, batch):
    return jnp.mean(jnp.square(outputs - batch["targets"]))


@dataclasses.dataclass(frozen=True)
class Training:
    """How a framework trains: a session is what it carries from step to step."""

    start: Callable  # (tx, params) -> session
    step: Callable  # (session, batch) -> session, jitted
    params: Callable  # session -> a tree of arrays in the order of START


# ---- a plain loop


def plain(tx):
    def loss(params, batch):
        hidden = jnp.tanh(affine(batch["inputs"], **params["first"]))
        return error(affine(hidden, **params["last"]), batch)

    @jax.jit
    def step(session, batch):
        params, state = session
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return Training(lambda params: (params, tx.init(params)), step, lambda s: s[0])


# ---- Flax linen


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, inputs):
        hidden = jnp.tanh(linen.Dense(6, name="first")(inputs))
        return linen.Dense(6, name="last")(hidden)


def with_linen(tx):
    model = LinenNet()

    def start(params):
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return state.replace(step=jnp.zeros((), jnp.int32))

    @jax.jit
    def step(state, batch):
        def loss(params):
            return error(state.apply_fn({"params": params}, batch["inputs"]), batch)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    return Training(start, step, lambda state: state.params)


# ---- Flax nnx

# From flax 0.11 on the optimizer does not hold the model.
HOLDS_MODEL = "model" not in inspect.signature(nnx.Optimizer.update).parameters


class Weight(nnx.Variable):
    """A kind of variable of the user's own."""


class Seen(nnx.Variable):
    """A state that is not trained."""


class NnxAffine(nnx.Module):
    def __init__(self, kernel, bias):
        self.kernel, self.bias = Weight(kernel), Weight(bias)

    def __call__(self, inputs):
        return affine(inputs, self.kernel[...], self.bias[...])


class NnxNet(nnx.Module):
    def __init__(self, first, last):
        self.first, self.last = NnxAffine(**first), NnxAffine(**last)
        self.seen = Seen(jnp.zeros((), jnp.int32))

    def __call__(self, inputs):
        self.seen[...] += 1
        return self.last(jnp.tanh(self.first(inputs)))


def with_nnx(tx):
    def start(params):
        model = NnxNet(**params)
        return model, nnx.Optimizer(model, tx, wrt=Weight)

    @nnx.jit
    def train(model, optimizer, batch):
        def loss(model):
            return error(model(batch["inputs"]), batch)

        grads = nnx.grad(loss, argnums=nnx.DiffState(0, Weight))(model)
        optimizer.update(*([grads] if HOLDS_MODEL else [model, grads]))

    def step(session, batch):
        train(*session, batch)
        return session

    def params(session):
        return nnx.state(session[0], Weight)

    return Training(start, step, params)


# ---- modules like Equinox's


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias", "kernel", "activation", "absent"],
    meta_fields=["name"],
)
@dataclasses.dataclass
class Layer:
    bias: jax.Array
    kernel: jax.Array
    activation: Callable  # a leaf that is no array
    absent: None = None
    name: str = "layer"

    def __call__(self, inputs):
        return self.activation(affine(inputs, self.kernel, self.bias))


def layers(params):
    first = Layer(**params["first"], activation=jnp.tanh)
    return [first, Layer(**params["last"], activation=lambda outputs: outputs)]


def only_arrays(tree):
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, tree)


def combined(arrays, tree):
    def pick(array, leaf):
        return leaf if array is None else array

    return jax.tree.map(pick, arrays, tree, is_leaf=lambda node: node is None)


def with_modules(tx):
    def start(params):
        arrays = only_arrays(layers(params))
        return arrays, tx.init(arrays)

    def loss(arrays, batch):
        first, last = combined(arrays, layers(START))
        return error(last(first(batch["inputs"])), batch)

    @jax.jit
    def step(session, batch):
        arrays, state = session
        updates, state = tx.update(jax.grad(loss)(arrays, batch), state, arrays)
        return optax.apply_updates(arrays, updates), state

    return Training(start, step, lambda session: session[0])


# ---- the tests

FRAMEWORKS = {"linen": with_linen, "nnx": with_nnx, "modules": with_modules}


@functools.lru_cache
def training(name, *sizes):
    return (FRAMEWORKS | {"plain": plain})[name](averaged(*sizes))


def copies(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def arrays_of(session):
    """What a checkpoint holds: the model and the optimizer together."""
    return nnx.state(session) if is_nnx(session) else session


def with_arrays(session, arrays):
    if not is_nnx(session):
        return arrays
    nnx.update(session, arrays)
    return session


def is_nnx(session):
    return isinstance(session, tuple) and isinstance(session[0], nnx.Module)


def started(name, *sizes):
    """A session whose arrays have chosen their devices, as restored ones have."""
    home = jax.devices()[0]
    if sizes:
        home = NamedSharding(helpers.mesh_of(*sizes), PartitionSpec())

    def settle(leaf):
        divided = isinstance(leaf.sharding, NamedSharding)
        return leaf if divided else jax.device_put(leaf, home)

    session = training(name, *sizes).start(jax.device_put(START, home))
    return with_arrays(session, jax.tree.map(settle, arrays_of(session)))


def train(name, sizes, session, batches):
    """The session after the last batch, and the parameters after each."""
    how, found = training(name, *sizes), []
    for batch in batches:
        batch = helpers.replicate(batch, helpers.mesh_of(*sizes))
        session = how.step(session, batch)
        found.append(copies(how.params(session)))
    return session, found


@functools.lru_cache
def unbroken(name, *sizes):
    return train(name, sizes, started(name, *sizes), BATCHES)[1]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_training_is_that_of_a_plain_loop(name):
    assert np.any(unbroken("plain")[0][0] != START["first"]["bias"])
    helpers.assert_equal(unbroken(name), unbroken("plain"))


@pytest.mark.parametrize("sizes", [(), (8,)])
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_a_run_goes_on_from_a_checkpoint_within_a_period(name, sizes, tmp_path):
    wanted = unbroken(name, *sizes)[7:]
    session, _ = train(name, sizes, started(name, *sizes), BATCHES[:7])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", arrays_of(session))
        checkpointer.wait_until_finished()
        fresh = started(name, *sizes)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays_of(fresh))
        restored = checkpointer.restore(tmp_path / "run", target)
    assert all(leaf.size for leaf in jax.tree.leaves(restored))
    with helpers.compilations() as compiled:
        _, found = train(name, sizes, with_arrays(fresh, restored), BATCHES[7:])
    helpers.assert_equal(found, wanted)
    assert compiled == [0]
