"""The main job and the sweep: data, schedules, choices, files and errors."""

import dataclasses
import gzip
import itertools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shampoo_optax as so
from benchmarks import compare_devices, data, loop, report, storage, sweep, train
from benchmarks.loop import Record, Run
from benchmarks.models import ByteTransformer
from benchmarks.optimizers import OPTIMIZERS, RATES, Settings, warmup_cosine
from benchmarks.tasks import make_task

SETTINGS = Settings(weight_decay=0.1, block_size=32, refresh_every=2, clip=1.0)


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # Flax and the models rely on it
        yield


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    path.write_bytes(rng.integers(97, 100, 20_000, dtype=np.uint8).tobytes())
    return path


def record_of(rate, steps_to_target, final):
    run = Run("shampoo", rate, 10, 0, 5, "held_out", SETTINGS)
    return Record(
        run,
        dataset="verses",
        metric="bits per byte",
        target=3.0,
        state_bytes=0,
        losses=[1.0] * 10,
        step_seconds=[0.1] * 10,
        evaluations=[(5, 1.0, final + 1), (10, 1.0, final)],
        steps_to_target=steps_to_target,
    )


def test_verses_are_cut_into_three_parts_in_order():
    verses = data.load_text()
    (train_part,), (held_out,), (test,) = verses.train, verses.held_out, verses.test
    assert train_part.tobytes().startswith(b"In the beginning God created")
    assert len(held_out) == len(test) == pytest.approx(len(train_part) / 18, abs=2)
    assert len(train_part) + len(held_out) + len(test) > 4_000_000


