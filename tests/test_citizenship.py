"""Acceptance cases of JAX and optax citizenship: program, dtypes, odd trees."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMS

import shampoo_optax as so

ALIASES = {"shampoo": so.shampoo, "soap": so.soap}
names = pytest.mark.parametrize("name", TRANSFORMS)

# ---- C11: eager, jitted and scanned

# Four gradients give every factor its full rank before the first refresh: a factor
# that lacks it would multiply rounding errors by 1 / relative_eps.
MIXED = {"matrix": (6, 4), "vector": (3,), "scalar": (), "order4": (2, 3, 2, 4)}


def scanned(tx, params, steps):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)

    def body(state, grads):
        update, state = tx.update(grads, state, params)
        return state, update

    return jax.jit(lambda s: jax.lax.scan(body, s, stacked))(tx.init(params))


@names
def test_eager_jitted_and_scanned_agree(name):
    steps = helpers.normal_steps(MIXED, 25)
    tx = TRANSFORMS[name](refresh_every=4, graft="adam")
    jitted, states = helpers.trace(tx, steps[0], steps)
    final, stacked = scanned(tx, steps[0], steps)
    in_scan = [jax.tree.map(lambda x, t=t: x[t], stacked) for t in range(25)]
    with jax.disable_jit():  # otherwise eager steps compile the `cond` each time
        eager, _ = helpers.trace(tx, steps[0], steps)
    for one, other, third in zip(eager, jitted, in_scan, strict=True):
        assert helpers.worst(one, other) <= 1e-5
        assert helpers.worst(third, other) <= 1e-5
    assert jax.tree.structure(final) == jax.tree.structure(states[-1])


@names
def test_plain_eager_steps_agree_with_jitted_ones(name):
    steps = helpers.normal_steps({"w": (4, 3)}, 3)
    tx = TRANSFORMS[name](refresh_every=2, graft="adam")
    jitted, _ = helpers.trace(tx, steps[0], steps)
    eager, _ = helpers.trace(tx, steps[0], steps, jit=lambda update: update)
    for one, other in zip(eager, jitted, strict=True):
        assert helpers.worst(one, other) <= 1e-5


# ---- C13: program size


def equal_matrices(count):
    return {str(i): jnp.ones((12, 8)) for i in range(count)}


def decompositions(tx, params):
    """Shape and number of the matrices of every traced eigendecomposition.

    On CPU each is the body of a loop over the matrices of one side.
    """
    return sorted(
        (eqn.invars[0].aval.shape, inside.count("scan"))
        for eqn, inside in helpers.update_equations(tx, params)
        if eqn.primitive.name == "eigh"
    )


@names
@pytest.mark.parametrize("count", [8, 64])
def test_number_of_eigh_does_not_grow(name, count):
    found = decompositions(TRANSFORMS[name](), equal_matrices(count))
    assert found == [((8, 8), 1), ((12, 12), 1)]


def test_eigh_is_shared_between_stacks_and_axes_of_one_side():
    params = {"a": jnp.ones((12, 8)), "b": jnp.ones((8, 8)), "c": jnp.ones(12)}
    found = decompositions(so.scale_by_shampoo(), params)
    assert found == [((8, 8), 1), ((12, 12), 1)]


@names
def test_compiled_program_hardly_grows(name):
    """Lines of compiled HLO; `benchmarks/program_size.py` measures the time."""

    def lines(count):
        params, tx = equal_matrices(count), TRANSFORMS[name]()
        lowered = jax.jit(tx.update).lower(params, tx.init(params))
        return lowered.compile().as_text().count("\n")

    few, many = lines(8), lines(64)
    assert few < many <= 3 * few


# ---- C21: dtypes


def test_stack_of_float64_blocks_is_named_so(x64):
    params = {"a": jnp.ones((6, 4), jnp.float64), "b": jnp.ones((6, 4), jnp.float32)}
    state = so.scale_by_shampoo().init(params)
    kinds = {name: axes["0"].dtype for name, axes in state.factors.items()}
    wanted = {"6x4": jnp.dtype(jnp.float32), "6x4_float64": jnp.dtype(jnp.float64)}
    assert kinds == wanted


@pytest.mark.parametrize("alias", ALIASES)
def test_bfloat16_ends_near_float32(alias):
    """Least squares: the loss reached in bfloat16 is within 2 % of float32's."""
    inputs, target = helpers.normals(0, 64, 6), helpers.normals(1, 64, 4)

    def final_loss(dtype):
        params = {"w": jnp.zeros((6, 4), dtype)}
        tx = ALIASES[alias](0.02, refresh_every=5)

        def loss(params):
            error = inputs @ params["w"].astype(jnp.float32) - target
            return jnp.mean(jnp.square(error))

        def body(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        start = (params, tx.init(params))
        (params, _), _ = jax.jit(lambda s: jax.lax.scan(body, s, None, 40))(start)
        assert params["w"].dtype == dtype
        return float(loss({"w": jnp.zeros((6, 4))})), float(loss(params))

    (first, single), (_, half) = final_loss(jnp.float32), final_loss(jnp.bfloat16)
    assert single < 0.95 * first
    assert abs(half - single) <= 0.02 * single


# ---- C23: odd trees

ODD = {
    "scalar": (),
    "empty": (0, 3),
    "one": (1,),
    "row": (1, 7),
    "column": (7, 1),
    "tall": (50000, 16),
    "kernel": (3, 3, 8, 16),
}


def run_five(tx, params, scale=1.0):
    """Five jitted updates; all finite, shaped and typed as the parameters."""
    update = jax.jit(tx.update)
    state = tx.init(params)
    for t in range(5):
        grads = jax.tree.map(lambda x, t=t: scale * jnp.cos(x + t), params)
        updates, state = update(grads, state, params)
        jax.tree.map(
            lambda u, p: np.testing.assert_equal(u.shape, p.shape), updates, params
        )
        helpers.assert_finite((updates, state))
        assert all(np.any(u) for u in jax.tree.leaves(updates) if u.size)
    return updates, state


def odd_params():
    return {key: helpers.normals(0, *shape) for key, shape in ODD.items()}


@names
def test_odd_shapes(name):
    params = odd_params() | {"nothing": None}
    tx = TRANSFORMS[name](refresh_every=2, blocking=so.Blocking(64))
    updates, state = run_five(tx, params)
    assert updates["nothing"] is None
    for leaf in jax.tree.leaves(state):
        assert leaf.size > 0
        sides = leaf.shape[1:]  # the first dimension counts the blocks of a stack
        assert max(sides, default=0) <= 64
    held = sum(leaf.size for leaf in jax.tree.leaves(state.filtered))
    assert held == sum(np.prod(shape, dtype=int) for shape in ODD.values())


@names
@pytest.mark.parametrize("params", [{}, {"e": jnp.ones((0, 3))}, (None, None)], ids=str)
def test_trees_with_nothing_to_precondition(name, params):
    tx = TRANSFORMS[name]()
    state = tx.init(params)
    for t in range(1, 4):
        updates, state = jax.jit(tx.update)(params, state, params)
        helpers.assert_equal(updates, params)
        assert int(state.count) == t


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Linear:
    """A module like Equinox's: a node with arrays, an absent leaf, static data."""

    weight: jax.Array
    bias: jax.Array
    unused: None = None
    name: str = "linear"

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        children = [(key("weight"), self.weight), (key("bias"), self.bias)]
        return [*children, (key("unused"), self.unused)], self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


@names
def test_custom_nodes_and_dicts_give_the_same_updates(name):
    weight, bias = helpers.normals(0, 6, 4), helpers.normals(1, 4)
    tx = TRANSFORMS[name](refresh_every=2)
    module, _ = run_five(tx, {"layer": Linear(weight, bias)})
    plain, _ = run_five(tx, {"layer": {"0weight": weight, "1bias": bias}})
    assert isinstance(module["layer"], Linear)
    assert module["layer"].unused is None
    for got, want in zip(*map(jax.tree.leaves, (module, plain)), strict=True):
        np.testing.assert_array_equal(got, want)


@names
def test_nnx_state_and_dicts_give_the_same_updates(name):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 5, rngs=rngs)
            self.norm = nnx.LayerNorm(5, rngs=rngs)

    params = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    tx = TRANSFORMS[name](refresh_every=2)
    updates, _ = run_five(tx, params)
    leaves = {f"{i:02d}": leaf for i, leaf in enumerate(jax.tree.leaves(params))}
    assert len(leaves) == 4
    plain, _ = run_five(tx, leaves)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for got, want in zip(*map(jax.tree.leaves, (updates, plain)), strict=True):
        np.testing.assert_array_equal(got, want)


