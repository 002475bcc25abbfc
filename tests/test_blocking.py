"""Merging, cutting and pasting: the official tables, and exact round trips."""

import json
import math
import re

import golden
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shampoo_optax as so
from shampoo_optax import _cutting
from shampoo_optax._blocking import views_of

TABLES = json.loads((golden.DATA / "tables.json").read_text())
MERGES = TABLES["merge_small_dims"]
SPLITS = TABLES["multi_dim_split"]

# (shape, block size, merge_to, merged shape from the leading side), by hand.
LEADING = [
    ((3, 3, 64, 128), 1024, 2, (576, 128)),
    ((3, 3, 64, 128), 256, 2, (9, 64, 128)),
    ((3, 4, 5), 20, 1, (12, 5)),
    ((3, 4, 5), 60, 1, (60,)),
    ((3, 4, 5), 60, 2, (12, 5)),
    ((2, 2, 2, 2, 2), 4, 1, (4, 4, 2)),
    ((5, 1, 3), 4, 2, (5, 3)),
    ((1, 1), 4, 2, (1,)),
    ((), 4, 2, (1,)),
    ((), 4, None, ()),
    ((4, 0, 2), 4, 2, (0,)),
    ((2, 1, 3), 4, None, (2, 1, 3)),
    ((2, 3, 4), None, 1, (24,)),
]


def blocking_of(size, target, side):
    def finite(value):
        return None if value == "inf" else value

    return so.Blocking(finite(size), finite(target), side)


def row_id(row):
    shape = "x".join(map(str, row["shape"])) or "scalar"
    rest = (str(row[key]) for key in ("threshold", "target", "split") if key in row)
    return "-".join((shape, *rest))


def test_tables_are_whole():
    assert len(MERGES) == 145
    assert len(SPLITS) == 14


@pytest.mark.parametrize("row", MERGES, ids=row_id)
def test_merge_table_from_the_trailing_side(row):
    blocking = blocking_of(row["threshold"], row["target"], "trailing")
    assert _cutting.merge_shape(tuple(row["shape"]), blocking) == tuple(row["out"])


@pytest.mark.parametrize("row", MERGES, ids=row_id)
def test_merge_table_mirrored_for_the_leading_side(row):
    blocking = blocking_of(row["threshold"], row["target"], "leading")
    shape, merged = tuple(row["shape"][::-1]), tuple(row["out"][::-1])
    assert _cutting.merge_shape(shape, blocking) == merged


@pytest.mark.parametrize("shape, size, merge_to, merged", LEADING)
def test_merge_from_the_leading_side(shape, size, merge_to, merged):
    assert _cutting.merge_shape(shape, so.Blocking(size, merge_to)) == merged


@pytest.mark.parametrize("row", SPLITS, ids=row_id)
def test_split_table(row):
    """Shape and first element of each block, found through the stacks of a cut."""
    blocking = blocking_of(row["split"], None, "trailing")
    size = math.prod(row["shape"])
    leaf = jnp.arange(size, dtype=jnp.float32).reshape(row["shape"])
    stacks = _cutting.cut(_cutting.plan_of([leaf], blocking), [leaf])
    first = {}
    for stack in stacks.values():
        for block in stack:
            first[int(block.ravel()[0])] = list(block.shape)
    wanted = zip(row["first_flat_index"], row["block_shapes"], strict=True)
    assert first == {index: shape for index, shape in wanted if index is not None}


# A scalar that is not merged has no axis, and so no factor.
idle = pytest.mark.filterwarnings("ignore:no parameter is preconditioned")


def state_blocks(shape, blocking):
    """Shapes of the blocks that the state of the transform holds, with counts."""
    tx = so.scale_by_shampoo(b2=0.9, graft="adam", blocking=blocking)
    state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct(shape, jnp.float32))
    stacks = [x.shape for x in jax.tree.leaves(state.graft_moments) if x.shape]
    return {shape[1:]: shape[0] for shape in stacks}


@idle
@pytest.mark.parametrize("row", SPLITS, ids=row_id)
def test_state_holds_the_blocks_of_the_split_table(row):
    blocks = [tuple(shape) for shape in row["block_shapes"] if shape != [0]]
    blocking = blocking_of(row["split"], None, "trailing")
    wanted = {block: blocks.count(block) for block in blocks}
    assert state_blocks(tuple(row["shape"]), blocking) == wanted


