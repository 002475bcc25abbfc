"""`describe` against real states, exchanges and the compiler's counts."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMS, placement_of, structs
from jax.sharding import PartitionSpec

import shampoo_optax as so
from shampoo_optax import _bases, _shampoo
from shampoo_optax._tables import human_bytes

names = pytest.mark.parametrize("name", TRANSFORMS)
SHAPES = {"w": (40, 24), "v": (24, 12), "k": (3, 3, 5, 7), "b": (24,), "s": ()}
OPTIONS = {
    "default": {},
    "bare": dict(b1=0.0, graft=None),
    "blocks of 16": dict(blocking=so.Blocking(block_size=16)),
}


def only(description):
    (part,) = description.parts
    return part


# ---- bytes


@names
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "placement", [None, ((8,), None), ((4, 2), "y"), ((4, 2), None)], ids=str
)
def test_bytes_are_those_of_the_real_state(name, options, placement):
    if placement is not None:
        placement = placement_of(*placement[0], axes=placement[1])
    tx = TRANSFORMS[name](**OPTIONS[options], placement=placement)
    part = only(so.describe(structs(SHAPES), tx))
    state = tx.init(helpers.zeros_like(structs(SHAPES)))
    held = {}
    for field, leaves in state._asdict().items():
        leaves = jax.tree.leaves(leaves)
        held[field] = (
            sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
            sum(leaf.nbytes for leaf in leaves),
        )
    assert part.bytes == held


@names
def test_bytes_of_wide_and_narrow_parameters(name, x64):
    shapes = {"w": (40, 24), "b": (24,)}
    params = {
        str(dtype): structs(shapes, dtype)
        for dtype in ("float64", "float32", "bfloat16")
    }
    part = only(so.describe(params, TRANSFORMS[name](placement=placement_of(8))))
    state = TRANSFORMS[name](placement=placement_of(8)).init(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    )
    held = {
        field: sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        for field, leaves in zip(
            state._fields, map(jax.tree.leaves, state), strict=True
        )
    }
    assert {field: device for field, (device, _) in part.bytes.items()} == held
    assert {str(stack.dtype) for stack in part.stacks.values()} == {
        "float64",
        "float32",
    }


@names
def test_a_mesh_that_is_not_there_is_planned_as_one_that_is(name):
    real = so.describe(structs(SHAPES), TRANSFORMS[name](placement=placement_of(8)))
    planned = so.describe(structs(SHAPES), TRANSFORMS[name](), devices=8)
    assert planned == real
    assert only(planned).owners == 8


@pytest.mark.parametrize("devices", [64, 256])
def test_shares_of_many_devices(devices):
    shapes = {f"w{n}": (32, 16) for n in range(devices)}
    few = only(so.describe(structs(shapes)))
    many = only(so.describe(structs(shapes), devices=devices))
    for field, (device, total) in many.bytes.items():
        assert total == few.bytes[field].total
        assert device == (total if field == "count" else total // devices)
    for kind, number in few.flops.items():
        assert many.flops[kind] == pytest.approx(number / devices, rel=0.05)
    assert {name: use.slots for name, use in many.stacks.items()} == {
        f"32x16@{devices}": 1
    }
    assert all(value > 0.99 for value in many.efficiency.values())


def test_padding_is_counted():
    shapes = {"w": (32, 16), "v": (24, 16), "u": (32, 8)}
    part = only(so.describe(structs(shapes), devices=3))
    (stack,) = part.stacks.values()
    assert stack[:1] + stack[2:4] == ((32, 16), 3, 1)
    entries = 32 * 16 + 24 * 16 + 32 * 8
    assert stack.padding == pytest.approx(1 - entries / (3 * 32 * 16))
    assert part.efficiency["wire"] == pytest.approx(entries / (3 * 32 * 16))
    matrices = (32**2 + 16**2) + (24**2 + 16**2) + (32**2 + 8**2)
    wanted = matrices / (3 * (32**2 + 16**2))
    assert part.efficiency["matrices"] == pytest.approx(wanted)


# ---- operations

FLOP_SHAPES = {
    "even": {f"w{n}": (128, 128) for n in range(8)},
    "uneven": {
        **{f"w{n}": (128, 64) for n in range(9)},
        **{f"v{n}": (100, 48) for n in range(5)},
        **{f"b{n}": (64,) for n in range(8)},
    },
}
VARIANTS = {
    "shampoo": {},
    "newton": dict(root=so.CoupledNewton(), graft=None),
    "soap": {},
    "soap without filter": dict(b1=0.0),
}


def variant(label, devices):
    name = "soap" if "soap" in label else "shampoo"
    placement = None if devices == 1 else placement_of(devices)
    return TRANSFORMS[name](**VARIANTS[label], placement=placement)


def compiled_flops(tx, params):
    """The compiler's count for one device, which leaves out decompositions."""
    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    return compiled.cost_analysis()["flops"]


