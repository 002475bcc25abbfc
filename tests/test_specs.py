"""How parameters are divided: what is declared, what types say, what arrays know."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, structs
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shampoo_optax as so
from shampoo_optax._planning import specs_at
from shampoo_optax._rules import name_of
from shampoo_optax._specs import shards_of, specs_for

P = PartitionSpec
KINDS = ("Auto", "Explicit")
X, Y, XY = ("x",), ("y",), ("x", "y")

# {path: (shape, how it is divided, the axes of every dimension)} on a mesh (4, 2)
DIVIDED = {
    "a": ((4, 8), P("x"), (X, ())),
    "b": ((4, 8), P(None, "x"), ((), X)),
    "both": ((4, 8), P("x", "y"), (X, Y)),
    "joint": ((8, 3), P(("x", "y")), (XY, ())),
    "minor first": ((3, 8), P(None, ("y", "x")), ((), ("y", "x"))),
    "vector": ((6,), P("y"), (Y,)),
    "scalar": ((), P(), ()),
    "whole": ((3, 5), P(), ((), ())),
    "layers/0/k.w": ((2, 4, 3), P(None, "x"), ((), X, ())),
    "layers/0/k_w": ((2, 4, 3), P("y"), (Y, (), ())),
    "layers/0/k_w2": ((2, 4, 3), P(None, "x"), ((), X, ())),
}
PLAIN = {path: shape for path, (shape, _, _) in DIVIDED.items()}
WANTED = {path: wanted for path, (_, _, wanted) in DIVIDED.items()}


def placed(mesh):
    """The parameters of `DIVIDED`, as arrays that are divided over the mesh."""
    whole = {path: jnp.ones(shape) for path, shape in PLAIN.items()}
    shardings = {n: NamedSharding(mesh, spec) for n, (_, spec, _) in DIVIDED.items()}
    return jax.device_put(whole, shardings)


def abstract(arrays):
    """The same parameters, of which only shapes and shardings are there."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def found(params, mesh, specs=None, axes=None):
    """What is found out of every parameter of a flat tree."""
    placement = so.Placement(mesh, axes, specs=specs)
    pairs, _ = jax.tree_util.tree_flatten_with_path(params)
    paths, leaves = zip(*pairs, strict=True)
    answers = specs_for(placement.specs, paths, leaves, mesh, placement.axes)
    return {path[0].key: spec for path, spec in zip(paths, answers, strict=True)}


# ---- what is declared


def test_one_spec_is_for_all_parameters():
    params = structs({"a": (4, 8), "b": (8, 3, 5)})
    assert found(params, mesh_of(4, 2), P("x")) == {"a": (X, ()), "b": (X, (), ())}
    assert found(params, mesh_of(4, 2), P()) == {"a": ((), ()), "b": ((), (), ())}


def test_the_first_rule_in_the_path_counts():
    rules = {
        "attention/bias": None,
        "ATTENTION": P("x"),
        "^mlp": P(None, ("x",)),
        "attention/kernel": P("y"),
    }
    params = structs(
        {
            "Attention/kernel": (4, 8),
            "attention/bias": (4, 8),
            "mlp/kernel": (3, 8),
            "head/mlp": (4, 8),
        }
    )
    wanted = {
        "Attention/kernel": (X, ()),
        "attention/bias": ((), ()),
        "mlp/kernel": ((), X),
        "head/mlp": ((), ()),
    }
    assert found(params, mesh_of(4, 2), rules) == wanted
    assert found(params, mesh_of(4, 2), tuple(rules.items())) == wanted
    assert set(found(params, mesh_of(4, 2), {}).values()) == {((), ())}


def test_a_function_is_given_paths_and_whole_shapes():
    asked = []

    def specs(path, struct):
        asked.append((path, struct.shape, struct.dtype))
        return P(None, "y") if len(struct.shape) == 2 else None

    params = {"w": jnp.ones((4, 8), jnp.bfloat16), "b": jnp.ones(8)}
    params = jax.device_put(params, NamedSharding(mesh_of(4, 2), P("x")))
    assert found(params, mesh_of(4, 2), specs) == {"w": ((), Y), "b": ((),)}
    assert asked == [("b", (8,), jnp.float32), ("w", (4, 8), jnp.bfloat16)]


