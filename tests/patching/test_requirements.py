"""Importing rope_ext beside a torch or transformers that is too old says what to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rope_ext.requirements import MINIMUM

ROOT = Path(__file__).parents[2]
LINES = "import sys; sys.path.insert(0, sys.argv[1])\nimport rope_ext"


def imported(folder: Path, **versions: str) -> str:
    """What Python says last on ``import rope_ext`` beside packages that claim these versions."""
    for name, version in versions.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"__version__ = {version!r}")
    command = [sys.executable, "-c", LINES, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_old_versions_are_named_all_at_once(tmp_path: Path) -> None:
    said = imported(tmp_path, torch="2.4.1+cpu", transformers="4.57.1")
    assert said.startswith("ImportError: rope_ext")
    assert f"torch {MINIMUM['torch']} or later, but 2.4.1+cpu is installed" in said
    assert f"transformers {MINIMUM['transformers']} or later, but 4.57.1 is installed" in said
    assert "pip install -U 'torch>=" in said and "optimum" in said


@pytest.mark.parametrize("version", ["5.16.3", "4.57.0.dev0"])
def test_only_what_is_too_old_is_named(tmp_path: Path, version: str) -> None:
    said = imported(tmp_path, torch="2.13.0", transformers=version)
    assert f"but {version} is installed" in said and "2.13.0" not in said


def test_other_errors_of_an_import_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import nosuchmodule")
    assert imported(tmp_path) == "ModuleNotFoundError: No module named 'nosuchmodule'"


def test_the_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (line,) = re.findall(r"^dependencies = .*", text, re.M)
    assert {name: re.search(rf'"{name}>=([\d.]+)"', line)[1] for name in MINIMUM} == MINIMUM
