"""The combinator that takes the direction of one transform and the size of another."""

import itertools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shampoo_optax as so

SHAPES = {"w": (7, 4), "b": (5,), "k": (2, 3, 4), "s": ()}
BLOCKING = so.Blocking(3)
SIGN = optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates))


def blocks_of(array, size):
    """The slices of an array cut along every dimension, in NumPy."""
    starts = (range(0, side, size) for side in array.shape)
    for corner in itertools.product(*starts):
        yield tuple(slice(start, start + size) for start in corner)


def grafted(direction, magnitude, size=None):
    """The float64 reference: norms over whole arrays or over their blocks."""
    direction, magnitude = (np.asarray(x, np.float64) for x in (direction, magnitude))
    out = np.zeros_like(direction)
    boxes = [()] if size is None else list(blocks_of(direction, size))
    for box in boxes:
        scale = np.linalg.norm(magnitude[box]) / np.linalg.norm(direction[box])
        out[box] = direction[box] * scale
    return out


@pytest.mark.parametrize("size", [None, 3], ids=["parameter", "block"])
def test_norms_are_those_of_the_other(size):
    """Any two optax transforms: Lion's direction with the size of Adam's."""
    parts = optax.scale_by_lion(), optax.scale_by_adam()
    blocking = None if size is None else so.Blocking(size, merge_to=None)
    steps = helpers.normal_steps(SHAPES, 3)
    updates, _ = helpers.trace(so.graft(*parts, blocking=blocking), steps[0], steps)
    both = [helpers.trace(part, steps[0], steps)[0] for part in parts]
    for got, one, other in zip(updates, *both, strict=True):
        for key in SHAPES:
            wanted = grafted(one[key], other[key], size)
            np.testing.assert_allclose(got[key], wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_built_in_grafting_is_the_same(name):
    """The combinator has the blocks of the transform, whose moments are its own."""
    magnitudes = {"adam": optax.scale_by_adam(b1=0.0, b2=0.99), "sgd": optax.identity()}
    kwargs = dict(b1=0.0, refresh_every=1, blocking=BLOCKING)
    built_in = so.scale_by_shampoo(graft=name, **kwargs)
    ours = so.graft(
        so.scale_by_shampoo(graft=None, **kwargs), magnitudes[name], blocking=BLOCKING
    )
    steps = helpers.normal_steps({"w": (6, 3), "b": (3,)}, 3)
    got, want = (
        helpers.trace(tx, steps[0], steps, jit=helpers.quick_jit)[0]
        for tx in (ours, built_in)
    )
    for one, other in zip(got, want, strict=True):
        assert helpers.worst(one, other) <= 1e-6


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("blocking", [None, so.Blocking(4)], ids=["parameter", "block"])
def test_sharded_parameters(kind, blocking):
    mesh = helpers.mesh_of(8, kind=kind)
    grads = {"w": helpers.normals(0, 8, 4), "b": helpers.normals(1, 5)}
    specs = {"w": PartitionSpec("x"), "b": PartitionSpec()}
    placed = {
        key: jax.device_put(leaf, NamedSharding(mesh, specs[key]))
        for key, leaf in grads.items()
    }
    tx = so.graft(SIGN, optax.identity(), blocking=blocking)
    want, _ = tx.update(grads, tx.init(grads))
    got, _ = helpers.quick_jit(tx.update)(placed, tx.init(placed))
    assert helpers.worst(got, want) <= 1e-6
    for key, leaf in got.items():
        assert leaf.sharding.is_equivalent_to(placed[key].sharding, leaf.ndim)


def test_bad_numbers_absent_gradients_and_dtypes():
    grads = {
        "nan": jnp.array([1.0, jnp.nan]),
        "huge": jnp.full((2, 2), 3e38),
        "zero": jnp.zeros(3),
        "none": None,
        "empty": jnp.zeros((0, 2)),
        "half": jnp.full((2, 2), 2.0, jnp.bfloat16),
    }
    tx = so.graft(SIGN, optax.identity())
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    helpers.assert_finite(updates)
    assert not np.any(updates["nan"]) and not np.any(updates["zero"])
    assert updates["none"] is None and updates["empty"].shape == (0, 2)
    assert updates["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(updates["half"], np.float32), 2.0)
    assert isinstance(state, so.GraftState)


def test_extra_arguments_reach_both():
    seen = []

    def noting(name):
        def update(updates, state, params=None, **extra):
            seen.append((name, extra))
            return updates, state

        init = optax.identity().init
        return optax.GradientTransformationExtraArgs(init, update)

    tx = so.graft(noting("direction"), noting("magnitude"))
    grads = jnp.ones(2)
    tx.update(grads, tx.init(grads), grads, value=3.0)
    assert seen == [("direction", {"value": 3.0}), ("magnitude", {"value": 3.0})]


@pytest.mark.parametrize(
    "change",
    [lambda updates: (updates,), jnp.transpose, lambda updates: None],
    ids=["structure", "shape", "absent"],
)
def test_updates_that_differ_are_refused(change):
    other = optax.stateless(lambda updates, _: change(updates))
    tx = so.graft(optax.identity(), other)
    with pytest.raises(ValueError, match="`magnitude` must give updates like"):
        tx.update(jnp.ones((2, 3)), tx.init(jnp.ones((2, 3))))


@pytest.mark.parametrize("leaf", [jnp.ones(2, complex), jnp.ones(2, int), 1.0])
def test_leaves_that_are_not_real_are_refused(leaf):
    parts = so.graft(optax.identity(), optax.identity()), so.cap_rms(1.0)
    for tx in (*parts, so.match_rms(), so.scale_by_row_wise_adagrad()):
        with pytest.raises(ValueError, match="`updates` must hold real floating-point"):
            tx.update({"w": leaf}, tx.init({"w": jnp.ones(2)}))


@pytest.mark.parametrize(
    "name, args, kwargs",
    [
        ("direction", ("adam", optax.identity()), {}),
        ("magnitude", (optax.identity(), None), {}),
        ("blocking", (optax.identity(), optax.identity()), dict(blocking=3)),
    ],
)
def test_bad_arguments_are_refused(name, args, kwargs):
    with pytest.raises(ValueError, match=f"`{name}` must be .* got"):
        so.graft(*args, **kwargs)
