"""Says what the training data contains: files, documents, tokens, rows, and what is left out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

SHOWN = 5  # files or rows that cannot be read, by name
CODE = ("chat.py", "contents.py", "data.py", "files.py", "stream.py")
"""Files that make documents, their tokens and rows of them."""


@dataclass(frozen=True)
class Contents:
    """What one dataset contains. Counts are None for data that is read during training.

    Args:
        documents: number of documents that are not empty.
        duplicates: documents with the same text as an earlier one. They are trained on.
        tokens: tokens of all documents.
        dropped: number of documents that are too short.
        dropped_tokens: their tokens.
        minimum: length of the shortest document that is used, tokens.
        long: number of conversations that do not fit into a row.
        long_tokens: their tokens.
        empty: number of documents without text, or conversations without an answer.
        rows: number of training rows.
        problems: reasons why files or rows are left out.
        digest: hash of the documents, or of the beginning of data read during training.
    """

    digest: str
    documents: int | None = None
    duplicates: int = 0
    tokens: int | None = None
    dropped: int = 0
    dropped_tokens: int = 0
    minimum: int = 0
    long: int = 0
    long_tokens: int = 0
    empty: int = 0
    rows: int | None = None
    problems: tuple[str, ...] = ()

    def lines(self, name: str, files: str, row: int, needed: float | None) -> Iterator[str]:
        """Sentences for the user.

        Args:
            name: name of the dataset.
            files: number of its files; empty if it has none.
            row: length of a row in tokens.
            needed: number of rows that the run trains on; None: one pass.
        """
        parts = [files] if files else []
        if self.documents is None:
            parts.append("read during training, so documents and rows are not counted")
        else:
            same = f" ({self.duplicates:,} duplicates)" if self.duplicates else ""
            parts.append(f"{self.documents:,} documents{same}")
        if self.tokens is not None:
            parts.append(f"{self.tokens:,} tokens")
        if self.rows is not None:
            parts.append(f"{self.rows:,} rows of {row:,} tokens")
            if needed is not None:
                parts.append(f"{needed / self.rows:.3g} passes")
        yield f"{name}: {', '.join(parts)}"
        if self.dropped and self.tokens:
            share = self.dropped_tokens / self.tokens
            yield (
                f"{self.dropped:,} of {self.documents:,} documents have fewer than "
                f"{self.minimum:,} tokens and are dropped, with {share:.1%} of the tokens"
            )
        if self.long and self.tokens:
            yield (
                f"{self.long:,} of {self.documents:,} conversations have more than {row:,} tokens "
                f"and are dropped, with {self.long_tokens / self.tokens:.1%} of the tokens; give a "
                f"longer --length to keep them"
            )
        if self.empty:
            yield f"{self.empty:,} documents are empty or have no answer, and are dropped"
        for problem in self.problems[:SHOWN]:
            yield f"left out: {problem}"
        more = len(self.problems) - SHOWN
        if more > 0:
            yield f"left out: {more:,} more {'files or rows' if files else 'rows'}"


def contents(
    counts: Sequence[int],
    digests: Sequence[int],
    *,
    problems: Sequence[str],
    minimum: int,
    longest: int | None,
    rows: int,
) -> Contents:
    """Summarize tokenized documents.

    Args:
        counts: tokens of each document; 0 for an empty one.
        digests: hash of the text of each document.
        problems: reasons why files or rows are left out.
        minimum: length of the shortest document that is used, tokens.
        longest: length of the longest document that is used, tokens; None: any.
        rows: number of rows made of them.
    """
    sizes = np.asarray(counts, np.int64)
    texts = np.asarray(digests, np.int64)
    short = (sizes > 0) & (sizes < minimum)
    above = sizes > longest if longest is not None else np.zeros_like(short)
    filled = texts[sizes > 0]
    return Contents(
        digest=_joined(texts),
        documents=len(filled),
        duplicates=len(filled) - len(np.unique(filled)),
        tokens=int(sizes.sum()),
        dropped=int(short.sum()),
        dropped_tokens=int(sizes[short].sum()),
        minimum=minimum,
        long=int(above.sum()),
        long_tokens=int(sizes[above].sum()),
        empty=len(sizes) - len(filled) - len(problems),  # what is left out is an empty one
        rows=rows,
        problems=tuple(problems),
    )


def texts_of(digests: Sequence[int]) -> Contents:
    """Contents of documents that are on disk, and are tokenized during training.

    Args:
        digests: hash of the text of each document.
    """
    return Contents(digest=_joined(np.asarray(digests, np.int64)), documents=len(digests))


def _joined(digests: np.ndarray) -> str:
    return hashlib.sha256(digests.astype("<i8").tobytes()).hexdigest()[:16]


def beginning_of(parts: Sequence[Any]) -> Contents:
    """Contents of data that is read during training.

    Args:
        parts: what identifies it: names and sizes of its files, and its first documents.
    """
    return Contents(digest=hashlib.sha256(repr(list(parts)).encode()).hexdigest()[:16])


def code_digest() -> str:
    """Return a hash of the code that makes documents, their tokens and rows.

    It is among the arguments of what datasets caches, which knows a function by its name alone.
    """
    found = hashlib.sha256()
    for name in CODE:
        found.update(Path(__file__).with_name(name).read_bytes())
    for name in ("transformers", "trl"):
        with suppress(PackageNotFoundError):
            found.update(f"{name} {version(name)}".encode())
    return found.hexdigest()[:16]


def digest_of(text: str) -> int:
    """Hash of a text as a signed number of 64 bits."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
