"""Importing rope_ext beside a torch or transformers that is too old says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rope_ext.requirements import MINIMUM

ROOT = Path(__file__).parents[2]
LINES = "import sys; sys.path.insert(0, sys.argv[1])\nimport rope_ext"


def imported(folder: Path, **versions: str) -> str:
    """What Python says last on ``import rope_ext`` beside packages that claim these versions."""
    for name, version in versions.items():
        (folder / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / f"{name}-{version}.dist-info/METADATA").write_text(metadata)
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
