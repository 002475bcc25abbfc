"""The table of what sharded parameters send: read by hand for a few small trees."""

import pytest

import shampoo_optax as so
from benchmarks import hlo, sharded

# Eight matrices, one for each device, of which all have two rows; 512 bytes each.
MATRICES = [(16, 8)] * 8
ALL, ONE = 8 * 512, 512
NUMBERS = 16**2 + 8**2  # of the factors of a matrix
SLOT = 4 * (2 * NUMBERS + 2 * 16 * 8 + 4)  # with roots, moments, and four counters
SENT = {
    "whole": ({}, {"all-gather": ALL}, 2 * ALL + SLOT),
    # Strips of rows to all devices, then those of a matrix to its owner.
    "lossless FSDP": ({"all-to-all": 2 * ONE}, {"all-to-all": 2 * ONE}, 2 * ONE + SLOT),
    # Every device has two rows of all matrices, with factors of their own.
    "local FSDP": ({}, {}, 2 * ONE + 8 * 4 * (2 * (2**2 + 8**2) + 2 * 2 * 8 + 4)),
}
# What a device keeps for the slots beside their factors.
REST = 4 * (NUMBERS + 2 * 16 * 8 + 4)
LOCAL_REST = 8 * 4 * (2**2 + 8**2 + 2 * 2 * 8 + 4)
ROOTS_AND_MORE = {"whole": REST, "lossless FSDP": REST, "local FSDP": LOCAL_REST}


@pytest.mark.parametrize("name", SENT)
def test_a_mode_sends_and_keeps_what_is_counted_by_hand(name):
    arguments = MATRICES, sharded.MODES[name], 16
    found = sharded.measure(*arguments)
    assert (found.forward, found.back, found.yardstick) == SENT[name]
    assert found.yardstick - found.with_factors == ROOTS_AND_MORE[name]
    assert found.temporary > 0
    tx, params = sharded.transform(*arguments)
    (part,) = so.describe(params, tx).parts
    assert part.wire == found.forward + found.back


def test_the_official_package_sends_what_is_counted_by_hand():
    """Where all is even; and a kernel in PyTorch's order, (5, 2, 3, 3), with the rest.

    The kernel is one block of (5, 18): 360 bytes, 384 with padding. The other matrix
    has 240 and 256. The first of 8 shards has (1, 2, 3, 3) and (2, 6), that of 4 shards
    (2, 2, 3, 3) and (3, 6): 36 and 18 entries, 192 and 128 bytes with padding.
    """
    assert sharded.official(MATRICES, 16) == {
        "DDP": (0, ALL),
        "FSDP": (0, 0),
        "FSDP, REPLICATE": (ALL, 0),
        "FSDP, ROUND_ROBIN": (ONE, ONE),
        "HSDP": (0, ALL // 4),
        "HSDP, REPLICATE": (ALL, ALL),
        "HSDP, ROUND_ROBIN": (2 * ONE, 2 * ONE + ALL // 4),
    }
    assert sharded.official([(3, 3, 2, 5), (10, 6)], 18) == {
        "DDP": (0, 8 * 384),
        "FSDP": (0, 0),
        "FSDP, REPLICATE": (8 * 4 * (18 + 12), 0),
        "FSDP, ROUND_ROBIN": (360, 4 * (18 + 12)),
        "HSDP": (0, 2 * 192),
        "HSDP, REPLICATE": (4 * 4 * (36 + 18), 2 * 384),
        "HSDP, ROUND_ROBIN": (360, 2 * 384 + 4 * (36 + 18)),
    }


def test_collectives_are_told_apart_by_what_they_depend_on():
    program = """
%body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
}

ENTRY %main (a: f32[2], s: f32[2]) -> f32[4] {
  %a = f32[2]{0} parameter(0), metadata={op_name="grads"}
  %s = f32[2]{0} parameter(1), metadata={op_name="state.count"}
  %first = f32[4]{0} all-gather(%a), dimensions={0}
  %sum = f32[2]{0} fusion(%a, %s), calls=%body, metadata={op_name="jit(f)/%first"}
  %second = (f32[1]{0}, f32[1]{0}) all-to-all(%sum, %sum), channel_id=1
  ROOT %third = f32[4]{0} all-gather(%second), dimensions={0}
}
"""
    assert hlo.bytes_by_source(program, "state.") == {
        False: {"all-gather": 16},
        True: {"all-to-all": 8, "all-gather": 16},
    }
    with pytest.raises(RuntimeError, match="outside of main"):
        body = "parameter(0)\n  %y = f32[8]{0} all-gather(%x), dimensions={0}"
        hlo.bytes_by_source(program.replace("parameter(0)\n}", body + "\n}"), "state.")


def test_axes_divide_the_largest_dimensions_that_fit():
    mode = sharded.MODES["lossless FSDP x TP"]  # model: 2, fsdp: 4
    shapes = [(768, 2304), (3, 3, 64, 64), (7,), (6, 5)]
    found = [tuple(sharded.spec_of(shape, mode)) for shape in shapes]
    assert found == [
        ("fsdp", "model"),
        (None, None, "model", "fsdp"),
        (None,),
        ("model", None),
    ]


def test_the_command_writes_both_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sharded.MODELS, "tiny", MATRICES)
    monkeypatch.setattr(sharded, "MODES", {"whole": sharded.MODES["whole"]})
    out = tmp_path / "new" / "sharded.md"
    sharded.main(["--model", "tiny", "--block-size", "16", "--out", str(out)])
    text = out.read_text()
    assert text in capsys.readouterr().out
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "tiny DDP 0.0 0.0 1.00" in rows
    assert any(row.startswith("tiny whole 0.0 0.0 1.00 0.0 0.0 ") for row in rows)