def test_digits_of_the_user_are_all_used_once(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 10
    rows = np.column_stack([rng.integers(256, size=(300, 784)), labels])
    path = tmp_path / "digits.csv.gz"
    with gzip.open(path, "wt") as file:
        np.savetxt(file, rows, fmt="%d", delimiter=",")
    digits = data.load_images(path)
    parts = (digits.train, digits.held_out, digits.test)
    assert [len(split[0]) for split in parts] == [210, 30, 60]
    assert (
        sum(np.bincount(split[1], minlength=10) for split in parts).tolist()
        == [30] * 10
    )
    sums = np.concatenate([split[0].sum((1, 2), int) for split in parts])
    assert sorted(sums) == sorted(rows[:, :-1].sum(1))


def test_schedule_rises_to_the_rate_and_falls_to_zero():
    schedule = warmup_cosine(0.5, 200)
    rates = [float(schedule(step)) for step in range(201)]
    assert np.argmax(rates) == 10 and rates[10] == pytest.approx(0.5)
    assert np.all(np.diff(rates[:11]) > 0) and np.all(np.diff(rates[10:]) < 0)
    assert rates[0] == pytest.approx(0.05) and rates[200] == pytest.approx(0, abs=1e-7)


def test_labels_are_the_inputs_one_byte_later(text):
    task = make_task("text", text)
    inputs, labels = task.take(jax.device_put(task.dataset.train), jnp.array([3, 50]))
    stream = task.dataset.train[0]
    assert inputs[1].tolist() == stream[50:114].tolist()
    assert labels[1].tolist() == stream[51:115].tolist()


def test_batches_depend_on_the_seed_alone(text):
    task = make_task("text", text)
    first, again, other = (next(task.draw(seed)).tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_the_rate_with_fewest_steps_then_best_metric_is_chosen(text):
    task = make_task("text", text)
    slow, fast, better = (
        record_of(0.1, None, 1.0),
        record_of(0.2, 5, 3.0),
        record_of(0.3, 5, 2.0),
    )
    assert sweep.choose(task, [slow, fast, better]) is better
    assert sweep.choose(task, [slow, record_of(0.4, None, 2.0)]) is slow


def test_a_record_survives_its_file(tmp_path):
    record = record_of(0.1, 5, 2.0)
    path = tmp_path / "run.json"
    report.save(record, path)
    assert report.load(path).run == record.run
    assert report.load(path).steps_to_target == 5
    assert report.load(tmp_path / "other.json") is None


def test_the_main_job_writes_a_figure_and_its_numbers(text, tmp_path, capsys):
    arguments = ["--data", str(text), "--steps", "3", "--eval-every", "2"]
    train.main([*arguments, "--refresh-every", "2", "--out", str(tmp_path)])
    shampoo, adamw = json.loads((tmp_path / "text.txt.json").read_text())
    assert (tmp_path / "text.txt.png").read_bytes().startswith(b"\x89PNG")
    assert [shampoo["run"]["optimizer"], adamw["run"]["optimizer"]] == [
        "shampoo",
        "adamw",
    ]
    # The same initial model and batch, and two different optimizers.
    assert shampoo["losses"][0] == adamw["losses"][0] != shampoo["losses"][2]
    assert shampoo["losses"][2] != adamw["losses"][2]
    for step, nats, bits in shampoo["evaluations"] + adamw["evaluations"]:
        assert step in (2, 3) and bits == pytest.approx(nats / math.log(2))
    assert "state bytes" in capsys.readouterr().out


def test_a_stopped_sweep_goes_on_where_it_was(text, tmp_path, monkeypatch):
    begun, documented = [], RATES["text"]["shampoo"]

    def run_instead(task, run):
        begun.append(run)
        return record_of(run.learning_rate, 5, run.learning_rate)

    def save_with_its_run(record, path, save=report.save):
        record.run = begun[-1]
        save(record, path)

    monkeypatch.setattr(sweep, "train", run_instead)
    monkeypatch.setattr(sweep, "mean_seconds", lambda *_: {"shampoo": 0.25})
    monkeypatch.setattr(report, "save", save_with_its_run)
    arguments = ["--data", str(text), "--optimizer", "shampoo", "--steps", "10"]
    arguments += ["--out", str(tmp_path / "out"), "--seeds", "2", "--documented"]
    sweep.main([*arguments, "--rates", "0.2", "0.1"])
    tried = [(run.learning_rate, run.split, run.seed) for run in begun]
    assert tried == [
        (0.2, "held_out", 0),
        (0.1, "held_out", 0),
        *((rate, "test", seed) for rate in (0.1, documented) for seed in (1, 2)),
    ]
    sweep.main([*arguments, "--rates", "0.2", "0.1", "0.4"])
    assert [run.learning_rate for run in begun[6:]] == [0.4]
    # Both seeds reached the target after 5 steps of a quarter of a second.
    table = (tmp_path / "out" / "text.txt" / "results.md").read_text()
    assert "| shampoo | 0.1 | 5, 5 | 5 | 250.0 | 1.2 | 0.100 ± 0.000 |" in table


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A task whose text is all bytes in turn, so that no factor lacks rank."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(256)) * 80)
    small = ByteTransformer(layers=0, width=16)
    return dataclasses.replace(make_task("text", path), model=small)


def run_on(task, optimizer, devices, wire=None):
    """Six steps with two refreshes."""
    settings = dataclasses.replace(
        SETTINGS, block_size=16, refresh_every=3, devices=devices, wire=wire
    )
    run = Run(optimizer, 0.01, 6, 0, 6, "test", settings)
    return loop.train(task, run)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_eight_devices_give_the_curve_of_one(counting, optimizer):
    one, eight = (run_on(counting, optimizer, devices) for devices in (1, 8))
    assert one.losses[-1] < one.losses[0] - 0.1
    # The mean over the batch is rounded otherwise; 1.5e-6 was seen.
    np.testing.assert_allclose(eight.losses, one.losses, rtol=5e-6)
    assert eight.final == pytest.approx(one.final, rel=5e-6)
    share = eight.state_bytes / one.state_bytes
    # The model has no hidden matrix, so that Muon leaves all to AdamW.
    whole = optimizer in ("adamw", "muon")
    assert share == 1 if whole else 1 / 8 <= share < 1.5 / 8


def test_a_narrow_wire_changes_the_curve_a_little(counting):
    wide, narrow = (run_on(counting, "shampoo", 8, wire) for wire in (None, "bfloat16"))
    assert wide.losses[0] == narrow.losses[0] and wide.losses != narrow.losses
    np.testing.assert_allclose(narrow.losses, wide.losses, rtol=1e-4)


def test_devices_are_simulated_where_jax_has_not_started():
    program = "from benchmarks import mesh; print(mesh.provide(3), mesh.mesh_of(3))"
    environment = {key: os.environ[key] for key in os.environ if key != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("3 Mesh('data': 3"), done.stderr


def test_the_commands_on_several_devices_are_compared(tmp_path, monkeypatch):
    begun = []

    def run_instead(arguments):
        begun.append(arguments)
        loss = 1 + len(begun) / 10
        settings = dataclasses.replace(
            SETTINGS, wire="bfloat16" if "--wire" in arguments else None
        )
        return [
            dataclasses.replace(
                record_of(0.1, 5, 2.0),
                run=Run(name, 0.1, 10, 0, 5, "test", settings),
                losses=[1.0] * 5 + [2 * loss - 1] * 5,  # the mean is the loss
                evaluations=[(10, loss, 2.0)],
            )
            for name in arguments
            if name in OPTIMIZERS
        ]

    monkeypatch.setattr(compare_devices, "run", run_instead)
    options = ["--steps", "10"]
    arguments = ["--optimizer", "adamw", "soap", *options, "--out", str(tmp_path)]
    compare_devices.main(arguments)
    eight = ["--devices", "8"]
    assert begun == [
        ["--optimizer", "adamw", "soap", *options],
        ["--optimizer", "adamw", "soap", *eight, *options],
        ["--optimizer", "soap", *eight, "--wire", "bfloat16", *options],
    ]
    rows = (tmp_path / "results.md").read_text().splitlines()
    rows = [" ".join(row.split()) for row in rows if row.startswith(("adamw", "soap"))]
    assert rows == [
        "adamw 1 device 1.1000 +0.00% 0.00% - 2.0000 5 0",
        "adamw 8 devices 1.2000 +9.09% 9.09% - 2.0000 5 0",
        "soap 1 device 1.1000 +0.00% 0.00% - 2.0000 5 0",
        "soap 8 devices 1.2000 +9.09% 9.09% - 2.0000 5 0",
        "soap 8, bfloat16 wire 1.3000 +18.18% 18.18% +8.33% 2.0000 5 0",
    ]
    assert len(json.loads((tmp_path / "runs.json").read_text())) == len(rows)
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--task", "audio"], ["--task", "'audio'", "text"]),
        (["--optimizer", "lion"], ["--optimizer", "'lion'", "adamw"]),
        (["--steps", "0"], ["--steps", "'0'"]),
        (["--learning-rate", "nan"], ["--learning-rate", "'nan'"]),
        (["--data", "no-such-file"], ["--data", "no-such-file"]),
        (["--block", "8"], ["--block"]),
        (["--devices", "0"], ["--devices", "'0'"]),
        (["--devices", "3"], ["--devices", "batch", "32", "3"]),
        (["--devices", "16"], ["--devices", "at most 8", "16"]),
        (["--devices", "8", "--wire", "int8"], ["--wire", "'int8'"]),
        (["--wire", "bfloat16"], ["--wire", "--devices", "'bfloat16'"]),
    ],
)
def test_a_bad_option_is_named_in_one_line(arguments, words, capsys):
    assert jax.device_count() == 8  # JAX has started
    with pytest.raises(SystemExit) as stop:
        train.main(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1
    assert all(word in lines[0] for word in words)


def test_the_forms_of_the_state_are_measured_in_turns(tmp_path, monkeypatch, capsys):
    forms = dict(list(storage.FORMS.items())[:3])
    monkeypatch.setattr(storage, "FORMS", forms)
    monkeypatch.setitem(storage.TREES, "tiny", [(6, 4), (5,)])
    out = tmp_path / "new" / "storage.md"
    storage.main(["--tree", "tiny", "--rounds", "3", "--out", str(out)])
    table = capsys.readouterr().out.strip()
    assert table in out.read_text() and "Steps of each form: 3." in out.read_text()
    head, tree, *rows = (line.split() for line in table.splitlines())
    assert tree == ["tiny"] and len(rows) == 3
    # 6, 4 and 5 squared, factors and roots; then what a triangle has.
    assert [row[-5:-2] for row in rows] == [
        ["616", "B", "1.000"],
        ["368", "B", "0.597"],
        ["308", "B", "0.500"],
    ]
    assert all(float(row[-2]) > 0 and float(row[-1]) > 0 for row in rows)
    assert rows[0][-1] == "1.000"


def test_storage_never_refreshes_while_it_is_measured():
    grads = {"w": jnp.ones((3, 2))}
    tx = storage.transform(storage.FORMS["float32 packed"])
    state, update = tx.init(grads), jax.jit(tx.update)
    for _ in range(3):
        _, state = update(grads, state)
    assert not any(np.any(x) for x in jax.tree.leaves(state.residuals))
    np.testing.assert_array_equal(
        state.roots["3x2"]["1"], tx.init(grads).roots["3x2"]["1"]
    )


def test_inverse_free_shampoo_in_bfloat16_learns_the_demo_text():
    """The main job's task with a smaller model: the loss is that of float32."""
    small = ByteTransformer(layers=1, width=32)
    task = dataclasses.replace(make_task("text"), model=small)
    data = jax.device_put(task.dataset.train)
    batches = list(itertools.islice(task.draw(0), 80))
    params = jax.jit(small.init)(jax.random.key(0), task.take(data, batches[0])[0])

    def losses(dtype):
        tx = so.inverse_free_shampoo(4e-3, b1=0.9, momentum=None, dtype=dtype)
        state = loop.TrainState(jax.tree.map(jnp.copy, params), tx.init(params))
        step = loop.make_step(task, tx, jax.tree.map(lambda x: x.sharding, state))
        for index in batches:
            state, loss = step(state, data, index)
            yield float(loss)

    wide, half = (np.array(list(losses(dtype))) for dtype in ("float32", "bfloat16"))
    assert np.mean(wide[-20:]) < 0.9 * wide[0]
    assert abs(np.mean(half[-20:]) / np.mean(wide[-20:]) - 1) <= 0.02
    assert np.any(half != wide)