@pytest.mark.parametrize(
    "keys, name",
    [
        ("layers/w/.value", "layers/w"),
        ("layers/.value/w", "layers/value/w"),
        ("w/value", "w/value"),  # of a dict
        (".value", "value"),
    ],
)
def test_variables_of_nnx_are_named_as_their_gradients(keys, name):
    path = [
        jax.tree_util.GetAttrKey(key[1:]) if key[0] == "." else key
        for key in keys.split("/")
    ]
    path = [jax.tree_util.DictKey(k) if isinstance(k, str) else k for k in path]
    assert name_of(tuple(path)) == name


def test_paths_have_names_and_places_with_slashes_between():
    params = {"layers": [{"w": jnp.ones((4, 8))}]}
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path(params)
    specs = (("^layers/0/w$", P("x")),)
    assert specs_for(specs, [path], [leaf], mesh_of(4, 2), XY) == ((X, ()),)


@pytest.mark.parametrize(
    "specs", [None, P("x"), {"w": P("x"), "b": None}, lambda path, leaf: None]
)
def test_placements_stay_hashable(specs):
    mesh = mesh_of(4, 2, kind="Explicit")
    one, other = (so.Placement(mesh, specs=specs) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != so.Placement(mesh, specs=P("x", "y"))
    assert one != so.Placement(mesh, specs=specs, mode="local")


def test_a_mapping_is_kept_as_pairs():
    placement = so.Placement(mesh_of(4, 2), specs={"w": P("x"), "b": None})
    assert placement.specs == (("w", P("x")), ("b", None))
    assert (placement.mode, so.Placement(mesh_of(4, 2)).specs) == ("lossless", None)


@pytest.mark.parametrize(
    "specs",
    [
        "x",
        ("x", None),
        0,
        {0: P()},
        P(3),
        P(("x", 3)),
        P(("x", None)),
        P(P.UNCONSTRAINED),
        P(unreduced={"x"}),
    ],
)
def test_specs_of_other_kinds_are_refused(specs):
    wanted = f"^`specs` must be a PartitionSpec .* got {re.escape(repr(specs))}\\.$"
    with pytest.raises(ValueError, match=wanted):
        so.Placement(mesh_of(4, 2), specs=specs)


@pytest.mark.parametrize(
    "value", ["x", ("x",), P(3), P(P.UNCONSTRAINED), P(unreduced={"x"})], ids=str
)
def test_the_rule_of_another_kind_is_named(value):
    wanted = f"^`specs` must have .* got {re.escape(repr(value))} for '\\^w\\$'\\.$"
    with pytest.raises(ValueError, match=wanted):
        so.Placement(mesh_of(4, 2), specs={"b": P("x"), "^w$": value})


def test_a_rule_that_is_no_regular_expression_is_named():
    wanted = r"^`specs` must have regular expressions, got '\(': missing \), .*\.$"
    with pytest.raises(ValueError, match=wanted):
        so.Placement(mesh_of(4, 2), specs={"w": P("x"), "(": P()})


@pytest.mark.parametrize("mode", ["global", None, ["local"]])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match=rf"^`mode` .* got {re.escape(repr(mode))}\.$"):
        so.Placement(mesh_of(4, 2), mode=mode)


@pytest.mark.parametrize(
    "name, value, shown",
    [
        ("specs", P("x"), repr(P("x"))),
        ("specs", {}, "{}"),
        ("specs", "x", "'x'"),
        ("mode", "local", "'local'"),
    ],
)
def test_specs_and_local_mode_need_a_mesh(name, value, shown):
    wanted = rf"^`{name}` .*own jax.shard_map a transform without placement.* got "
    with pytest.raises(ValueError, match=wanted + re.escape(f"{shown}.") + "$"):
        so.Placement(axes="x", **{name: value})


