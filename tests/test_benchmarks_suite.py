"""The suite and what belongs to it: what is measured, and how it is told."""

import io
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import benchmarks.__main__ as command
import shampoo_optax as so
from benchmarks import (
    compare_torch,
    contenders,
    floor,
    jax_worker,
    memory,
    periods,
    shapes,
    suite,
)
from benchmarks.contenders import BASE, Contender, Group
from benchmarks.peers import Peer, find

TINY = [(6, 4), (5,)]


def sgd(*_):
    return optax.sgd(0.1)


def test_means_are_those_of_whole_periods():
    # Two rounds of four steps; the second of each pair is the refresh.
    seconds = [1.0, 11.0, 3.0, 13.0, 2.0, 22.0, 2.0, 22.0]
    means = periods.round_means(seconds, periods.LAST, 4)
    np.testing.assert_allclose(means, [0.9 * 2 + 0.1 * 12, 0.9 * 2 + 0.1 * 22])
    plain, refresh = periods.plain_and_refresh(seconds, periods.LAST)
    assert (plain, refresh) == (2.0, 17.5)
    first = periods.round_means(seconds, periods.FIRST, 4)
    np.testing.assert_allclose(first, [0.1 * 2 + 0.9 * 12, 0.1 * 2 + 0.9 * 22])
    assert periods.plain_and_refresh(seconds, periods.ALIKE) == (7.0, None)
    turns = [1.0] * 9 + [11.0] + [1.0] * 9 + [21.0]
    assert periods.plain_and_refresh(turns, periods.EACH) == (1.0, 16.0)
    means = periods.round_means(turns, periods.EACH, 10)
    np.testing.assert_allclose(means, [2.0, 3.0])
    assert periods.ratio_of(np.array([1.0, 9.0, 4.0]), np.array([2, 3, 2])) == 2.0


@pytest.mark.parametrize(
    "alias, options",
    [(so.shampoo, {}), (so.shampoo, contenders.LEAN), (so.soap, {})]
    + [(so.kl_shampoo, {})],
)
def test_a_short_period_is_the_same_program(alias, options):
    short = dict(refresh_every=periods.SHORT)
    weights, whole = periods.LAST, dict(refresh_every=periods.PERIOD)
    if options:
        short, weights = contenders.LEAN_SHORT, contenders.LEAN_WEIGHTS

    def program(**numbers):
        tx = alias(1e-3, **options | numbers)
        grads = [jnp.ones(shape) for shape in TINY]
        text = str(jax.make_jaxpr(tx.update)(grads, tx.init(grads), grads))
        # Periods are scalars; all else has to be the same to the letter.
        return re.sub(r"\b\d+:i32\[\]", "number", text)

    assert program(**short) == program(**whole)
    assert len(weights) == short["refresh_every"]
    assert sum(weights) == periods.PERIOD


def test_weights_count_the_steps_of_a_period():
    every = contenders.LEAN["statistics_every"]
    kinds = [
        (step % every == 0, step % periods.PERIOD == 0)
        for step in range(1, periods.PERIOD + 1)
    ]
    numbers = contenders.LEAN_SHORT
    found = dict.fromkeys(kinds, 0)
    for step, weight in enumerate(contenders.LEAN_WEIGHTS, start=1):
        statistics = step % numbers["statistics_every"] == 0
        found[statistics, step % numbers["refresh_every"] == 0] += weight
    assert found == {kind: kinds.count(kind) for kind in kinds}


def test_the_muon_recipe_moves_as_optax_does():
    params = {"a": jax.random.normal(jax.random.key(0), (6, 4)), "b": jnp.ones(3)}
    updates = []
    for make in (
        contenders.GROUPS["muon"].contenders[name].make
        for name in ("muon", "optax.contrib.muon")
    ):
        tx = make(0)
        state = tx.init(params)
        for _ in range(2):
            found, state = tx.update(params, state, params)
        updates.append(found)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3), *updates)


