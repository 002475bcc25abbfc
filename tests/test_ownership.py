"""The bars of ownership, and how the benchmark reads compiled programs."""

import json
import math

import golden
import helpers
import pytest

import shampoo_optax as so
from benchmarks import hlo, ownership
from benchmarks.shapes import MODELS
from shampoo_optax._division import polynomial

TABLES = json.loads((golden.DATA / "tables.json").read_text())

BARS = {
    ("ResNet-50", 8): {"work": 0.75, "matrices": 0.85},
    ("GPT-2 small", 8): {"work": 0.95, "memory": 0.95, "matrices": 0.95, "wire": 0.95},
    ("GPT 1.3B", 64): {"work": 0.95, "memory": 0.95, "matrices": 0.95},
}


@pytest.mark.parametrize("model, owners", BARS)
def test_models_are_divided_evenly(model, owners):
    (part,) = so.describe(helpers.structs(MODELS[model]), devices=owners).parts
    found = part.efficiency
    bars = BARS[model, owners]
    assert {name: found[name] for name in bars if found[name] < bars[name]} == {}


def test_ways_of_dividing():
    """The benchmark's own arithmetic agrees with the plan's, and in its order."""
    head, *rows = ownership.ways()
    ways = {(model, way): values for model, way, _, *values in rows}
    assert head[3:] == ["work", "memory", "wire"]
    for model in MODELS:
        exact, deal, greedy = (ways[model, way] for way in ("exact", "deal", "greedy"))
        (part,) = so.describe(helpers.structs(MODELS[model]), devices=8).parts
        assert deal[1:] == [f"{part.efficiency[name]:.3f}" for name in head[4:]]
        assert float(exact[0]) < float(deal[0]) < float(greedy[0])


def test_every_table_of_the_reference_is_read():
    """The other two are in test_blocking.py."""
    sizes = {name: len(rows) for name, rows in TABLES.items() if name != "source"}
    assert sizes == {
        "merge_small_dims": 145,
        "multi_dim_split": 14,
        "distribute_buffer_sizes": 120,
        "greedy_bin_pack": 4,
    }


def test_greedy_owners_are_those_of_the_reference():
    for row in TABLES["distribute_buffer_sizes"]:
        assert ownership.greedy_owners(row["costs"], row["group_size"]) == row["ranks"]


def test_greedy_loads_are_those_of_the_reference():
    for row in TABLES["greedy_bin_pack"]:
        loads = [0] * row["num_bins"]
        owners = ownership.greedy_owners(row["costs"], row["num_bins"])
        for cost, owner in zip(row["costs"], owners, strict=True):
            loads[owner] += cost
        assert sorted(loads) == sorted(row["bin_costs"])


def test_polynomial_costs_are_those_of_the_reference():
    """Their smallest cost of a side, where it is set, is not ours to have."""
    compared = 0
    for row in TABLES["distribute_buffer_sizes"]:
        if row["cost_model"] == "polynomial":
            arguments = row["cost_kwargs"]
            cost = polynomial(arguments["coefficients"])
            for block, wanted in zip(row["block_shapes"], row["costs"], strict=True):
                least = arguments.get("min_cost", 0.0)
                got = sum(max(cost((side,)), least) for side in block)
                assert got == pytest.approx(wanted)
                assert least or cost(tuple(block)) == got
                compared += 1
    assert compared > 100


def test_models_have_their_published_sizes():
    sizes = {name: sum(map(math.prod, shapes)) for name, shapes in MODELS.items()}
    assert sizes == {
        "ResNet-50": 25_557_032,
        "ViT-S/16": 22_050_664,
        "GPT-2 small": 124_439_808,
        "GPT 1.3B": 1_315_723_264,
    }


HLO = """\
HloModule jit_update, entry_computation_layout={(f32[3]{0})->f32[8,3]{1,0}}

FileNames
1 "/somewhere/all-gather(.py"

FunctionNames
1 "update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused (p.0: f32[3]) -> f32[3] {
  %p.0 = f32[3]{0} parameter(0)
  ROOT %neg = f32[3]{0} negate(%p.0)
}

ENTRY %main (p.1: f32[3]) -> f32[8,3] {
  %p.1 = f32[3]{0} parameter(0)
  %sums = (f32[2]{0}, pred[]) all-reduce(%p.1, %p.1), to_apply=%add
  %half = bf16[8,5]{1,0} all-gather-start(%p.1), dimensions={0}
  ROOT %all = f32[8,3]{1,0} all-gather(%p.1), metadata={op_name="all-gather(x)"}
}
"""


def test_lines_of_a_program_leave_out_names_of_sources():
    names = 2 + 2 + 2 + 2  # a title and an entry in each table
    program = 1 + 4 + 6
    assert hlo.lines_of(HLO) == (HLO.count("\n"), names + program, program)


def test_bytes_of_collectives_are_read_from_a_program():
    found = hlo.collective_bytes(HLO)
    assert found == {"all-reduce": 9, "all-gather": 4 * 8 * 3 + 2 * 8 * 5}


def test_plan_and_compiled_program_agree_on_one_device():
    params = helpers.structs([(32, 24)] * 11)
    tx = so.scale_by_shampoo(placement=helpers.placement_of(8))
    (part,) = so.describe(params, tx).parts
    compiled = ownership.compile_update(tx, params)
    state = sum(kind.device for kind in part.bytes.values())
    assert compiled.arguments == state + 11 * 4 * 32 * 24
    assert compiled.collectives == part.wire
