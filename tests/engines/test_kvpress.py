"""Presses of kvpress on patched models: the scores of a natively scaled one, or a refusal.

kvpress 0.5.5 asks for a transformers older than ours, so it is installed without dependencies into
the folder that ENGINE_SOURCES names, as the packages of ``test_sglang.py`` are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

SCRIPT = Path(__file__).parents[1] / "helpers" / "presses.py"


@pytest.fixture(scope="module")
def answers() -> dict:
    folder = os.environ.get("ENGINE_SOURCES")
    if folder is None:
        pytest.skip("ENGINE_SOURCES names no folder")
    if Version(transformers.__version__) >= Version("5.24"):
        pytest.skip("kvpress reads an argument that transformers 5.24 has renamed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.presses", folder],
        cwd=SCRIPT.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_example_on_the_page_runs(answers: dict) -> None:
    assert answers["page"] == [500, 500]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "resonance", "dynamic_yarn"])
def test_presses_score_and_keep_as_over_a_natively_scaled_model(answers: dict, method: str) -> None:
    for name, (ours, unextended) in answers[method].items():
        assert ours < 1e-4, name  # float32; angles of two tables
        assert unextended > 1e-3, name


@pytest.mark.slow
def test_presses_over_other_rotations_than_the_modules_are_refused(answers: dict) -> None:
    for name, message in answers["refused rerope"].items():
        assert f"{name} of kvpress drops keys or rotates them" in message
    for name, message in answers["refused dynamic_yarn"].items():
        assert f"{name} of kvpress drops keys or rotates them" in message
    assert "KnormPress of kvpress" in answers["patched under a press"]