@pytest.mark.filterwarnings("ignore:no parameter is preconditioned")
def test_the_suite_writes_tables_numbers_and_figures(tmp_path, capsys):
    arguments = ["--small", "--rounds", "2", "--groups", "lean", "plain", "muon"]
    command.main([*arguments, "--out", str(tmp_path)])
    text = (tmp_path / "small.md").read_text()
    assert capsys.readouterr().out.strip() in text
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    groups = json.loads((tmp_path / "small.json").read_text())["groups"]
    rows = {row["name"]: row for found in groups.values() for row in found["rows"]}
    names = [BASE, "shampoo, lean", "shampoo, lean, packed"]
    names += ["adamw, by rules", "left to grafting", "muon", "optax.contrib.muon"]
    assert list(rows) == names
    assert rows[BASE]["ratio"] == 1 and "1.00x" in text
    assert len(rows["shampoo, lean"]["steps"]) == 2 * len(contenders.LEAN_WEIGHTS)
    for row in rows.values():
        assert 0 < row["plain"] <= max(row["steps"])
        assert row["lines"] > 100 and row["compilation"] > 0 and row["largest"] >= 1
    # Two averages and counters; Muon has one of matrices, its adamw two of the vectors.
    assert 8 < rows[BASE]["bytes_each"] < 8.1
    assert 8 < rows["adamw, by rules"]["bytes_each"] < 8.3
    assert 4 < rows["muon"]["bytes_each"] < 4.5
    (pair,) = groups["muon"]["rivals"]
    assert pair[:2] == ["muon", "optax.contrib.muon"] and pair[2] > 0
    assert "muon / optax.contrib.muon:" in text and "Not measured" not in text


def test_peers_that_do_not_run_are_noted():
    def broken(_):
        raise TypeError("too old\nfor this")

    peers = {
        "absent": Contender(sgd, peer=Peer(None, None, "nowhere: not found")),
        "broken": Contender(broken, peer=Peer(broken, None, "somewhere")),
        "there": Contender(sgd, peer=Peer(sgd, None, "here")),
    }
    base = {BASE: Contender(sgd, periods.ALIKE)}
    pairs = (("there", BASE), ("there", "broken"))
    result = suite.measure(TINY, Group(base | peers, pairs), 16, 2, "test")
    assert [row.name for row in result.rows] == [BASE, "there"]
    notes = {"absent": "nowhere: not found", "broken": "somewhere: TypeError: too old"}
    assert result.absent == notes
    assert [pair[:2] for pair in result.rivals] == [("there", BASE)]
    ours = Group(base | {"ours": Contender(broken)}, ())
    with pytest.raises(TypeError, match="too old"):
        suite.measure(TINY, ours, 16, 2, "test")


def test_a_peer_is_the_first_module_that_has_it():
    found = find("sqrt", "no_such_module_here", "math")
    assert found.make(9) == 3 and found.note == "math"
    missing = find("no_such_name", "no_such_module_here", "math")
    assert missing.make is None
    assert re.fullmatch("no_such_module_here: ModuleNotF.*; math: Attr.*", missing.note)


def test_shapes_are_seen_as_matrices_and_as_torch_has_them():
    kernels = [(3, 3, 64, 128), (384, 6, 64), (6, 64, 384), (7,), (5, 9)]
    matrices = [(576, 128), (384, 384), (384, 384), (7,), (5, 9)]
    assert shapes.as_matrices(kernels) == matrices
    turned = [(128, 64, 3, 3), *kernels[1:]]
    assert shapes.as_torch(kernels) == turned
    assert shapes.count(kernels) == shapes.count(matrices)
    first, again, other = (shapes.draw(TINY, seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (6, 4) and np.all(first != other)


def test_bytes_each_are_those_of_the_arrays():
    # Factors and roots of sides 6, 4 and 5, two averages of 29 entries, and counters:
    # one, and four for each of the two stacks.
    numbers = 2 * (36 + 16 + 25) + 2 * 29 + 1 + 4 * 2
    found = memory.bytes_each(so.shampoo(1e-3), TINY)
    assert found == pytest.approx(4 * numbers / 29)
    for name, make in memory.CONFIGURATIONS.items():
        params = [jnp.ones(shape) for shape in TINY]
        state = make().init(params)
        real = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 29
        assert memory.bytes_each(make(), TINY) == pytest.approx(real), name


def test_the_table_of_memory_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "SUITE", {"tiny": TINY})
    memory.main(["--out", str(tmp_path)])
    text = (tmp_path / "memory.md").read_text()
    table = capsys.readouterr().out.strip()
    assert table in text and table.split()[:2] == ["state", "tiny"]
    assert len(table.splitlines()) == 1 + len(memory.CONFIGURATIONS)


def test_bare_products_are_all_that_a_step_needs():
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((2, 3, 4, 5), np.float32)
    roots = [rng.standard_normal((2, side, side), np.float32) for side in (3, 4, 5)]
    result, grams = floor.products(blocks, roots)
    exact = np.einsum("nabc,nax,nby,ncz->nxyz", blocks, *roots)
    np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4)
    for axis, gram in enumerate(grams, start=1):
        flat = np.moveaxis(blocks, axis, 1).reshape(2, blocks.shape[axis], -1)
        exact = flat @ flat.transpose(0, 2, 1)
        np.testing.assert_allclose(gram, exact, rtol=1e-4, atol=1e-4)


