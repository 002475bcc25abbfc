"""What several test files share: running a transform, reading a jaxpr."""

import contextlib
import functools
import re
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shampoo_optax as so
from shampoo_optax._placement import only_layouts

# The settings of the acceptance cases: refresh at every step, factors as a sum,
# no filter, no grafting. `eps` and `relative_eps` keep their defaults.
BARE = dict(b1=0.0, b2=1.0, graft=None, refresh_every=1)

TRANSFORMS = {"shampoo": so.scale_by_shampoo, "soap": so.scale_by_soap}

# `optax.partition` is the newer name of `optax.multi_transform`.
partition = getattr(optax, "partition", optax.multi_transform)


def enable_x64():
    """A context in which arrays may have 64 bits."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as context  # before jax 0.8

    return context()


def normals(seed, *shape, dtype=jnp.float32):
    """Standard normal numbers as a jax array."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def normal_steps(shapes, steps, seed=0, scale=1.0):
    """A list of trees of random gradients, one a step."""
    rng = np.random.default_rng(seed)

    def tree():
        return {
            name: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)
            for name, shape in shapes.items()
        }

    return [tree() for _ in range(steps)]


def zeros_like(tree):
    return jax.tree.map(jnp.zeros_like, tree)


@functools.lru_cache
def make(name, **kwargs):
    """One transform for all tests with these arguments: it compiles once."""
    return TRANSFORMS[name](**kwargs)


# Compiles a third faster, to slower code: for comparisons with a tolerance.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def trace(tx, params, steps, *, jit=jax.jit):
    """Updates and states after each of `steps` (a list of gradient trees)."""
    update = jit(tx.update)
    state = tx.init(params)
    updates, states = [], []
    for grads in steps:
        update_now, state = jax.block_until_ready(update(grads, state, params))
        updates.append(update_now)
        states.append(state)
    return updates, states


def scanned(tx, steps):
    """The directions of all steps, and the last state, in one compiled scan."""
    params = jax.tree.map(jnp.zeros_like, steps[0])

    @quick_jit
    def run(stacked):
        def step(state, grads):
            update, state = tx.update(grads, state, params)
            return state, update

        return jax.lax.scan(step, tx.init(params), stacked)

    state, updates = run(jax.tree.map(lambda *x: jnp.stack(x), *steps))
    each = (jax.tree.map(itemgetter(t), updates) for t in range(len(steps)))
    return list(each), state


def field(state, name):
    """The field `name` of the one named tuple in `state` that has it."""
    return optax.tree_utils.tree_get(state, name)


def total(counters):
    """The sum of the counters of all stacks."""
    return int(sum(np.sum(x) for x in jax.tree.leaves(counters)))


def assert_finite(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        finite = np.isfinite(np.asarray(leaf, np.float64)).all()
        assert finite, f"{jax.tree_util.keystr(path)} is not finite"


def assert_equal(tree, expected):
    """Bit for bit, types and structure included."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def worst(got, want):
    """The largest error of a leaf, relative to the largest entry of the leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    errors = [0.0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.shape(a) == np.shape(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.max(np.abs(a - b), initial=0.0)
        assert not np.isnan(error)
        errors.append(error / np.max(np.abs(b), initial=0.0) if error else 0.0)
    return max(errors)


def worst_of_steps(got, want):
    """As `worst`, relative to the largest entry of a leaf in all steps."""
    stacked = (
        jax.tree.map(lambda *x: np.stack(x), *updates) for updates in (got, want)
    )
    return worst(*stacked)


def structs(shapes, dtype=jnp.float32):
    """Arrays that are only known by their shapes, a tree of tuples."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _subjaxprs(value):
    if isinstance(value, list | tuple):
        for item in value:
            yield from _subjaxprs(item)
    elif hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr


def equations(jaxpr, inside=()):
    """All equations of a jaxpr, each with the primitives it is nested in.

    A branch of a `cond` is written `cond[0]`, `cond[1]`.
    """
    for eqn in jaxpr.eqns:
        yield eqn, inside
        name = eqn.primitive.name
        for value in eqn.params.values():
            for index, sub in enumerate(_subjaxprs(value)):
                here = f"{name}[{index}]" if name == "cond" else name
                yield from equations(sub, (*inside, here))


def update_equations(tx, params):
    """The equations of one traced update."""
    state = jax.eval_shape(tx.init, params)
    closed = jax.make_jaxpr(tx.update)(params, state, params)
    return list(equations(closed.jaxpr))


# ---- documents


def blocks_of(text):
    """The Python code of a document, block by block."""
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def run_blocks(text, title):
    """What the blocks of a document, run in their order, define."""
    namespace = {}
    for number, block in enumerate(blocks_of(text)):
        exec(compile(block, f"{title}, block {number}", "exec"), namespace)
    return namespace


# ---- meshes

# `jax.set_mesh` is the newer name.
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh


@functools.lru_cache
def mesh_of(*sizes, kind="Auto"):
    """A mesh of the first devices with the axes x, y, z; none without sizes."""
    if not sizes:
        return None
    kinds = (getattr(AxisType, kind),) * len(sizes)
    return jax.make_mesh(sizes, tuple("xyz"[: len(sizes)]), axis_types=kinds)


def placement_of(*sizes, axes=None, kind="Auto", **kwargs):
    """Over the axes of a mesh; none without sizes."""
    return so.Placement(mesh_of(*sizes, kind=kind), axes, **kwargs) if sizes else None


def plan_of(tx, params, owners=0):
    """The plan of one of our transforms; 0 stands for the placement's own owners."""
    with only_layouts(owners):
        return tx.init(params).plan


def replicate(tree, mesh):
    """A copy of the tree on every device of the mesh; the tree where there is none."""
    if mesh is None:
        return tree
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def divide(tree, mesh, specs):
    """The arrays of a dict on a mesh, each as its spec says; `None` stays."""
    return {
        name: leaf
        if leaf is None
        else jax.device_put(leaf, NamedSharding(mesh, specs[name]))
        for name, leaf in tree.items()
    }


def same_sharding(one, other):
    return one.sharding.is_equivalent_to(other.sharding, one.ndim)


_compiled = []  # one entry for every program that XLA has compiled


def _count(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(duration)


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def compilations():
    """Yields a list that holds, once the context ends, how many there were."""
    found, before = [], len(_compiled)
    yield found
    found.append(len(_compiled) - before)
