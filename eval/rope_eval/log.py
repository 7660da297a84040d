"""Append-only logs of JSON lines, from which a run that was killed resumes.

The first line is a header; each line after it is one result, on disk before the next is computed.
A killed process may leave its last line unfinished: it is skipped when the log is read, and cut
off before anything is appended, since the next line would become part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rope_eval.folder import replace_file, writing


class Log:
    """A log at ``path``.

    Args:
        path: the file; it need not exist.
        header: its first line, with the line break.
        cure: what to do if it cannot be written, for errors.
    """

    def __init__(self, path: Path, header: bytes, cure: str) -> None:
        self.path, self.header, self.cure = path, header, cure

    def open(self) -> None:
        """Start the log, or cut off the unfinished last line of one that exists.

        Raises:
            MeasureError: it cannot be written.
        """
        with writing(self.path, self.cure):
            if not self.path.exists():
                replace_file(self.path, self.header)
                return
            with self.path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def add(self, line: bytes) -> None:
        """Append a line of :func:`to_line`.

        Raises:
            MeasureError: it cannot be written, at least not all of it.
        """
        left = line
        # Unbuffered: a buffer would be written again when the file is closed after an error.
        with writing(self.path, self.cure), self.path.open("ab", buffering=0) as file:
            while left:  # a disk that is almost full takes part of a line
                left = left[file.write(left) :]

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace all lines at once: a crash leaves the old file or the new one."""
        replace_file(self.path, self.header + b"".join(lines))


def to_line(entry: Mapping[str, Any]) -> bytes:
    """One line of a log."""
    return (json.dumps(entry) + "\n").encode()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All lines that are JSON objects, the header included; damaged lines are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry
