"""The folder of results: nobody's files are touched, nobody else is in it, nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rope_eval import command
from rope_eval.cases import Outcome, adding, line, read_outcomes
from rope_eval.evaluate import evaluate
from rope_eval.folder import HEADER, HIDDEN, Folder, lock, log_name, replace_file
from rope_eval.run import runner as run
from rope_eval.run.plan import prepare
from rope_eval.settings import Settings
from rope_eval.tasks.passkey import Passkey
from rope_eval.tune.search import log_beside
from rope_ext.errors import MeasureError, OptionError
from rope_ext.saving import checkpoints as models
from rope_ext.terminal import clean_errors

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


@contextmanager
def disk_full_beyond(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: what a full disk does, for root as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Whose files


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
    names = [
        "cases_corpus.jsonl",
        "cases.1.jsonl",
        "cases.old.jsonl",
        "cases.tmp",
        "casesbook.jsonl",
    ]
    for name in names:
        (settings.output / name).write_text(CORPUS)
    evaluate(settings, TASKS)
    evaluate(changed(settings, overwrite=True), TASKS)
    evaluate(changed(settings, resume=True), TASKS)
    assert all((settings.output / name).read_text() == CORPUS for name in names)
    assert {path.name for path in settings.output.iterdir()} == {
        *names, *NAMES, "cases.jsonl", HIDDEN
    }  # fmt: skip


def test_a_foreign_log_of_another_process_is_in_the_way(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.output.mkdir()
    (settings.output / "cases.1.jsonl").write_text(CORPUS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeasureError, match=r"cases\.1\.jsonl is not what this program wrote"):
        prepare(changed(settings, overwrite=True), TASKS)


def test_a_report_that_the_user_edited_is_not_overwritten(settings: Settings) -> None:
    evaluate(settings, TASKS)
    (settings.output / "table.md").write_text("my own words")
    for how in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(MeasureError, match=r"table\.md is not what .* or was changed since"):
            prepare(changed(settings, **how), TASKS)
    (settings.output / "table.md").unlink()
    evaluate(changed(settings, resume=True), TASKS)
    assert "yarn" in (settings.output / "table.md").read_text()


def test_overwriting_deletes_everything_of_ours_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write({"table.md": b"ours", "rates.png": b"ours", "cells.csv": b"ours"})
    for rank in (0, 3):
        replace_file(tmp_path / log_name(rank), HEADER + b"{}\n")
    (tmp_path / "cells.csv").write_bytes(b"edited")
    (tmp_path / "notes.md").write_bytes(b"theirs")
    folder.clear()
    assert {path.name for path in tmp_path.iterdir()} == {HIDDEN, "cells.csv", "notes.md"}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": 3}', '{"files": {"table.md": 3}}', "[" * 9999]
)
def test_a_broken_list_of_files_makes_none_of_them_ours(tmp_path: Path, text: str) -> None:
    Folder(tmp_path).write({"table.md": b"ours"})
    (tmp_path / HIDDEN / "files.json").write_text(text)
    with pytest.raises(MeasureError, match="is not what this program wrote"):
        Folder(tmp_path).check(["table.md"])


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


def test_what_measures_by_itself_does_not_overwrite_either(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "speed.json").write_text(CORPUS)
    parser = command.bare("", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        command.run(
            parser.parse_args(["--model", "m"]),
            lambda args: pytest.fail("measured"),
            print,
            "speed.json",
        )
    assert stopped.value.code == 2 and "is not what this program wrote" in capsys.readouterr().err
    assert (tmp_path / "speed.json").read_text() == CORPUS


def test_what_is_measured_in_parts_is_written_after_each(tmp_path: Path) -> None:
    path, there = tmp_path / "out" / "speed.json", []

    def parts(args: object) -> Iterator[dict]:
        yield {"program": "rope_ext", "parts": 1}
        there.append(json.loads(path.read_text()))
        yield {"program": "rope_ext", "parts": 2}

    args = command.bare("", str(path.parent)).parse_args(["--model", "m"])
    command.run(args, parts, there.append, path.name)
    assert [data["parts"] for data in (*there, json.loads(path.read_text()))] == [1, 2, 2]


def test_a_search_cuts_and_replaces_nothing_of_the_user(tmp_path: Path) -> None:
    output, path = tmp_path / "found.json", tmp_path / "found.jsonl"
    path.write_text(CORPUS)  # its last line is unfinished
    with (
        pytest.raises(MeasureError, match="is not the log of a search"),
        log_beside(output, {"seed": 0}),
    ):
        pytest.fail("begun")
    assert path.read_text() == CORPUS
    path.write_text('{"search": {"seed": 0}}\n{"method": {"na')
    output.write_text(CORPUS)
    with (
        pytest.raises(MeasureError, match="is not what the search"),
        log_beside(output, {"seed": 0}),
    ):
        pytest.fail("begun")
    assert output.read_text() == CORPUS
    output.unlink()
    (tmp_path / "found.tmp").write_text(CORPUS)
    with log_beside(output, {"seed": 0}) as log:
        assert log.found == {} and path.read_text() == '{"search": {"seed": 0}}\n'
    assert (tmp_path / "found.tmp").read_text() == CORPUS


# One run at a time


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


def test_a_file_system_without_locks_is_refused_or_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object, **options: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("rope_eval.folder.FileLock.acquire", none)
    said = "without locks; give --output_dir a folder on another one"
    with pytest.raises(MeasureError, match=said), lock(tmp_path, option="--output_dir"):
        pytest.fail("begun")
    with lock(tmp_path, required=False):
        assert (tmp_path / HIDDEN / "run.holder").exists()
    assert not (tmp_path / HIDDEN / "run.holder").exists()


def test_a_folder_in_use_names_who_uses_it_and_a_killed_run_leaves_it_free(
    settings: Settings, checkpoint: Path
) -> None:
    evaluate(settings, TASKS)
    other = holding(settings.output)
    try:
        more = changed(settings, resume=True, methods=("ntk",))
        said = rf"out is in use by another run \(process {other} on \S+ since 2\d\d\d-"
        with pytest.raises(MeasureError, match=said):
            evaluate(more, TASKS)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    evaluate(more, TASKS)
    methods = [o.system for o in read_outcomes([settings.output / run.LOG]).values()]
    assert set(methods) == {"none", "ntk", "yarn"}


def test_a_run_of_the_same_process_is_another_run_too(tmp_path: Path) -> None:
    said = f"process {os.getpid()} on "
    with lock(tmp_path), pytest.raises(MeasureError, match=said), lock(tmp_path):
        pytest.fail("entered")
    folder = Folder(tmp_path)
    with folder.lock(), folder.lock(), lock(tmp_path, "another.jsonl"):
        pass
    with lock(tmp_path):
        pass


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


# What a log may hold


def outcome(**change: Any) -> Outcome:
    values = dict(
        key="k", system="yarn", task="passkey", length=128, bin=0, depth=0.5, seed=0, prompt="p",
        answers=("1",), group=0, value=1.0, tokens=5,
    )  # fmt: skip
    return Outcome(**(values | change))


@pytest.mark.parametrize(
    "change",
    [
        {"value": "1.0"}, {"value": [1]}, {"value": True}, {"length": "128"}, {"length": 128.0},
        {"key": 3}, {"key": None}, {"system": None}, {"tokens": None}, {"answers": 5},
        {"answers": [5]}, {"bin": "0"}, {"depth": "deep"}, {"curve": 3}, {"curve": [[1, 2]]},
        {"curve": [["a", 1.0, 2]]}, {"written": 3}, {"group": []}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_lines_whose_fields_have_other_types_are_measured_again(
    tmp_path: Path, change: dict
) -> None:
    log = tmp_path / "cases.jsonl"
    good = line(outcome(key="good"))
    wrong = json.dumps(json.loads(line(outcome())) | change)
    log.write_bytes(HEADER + f"{wrong}\n[1]\n3\n{'[' * 9999}\nnull\n{good}".encode())
    assert read_outcomes([log]) == {"good": outcome(key="good")}


def test_adding_to_a_log_begins_it_once(tmp_path: Path) -> None:
    log = tmp_path / "cases.jsonl"
    for key in ("a", "b"):
        with adding(log) as add:
            add(outcome(key=key))
    assert log.read_bytes().count(HEADER) == 1 and list(read_outcomes([log])) == ["a", "b"]


# Disks


def test_a_disk_that_is_full_loses_no_finished_case(settings: Settings) -> None:
    with disk_full_beyond(700), pytest.raises(MeasureError, match=r"make room .* --resume keeps"):
        evaluate(settings, TASKS)
    kept = read_outcomes([settings.output / run.LOG])
    assert 0 < len(kept) < 8
    size = 10_000  # enough for the log, not for the page
    with disk_full_beyond(size), pytest.raises(MeasureError, match=r"cannot write to .*out: "):
        evaluate(changed(settings, resume=True), TASKS)
    evaluate(changed(settings, resume=True), TASKS)
    assert (settings.output / "report.html").stat().st_size > size
    assert not list((settings.output / HIDDEN).glob("*.draft"))


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    """/proc is read-only for root as well."""
    if not Path("/proc/self").is_dir():
        pytest.skip("Linux only")
    for folder in ("/proc/results", "/proc"):
        with pytest.raises(MeasureError, match=r"cannot write to /proc.*; give --output another"):
            Folder(Path(folder)).check([])


# What is printed


class Closed:
    """A standard output whose reader has gone, or whose disk is full."""

    def __init__(self, error: OSError) -> None:
        self.error, self.encoding = error, "utf-8"

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (OSError(28, "No space left on device"), 2, "error: No space left on device; "),
    ],
    ids=["pipe", "full"],
)
def test_reports_are_written_though_nothing_can_be_printed(
    settings: Settings,
    error: OSError,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "stdout", Closed(error))
    monkeypatch.setattr(os, "dup2", lambda *args: None)  # rich would close pytest's own
    with pytest.raises(SystemExit) as stopped, clean_errors():
        evaluate(settings, TASKS)
    assert stopped.value.code == code
    assert said in capfd.readouterr().err
    assert {path.name for path in settings.output.iterdir()} >= set(NAMES)


@pytest.mark.slow  # two processes that import torch
def test_nothing_is_left_to_fail_at_the_end_of_the_process() -> None:
    code = (
        "from rope_ext.terminal import clean_errors\n"
        "with clean_errors():\n    print('x' * 100000)\n"
    )
    for target, status in (("/dev/full", 2), ("pipe", 1)):
        if target == "pipe":
            read, write = os.pipe()
            os.close(read)
        else:
            write = os.open(target, os.O_WRONLY)
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        assert ("\nerror: No space left" in f"\n{done.stderr}") is (target != "pipe")


@pytest.mark.parametrize("seed", [-1, 10**30, 2**32, 1.5, True])
def test_a_seed_of_no_use_is_told_before_anything_is_measured(
    settings: Settings, seed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_tokenizer", lambda *args: pytest.fail("too late"))
    with pytest.raises(OptionError, match="whole number from 0 to 4294967295"):
        prepare(changed(settings, seed=seed), TASKS)
