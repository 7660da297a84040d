"""Published tables: the files are complete, and a dry run measures the stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.reproduce.__main__ import Cell, agrees, main, names, read, runs
from rope_eval import command
from rope_ext.errors import OptionError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", names())
def test_a_table_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    table = read(name)
    assert table.source and table.tolerance > 0 and table.gpu_hours > 0
    for dry in (False, True):
        for run in runs(table, tmp_path, dry):
            assert min(run.cells) >= 512  # a question of RULER needs this much
            made = command.command_for("eval", run.words)
            parsed = made.make_context("eval", list(run.words)).params
            assert parsed["lengths"] == [",".join(map(str, run.cells))]


def test_a_number_agrees_within_the_tolerance() -> None:
    table = read("yarn-llama2")
    cell = Cell(length=8192, published=3.5)
    assert agrees(table, cell, 3.6) and not agrees(table, cell, 3.7)
    assert not agrees(table, cell, float("nan"))
    with pytest.raises(OptionError, match="there is no table 'yarn-llama'"):
        read("yarn-llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerope-llama2-13b", "self-extend-passkey", "ruler-phi3"])
def test_a_dry_run_measures_the_stand_in(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of each task; commands and results go through the same code as a real run."""
    monkeypatch.chdir(ROOT)
    table = read(name)
    short = tuple(cell for cell in table.cells if cell.length <= 2 * table.trained)
    object.__setattr__(table, "cells", short)
    monkeypatch.setattr("lab.reproduce.__main__.read", lambda _: table)
    main([name, "--dry-run", "--output", str(tmp_path)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("stand-in")]
    assert len(rows) == len(short) and not any("nan" in row for row in rows)
