"""One-sided, diagonal and skipped axes against dense NumPy, and how they are dealt."""

import functools
import itertools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BARE, assert_equal, mesh_of, quick_jit, replicate, worst
from hypothesis import given, settings
from hypothesis import strategies as st

import shampoo_optax as so
from shampoo_optax._cutting import plan_of
from shampoo_optax._division import UNDIVIDED, Division, memory

SMALL = so.Blocking(8)
SHAPES = {"table": (300, 6), "square": (5, 4), "vector": (7,)}


def normals(shapes, steps, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {k: rng.standard_normal(s) for k, s in shapes.items()} for _ in range(steps)
    ]


# ---- the oracle: dense, float64, one block


def power(matrix, e, eps, relative, rtol):
    values, vectors = np.linalg.eigh(matrix)
    if rtol is not None:
        inside = values > rtol * values[-1]
        scale = np.where(inside, np.where(inside, values, 1) ** -e, 0)
    else:
        scale = (values + max(eps, relative * values[-1])) ** -e
    return (vectors * scale) @ vectors.T


def directions(
    grads, kinds, exponents, eps=0.0, relative=0.0, rtol=None, whitened=False
):
    """Sums of statistics, new roots at every step; kinds: whole, diagonal or none.

    A diagonal factor is a dense matrix of which nothing but the diagonal is kept.
    """
    factors, roots, found = {}, {}, []
    for g in grads:
        for k, kind in enumerate(kinds):
            if kind == "none":
                continue
            seen = g
            for j, root in (roots if whitened else {}).items():
                seen = seen if j == k else multiply(root, seen, j)
            flat = np.moveaxis(seen, k, 0).reshape(g.shape[k], -1)
            new = flat @ flat.T
            new = np.diag(np.diag(new)) if kind == "diagonal" else new
            factors[k] = factors.get(k, 0.0) + new
        roots = {
            k: power(factor, exponents[k], eps, relative, rtol)
            for k, factor in factors.items()
        }
        p = g
        for k, root in roots.items():
            p = multiply(root, p, k)
        found.append(p)
    return found


def multiply(matrix, x, axis):
    return np.moveaxis(np.tensordot(matrix, x, axes=(1, axis)), 0, axis)


def stack_of(part, block):
    """What a dict has for the stack of these float64 blocks."""
    return part[f"{block}_float64"]


def expected(steps, kinds, **kwargs):
    """Of a tree, as lists of trees; kinds is {name: (kinds, exponents)}."""
    by_name = {
        name: directions([g[name] for g in steps], *kinds[name], **kwargs)
        for name in kinds
    }
    return [{name: by_name[name][t] for name in by_name} for t in range(len(steps))]


def transform(make=so.scale_by_shampoo, devices=0, **kwargs):
    placement = so.Placement(mesh_of(devices)) if devices else None
    return make(**BARE | dict(blocking=SMALL) | kwargs, placement=placement)


def run(tx, steps, devices=0):
    mesh = mesh_of(devices) if devices else None
    steps = [replicate(jax.tree.map(jnp.asarray, g), mesh) for g in steps]
    return helpers.trace(tx, steps[0], steps, jit=quick_jit)


# ---- one side


KERNELS = {"matrix": (5, 4), "kernel": (2, 3, 2, 4), "vector": (6,)}


@pytest.mark.parametrize("sides", ["input", "output"])
def test_one_side_of_a_matrix(sides, x64):
    """L^{-1/2} G or G R^{-1/2}; blocks of other orders have all their factors."""
    steps = normals(KERNELS, 3)
    one = ["whole", "none"] if sides == "input" else ["none", "whole"]
    kinds = {
        "matrix": (one, [1 / 2] * 2),
        "kernel": (["whole"] * 4, [1 / 8] * 4),
        "vector": (["whole"], [1 / 2]),
    }
    tx = transform(axes=so.Axes(sides), blocking=so.Blocking(8, merge_to=None))
    updates, states = run(tx, steps)
    assert worst(updates, expected(steps, kinds, relative=1e-6)) < 1e-9
    kept = {"input": "0", "output": "1"}[sides]
    kept = {"5x4": [kept], "2x3x2x4": ["0", "1", "2", "3"], "6": ["0"]}
    for block, axes in kept.items():
        assert sorted(stack_of(states[-1].factors, block)) == axes


