"""Versions of everything that computes an outcome: if they change, ``--resume`` measures again."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers

import rope_eval
import rope_ext
from rope_eval.cases import digest
from rope_ext.version import __version__

PACKAGES = (rope_ext, rope_eval)
SHOWS = ("advice", "engines", "plots", "reports", "command", "cli.py", "__main__.py", "progress.py")
"""Folders and files of both packages that never change outcomes; all others may."""


def versions() -> dict[str, str]:
    return {
        "rope_ext": __version__,
        "rope_ext_sources": digest([sources(Path(p.__path__[0])) for p in PACKAGES]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def sources(package: Path) -> str:
    """Return a digest of a folder of sources, without ``SHOWS``."""
    shown = {package / name for name in SHOWS}
    files = sorted(
        path for path in package.rglob("*.py") if shown.isdisjoint((path, *path.parents))
    )
    return digest([(str(path.relative_to(package)), path.read_text("utf-8")) for path in files])
