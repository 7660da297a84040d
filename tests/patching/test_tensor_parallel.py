"""A model whose heads are split over processes (``tp_plan="auto"``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_compute_what_one_does_or_refuse(tmp_path: Path) -> None:
    tiny_llama(num_key_value_heads=2).save_pretrained(tmp_path / "model")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words += [ROOT / "tests/helpers/tensor_parallel.py", tmp_path / "model", tmp_path / "found"]
    run = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "eval")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "found").read_text())
    for method in ("yarn", "dynamic_yarn"):
        difference, effect = found[method]
        assert difference < 1e-4 < 0.1 < effect
    for method in ("rerope", "alibi"):
        assert "tensor parallelism" in found[method] and "\n" not in found[method]