@pytest.mark.parametrize("sides", ["input", "output"])
def test_a_merged_kernel_is_a_matrix(sides, x64):
    steps = normals({"kernel": (2, 4, 3)}, 3)
    one = ["whole", "none"] if sides == "input" else ["none", "whole"]
    merged = [{"kernel": g["kernel"].reshape(8, 3)} for g in steps]
    wanted = expected(merged, {"kernel": (one, [0.5] * 2)}, relative=1e-6)
    updates, _ = run(transform(axes=so.Axes(sides)), steps)
    updates = [{"kernel": u["kernel"].reshape(8, 3)} for u in updates]
    assert worst(updates, wanted) < 1e-9


def test_exponents_of_what_is_left(x64):
    """1/2 for `sides` alone; 1/(2 order) beside a skipped axis or one with 0."""
    steps = normals({"w": (12, 4)}, 2)
    whole = so.Blocking(None)
    skipped, zero, one_sided, override = (
        run(transform(blocking=whole, **kwargs), steps)[0]
        for kwargs in (
            dict(axes=so.Axes(skip_above=10)),
            dict(exponents={2: {0: 0}}),
            dict(axes=so.Axes("output")),
            dict(axes=so.Axes("output"), exponents={2: 0.3}),
        )
    )
    kinds = ["none", "whole"]
    assert_equal(skipped, zero)
    for found, e in ((skipped, 1 / 4), (one_sided, 1 / 2), (override, 0.3)):
        wanted = expected(steps, {"w": (kinds, [e] * 2)}, relative=1e-6)
        assert worst(found, wanted) < 1e-9


@pytest.mark.parametrize("graft", [None, "adagrad"])
@pytest.mark.parametrize("axes", [so.Axes(min_order=2), so.Axes(skip_above=8)], ids=str)
def test_blocks_without_factors_are_left_to_grafting(axes, graft, x64):
    """The grafted method's own direction, entry by entry."""
    steps = normals({"square": (5, 4), "vector": (9,)}, 3)
    tx = transform(
        axes=axes, graft=graft, blocking=so.Blocking(8 if axes.skip_above else 9)
    )
    updates, states = run(tx, steps)
    total = 0.0
    for update, g in zip(updates, steps, strict=True):
        total = total + g["vector"] ** 2
        wanted = g["vector"] / (np.sqrt(total) + 1e-8) if graft else g["vector"]
        np.testing.assert_allclose(update["vector"], wanted, rtol=1e-9)
    plain, _ = run(transform(graft=graft), steps)
    for one, other in zip(updates, plain, strict=True):
        assert_equal(one["square"], other["square"])
    final = states[-1]
    for part in (final.factors, final.roots, final.failures):
        assert set(part) == {"5x4_float64"}
    assert set(final.skipped) == {"5x4_float64", "9_float64"}


# ---- long axes


METHODS = {
    "eigh": (so.scale_by_shampoo, dict(eps=0.1, relative_eps=0), 1e-10),
    "relative": (so.scale_by_shampoo, dict(relative_eps=1e-3), 1e-10),
    "pseudo-inverse": (so.scale_by_shampoo, dict(root=so.PseudoInverse(1e-9)), 1e-9),
    "eigendecomposed": (
        so.scale_by_shampoo,
        dict(root=so.Eigendecomposed(), relative_eps=1e-3),
        1e-10,
    ),
    "newton": (
        so.scale_by_shampoo,
        dict(root=so.CoupledNewton(tolerance=1e-13), eps=0.1, relative_eps=0),
        1e-9,
    ),
    "kl": (so.scale_by_kl_shampoo, dict(relative_eps=1e-3), 1e-9),
}


