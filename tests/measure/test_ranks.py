"""Evaluation shared out over processes that are killed: the report is that of one, unbroken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rope_ext.cli import app
from tests.helpers.checkpoint import save_texts

ROOT = Path(__file__).parents[2]


def words(checkpoint: Path, output: Path) -> list[str]:
    text = save_texts(output.with_name("texts.jsonl"))
    made = ["perplexity", "passkey", "--model", checkpoint, "--method", "yarn,rerope"]
    made += ["--lengths", "128,256", "--trials", 2, "--depths", 2, "--windows", 2]
    made += ["--batch-size", 2, "--text", text, "--output", output, "--resume"]
    return list(map(str, made))


def files(folder: Path) -> dict[str, bytes]:
    """What was written, without pictures, which conftest.py makes small in this process alone."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    kept = {name: content for name, content in found.items() if not name.endswith(".png")}
    return {name: re.sub(rb"base64,[^\"]+", b"", content) for name, content in kept.items()}


@pytest.mark.slow
def test_processes_that_are_killed_go_on_to_the_bytes_of_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    """One of two, then three go on; both of two, then one; one alone, within a batch."""
    app(["eval", *words(checkpoint, tmp_path / "whole")], standalone_mode=False)
    names = ("more", "fewer", "single")
    more, fewer, single = (words(checkpoint, tmp_path / name) for name in names)
    runs = [(2, 1, 3, more), (3, None, 0, more)]
    runs += [(2, "all", 4, fewer), (1, None, 0, fewer)]
    runs += [(1, 0, 5, single), (1, None, 0, single)]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    done = subprocess.run(
        [sys.executable, "tests/helpers/ranks.py", str(tmp_path / "runs.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    one, three, both, alone, early, last = json.loads(done.stdout.splitlines()[-1])
    assert one[1] == -9 and one[0] and both == [-9, -9] and early == [-9], done.stderr
    assert {*three, *alone, *last} == {0}, done.stderr
    assert done.stdout.count("Token-weighted perplexity") == 3  # one process of each speaks
    whole = files(tmp_path / "whole")
    assert whole.keys() >= {"cases.jsonl", "results.json", "table.md", "report.html"}
    for name in names:
        assert files(tmp_path / name) == whole, name
