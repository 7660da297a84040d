"""Text for perplexity: a user's own files, or Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

_SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def python_library(split: Literal["train", "held_out"]) -> list[str]:
    """Sources of the running Python's standard library, one text per file, in name order.

    A file belongs to ``held_out`` when a hash of its name says so (about one in twenty), so
    that the split is the same on every machine and for every Python version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.intersection(name.parts):
            continue
        held_out = hashlib.sha256(f"20:{name.as_posix()}".encode()).digest()[0] < 16
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip() and held_out == (split == "held_out"):
            texts.append(text)
    return texts