@pytest.mark.parametrize(
    "specs, axes, fault",
    [
        (P("x", None, "y"), None, "no more entries"),
        (P(None, None, None), None, "no more entries"),
        (P("data"), None, "axes of the mesh, ('x', 'y')"),
        (P("x", "y"), "x", "axes of the placement, ('x',)"),
        (P(("x", "y")), ("y",), "axes of the placement, ('y',)"),
        (P("x", "x"), None, "no mesh axis twice"),
        (P(("y", "y")), None, "no mesh axis twice"),
        (P(None, "x"), None, "evenly, not the 6 of dimension 1 by 4,"),
        (P(("x", "y"), None), None, "evenly, not the 4 of dimension 0 by 8,"),
        ({"^w$": P("x", "x")}, None, "no mesh axis twice"),
        (lambda path, leaf: P("x", "x"), None, "no mesh axis twice"),
        (lambda path, leaf: "x", None, "return a PartitionSpec"),
        (lambda path, leaf: P(P.UNCONSTRAINED), None, "return a PartitionSpec"),
    ],
)
def test_what_does_not_fit_is_refused(specs, axes, fault):
    """With the path, the shape and the value, which is that of this parameter."""
    params = structs({"v": (4, 8), "w": (4, 6)})
    value = specs("w", params["w"]) if callable(specs) else specs
    value = value["^w$"] if isinstance(value, dict) else value
    rules = specs if callable(specs) or isinstance(specs, dict) else {"w": specs}
    with pytest.raises(ValueError) as error:
        found({"w": params["w"]}, mesh_of(4, 2), rules, axes)
    message = str(error.value)
    assert message.startswith("`specs` must ") and fault in message
    assert message.endswith(f"got {value!r} for [4, 6] at 'w'.")


NAMES = st.sampled_from(["x", "y", "z", "w"])  # of which the last is no axis
ENTRIES = st.none() | NAMES | st.lists(NAMES, max_size=3).map(tuple)


def shard_of(mesh, spec, shape):
    """The shape of a shard, as jax has it; None where jax refuses the spec."""
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.check_compatible_aval(shape)
        return sharding.shard_shape(shape)
    except Exception:  # of several classes, not all public
        return None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0, 1, 2, 4, 6, 8]), max_size=3).map(tuple),
    st.lists(ENTRIES, max_size=3),
)
def test_what_jax_takes_is_taken(shape, entries):
    """Against the shards that jax cuts, and the specs that it refuses."""
    mesh, spec = mesh_of(2, 2, 2), P(*entries)
    params, shard = structs({"w": shape}), shard_of(mesh, spec, shape)
    if shard is None:
        with pytest.raises(ValueError, match=r"^`specs` must .* for \[.* at 'w'"):
            found(params, mesh, spec)
        return
    answer = found(params, mesh, spec)["w"]
    assert len(answer) == len(shape)
    shards = shards_of(answer, mesh)
    assert tuple(s // n for s, n in zip(shape, shards, strict=True)) == shard
    assert NamedSharding(mesh, P(*answer)).is_equivalent_to(
        NamedSharding(mesh, spec), len(shape)
    )


# ---- what types say


def test_types_on_explicit_axes_are_read():
    """Of arrays, of tracers and of what has only a shape and a sharding, alike."""
    mesh, traced = mesh_of(4, 2, kind="Explicit"), {}
    params = placed(mesh)

    def look(tree):
        traced.update(found(tree, mesh))
        return tree

    jax.make_jaxpr(look)(params)
    assert found(params, mesh) == traced == found(abstract(params), mesh) == WANTED


def test_types_on_auto_axes_say_nothing():
    params = placed(mesh_of(4, 2))
    whole = {path: ((),) * len(shape) for path, shape in PLAIN.items()}
    assert found(params, mesh_of(4, 2)) == found(abstract(params), mesh_of(4, 2))
    assert found(params, mesh_of(4, 2)) == whole


def test_of_mixed_axes_the_explicit_ones_are_read():
    mixed = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=mixed)
    w = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("x", "y")))
    assert found({"w": w}, mesh) == {"w": (X, ())}
    assert found({"w": w}, mesh, P("x", "y")) == {"w": (X, Y)}


def test_axes_that_are_not_the_placements_are_left_out_of_types():
    params = placed(mesh_of(4, 2, kind="Explicit"))
    along_y = {
        path: tuple(tuple(a for a in axes if a == "y") for axes in wanted)
        for path, wanted in WANTED.items()
    }
    assert along_y["minor first"] == ((), Y)
    assert found(params, mesh_of(4, 2, kind="Explicit"), axes="y") == along_y


