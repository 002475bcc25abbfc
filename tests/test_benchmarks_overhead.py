"""The benchmark of whole training steps, on a small model."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import overhead, sweep
from benchmarks.models import ByteTransformer
from benchmarks.optimizers import Settings
from benchmarks.tasks import make_task

MEANS = {"adamw": np.array([1.0, 2.0, 4.0]), "soap": np.array([2.0, 6.0, 4.0])}


def test_rows_have_medians_of_means_and_of_ratios():
    assert overhead.rows_of(8, MEANS) == [
        ["8", "adamw", "2000.0", "1.000x"],
        ["8", "soap", "4000.0", "2.000x"],
    ]


@pytest.fixture
def small_task(tmp_path, monkeypatch):
    """In the place of the packaged text; Flax and the models rely on rank promotion."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 80)
    task = make_task("text", path)
    small = dataclasses.replace(task, model=ByteTransformer(layers=0, width=16))
    monkeypatch.setattr(overhead, "make_task", lambda name, batch: small)
    with jax.numpy_rank_promotion("allow"):
        yield small


def test_the_command_writes_a_line_for_each(small_task, tmp_path, capsys):
    options = ["--batches", "2", "3", "--optimizers", "shampoo_lean", "--rounds", "1"]
    overhead.main([*options, "--out", str(tmp_path)])
    written = (tmp_path / "overhead.md").read_text()
    assert capsys.readouterr().out.strip() in written
    rows = [line.split()[:2] for line in written.splitlines() if line[:1].isdigit()]
    names = ("adamw", "shampoo_lean")
    assert [r for r in rows if r[1] in names] == [[b, n] for b in "23" for n in names]


def test_the_first_period_does_not_count(small_task, monkeypatch):
    spent = iter(range(1, 21))
    monkeypatch.setattr(overhead, "stepper", lambda *_: lambda index: next(spent))
    batches, settings = small_task.draw(0), Settings(0.0, 16, 5, None)
    means = overhead.measure(small_task, ["adamw"], batches, settings, rounds=3)
    np.testing.assert_array_equal(means["adamw"], [8.0, 13.0, 18.0])


def test_a_sweep_times_steps_of_each_optimizer(small_task, monkeypatch):
    monkeypatch.setattr(sweep, "ROUNDS", 1)
    names, settings = ["adamw", "shampoo"], Settings(0.0, 16, 2, None)
    seconds = sweep.mean_seconds(small_task, names, settings)
    assert list(seconds) == names and min(seconds.values()) > 0
