"""A short training that one process can do alone, or several together.

`test_processes.py` calls :func:`train` itself, and starts this file once for each
process of a group.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shampoo_optax as so

STEPS = 20
PARTS = ("curve", "before", "after", "portable", "again")
WHOLE = PartitionSpec()
SHAPES = {"wide": (24, 40), "square": (16, 16), "kernel": (3, 3, 2, 8), "bias": (8,)}
OPTIONS = dict(
    refresh_every=5,
    weight_decay=0.01,
    blocking=so.Blocking(block_size=16),
    metrics=True,
)
OPTIMIZERS = {
    "shampoo": partial(so.shampoo, 0.1, **OPTIONS),
    "soap": partial(so.soap, 0.1, **OPTIONS),
    "reduced": partial(so.shampoo, 0.1, **OPTIONS),
}


def make_mesh(name):
    """All devices; the axis is of the type Auto for SOAP, else the release's own."""
    if name == "soap":
        return Mesh(np.array(jax.devices()), ("data",))
    return jax.make_mesh((jax.device_count(),), ("data",))


def train(name):
    """Trains on all devices, those of other processes included.

    Returns:
      the parameters after each step on each of this process's devices, `{parameter:
      [steps, devices, *shape]}`, and the parts of the optimizer's state that it
      holds, `{"path from slot": array}`, before the first step and after the last;
      the last state in its portable form, with its diagnosis, and the same once it
      went back and forth.
    """
    mesh, reduced = make_mesh(name), name == "reduced"
    params = put(values(1), mesh)
    # Where gradients are still to be reduced, every device has its own.
    noise = put(values(0, STEPS, mesh.size if reduced else 1), mesh)
    tx, init, step = (reducing if reduced else placed)(name, mesh, params)
    state = init(params)
    seen, before = [], held(state)
    for index in range(STEPS):
        params, state = step(params, state, noise, index)
        seen.append({key: copies(leaf) for key, leaf in params.items()})
    curve = {key: np.stack([leaves[key] for leaves in seen]) for key in SHAPES}
    portable = so.to_portable(tx, state, params, mesh)
    again = so.from_portable(tx, portable, params, mesh)
    found = [
        so.to_portable(tx, one, params, mesh) | diagnosed(tx, one, params, mesh)
        for one in (state, again)
    ]
    return curve, before, held(state), *found


def diagnosed(tx, state, params, mesh):
    scalars = so.diagnose(state, params, tx, mesh=mesh).scalars()
    return {tag: np.array(value) for tag, value in scalars.items()}


def copies(leaf):
    return np.stack([shard.data for shard in leaf.addressable_shards])


def values(seed, *lead):
    rng = np.random.default_rng(seed)
    return {
        key: rng.standard_normal((*lead, *shape), np.float32)
        for key, shape in SHAPES.items()
    }


def put(tree, mesh):
    """Gives every device a copy of arrays that every process has."""
    sharding = NamedSharding(mesh, WHOLE)

    def place(leaf):
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: leaf[index]
        )

    return jax.tree.map(place, tree)


def advance(tx, params, state, noise):
    """Descends a parabola whose gradient is disturbed.

    And rounded: sums over the devices are then exact, in any order.
    """
    gradient = jax.tree.map(lambda p, n: jnp.round(16 * (p + n)) / 16, params, noise)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def placed(name, mesh, params):
    tx = OPTIMIZERS[name](placement=so.Placement(mesh))

    @jax.jit
    def step(params, state, noise, index):
        return advance(tx, params, state, {k: n[index, 0] for k, n in noise.items()})

    return tx, tx.init, step


def reducing(name, mesh, params):
    tx = OPTIMIZERS[name](placement=so.Placement(axes="data", reduce=True))
    shardings = so.state_shardings(tx, params, mesh)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    mapped = partial(jax.shard_map, mesh=mesh, check_vma=False)

    @jax.jit
    @partial(mapped, in_specs=(WHOLE, specs, WHOLE, WHOLE), out_specs=(WHOLE, specs))
    def step(params, state, noise, index):
        device = jax.lax.axis_index("data")
        own = {key: leaf[index, device] for key, leaf in noise.items()}
        return advance(tx, params, state, own)

    return tx, jax.jit(mapped(tx.init, in_specs=WHOLE, out_specs=specs)), step


def held(tree):
    """What this process holds of a tree, by path and first slot."""
    return {
        f"{jax.tree_util.keystr(path)} from {first_slot(shard)}": np.asarray(shard.data)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        for shard in leaf.addressable_shards
    }


def first_slot(shard):
    return shard.index[0].start or 0 if shard.index else "all"


def main(port, processes, process, folder):
    """Joins the other processes, trains, and writes what was seen."""
    # Simulated devices of several processes need it; GPUs and TPUs do not.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))
    for name in OPTIMIZERS:
        for part, arrays in zip(PARTS, train(name), strict=True):
            np.savez(f"{folder}/{name}-{part}-{process}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