def test_types_of_another_mesh_say_nothing():
    other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    w = jax.device_put(jnp.ones((8, 8)), NamedSharding(other, P("data")))
    v = jax.device_put(
        jnp.ones((8, 8)), NamedSharding(mesh_of(2, 2, kind="Explicit"), P("x"))
    )
    params = {"w": w, "v": v, "here": jnp.ones((8, 8)), "numpy": np.ones((8, 8))}
    answers = found(params, mesh_of(4, 2, kind="Explicit"))
    assert answers == dict.fromkeys(params, ((), ()))


def test_declarations_come_before_types():
    mesh = mesh_of(4, 2, kind="Explicit")
    w = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("x")))
    assert found({"w": w}, mesh, P(None, "y")) == {"w": ((), Y)}
    assert found({"w": w}, mesh, {}) == {"w": ((), ())}


def test_without_a_mesh_parameters_are_whole():
    for placement in (None, so.Placement(axes="x")):
        assert specs_at([()], [jnp.ones((4, 8))], placement) == ()


# ---- what arrays know


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_know_their_specs(kind):
    mesh = mesh_of(4, 2, kind=kind)
    params = placed(mesh)
    specs = so.specs_of(params)
    assert [rule for rule, _ in specs] == [
        f"^{re.escape(path)}$" for path, axes in sorted(WANTED.items()) if any(axes)
    ]
    assert dict(specs)["^a$"] == P("x")
    assert specs == so.specs_of(abstract(params))
    assert found(params, mesh, specs) == WANTED
    assert found(structs(PLAIN), mesh, specs) == WANTED


def test_shardings_that_jit_chose_are_known():
    mesh = mesh_of(4, 2)
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("x", "y")))
    params = {"layers": [jax.jit(lambda x: (2.0 * x).T)(x)], "there": jnp.ones((4, 8))}
    ((rule, spec),) = so.specs_of(params)
    assert rule == "^layers/0$"
    assert NamedSharding(mesh, spec).is_equivalent_to(params["layers"][0].sharding, 2)


def test_parameters_that_are_whole_have_no_rule():
    whole = NamedSharding(mesh_of(4, 2), P(None, ()))
    params = {
        "numpy": np.ones((4, 8)),
        "one device": jax.device_put(jnp.ones((4, 8)), jax.devices()[3]),
        "everywhere": jax.device_put(jnp.ones((4, 8)), whole),
        "absent": None,
    }
    assert so.specs_of(params) == so.specs_of({}) == so.specs_of(None) == ()


def test_names_that_differ_in_their_cases_are_told_apart():
    mesh = mesh_of(4, 2)
    specs = {"W": P("x"), "w": P(None, "x"), "V": P("y"), "v": P()}
    params = {
        name: jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    wanted = {"W": (X, ()), "w": ((), X), "V": (Y, ()), "v": ((), ())}
    assert found(params, mesh, so.specs_of(params)) == wanted


def test_a_bare_array_has_the_empty_path():
    w = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh_of(4, 2), P("x")))
    specs = so.specs_of(w)
    assert specs == (("^$", P("x")),)
    assert specs_for(specs, [()], [w], mesh_of(4, 2), X) == ((X, ()),)


def test_specs_of_tracers_are_refused():
    with pytest.raises(ValueError, match="`params` .*outside of jax.jit, got .*'w'"):
        jax.make_jaxpr(lambda w: so.specs_of({"w": w}) and w)(jnp.ones((4, 8)))


def test_shapes_without_a_sharding_are_refused():
    """They would pass for parameters that are whole."""
    wanted = r"^`params` must have shardings, .*ShapeDtypeStruct.*\(4, 8\).* at 'w'\.$"
    with pytest.raises(ValueError, match=wanted):
        so.specs_of({"v": jnp.ones((4, 8)), "w": structs((4, 8))})


def test_specs_that_are_not_said_by_names_are_refused():
    sharding = NamedSharding(mesh_of(4, 2), P(P.UNCONSTRAINED, "x"))
    odd = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharding)
    with pytest.raises(ValueError, match="`params` .*NamedSharding.*UNCON.* at 'w'"):
        so.specs_of({"w": odd})
