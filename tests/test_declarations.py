"""Declarations against parameters: how arrays lie, and what a placement can do."""

import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import divide, mesh_of, quick_jit, same_sharding, structs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shampoo_optax as so
from shampoo_optax._planning import specs_at

# ---- how arrays lie


def laid(spec):
    """An array on the mesh (4, 2)."""
    return jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh_of(4, 2), spec))


def eager_init(tx, params):
    return tx.init(params)


def eager_update(tx, params):
    """With a state from a `jit`, in which nothing is known of how arrays lie."""
    return tx.update(params, jax.jit(tx.init)(params), params)


def described(tx, params):
    return so.describe(params, tx)


LOOKS = (eager_init, eager_update, described, so.state_shardings, so.abstract_state)


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_specs_that_arrays_do_not_lie_by_are_refused(look):
    placement = so.Placement(mesh_of(4, 2), specs={"w": P(None, "x")})
    tx = optax.chain(so.scale_by_sign_descent(placement=placement))
    wanted = (
        f"`specs` must be as the parameter lies, {P('x')}, got {P(None, 'x')} for "
        "[8, 8] at 'w'; specs_of(params) writes it down."
    )
    with pytest.raises(ValueError, match="^`specs` must be as") as error:
        look(tx, {"w": laid(P("x")), "b": laid(P())})
    assert str(error.value) == wanted


@pytest.mark.parametrize("look", LOOKS[2:], ids=lambda look: look.__name__)
def test_shapes_with_shardings_are_looked_at_as_arrays(look):
    tx = so.scale_by_sign_descent(
        placement=so.Placement(mesh_of(4, 2), specs=P(None, "x"))
    )
    with pytest.raises(ValueError, match="^`specs` must be as the parameter lies"):
        w = laid(P("x"))
        look(tx, {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)})


@pytest.mark.parametrize(
    "specs, lies, mode, fits",
    [
        (P("x"), P("x"), "lossless", True),
        (P("x"), P("y"), "lossless", False),
        (P("x"), P(None, "x"), "lossless", False),
        (P("x"), P("x", "y"), "lossless", False),
        (P(("x", "y")), P("x"), "lossless", True),  # the step divides further
        (P(("x", "y")), P("y"), "lossless", False),
        (P("x", "y"), P("x"), "lossless", True),
        (P("x"), P(), "lossless", True),
        ({"b": P("x")}, P("x"), "lossless", True),  # taken as whole
        (P("x"), P("x"), "local", True),
        (P("x"), P(), "local", True),
        (P("x"), P("y"), "local", False),
        (P(), P("x"), "local", False),
        ({"b": P("x")}, P("x"), "local", False),
        ({"b": P("x")}, P(), "local", True),
    ],
    ids=str,
)
def test_arrays_fit_specs_that_divide_them_further(specs, lies, mode, fits):
    placement = so.Placement(mesh_of(4, 2), specs=specs, mode=mode)
    paths, leaves = [(jax.tree_util.DictKey("w"),)], [laid(lies)]
    if fits:
        assert len(specs_at(paths, leaves, placement)) == 1
        return
    with pytest.raises(ValueError, match=re.escape(f"lies, {lies}, got ")):
        specs_at(paths, leaves, placement)


def test_arrays_elsewhere_fit_all_specs():
    """On another mesh, on one device, or not yet anywhere."""
    other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    elsewhere = [
        jax.device_put(jnp.ones((8, 8)), NamedSharding(other, P("data"))),
        jnp.ones((8, 8)),
        np.ones((8, 8)),
        structs((8, 8)),
    ]
    placement = so.Placement(mesh_of(4, 2), specs=P(None, "y"), mode="local")
    found = specs_at([()] * len(elsewhere), elsewhere, placement)
    assert found == (((), ("y",)),) * len(elsewhere)


# ---- rules for some parameters