def wanted_of(method, steps, kinds):
    make, kwargs, _ = METHODS[method]
    root = kwargs.get("root")
    return expected(
        steps,
        kinds,
        eps=kwargs.get("eps", 0.0),
        relative=kwargs.get("relative_eps", 0.0),
        rtol=root.rtol if isinstance(root, so.PseudoInverse) else None,
        whitened=make is so.scale_by_kl_shampoo,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_table_has_a_diagonal_factor(method, x64):
    """[300, 6] with blocks of 8: whole, l_i the sum of squares of row i."""
    make, kwargs, tolerance = METHODS[method]
    tx = transform(make, axes=so.Axes(diagonal_above=100), **kwargs)
    steps = normals(SHAPES, 3)
    for g in steps:
        g["table"][250:] = 0  # words that do not occur
    updates, states = run(tx, steps)
    e = 1 / 2 if method == "kl" else 1 / 4
    kinds = {
        "table": (["diagonal", "whole"], [e] * 2),
        "square": (["whole"] * 2, [e] * 2),
        "vector": (["whole"], [1 / 2]),
    }
    assert worst(updates, wanted_of(method, steps, kinds)) < tolerance
    final = states[-1]
    assert stack_of(final.factors, "300x6")["0"].shape == (1, 300)
    sides = [x.shape[-1] for x in jax.tree.leaves(final) if x.ndim == 3]
    assert set(sides) <= {4, 5, 6, 7} and helpers.total(final.failures) == 0
    if method != "kl":
        squares = sum(np.sum(g["table"] ** 2, axis=1) for g in steps)
        np.testing.assert_allclose(
            stack_of(final.factors, "300x6")["0"][0], squares, rtol=1e-12
        )


LONG = {
    "both": (150, 300),
    "first": (150, 8),
    "longest": (300, 6),
    "many": (24, 16),
    "odd": (7, 5),
    "other": (150, 8),
    "second": (3, 220),
    "vector": (150,),
    "words": (300,),
}
LIMITS = so.Axes(diagonal_above=100, skip_above=200)


def long_kinds(name):
    kinds = [
        "whole" if s <= 100 else "diagonal" if s <= 200 else "none" for s in LONG[name]
    ]
    return kinds, [1 / (2 * len(kinds))] * len(kinds)


@functools.cache
def long_steps():
    return normals(LONG, 3)


@pytest.mark.parametrize("devices", [0, 3, 8])
def test_both_limits_on_devices(devices, x64):
    """Long and short blocks mixed and padded: each as the oracle has it alone."""
    steps = long_steps()
    tx = transform(devices=devices, axes=LIMITS, relative_eps=1e-3)
    updates, states = run(tx, steps, devices)
    names = [name for name in LONG if name != "many"]
    wanted = expected(steps, {n: long_kinds(n) for n in names}, relative=1e-3)
    for t, update in enumerate(updates):
        for i, j in itertools.product(range(3), range(2)):
            part = np.s_[8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
            block = [{"b": g["many"][part]} for g in steps]
            own = expected(block, {"b": (["whole"] * 2, [1 / 4] * 2)}, relative=1e-3)
            np.testing.assert_allclose(update["many"][part], own[t]["b"], atol=1e-9)
    updates = [{name: u[name] for name in names} for u in updates]
    assert worst(updates, wanted) < 1e-9
    assert helpers.total(states[-1].failures) == 0
    check_sides(states[-1], 8, 100)
    if devices == 8:
        assert any(
            stack.block != region.stacked
            for region, stack in placed(helpers.plan_of(tx, steps[0]))
        )


def check_sides(state, size, limit):
    """No matrix has a side above the block size, and only long axes are diagonal."""
    for field in (state.factors, state.roots):
        for axes in field.values():
            for stored in axes.values():
                short = stored.ndim == 3 and stored.shape[-1] <= size
                assert short or (stored.ndim == 2 and stored.shape[-1] > limit)


def placed(plan):
    """The regions of a plan, with the stacks of their pieces."""
    return [
        (region, plan.stacks[piece.stack])
        for region in plan.regions
        for piece in region.pieces
    ]


sides = st.sampled_from([1, 2, 5, 8, 9, 16, 17, 40, 41, 60, 100])
trees = st.lists(st.lists(sides, min_size=1, max_size=3), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(trees, st.sampled_from([1, 2, 3, 8]), st.sampled_from([(20,), (20, 50), (8,)]),
       st.sampled_from([8, None]))  # fmt: skip
def test_long_and_short_sides_never_share_a_stack(shapes, owners, limits, size):
    leaves = helpers.structs([tuple(shape) for shape in shapes])
    division = UNDIVIDED if owners == 1 else Division(owners, memory, frozenset())
    plan = plan_of(leaves, so.Blocking(size), division, limits)

    def kind(side):
        return tuple(side > limit for limit in limits)

    taken = set()
    for region in plan.regions:
        for piece in region.pieces:
            block = plan.stacks[piece.stack].block
            assert list(map(kind, region.stacked)) == list(map(kind, block))
            assert all(a <= b for a, b in zip(region.stacked, block, strict=True))
            slots = {
                (piece.stack, slot)
                for slot in range(piece.slot, piece.slot + piece.size)
            }
            assert not slots & taken
            taken |= slots
        for own, start, side in zip(
            region.block, region.start, plan.merged[region.leaf], strict=True
        ):
            assert (
                own == side and start == 0
                if any(kind(side))
                else size is None or own <= size
            )
    assert all(stack.size % owners == 0 for stack in plan.stacks.values())


@pytest.mark.parametrize(
    "axes", [LIMITS, so.Axes(diagonal_above=100), so.Axes("input")]
)
def test_uncut_parameters(axes, x64):
    """`Blocking(None)`: limits alone keep factors small."""
    steps = normals({"table": (120, 5), "tall": (90, 4)}, 3)
    updates, states = run(
        transform(axes=axes, blocking=so.Blocking(None), relative_eps=1e-3), steps
    )
    first = "diagonal" if axes.diagonal_above else "whole"
    second, e = ("whole", 1 / 4) if axes.sides == "both" else ("none", 1 / 2)
    kinds = {
        "table": ([first, second], [e] * 2),
        "tall": (["whole", second], [e] * 2),
    }
    assert worst(updates, expected(steps, kinds, relative=1e-3)) < 1e-9
    wanted = 2 if axes.diagonal_above else 3
    assert stack_of(states[-1].factors, "120x5")["0"].ndim == wanted


@pytest.mark.parametrize("name", ["diagonal_above", "skip_above"])
@pytest.mark.parametrize(
    "make", [so.scale_by_shampoo, so.scale_by_kl_shampoo, so.scale_by_soap]
)
def test_limits_below_the_block_size_are_refused(make, name):
    with pytest.raises(ValueError, match=f"`{name}` .*\\(64\\), got 63"):
        make(axes=so.Axes(**{name: 63}), blocking=so.Blocking(64))
    make(axes=so.Axes(**{name: 64}), blocking=so.Blocking(64))
    make(axes=so.Axes(**{name: 1}), blocking=so.Blocking(None))


@pytest.mark.parametrize(
    "field, value",
    [("sides", "left"), ("min_order", 0), ("diagonal_above", 0), ("skip_above", 2.5)],
)
def test_bad_fields_are_refused(field, value):
    with pytest.raises(ValueError, match=f"`{field}` .*got {value!r}"):
        so.Axes(**{field: value})
    with pytest.raises(ValueError, match="`axes` .*got 'input'"):
        so.scale_by_shampoo(axes="input")


# ---- what is kept, and what it costs


def test_bytes_and_portable_states_of_long_axes(x64):
    """Saved on eight devices, gone on with on one: the same numbers."""
    steps = long_steps()
    eight, one = (
        transform(devices=devices, axes=LIMITS, relative_eps=1e-3) for devices in (8, 0)
    )
    wanted, states = run(one, steps)
    _, on_eight = run(eight, steps[:2], 8)
    portable = so.to_portable(eight, on_eight[-1], steps[0])
    assert portable[".factors/['first']/0,0/0"].shape == (1, 150)
    assert portable[".factors/['second']/0,0/0"].shape == (1, 3, 3)
    assert not any(key.startswith(".factors/['words']") for key in portable)
    single = so.to_portable(one, states[1], steps[0])
    assert portable.keys() == single.keys()
    kept = [
        key for key in single if "residuals" not in key
    ]  # these are rounding errors
    assert worst(*([x[key] for key in kept] for x in (portable, single))) < 1e-12
    params = jax.tree.map(jnp.asarray, steps[0])
    restored = so.from_portable(one, portable, params)
    update, _ = quick_jit(one.update)(
        jax.tree.map(jnp.asarray, steps[2]), restored, params
    )
    assert worst(update, wanted[2]) < 1e-12
    (part,) = so.describe(params, one).parts
    numbers = 0
    for name in LONG:
        kept = {"whole": lambda s: s * s, "diagonal": int, "none": lambda s: 0}
        shape, (kinds, _) = LONG[name], long_kinds(name)
        if name == "many":
            shape, numbers = (8, 8), numbers + 5 * 2 * 64
        numbers += sum(kept[k](s) for k, s in zip(kinds, shape, strict=True))
    for field in ("factors", "roots"):
        assert part.bytes[field].total == 8 * numbers
        held = jax.tree.leaves(getattr(states[0], field))
        assert sum(leaf.nbytes for leaf in held) == 8 * numbers
    (dealt,) = so.describe(params, eight).parts
    held = jax.tree.leaves(on_eight[0].factors)
    assert sum(leaf.nbytes for leaf in held) == dealt.bytes["factors"].total
    products = sum(
        2 * int(np.prod(shape)) * side
        for name, shape in LONG.items()
        for kind, side in zip(long_kinds(name)[0], shape, strict=True)
        if kind == "whole"
        for side in [min(side, 8)]
    )
    assert part.flops["statistics"] == products


# ---- guards of diagonal factors


TABLE = so.Axes(diagonal_above=8)
GUARDS = {
    "shampoo": dict(),
    "eigendecomposed": dict(root=so.Eigendecomposed()),
    "tiny ridge": dict(relative_eps=1e-10),
}


@functools.cache
def table_update(case):
    """Of a [20, 6] table in float32, compiled once."""
    tx = transform(axes=TABLE, **GUARDS[case])
    return tx, jax.jit(tx.update)


def table_trace(case, steps):
    tx, update = table_update(case)
    state, found = tx.init(steps[0]), []
    for g in steps:
        updates, state = update(g, state)
        found.append((updates, state))
    return [list(x) for x in zip(*found, strict=True)]


def tables(*seeds, scale=1.0):
    return [scale * helpers.normals(seed, 20, 6) for seed in seeds]


@pytest.mark.parametrize("case", GUARDS)
def test_zero_first(case):
    """C1."""
    updates, states = table_trace(case, [jnp.zeros((20, 6))] * 3 + tables(1))
    helpers.assert_finite((updates, states))
    assert not np.any(updates[:3]) and np.all(updates[3] != 0)
    assert helpers.total(states[-1].failures) == 0


@pytest.mark.parametrize("case", ["shampoo", "eigendecomposed"])
def test_rank_one(case):
    """C3 in closed form: each row by its own size, the columns as one."""
    u, v = helpers.normals(1, 20), helpers.normals(2, 6)
    updates, _ = table_trace(case, [jnp.outer(u, v)] * 5)
    u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
    rows, columns = 5 * u**2 * (v @ v), 5 * (u @ u) * (v @ v)
    row_scale = (rows + 1e-6 * rows.max()) ** -0.25
    wanted = (row_scale * u)[:, None] * v[None] * (columns * (1 + 1e-6)) ** -0.25
    np.testing.assert_allclose(updates[-1], wanted, rtol=1e-4)


@pytest.mark.parametrize("case", GUARDS)
def test_scale(case):
    """C5: from 1e-15 to 1e15 the same direction, with rows that are never seen."""
    plain = [g.at[15:].set(0) for g in tables(1, 2, 3)]

    def direction(scale):
        updates, states = table_trace(case, [jnp.float32(scale) * g for g in plain])
        helpers.assert_finite((updates, states))
        last = np.asarray(updates[-1], np.float64)
        return last / np.linalg.norm(last)

    wanted = direction(1.0)
    for scale in (1e-15, 1e-8, 1e8, 1e15):
        np.testing.assert_allclose(direction(scale), wanted, atol=1e-3)
    beyond = tables(1, 2) + tables(3, scale=1e25) + tables(4)
    updates, states = table_trace(case, beyond)
    helpers.assert_finite((updates, states))
    assert not np.any(updates[2]) and helpers.total(states[-1].skipped) == 1
    assert_equal(states[2].factors, states[1].factors)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_is_left_out(bad):
    good = tables(1, 2, 3)
    spoilt = [*good[:2], good[0].at[3, 2].set(bad), good[2]]
    updates, states = table_trace("shampoo", spoilt)
    wanted, _ = table_trace("shampoo", good)
    helpers.assert_finite((updates, states))
    assert_equal([*updates[:2], updates[3]], wanted)
    assert not np.any(updates[2]) and helpers.total(states[-1].skipped) == 1