@idle
@pytest.mark.parametrize("row", MERGES, ids=row_id)
def test_state_holds_the_blocks_of_the_merge_table(row):
    """The merged shape of the table, each side cut into pieces and a rest."""
    size, wanted = row["threshold"], {(): 1}
    for side in row["out"]:
        piece = side if size == "inf" else min(size, side)
        counts = {piece: side // piece, side % piece: 1} if piece else {}
        wanted = {
            (*block, part): count * times
            for block, count in wanted.items()
            for part, times in counts.items()
            if part
        }
    blocking = blocking_of(size, row["target"], "trailing")
    assert state_blocks(tuple(row["shape"]), blocking) == wanted


def test_default_blocks_of_a_flax_kernel():
    assert state_blocks((3, 3, 64, 128), so.Blocking()) == {(576, 128): 1}
    assert state_blocks((3000, 512), so.Blocking()) == {(1024, 512): 2, (952, 512): 1}


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
blockings = st.builds(
    so.Blocking,
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 4),
    st.sampled_from(["leading", "trailing"]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(shapes, min_size=1, max_size=4), blockings, st.data())
def test_cut_and_paste_round_trip(leaf_shapes, blocking, data):
    sizes = [math.prod(shape) for shape in leaf_shapes]
    leaves = [
        (1000 * i + np.arange(size, dtype=np.float32)).reshape(shape)
        for i, (size, shape) in enumerate(zip(sizes, leaf_shapes, strict=True))
    ]
    present = [data.draw(st.booleans()) for _ in leaves]
    given_leaves = [x if p else None for x, p in zip(leaves, present, strict=True)]
    plan = _cutting.plan_of(leaves, blocking)
    stacks = _cutting.cut(
        plan, [None if x is None else jnp.asarray(x) for x in given_leaves]
    )
    limit = blocking.block_size or math.inf
    for stack in stacks.values():
        assert max(stack.shape[1:], default=1) <= limit
    # Every entry lies in exactly one block; an absent leaf is zero throughout.
    held = sum(stack.size for stack in stacks.values())
    assert held == sum(sizes)
    entries = np.concatenate([np.ravel(x) for x in stacks.values()] or [[]])
    wanted = np.concatenate(
        [
            np.ravel(x) if p else np.zeros(x.size)
            for x, p in zip(leaves, present, strict=True)
        ]
    )
    np.testing.assert_array_equal(np.sort(entries), np.sort(wanted))
    back = _cutting.paste(plan, stacks, given_leaves)
    for got, want in zip(back, given_leaves, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_blocks_are_float32_and_leaves_come_back_as_they_were(dtype):
    leaf = helpers.normals(0, 7, 5, dtype=dtype)
    plan = _cutting.plan_of([leaf], so.Blocking(4))
    stacks = _cutting.cut(plan, [leaf])
    assert {stack.dtype for stack in stacks.values()} == {jnp.dtype(jnp.float32)}
    (back,) = _cutting.paste(plan, stacks, [leaf])
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, leaf)


# ---- views of shards


def slices_of(view, leaf):
    """What a view shows of an array: its slices, by NumPy."""
    assert math.prod(view.shape) == leaf.size
    return leaf.reshape(view.shape).transpose(view.order).reshape(-1, *view.rest)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_shards_hold_the_slices_of_the_whole(data):
    """Together the shards have the slices of a run whose dimensions are split so."""
    sides = st.sampled_from([1, 2, 4, 8])
    shape = tuple(data.draw(st.lists(sides, min_size=1, max_size=3)))
    roles = [data.draw(st.sampled_from(["batch", "split", "own"])) for _ in shape]

    def divisor(number):
        fits = [count for count in (1, 2, 4, 8) if number % count == 0]
        return data.draw(st.sampled_from(fits))

    split = {a: divisor(shape[a]) for a, role in enumerate(roles) if role == "split"}
    shards = tuple(divisor(split.get(a, side)) for a, side in enumerate(shape))
    axes = tuple(a for a, role in enumerate(roles) if role == "batch")
    own = {a: shards[a] for a, role in enumerate(roles) if role == "own"}
    leaf = np.arange(math.prod(shape)).reshape(shape)

    (view,) = views_of(so.Batch(axes, split), [()], [leaf], [shards])
    pieces = np.split(leaf, shards[0], 0)
    for axis, count in enumerate(shards[1:], start=1):
        pieces = [part for one in pieces for part in np.split(one, count, axis)]
    held = np.concatenate([slices_of(view, piece) for piece in pieces])
    (whole,) = views_of(so.Batch(axes, split | own), [()], [leaf])
    wanted = slices_of(whole, leaf)
    order = np.argsort(held.reshape(len(held), -1)[:, 0])
    wanted = wanted[np.argsort(wanted.reshape(len(wanted), -1)[:, 0])]
    np.testing.assert_array_equal(held[order], wanted)


def test_without_batch_axes_shards_are_seen_as_they_are():
    leaves = [np.ones((4, 8)), np.ones((6,)), np.ones(())]
    views = views_of(None, [(), (), ()], leaves, [(2, 4), (3,), ()])
    assert [view.shape for view in views] == [(2, 2), (2,), ()]
    assert [view.slices for view in views] == [1, 1, 1]


def test_shards_that_cut_through_parts_are_refused():
    batch = so.Batch(split={-1: 3})
    path = (jax.tree_util.DictKey("qkv"),)
    leaf = np.ones((8, 24))
    (view,) = views_of(batch, [path], [leaf], [(4, 3)])
    assert (view.slices, view.rest) == (1, (2, 8))
    wanted = (
        "`specs` must leave the parts of split axes whole in local mode, got (1, 2) "
        f"shards of {batch!r} for [8, 24] at 'qkv'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        views_of(batch, [path], [leaf], [(1, 2)])


def test_rules_of_batch_axes_see_whole_shapes():
    asked = []

    def batch(path, struct):
        asked.append(struct.shape)
        return 0

    (view,) = views_of(batch, [()], [np.ones((8, 4, 6))], [(4, 1, 2)])
    assert (asked, view.slices, view.rest) == ([(8, 4, 6)], 2, (4, 3))
