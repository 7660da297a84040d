"""TRL's command on a saved folder, with the import of docs/trainers.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.transformers_serve import importing, saved

pytest.importorskip("trl")
TRL = "from trl.cli import main; main()"  # the command's own
OPTIONS = "--max_steps 1 --max_length 256 --use_cpu --bf16 false --report_to none"


@pytest.mark.slow
def test_trl_trains_a_folder_under_a_position_method(tmp_path: Path) -> None:
    folder = saved(tmp_path / "rerope", "rerope", factor=4)
    (tmp_path / "data").mkdir()
    row = json.dumps({"text": "one of two and another, " * 30})
    (tmp_path / "data" / "train.jsonl").write_text(f"{row}\n" * 2)
    words = ["sft", "--model_name_or_path", str(folder), "--dataset_name", str(tmp_path / "data")]
    words += ["--output_dir", str(tmp_path / "out"), *OPTIONS.split()]
    env = importing(tmp_path / "site")
    subprocess.run([sys.executable, "-c", TRL, *words], env=env, check=True, capture_output=True)
    trained = json.loads((tmp_path / "out" / "config.json").read_text())
    assert trained["rope_ext"]["method"]["name"] == "rerope"