def test_parameters_without_a_rule_are_updated_where_they_lie():
    """In a jit, where the step has them whole, and on Auto axes."""
    mesh = mesh_of(4, 2)
    specs = {"w": P("x"), "v": P(None, ("y", "x")), "u": P("y", "x"), "none": P("x")}
    (grads,) = helpers.normal_steps(dict.fromkeys(specs, (8, 8)), 1)
    rules = {"^w$": P("x"), "^none$": None}
    make = so.scale_by_sign_descent
    tx = make(placement=so.Placement(mesh, specs=rules))
    params = divide(grads, mesh, specs)
    updates, _ = quick_jit(tx.update)(params, tx.init(params), params)
    want, _ = quick_jit(make().update)(grads, make().init(grads), grads)
    assert helpers.worst(jax.device_get(updates), jax.device_get(want)) <= 1e-6
    for name in specs:
        assert same_sharding(updates[name], params[name]), name


def test_whole_parameters_stay_whole_in_local_mode():
    """Without a rule; their gradients would rather be divided, as experts are."""
    mesh, specs = mesh_of(8), {"experts": P("x"), "router": P()}
    (params,) = helpers.normal_steps({"experts": (8, 4, 2), "router": (4, 8)}, 1)
    inputs = helpers.normals(0, 16, 4)
    placement = so.Placement(mesh, specs={"experts": P("x")}, mode="local")
    tx = so.scale_by_sign_descent(placement=placement)

    def loss(params):
        outputs = jnp.einsum("bi,eij->ebj", inputs, params["experts"])
        return jnp.einsum(
            "ebj,be->", outputs, jax.nn.softmax(inputs @ params["router"])
        )

    params = divide(params, mesh, specs)
    step = quick_jit(lambda p, state: tx.update(jax.grad(loss)(p), state, p))
    updates, _ = step(params, tx.init(params))
    for name in specs:
        assert same_sharding(updates[name], params[name])


# ---- what local mode cannot do


@pytest.mark.parametrize(
    "name, given, wanted",
    [
        ("specs", {}, "say how .* Auto axes in local mode, such as specs_of.*None"),
        ("dtype", dict(specs=P(), dtype="bfloat16"), "None in local .* got 'bfloat16'"),
        ("cost", dict(specs=P(), cost=(0, 1)), r"'memory' in .* got \(0.0, 1.0\)"),
    ],
)
def test_fields_that_local_mode_has_no_use_for_are_refused(name, given, wanted):
    with pytest.raises(ValueError, match=f"^`{name}` must (be )?{wanted}\\.$"):
        so.Placement(mesh_of(4, 2), mode="local", **given)


def test_local_mode_over_axes_of_two_types_is_refused():
    """Over those of one type it is not."""
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    wanted = r"^`axes` must be all Auto or all Explicit .*'x': 'Explicit', 'y': 'Auto'"
    with pytest.raises(ValueError, match=wanted):
        so.Placement(mesh, specs=P("x"), mode="local")
    for axis in ("x", "y"):
        assert so.Placement(mesh, axis, specs=P(axis), mode="local").axes == (axis,)


def test_types_over_other_axes_are_refused_in_local_mode():
    mesh = mesh_of(4, 2, kind="Explicit")
    w = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x", "y")))
    tx = so.scale_by_sign_descent(placement=so.Placement(mesh, "x", mode="local"))
    wanted = r"^`specs` must divide parameters over the placement's axes, \('x',\)"
    with pytest.raises(ValueError, match=wanted):
        tx.init({"w": w})


# ---- inside of the user's own shard_map


@pytest.mark.parametrize("mode", ["lossless", "local"])
def test_the_error_in_the_users_shard_map_names_both_remedies(mode):
    params, mesh = {"w": laid(P("x"))}, mesh_of(4, 2)
    placement = so.Placement(mesh, specs=P("x"), mode=mode)
    tx = so.scale_by_sign_descent(placement=placement)
    state = tx.init(params)
    whole = jax.tree.map(lambda leaf: P(), state)
    for call, given in ((tx.init, (params,)), (tx.update, (params, state, params))):
        inside = jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(P("x"), whole, P("x"))[: len(given)],
            out_specs=whole,
            check_vma=False,
        )
        with pytest.raises(ValueError, match="^`placement` with a mesh") as error:
            jax.eval_shape(inside, *given)
        message = str(error.value)
        assert "whole on every device use Placement(axes=('x', 'y')) there" in message
        assert "for shards no placement at all, which is local mode" in message