@pytest.mark.parametrize(
    "label, shapes, devices",
    [
        *((label, "even", 8) for label in VARIANTS),
        *((label, "even", 1) for label in VARIANTS),
        ("shampoo", "uneven", 8),
        ("soap", "uneven", 1),
    ],
)
def test_operations_are_those_of_the_compiler(label, shapes, devices):
    params, tx = structs(FLOP_SHAPES[shapes]), variant(label, devices)
    flops = only(so.describe(params, tx)).flops
    counted = sum(flops.values()) - flops["decompositions"]
    assert counted == pytest.approx(compiled_flops(tx, params), rel=0.05)


@pytest.mark.parametrize("label", ["shampoo", "soap"])
def test_operations_without_a_refresh(label, monkeypatch):
    params = structs(FLOP_SHAPES["even"])
    flops = only(so.describe(params, variant(label, 8))).flops

    def keep(factors, derived, report, *args, **kwargs):
        return derived, report

    monkeypatch.setattr(_shampoo, "refresh_roots", keep)
    monkeypatch.setattr(_bases, "refresh", keep)
    step = sum(flops[kind] for kind in ("statistics", "application", "entrywise"))
    compiled = compiled_flops(variant(label, 8), params)
    assert step == pytest.approx(compiled, rel=0.05)


def test_operations_in_closed_form():
    part = only(so.describe(structs({"w": (6, 4), "v": (6, 4)})))
    assert part.flops["statistics"] == 2 * (2 * 6 * 4 * (6 + 4))
    assert part.flops["application"] == 2 * (2 * 6 * 4 * (6 + 4))
    assert part.flops["decompositions"] == 2 * 28 * (6**3 + 4**3)


def test_operations_of_a_basis_by_qr_are_those_of_one_turn():
    tx = so.scale_by_soap(basis=so.QRBasis(max_iterations=5))
    part = only(so.describe(structs({"w": (6, 4), "v": (6, 4)}), tx))
    assert part.flops["decompositions"] == 2 * 17 * (6**3 + 4**3)


def test_soap_rotates_the_gradient_and_its_average():
    flops = [only(so.describe(structs({"w": (6, 4)}), tx)).flops for tx in (
        so.scale_by_soap(), so.scale_by_shampoo(b1=0.0)
    )]  # fmt: skip
    assert flops[0]["application"] == 3 * flops[1]["application"]
    assert flops[0]["statistics"] == flops[1]["statistics"]


def test_iterations_decompose_nothing():
    eigh, newton = (
        only(so.describe(structs(SHAPES), so.scale_by_shampoo(root=root))).flops
        for root in (so.Eigh(), so.CoupledNewton())
    )
    assert newton["decompositions"] == 0 < eigh["decompositions"]
    assert newton["refresh"] > eigh["refresh"]
    assert newton["statistics"] == eigh["statistics"]


def test_second_attempts_are_not_counted(x64):
    params = structs({"w": (64, 48)})
    exact, low = (
        only(so.describe(params, so.scale_by_shampoo(root=root))).flops
        for root in (so.CoupledNewton(), so.CoupledNewton(precision="default"))
    )
    assert low["refresh"] == pytest.approx(exact["refresh"], rel=0.05)
    # In float64 where float32 fails.
    decompositions = only(so.describe(params)).flops["decompositions"]
    assert decompositions == 28 * (64**3 + 48**3)


