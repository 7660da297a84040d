"""Text for perplexity: a user's own files, or Python's standard library."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rope_ext.errors import MeasureError

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


def read_texts(paths: Iterable[Path]) -> list[str]:
    """Documents of text files: one per file, and one per line of ``.jsonl`` (field ``text``).

    Raises:
        MeasureError: a file is missing, empty, not UTF-8, or a line holds no ``text``.
    """
    return [text for path in paths for text in _documents(Path(path))]


def _documents(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MeasureError(
            f"cannot read the text {path}: {error.strerror}; give --text an existing file"
        ) from None
    except UnicodeDecodeError:
        raise MeasureError(f"{path} is not UTF-8 text; convert it, or leave it out") from None
    if path.suffix == ".jsonl":
        documents = [
            _field(path, number, line) for number, line in enumerate(content.split("\n"), 1)
        ]
    else:
        documents = [content]
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise MeasureError(f"the text {path} is empty; give --text a file with text in it")
    return documents


def _field(path: Path, number: int, line: str) -> str:
    if not line.strip():
        return ""
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise MeasureError(
            f'{path}, line {number}: expected a JSON object with a "text" field that is a string'
        )
    return text
