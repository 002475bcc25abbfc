"""Parameters divided over a mesh: what travels, what a device holds, and `describe`."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of, plan_of, quick_jit
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_wire import inside_conditionals

import shampoo_optax as so
from benchmarks.hlo import collective_bytes, collectives

# ---- what travels, and what a device holds


def compiled_step(tx, params, **donated):
    state = so.abstract_state(tx, params)
    return quick_jit(tx.update, **donated).lower(params, state, params).compile()


def abstract(shapes, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape in shapes.items()
    }


# {name: arguments}; the second keeps a sixteenth of a block, and no moments.
KEPT = {
    "all": dict(blocking=so.Blocking(32)),
    "little": dict(
        blocking=so.Blocking(128, batch=so.Batch(split={0: 16})),
        axes=so.Axes(sides="input"),
        b1=0.0,
        graft="sgd",
    ),
}


@functools.cache
def of_large_matrices(kept):
    """Two matrices of 32 or 16 blocks each, divided along rows."""
    mesh = mesh_of(8)
    params = abstract({"v": (256, 128), "w": (256, 128)}, mesh, P("x"))
    placement = so.Placement(mesh, specs=P("x"))
    tx = so.scale_by_shampoo(**KEPT[kept], refresh_every=2, placement=placement)
    step = compiled_step(tx, params, donate_argnums=1)
    return tx, params, step, 2 * 4 * 256 * 128 // 8


@pytest.mark.parametrize("kept", KEPT)
def test_no_device_holds_a_whole_parameter(kept):
    """No array of the step has as many entries as a whole parameter."""
    *_, step, _ = of_large_matrices(kept)
    kinds = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", step.as_text())
    assert max(math.prod(map(int, sides.split(","))) for sides in kinds) < 256 * 128


def test_memory_of_a_step():
    """2.5 times the shares of gradients and directions, and the slots of one stack.

    Of which there are few: else a device that has all gradients passes too.
    """
    tx, params, step, share = of_large_matrices("little")
    assert len(plan_of(tx, params).stacks) == 1
    state = so.abstract_state(tx, params)
    slots = sum(leaf.dtype.itemsize * leaf.size // 8 for leaf in jax.tree.leaves(state))
    most = 2.5 * (2 * share + slots)
    assert 0 < step.memory_analysis().temp_size_in_bytes <= most


def test_what_travels_on_even_shards():
    """Four exchanges of a share; none waits for a refresh."""
    *_, step, share = of_large_matrices("all")
    text = step.as_text()
    found = collectives(text)
    assert {kind for _, kind, _ in found} == {"all-to-all"}
    assert max(size for *_, size in found) <= 1.25 * share
    assert sum(size for *_, size in found) <= 4 * 1.25 * share
    assert not {where for where, *_ in found} & inside_conditionals(text)


def test_no_factor_travels():
    """The gradients together are smaller than any factor."""
    mesh = mesh_of(4, 2)
    specs = {"^w": P("x", "y"), "^v": P(("y", "x"))}
    params = abstract({"w": (64, 2)}, mesh, P("x", "y"))
    params |= abstract({"v": (64, 2)}, mesh, P(("y", "x")))
    placement = so.Placement(mesh, specs=specs)
    tx = so.scale_by_soap(axes=so.Axes(sides="input"), placement=placement)
    text = compiled_step(tx, params).as_text()
    found = collectives(text)
    assert found and sum(size for *_, size in found) < 4 * 64 * 64
    assert not {where for where, *_ in found} & inside_conditionals(text)


# ---- what describe says

MIXED = {  # (shape, spec on the mesh (4, 2)); blocks have sides of up to 8
    "even": ((32, 8), P("x")),
    "long": ((64,), P(("x", "y"))),
    "short": ((8,), P("x")),  # gathered, as the next one
    "shorter": ((4,), P("x")),
    "bias": ((6,), P("y")),
    "both": ((12, 12), P("x", "y")),  # blocks of 8 and 4
    "whole": ((8, 6), P()),
}


def test_bytes_on_the_wire_are_those_of_the_program():
    """Of vectors that are gathered, and of matrices that are in part."""
    mesh, params = mesh_of(4, 2), {}
    for name, (shape, spec) in MIXED.items():
        params |= abstract({name: shape}, mesh, spec)
    placement = so.Placement(mesh, specs=so.specs_of(params))
    blocking = so.Blocking(8)
    tx = so.scale_by_sign_descent(blocking=blocking, placement=placement)
    (part,) = so.describe(params, tx).parts
    assert part.wire == collective_bytes(compiled_step(tx, params).as_text())
    assert set(part.wire) == {"all-to-all", "all-gather"}


def test_short_vectors_travel_together():
    """Gathered at once, dealt to owners and back, and taken by all at once."""
    mesh = mesh_of(4, 2)
    params = abstract({str(n): (4 * n,) for n in range(1, 6)}, mesh, P("x"))
    tx = so.scale_by_sign_descent(placement=so.Placement(mesh, specs=P("x")))
    found = collectives(compiled_step(tx, params).as_text())
    kinds = sorted(kind for _, kind, _ in found)
    assert kinds == ["all-gather", "all-gather", "all-to-all", "all-to-all"]


@pytest.mark.parametrize("specs, mode", [(P("x"), "lossless"), (P(), "local")])
def test_costs_of_another_number_of_shards_are_refused(specs, mode):
    params = abstract({"w": (8, 8)}, mesh_of(4, 2), specs)
    placement = so.Placement(mesh_of(4, 2), specs=specs, mode=mode)
    tx = so.scale_by_sign_descent(placement=placement)
    wanted = "^`devices` must be 8, the mesh's, .*, got 4\\."
    with pytest.raises(ValueError, match=wanted):
        so.describe(params, tx, devices=4)
    assert [so.describe(params, tx, devices=n).parts[0].owners for n in (1, 8)] == [
        1,
        8,
    ]


def test_costs_of_whole_parameters_are_known_for_any_number_of_devices():
    tx = so.scale_by_sign_descent(placement=so.Placement(mesh_of(4, 2), specs=P()))
    params = abstract({"w": (8, 8)}, mesh_of(4, 2), P())
    (part,) = so.describe(params, tx, devices=4).parts
    assert part.owners == 4
