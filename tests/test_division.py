"""How blocks are dealt to owners, by random blocks and by the plans made of them."""

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

import shampoo_optax as so
from shampoo_optax._cutting import plan_of
from shampoo_optax._division import SLACK, Division, deal, memory, polynomial

COSTS = {"memory": memory, "work": polynomial((0.0, 0.0, 0.0, 1.0))}
seeds = pytest.mark.parametrize("seed", range(6))
owners_ = pytest.mark.parametrize("owners", [2, 3, 8, 64])


def random_counts(seed):
    """Numbers of blocks of up to 12 shapes of orders 0 to 3."""
    rng = np.random.default_rng(seed)
    shapes = {tuple(map(int, rng.integers(1, 65, n))) for n in rng.integers(0, 4, 12)}
    return {shape: int(rng.integers(1, 30)) for shape in sorted(shapes)}


def rules(owners, cost="memory"):
    return Division(owners, COSTS[cost], frozenset())


def price(block, blocks, division):
    """What an owner pays for its slots of a stack."""
    return division.cost(block) * math.ceil(blocks / division.owners)


@seeds
@owners_
def test_every_block_is_dealt_once_to_a_stack_that_holds_it(seed, owners):
    counts = random_counts(seed)
    dealt = deal(counts, rules(owners))
    assert sum(dealt.values(), Counter()) == Counter(counts)
    for block, members in dealt.items():
        for shape in members:
            assert len(shape) == len(block)
            assert all(a <= b for a, b in zip(shape, block, strict=True))


@seeds
@owners_
@pytest.mark.parametrize("cost", COSTS)
def test_dealing_costs_no_more_than_padding_equals(seed, owners, cost):
    counts, division = random_counts(seed), rules(owners, cost)
    dealt = sum(
        price(block, n.total(), division) for block, n in deal(counts, division).items()
    )
    equals = sum(price(shape, n, division) for shape, n in counts.items())
    share = sum(division.cost(shape) * n for shape, n in counts.items()) / owners
    assert dealt <= equals + SLACK * share
    assert dealt >= share


def test_dealing_is_cheaper_than_padding_equals():
    shapes = {(100 + i, 64): 1 for i in range(8)}
    assert {k: v.total() for k, v in deal(shapes, rules(8)).items()} == {(107, 64): 8}


def test_full_rounds_are_not_padded():
    dealt = deal({(64, 64): 16, (32, 32): 5, (8, 8): 3}, rules(8))
    assert dealt == {
        (64, 64): Counter({(64, 64): 16}),
        (32, 32): Counter({(32, 32): 5, (8, 8): 3}),
    }


def test_one_owner_has_exact_stacks_in_order_of_appearance():
    counts = {(3, 5): 2, (5, 3): 1, (): 4}
    dealt = deal(counts, rules(1))
    assert list(dealt) == list(counts)
    assert dealt == {shape: Counter({shape: n}) for shape, n in counts.items()}


def random_leaves(seed):
    rng = np.random.default_rng(seed)
    shapes = [tuple(map(int, rng.integers(1, 90, n))) for n in rng.integers(0, 4, 20)]
    dtypes = rng.choice([np.float16, np.float32], 20)
    return [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]


@seeds
@owners_
def test_every_block_has_one_slot_and_owners_have_equal_shares(seed, owners):
    plan = plan_of(random_leaves(seed), so.Blocking(block_size=32), rules(owners))
    taken = {name: [] for name in plan.stacks}
    for region in plan.regions:
        assert sum(piece.size for piece in region.pieces) == math.prod(region.grid)
        for piece in region.pieces:
            taken[piece.stack] += range(piece.slot, piece.slot + piece.size)
    for name, stack in plan.stacks.items():
        assert len(set(taken[name])) == len(taken[name])
        assert stack.size % owners == 0
        assert max(taken[name]) < stack.size
        assert stack.size - len(taken[name]) < owners
        assert plan.share[name].size * owners == stack.size


@seeds
def test_blocks_cover_every_entry(seed):
    leaves, covered = random_leaves(seed), Counter()
    for region in random_plan(seed).regions:
        covered[region.leaf] += math.prod(region.grid) * math.prod(region.block)
    assert covered == {n: math.prod(leaf.shape) for n, leaf in enumerate(leaves)}


def random_plan(seed):
    return plan_of(random_leaves(seed), so.Blocking(block_size=32), rules(8))


def test_every_process_makes_the_same_plan():
    """Whatever the order of Python's sets, which differs between processes."""
    code = "import test_division as t; print([t.random_plan(s) for s in range(6)])"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    printed = [process.communicate()[0] for process in running]
    assert printed[0] == printed[1]
    assert "Piece(" in printed[0]


@seeds
def test_the_order_of_parameters_changes_no_stack(seed):
    counts = random_counts(seed)
    backwards = dict(reversed(counts.items()))
    assert deal(counts, rules(8)) == deal(backwards, rules(8))