@names
def test_flattened(name):
    """All parameters as one long vector, cut into blocks of 64."""
    params = {key: helpers.normals(0, *s) for key, s in ODD.items() if key != "tall"}
    tx = TRANSFORMS[name](refresh_every=2, blocking=so.Blocking(64))
    updates, state = run_five(optax.flatten(tx), params)
    vector = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(params)])
    wanted, _ = run_five(tx, vector)
    got = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(updates)])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    sides = {x.shape[1:] for x in jax.tree.leaves(state.filtered)}
    assert sides == {(64,), (vector.size % 64,)}


@pytest.mark.parametrize("name", ["b1", "b2", "b3", "graft_b2"])
def test_a_hyperparameter_may_be_an_array_under_jit(name):
    gradient = {"w": helpers.normals(0, 6, 4)}
    updates = []
    for number in (0.5, jnp.float32(0.5)):
        tx = so.scale_by_shampoo(**{name: number}, refresh_every=1)
        updates.append(jax.jit(tx.update)(gradient, tx.init(gradient), gradient)[0])
    assert helpers.worst(*updates) <= 1e-5


def test_momentum_of_an_empty_parameter_takes_no_empty_array():
    params = {"e": jnp.zeros((0, 3)), "w": jnp.ones((2, 2))}
    tx = so.scale_by_momentum(0.9, nesterov=True)
    state = tx.init(params)
    assert all(leaf.size for leaf in jax.tree.leaves(state))
    updates, after = jax.jit(tx.update)(params, state)
    assert updates["e"].shape == (0, 3)
    np.testing.assert_allclose(updates["w"], 1.9)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
