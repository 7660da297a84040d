"""Reads text from files and data sets, or from Python itself, and words for prompts."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rope_eval.data.rows import Row, read_rows
from rope_ext.errors import MeasureError, first_line

_SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
_SUFFIXES = {".txt", ".md", ".jsonl", ".parquet"}

MOST_REPEATED = 0.2
"""Largest share of copied spans in a text whose documents count as independent."""


def python_library(split: Literal["train", "held_out"]) -> list[str]:
    """Sources of the standard library, one text per file, ordered by name.

    A file is ``held_out`` by a hash of its name (about one in sixteen), on every machine alike.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    # Sorted, since the order of a directory differs between file systems.
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.intersection(name.parts):
            continue
        held_out = hashlib.sha256(f"20:{name.as_posix()}".encode()).digest()[0] < 16
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip() and held_out == (split == "held_out"):
            texts.append(text)
    return texts


def read_texts(
    sources: Iterable[Path | str], option: str = "--text", most: int = 1000
) -> list[str]:
    """Documents in files, folders and data sets; ``option``, which named them, is for errors.

    A text file is one document; so is each line of ``.jsonl`` and each row of ``.parquet`` and
    ``.json``, in its field ``text``. A folder stands for all such files in it but ``.json``, and
    ``hf:ID``, ``hf:ID:SPLIT`` or ``hf:ID/CONFIG:SPLIT`` for the first ``most`` rows, streamed.
    """
    return [text for source in sources for text in _documents(str(source), option, most)]


def _documents(source: str, option: str, most: int) -> list[str]:
    if source in ("", "hf:"):  # Path("") is the current folder
        raise MeasureError(f"the name of a text is empty; give {option} a file, folder or hf:ID")
    if source.startswith("hf:"):
        documents = list(map(_field, read_rows(source, option, most)))
    elif os.path.isdir(source):
        found = sorted(path for path in Path(source).rglob("*") if path.suffix in _SUFFIXES)
        documents = [text for path in found if path.is_file() for text in _lines(path, option)]
    else:
        documents = _lines(Path(source), option)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise MeasureError(f"the text {source} is empty; give {option} a file with text in it")
    return documents


def _lines(path: Path, option: str) -> list[str]:
    """Return the documents in one file; some may be blank."""
    if path.suffix in (".json", ".jsonl", ".parquet"):
        return list(map(_field, read_rows(str(path), option)))
    try:
        return [path.read_text(encoding="utf-8-sig")]  # without a byte-order mark
    except UnicodeDecodeError:
        raise MeasureError(f"{path} is not UTF-8 text; convert it, or leave it out") from None
    except (OSError, ValueError) as error:  # the latter: no file can have such a name
        reason = getattr(error, "strerror", None) or first_line(error)
        raise MeasureError(
            f"cannot read the text {path}: {reason}; give {option} an existing file"
        ) from None


def _field(row: Row) -> str:
    """Return the text of a row; empty if it is null."""
    text = row.text("text") if row.data.get("text", "missing") is not None else ""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates


def share_of_copies(rows: Iterable[Sequence[Any]], span: int) -> float:
    """Return the share of ``span`` consecutive items that occur before, in the same row or another.

    Rows are strings or tokens.
    """
    spans = [
        hash(row[i : i + span] if isinstance(row, str) else tuple(row[i : i + span]))
        for row in rows
        for i in range(len(row) - span + 1)
    ]
    return 1 - len(set(spans)) / max(1, len(spans))


def sentences(text: str) -> list[str]:
    """Split text into sentences with their punctuation; blank lines also end a sentence."""
    flat = [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text)]
    return [s for part in flat for s in re.split(r"(?<=[.!?])\s+", part) if s]


def python_documentation() -> str:
    """Return prose from Python's documentation: the topics of ``help()``, without markup.

    If a distribution does not include them, docstrings of the standard library are used instead.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return "\n\n".join(python_library("held_out"))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = re.sub(r"^[^A-Za-z0-9\n]+$", "", text, flags=re.MULTILINE)  # rules under headings
    return re.sub(r"[*`\\]+", "", text)


@cache
def library_words() -> tuple[str, ...]:
    found: set[str] = set()
    for text in (python_documentation(), *python_library("train")):
        found.update(re.findall(r"(?<![A-Za-z_])[a-z]{4,9}(?![A-Za-z_])", text))
    return tuple(sorted(found))


_LISTS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split("\n\n")
ADJECTIVES, NOUNS = (tuple(part.split()) for part in _LISTS)


@cache
def pairs() -> tuple[str, ...]:
    """Return all pairs ``adjective-noun``, like RULER's keys."""
    return tuple(f"{one}-{other}" for one, other in product(ADJECTIVES, NOUNS))


def many_words(count: int, rng: random.Random) -> list[str]:
    """Return ``count`` different words in random order: Python's, then synthetic ones."""
    ordinary = library_words()
    words = dict.fromkeys(rng.sample(ordinary, min(count, len(ordinary))))
    while len(words) < count:  # ends: there are millions
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        words["".join(syllables) + rng.choice("dklmnrst")] = None
    return list(words)
