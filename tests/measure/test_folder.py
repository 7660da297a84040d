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
    monkeypatch.setattr(
        models, "load_model", lambda *args, **named: pytest.fail("the model was loaded")
    )
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
    assert set(methods) == {"unpatched", "ntk", "yarn"}


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


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A file of the user outside of the results folder."""
    path = tmp_path / "private.txt"
    path.write_text("keep me")
    return path


@pytest.mark.parametrize(
    "name",
    [f"{HIDDEN}/table.md.draft", f"{HIDDEN}/files.json.draft", f"{HIDDEN}/files.json",
     f"{HIDDEN}/run.lock", "table.md"],
)  # fmt: skip
def test_links_in_a_folder_from_elsewhere_are_not_followed(
    name: str, tmp_path: Path, private: Path
) -> None:
    folder = Folder(tmp_path / "out")
    link = folder.path / name
    link.parent.mkdir(parents=True)
    link.symlink_to(private)
    with pytest.raises(MeasureError, match=r"link|wrote"), folder.lock():
        folder.check(["table.md"])
        folder.write({"table.md": b"results"})
    assert private.read_text() == "keep me" and link.is_symlink()


def test_a_draft_that_is_a_link_is_not_written_through(tmp_path: Path, private: Path) -> None:
    draft = tmp_path / HIDDEN / "table.md.draft"
    draft.parent.mkdir()
    draft.symlink_to(private)
    replace_file(tmp_path / "table.md", b"results")
    assert private.read_text() == "keep me"
    assert (tmp_path / "table.md").read_bytes() == b"results"


def test_a_hidden_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    theirs = Folder(tmp_path / "theirs")
    theirs.write({"table.md": b"results"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / HIDDEN).symlink_to(theirs.path / HIDDEN)
    (tmp_path / "out" / "table.md").write_bytes(b"results")
    before = (theirs.path / HIDDEN / "files.json").read_bytes()
    for change in (lambda one: one.clear(), lambda one: one.write({"table.md": b"new"})):
        with pytest.raises(MeasureError, match="link"):
            change(Folder(tmp_path / "out"))
    assert (tmp_path / "out" / "table.md").read_bytes() == b"results"
    assert (theirs.path / HIDDEN / "files.json").read_bytes() == before


def test_a_log_that_is_a_link_is_neither_read_nor_written(settings: Settings) -> None:
    other = changed(settings, output=settings.output.with_name("other"))
    evaluate(other, TASKS)
    log = other.output / "cases.jsonl"
    before = log.read_bytes()
    settings.output.mkdir()
    (settings.output / "cases.jsonl").symlink_to(log)
    for how in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(MeasureError, match=r"cases\.jsonl is not what this program wrote"):
            evaluate(changed(settings, **how), TASKS)
    assert log.read_bytes() == before


LISTS = {
    "names": '{"files": ["thesis.docx"]}',
    "hashes": '{"files": {"thesis.docx": ["0000"], "../private.txt": ["0000"]}}',
    "no hashes": '{"files": {"thesis.docx": null}}',
    "deep": '{"files": ' + "[" * 100_000,
    "text": '{"files": "thesis.docx"}',
    "a number": "7",
}


@pytest.mark.parametrize("text", LISTS.values(), ids=LISTS)
@pytest.mark.every
def test_a_list_from_elsewhere_deletes_nothing_of_the_user(
    text: str, tmp_path: Path, private: Path
) -> None:
    folder = Folder(tmp_path / "out")
    (folder.path / HIDDEN).mkdir(parents=True)
    (folder.path / HIDDEN / "files.json").write_text(text)
    (folder.path / "thesis.docx").write_text("keep me, too")
    with pytest.raises(MeasureError, match="thesis"):
        folder.check(["thesis.docx"])
    folder.clear()
    assert (folder.path / "thesis.docx").read_text() == "keep me, too"
    assert private.read_text() == "keep me"


def test_a_file_that_the_user_edited_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write({"table.md": b"results", "cells.csv": b"numbers"})
    (tmp_path / "table.md").write_bytes(b"results, with notes")
    with pytest.raises(MeasureError, match=r"table\.md is not what this program wrote"):
        folder.write({"table.md": b"new results"})
    folder.clear()
    assert {path.name for path in tmp_path.iterdir()} == {HIDDEN, "table.md"}