# ---- the wire


def exchanged(tx, params, primitive, part):
    """Bytes of the operands or results of all exchanges of one kind."""
    found = [
        getattr(eqn, part)[0].aval
        for eqn, _ in helpers.update_equations(tx, params)
        if eqn.primitive.name == primitive
    ]
    return sum(aval.size * aval.dtype.itemsize for aval in found)


@pytest.mark.parametrize("gradients", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("wire", [None, "bfloat16", "float16"])
def test_bytes_on_the_wire_are_those_of_the_exchange(gradients, wire):
    params = structs(SHAPES, gradients) | structs({"z": (9, 9)})
    tx = so.scale_by_shampoo(placement=placement_of(8, dtype=wire))
    sent = exchanged(tx, params, "all_gather", "outvars")
    assert only(so.describe(params, tx)).wire == {"all-gather": sent}
    assert sent > 0


def test_bytes_of_the_reduction():
    placement = so.Placement(axes="x", reduce=True, dtype="bfloat16")
    tx = so.scale_by_shampoo(placement=placement)
    params = structs(SHAPES)
    mesh = helpers.mesh_of(8)

    def step(grads):
        return tx.update(grads, tx.init(grads))[0]

    whole = PartitionSpec()
    traced = jax.make_jaxpr(
        jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    )(params)
    found = {eqn.primitive.name: eqn for eqn, _ in helpers.equations(traced.jaxpr)}
    scattered = found["reduce_scatter"].invars[0].aval
    gathered = found["all_gather"].outvars[0].aval
    assert only(so.describe(params, tx, devices=8)).wire == {
        "reduce-scatter": 4 * scattered.size,
        "all-gather": 2 * gathered.size,
    }
    assert scattered.size == gathered.size


def test_one_device_sends_nothing():
    assert only(so.describe(structs(SHAPES), devices=1)).wire == {}


# ---- slots


@pytest.mark.parametrize("path", SHAPES)
def test_slots_are_where_a_parameter_is_counted(path):
    tx = helpers.make(
        "shampoo", placement=placement_of(8), blocking=so.Blocking(block_size=16)
    )
    params = helpers.zeros_like(structs(SHAPES))
    bad = jnp.full_like(params[path], jnp.nan)
    state = helpers.trace(tx, params, [params | {path: bad}])[1][-1]
    wanted = {name: np.zeros(len(x), int) for name, x in state.skipped.items()}
    for stack, start, stop in only(so.describe(params, tx)).slots[f"['{path}']"]:
        wanted[stack][start:stop] = 1
    helpers.assert_equal(
        jax.device_get(state.skipped),
        {name: x.astype(np.int32) for name, x in wanted.items()},
    )
    assert helpers.total(wanted) > 0


# ---- anywhere in a transform

LABELS = {"w": "a", "v": "b", "k": "a", "b": "c", "s": "c"}


def wrapped():
    shampoo, soap = so.scale_by_shampoo(), so.scale_by_soap(b1=0.0)
    yield "alias", so.shampoo(lambda count: 0.1, momentum=0.9, weight_decay=0.1), 1
    yield "chain", optax.chain(optax.clip(1.0), optax.chain(shampoo, soap)), 2
    mask = {name: label == "a" for name, label in LABELS.items()}
    yield "masked", optax.masked(soap, mask), 1
    groups = {"a": shampoo, "b": soap, "c": optax.adam(1e-3)}
    yield "partition", helpers.partition(groups, LABELS), 2
    injected = optax.inject_hyperparams(so.soap)(learning_rate=1e-3)
    yield "inject", injected, 1
    yield "accumulated", optax.MultiSteps(so.shampoo(0.1), 2), 1
    yield "finite", optax.apply_if_finite(shampoo, 3), 1
    yield "flattened", optax.flatten(shampoo), 1
    yield "averaged", optax.chain(shampoo, so.schedule_free(0.1)), 1


@pytest.mark.parametrize(
    "tx, count", [pytest.param(*rest, id=name) for name, *rest in wrapped()]
)
def test_found_at_any_depth(tx, count):
    description = so.describe(structs(SHAPES), tx)
    state = tx.init(helpers.zeros_like(structs(SHAPES)))
    ours = sum(total for part in description.parts for _, total in part.bytes.values())
    assert len(description.parts) == count
    assert ours + description.other_bytes == sum(
        leaf.nbytes for leaf in jax.tree.leaves(state)
    )


def test_an_injected_transform_is_described_as_a_plain_one():
    injected = optax.inject_hyperparams(so.scale_by_shampoo)(b2=0.9)
    got = only(so.describe(structs(SHAPES), injected, devices=4))
    want = only(so.describe(structs(SHAPES), so.scale_by_shampoo(b2=0.9), devices=4))
    assert got.bytes == want.bytes and got.slots == want.slots
    assert got.flops["statistics"] == want.flops["statistics"]
    assert got.flops["decompositions"] == want.flops["decompositions"]


def test_default_is_shampoo():
    got = so.describe(structs(SHAPES), devices=4)
    assert got == so.describe(structs(SHAPES), so.scale_by_shampoo(), devices=4)


@pytest.mark.parametrize("devices", [None, 64])
@pytest.mark.parametrize(
    "params",
    [{}, None, {"a": None}, {"a": jnp.ones(())}, {"a": jnp.ones((0, 3))}],
    ids=str,
)
def test_odd_trees(params, devices):
    part = only(so.describe(params, devices=devices))
    state = so.scale_by_shampoo().init(params)
    held = {
        n: sum(x.nbytes for x in jax.tree.leaves(s)) for n, s in state._asdict().items()
    }
    if devices is None:
        assert {name: total for name, (_, total) in part.bytes.items()} == held
    assert part.efficiency["memory"] <= 1.0
    assert "efficiency" in str(part)


# ---- the table


TABLES = """\
ScaleByShampooState at [0]: parameters 2, blocks 2, stacks 2, owners 4

stack      dtype  blocks  slots a device  padding
24@4     float32       1               1    75.0%
40x24@4  float32       1               1    75.0%

state          a device  in total
count               4 B       4 B
factors        10.8 KiB  43.0 KiB
roots          10.8 KiB  43.0 KiB
graft_moments  3.84 KiB  15.4 KiB
filtered       3.84 KiB  15.4 KiB
failures            8 B      32 B
residuals           8 B      32 B
iterations          8 B      32 B
skipped             8 B      32 B
sum            29.2 KiB   117 KiB
"""


def test_table():
    params = structs({"w": (40, 24), "b": (24,)})
    text = str(so.describe(params, so.shampoo(0.1), devices=4))
    assert text.startswith(TABLES)
    assert text.endswith("rest of the state  0 B")
    rows = [line.split() for line in text.split("\n")]
    assert ["all-gather", "(bytes)", "15.4", "KiB"] in rows
    assert ["efficiency", "work", "memory", "matrices", "wire"] in rows


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12_345_678, "11.8 MiB"),
        (140 * 2**30, "140 GiB"),
    ],
)
def test_bytes_are_shown_in_human_units(number, text):
    assert human_bytes(number) == text


@pytest.mark.parametrize(
    "tx, devices, match",
    [
        (None, 0, "`devices`.*got 0"),
        (None, -8, "`devices`.*got -8"),
        (None, 2.5, "`devices`.*got 2.5"),
        (None, "8", "`devices`.*got '8'"),
        (None, True, "`devices`.*got True"),
        (optax.adam(1e-3), None, "`tx`.*GradientTransformation"),
        (so.Blocking(), None, "`tx`.*Blocking"),
        (so.scale_by_shampoo(placement=so.Placement(axes="x")), None, "`placement`"),
    ],
)
def test_wrong_arguments_are_refused(tx, devices, match):
    with pytest.raises(ValueError, match=match):
        so.describe(structs(SHAPES), tx, devices=devices)


def test_leaves_are_checked_as_in_init():
    with pytest.raises(ValueError, match=r"`params`.*int32.*'a'"):
        so.describe({"a": jax.ShapeDtypeStruct((3,), jnp.int32)})
    with pytest.raises(ValueError, match=r"`params`.*float.*'a'"):
        so.describe({"a": 1.0})
