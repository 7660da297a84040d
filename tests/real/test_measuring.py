"""What measures runs on a pretrained GGUF in bfloat16, told a trained length that is short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rope_ext.cli import app
from tests.helpers import pretrained

FEW = ["--samples", "1", "--validation-samples", "0", "--population", "5", "--iterations", "1"]
COMMANDS = {
    "calibrate": ["--length", "320", "--cheap", "--output", "found"],
    "search": ["--length", "320", "--prompts", "0", *FEW, "--output", "found.json"],
    "compare": ["--method", "yarn", "--factor", "2", "--lengths", "200,320", "--windows", "2"],
    "verify": ["--method", "yarn", "--factor", "2", "--engine", "transformers"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs_on_a_gguf(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [command, str(pretrained.smollm2()), "--trained-length", "256", *COMMANDS[command]]
    if command == "compare":
        words += ["--trials", "1", "--depths", "1", "--needle", "word", "--output", "found"]
    if command != "verify":
        words += ["--dtype", "bfloat16"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    if command in ("calibrate", "search"):
        assert "forwards of one row" in result.stderr and "next: rope-ext" in result.stderr
    if command == "compare":
        assert json.loads(Path("found/results.json").read_text())["systems"]
