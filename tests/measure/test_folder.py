"""The folder of results: nobody's files are touched, nobody else is in it, nothing is lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rope_eval.cases import read_outcomes
from rope_eval.evaluate import evaluate
from rope_eval.folder import HEADER, HIDDEN, Folder, lock, log_name, replace_file
from rope_eval.run import runner as run
from rope_eval.run.plan import prepare
from rope_eval.settings import Settings
from rope_eval.tasks.passkey import Passkey
from rope_ext.errors import MeasureError
from rope_ext.saving import checkpoints as models

TASKS = (Passkey(trials=2, depths=1),)
CORPUS = '{"text": "years of work"}\n{"text": "and no line break at the end"}'
NAMES = ["results.json", "cells.csv", "table.md", "report.html", "passkey.png", "rates.png"]


@pytest.fixture
def settings(checkpoint: Path, tmp_path: Path) -> Settings:
    return Settings(
        models=(str(checkpoint),), methods=("yarn",), lengths=(128, 256), output=tmp_path / "out"
    )


def changed(settings: Settings, **change: Any) -> Settings:
    return dataclasses.replace(settings, **change)


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("name", ["cases.jsonl", *NAMES])
def test_a_file_of_the_user_is_in_the_way_and_stays(
    settings: Settings, name: str, how: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_model", lambda *args: pytest.fail("the model was loaded"))
    settings.output.mkdir()
    (settings.output / name).write_text(CORPUS)
    with pytest.raises(MeasureError, match=f"{name} is not what this program wrote"):
        prepare(changed(settings, **how), TASKS)
    assert (settings.output / name).read_text() == CORPUS


def test_files_with_names_like_those_of_logs_are_neither_read_nor_deleted(
    settings: Settings,
) -> None:
    settings.output.mkdir()
    names = ["cases_corpus.jsonl", "cases.1.jsonl", "cases.old.jsonl", "cases.tmp"]
    names.append("casesbook.jsonl")
    for name in names:
        (settings.output / name).write_text(CORPUS)
    evaluate(settings, TASKS)
    evaluate(changed(settings, overwrite=True), TASKS)
    evaluate(changed(settings, resume=True), TASKS)
    assert all((settings.output / name).read_text() == CORPUS for name in names)
    assert {path.name for path in settings.output.iterdir()} == {
        *names, *NAMES, "cases.jsonl", HIDDEN
    }  # fmt: skip


def test_overwriting_deletes_everything_of_ours_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write({"table.md": b"ours", "rates.png": b"ours", "cells.csv": b"ours"})
    for rank in (0, 3):
        replace_file(tmp_path / log_name(rank), HEADER + b"{}\n")
    (tmp_path / "notes.md").write_bytes(b"theirs")
    folder.clear()
    assert {path.name for path in tmp_path.iterdir()} == {HIDDEN, "notes.md"}


def test_killed_while_it_writes_the_files_are_still_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.write({"cells.csv": b"old", "table.md": b"old"})

    def killed(path: Path, content: bytes) -> None:
        if path.name == "table.md":
            raise KeyboardInterrupt
        replace_file(path, content)

    monkeypatch.setattr("rope_eval.folder.replace_file", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.write({"cells.csv": b"new", "table.md": b"new"})
    monkeypatch.undo()
    assert (tmp_path / "cells.csv").read_bytes() == b"new"
    assert (tmp_path / "table.md").read_bytes() == b"old"
    folder.write({"cells.csv": b"newest", "table.md": b"newest"})
    assert (tmp_path / "table.md").read_bytes() == b"newest"


def holding(folder: Path) -> int:
    """The number of another process that holds ``folder`` until it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with lock(folder):
            os.write(write, b"held")
            time.sleep(600)
        os._exit(0)
    assert os.read(read, 4) == b"held"
    os.close(read)
    os.close(write)
    return child


def test_a_folder_in_use_is_refused_and_a_killed_run_leaves_it_free(
    settings: Settings, checkpoint: Path
) -> None:
    evaluate(settings, TASKS)
    other = holding(settings.output)
    try:
        more = changed(settings, resume=True, methods=("ntk",))
        with pytest.raises(MeasureError, match="out is in use by another run"):
            evaluate(more, TASKS)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    evaluate(more, TASKS)
    methods = [o.system for o in read_outcomes([settings.output / run.LOG]).values()]
    assert set(methods) == {"none", "ntk", "yarn"}


def test_of_processes_launched_together_the_first_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Folder(tmp_path).lock():
        monkeypatch.setenv("RANK", "1")
        with Folder(tmp_path).lock():
            pass


def test_a_run_that_ended_after_the_plan_was_made_is_not_mixed_in(settings: Settings) -> None:
    plan = prepare(settings, TASKS)
    evaluate(settings, TASKS)
    with pytest.raises(MeasureError, match="holds results already"):
        run.run(plan)