def test_operations_of_the_floor_are_those_of_the_step():
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(6, 4), (6, 4), (9, 5)]]
    (part,) = so.describe(params, so.shampoo(1e-3)).parts
    counted = part.flops["statistics"] + part.flops["application"]
    assert floor.flops((2, 6, 4)) + floor.flops((1, 9, 5)) == counted


def test_the_floor_is_products_and_one_pass_over_the_state():
    seconds = {"step": [4.0, 6.0], "(1, 2, 2)": [1.0, 1.0], "copy": [2.0, 4.0]}
    arrays = {name: np.array(values) for name, values in seconds.items()}
    row = floor.row("tiny", arrays, [(1, 2, 2)], floor.COPIED // 2)
    # Floors of 2 and 3 seconds, and steps twice as long.
    assert row[0] == "tiny" and row[-2:] == ["2500.00", "2.00x"]
    assert row[1:3] == ["5000.00", "1000.00"] and row[5] == "1500.00"


def test_the_floor_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(floor.SMALL, "small", [(6, 4), (5,)])
    monkeypatch.setattr(floor, "COPIED", 2**12)
    arguments = ["--models", "small", "--rounds", "2", "--out", str(tmp_path)]
    floor.main(arguments)
    text = capsys.readouterr().out.strip()
    assert text in (tmp_path / "floor.md").read_text()
    assert float(text.split()[-1].rstrip("x")) > 0


def test_a_process_answers_with_the_seconds_of_its_steps(monkeypatch, capsys):
    monkeypatch.setitem(jax_worker.SMALL, "small", TINY)
    monkeypatch.setattr(sys, "argv", ["worker", "small", BASE, "16", "2"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n2\n"))
    jax_worker.main()
    first, second = map(float, capsys.readouterr().out.split())
    assert first > 0 and second > 0


def test_the_parameters_beside_torch_are_those_of_training():
    params = {"w": jnp.ones((2, 3))}
    tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.5, momentum=0.5))
    held = jax_worker.holding_parameters(tx)
    state = held.init(params)
    for grad in (1.0, 2.0):
        updates, state = held.update({"w": jnp.full((2, 3), grad)}, state, params)
        assert updates == ()
    # 1 - 0.5 (1 + 0.5) = 0.25, and then 0.25 - 0.5 (2 + 0.5 (0.25) + 0.5 (1.5))
    np.testing.assert_allclose(state[0]["w"], np.full((2, 3), -1.1875))


def test_processes_are_asked_in_turns(tmp_path, capsys, monkeypatch):
    """Processes that claim to be slow at refreshes, ours half as slow."""

    def start(model, kind, options):
        scale = 2 if kind == compare_torch.OFFICIAL else 1
        answer = f"print({scale} * (1 if int(line) % 2 else 11), flush=True)"
        program = f"import sys\nfor line in sys.stdin: {answer}"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return subprocess.Popen([sys.executable, "-c", program], **pipes)

    monkeypatch.setattr(compare_torch, "start", start)
    monkeypatch.setattr(compare_torch, "PAUSE", 0)
    paths = ["--torch-python", "x", "--torch-repo", "y", "--out", str(tmp_path)]
    kinds = ["--kinds", "official", "ours, like for like"]
    compare_torch.main([*paths, *kinds, "--models", "small", "--rounds", "3"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ") for line in lines if line.startswith(("offic", "ours"))]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert rows[0][1:] == ["4000.00", "2000.00", "22000.00", "1.00x"]
    assert rows[1][1:] == ["2000.00", "1000.00", "11000.00", "0.50x"]
    numbers = json.loads((tmp_path / "torch.json").read_text())["small"]
    assert numbers["official"] == [2, 22] * 3
    with pytest.raises(SystemExit):
        compare_torch.main(["--rounds", "0", *paths])
    assert "--rounds" in capsys.readouterr().err
