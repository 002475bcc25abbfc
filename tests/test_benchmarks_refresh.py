"""The command that measures how alike steps are."""

import pytest

from benchmarks import refresh


def test_both_kinds_are_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(refresh.MODELS, "tiny", [(6, 4), (5,)])
    arguments = ["--model", "tiny", "--block-size", "4", "--out", str(tmp_path)]
    refresh.main(arguments)
    text = (tmp_path / "refresh.md").read_text()
    assert "tiny, block size 4" in text and capsys.readouterr().out.strip() in text
    rows = [line.split() for line in text.splitlines()]
    rows = {row[0]: row[1:] for row in rows if row and row[0] in refresh.KINDS}
    assert set(rows) == set(refresh.KINDS)
    for _, mean, median, largest, ratio in rows.values():
        assert 0 < float(median) <= float(largest) and float(mean) <= float(largest)
        assert float(ratio.rstrip("x")) >= 1


def test_a_row_has_the_largest_over_the_median():
    row = refresh.row("together", 2.0, [1.0, 1.0, 4.0])
    assert row == ["together", "2.0", "2000.00", "1000.00", "4000.00", "4.00x"]


def test_a_bad_size_is_named(capsys):
    with pytest.raises(SystemExit):
        refresh.main(["--block-size", "0"])
    assert "--block-size" in capsys.readouterr().err
