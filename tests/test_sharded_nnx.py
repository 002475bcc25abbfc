"""nnx models of divided parameters: their paths in `init` and in `update` differ."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import mesh_of, normals, same_sharding
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shampoo_optax as so

INPUTS = normals(0, 32, 16)
# From flax 0.11 on the optimizer does not hold the model.
HOLDS_MODEL = "model" not in inspect.signature(nnx.Optimizer.update).parameters


def spec_of(leaf):
    """Columns of matrices, and vectors."""
    return P(*(None,) * (leaf.ndim - 1), "x")


def lie(mesh, leaf):
    return jax.device_put(leaf, NamedSharding(mesh, spec_of(leaf)))


class Net(nnx.Module):
    def __init__(self, mesh=None):
        self.up = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
        if mesh is not None:
            placed = jax.tree.map(functools.partial(lie, mesh), nnx.state(self))
            nnx.update(self, placed)

    def __call__(self, inputs):
        return self.down(jnp.tanh(self.up(inputs)))


@nnx.jit
def train_step(net, optimizer):
    def loss(net):
        return jnp.mean(jnp.square(net(INPUTS) - jnp.roll(INPUTS, 1)))

    value, grads = nnx.value_and_grad(loss)(net)
    optimizer.update(*([grads] if HOLDS_MODEL else [net, grads]))
    return value


def losses_of(net, placement=None, batch=None):
    blocking = so.Blocking(batch=batch)
    direction = so.scale_by_sign_descent(
        scale="l1", blocking=blocking, placement=placement
    )
    tx = optax.chain(direction, optax.scale_by_learning_rate(1e-3))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    return np.array([train_step(net, optimizer) for _ in range(6)])


@functools.cache
def on_one_device(mode):
    """Local mode is the run whose blocks end where shards do."""

    def split(path, leaf):
        return so.Batch(split={len(leaf.shape) - 1: 8})

    return losses_of(Net(), batch=split if mode == "local" else None)


@pytest.mark.parametrize("mode", ["lossless", "local"])
def test_losses_are_those_of_one_device(mode):
    net = Net(mesh_of(8))
    specs = so.specs_of(nnx.state(net, nnx.Param))
    assert len(specs) == 4
    losses = losses_of(net, so.Placement(mesh_of(8), specs=specs, mode=mode))
    np.testing.assert_allclose(losses, on_one_device(mode), rtol=1e-5)
    for leaf in jax.tree.leaves(nnx.state(net, nnx.Param)):
        assert same_sharding(leaf, lie(mesh_of(8), leaf))


def test_the_modes_are_different_runs_and_both_learn():
    for mode in ("lossless", "local"):
        assert on_one_device(mode)[-1] < on_one_device(mode)[0]
    assert abs(on_one_device("local")[-1] / on_one_device("lossless")[-1] - 1) > 1e-3
