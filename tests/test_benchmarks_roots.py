"""The commands that measure roots: what they write, and that it is right."""

import jax
import numpy as np
import pytest

import shampoo_optax as so
from benchmarks import roots, warm_bases, warm_roots


def test_every_method_is_timed_beside_its_error(tmp_path, capsys):
    arguments = ["--sides", "6", "--batches", "2", "--power", "2"]
    roots.main([*arguments, "--out", str(tmp_path)])
    text = (tmp_path / "cpu-p2.md").read_text()
    assert f"python -m benchmarks.roots {' '.join(arguments)}" in text
    assert (tmp_path / "cpu-p2.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() in text
    rows = [line.split() for line in text.splitlines() if line.startswith("6 ")]
    assert [row[:3] for row in rows] == [["6", "2", name] for name in roots.METHODS]
    for row in rows:
        milliseconds, against, turns, error = row[3:]
        assert float(milliseconds) > 0 and float(error) <= 0.1
        assert (turns == "-") == (row[2] == "Eigh")
        assert (against == "1.00x") or row[2] != "Eigh"


def test_a_root_of_too_few_turns_has_a_large_error(monkeypatch):
    monkeypatch.setitem(roots.METHODS, "early", so.CoupledNewton(max_iterations=2))
    early, exact = roots.measure(["early", "Eigh"], 6, 2, 4)
    assert early.turns == 2 and early.error > 0.1 > 1e-3 > exact.error


def test_the_study_iterates_as_the_package_does():
    factor = warm_roots.with_ridge(np.diag([4.0, 2.0, 1.0]))
    previous = np.float32(np.linalg.inv(1.3 * factor))
    turns, residual, warm, warm_residual = warm_roots.cold_and_warm(factor, previous, 1)
    one = jax.numpy.asarray(factor)[None]
    *_, found = roots.inverse_roots(one, np.ones(1), so.CoupledNewton(), 0.0, 0.0)
    assert abs(turns - found[0]) <= 1 and warm < turns
    assert max(residual, warm_residual) < 1e-5


def test_the_study_of_warm_starts_is_written(tmp_path, monkeypatch):
    for name, value in dict(SIDES=(5,), POWERS=(1, 2), SKIPPED=0, REFRESHES=3).items():
        monkeypatch.setattr(warm_roots, name, value)
    warm_roots.main(["--out", str(tmp_path)])
    text = (tmp_path / "warm_start.md").read_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("5 ")]
    assert [row[3] for row in rows] == 4 * ["1", "2"]


def test_bases_are_timed_beside_their_share_off_the_diagonal(tmp_path, capsys):
    warm_bases.main(["--sides", "24", "--refreshes", "5", "--out", str(tmp_path)])
    text = (tmp_path / "warm_bases.md").read_text()
    assert capsys.readouterr().out.strip() in text
    rows = [line.split() for line in text.splitlines() if line.startswith("24 ")]
    assert [row[1] for row in rows] == ["EighBasis", "QRBasis", "CholeskyBasis"]
    exact, by_qr, by_cholesky = (float(row[4]) for row in rows)
    assert exact <= 1e-4 < by_cholesky < 0.06 < by_qr and float(rows[0][2]) > 0
    assert rows[0][3] == "1.00x"


@pytest.mark.parametrize("option", ["--sides", "--batches"])
def test_a_bad_size_is_named(option, capsys):
    with pytest.raises(SystemExit):
        roots.main([option, "0"])
    assert option in capsys.readouterr().err
