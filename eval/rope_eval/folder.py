"""Access to a results folder: one run at a time, and only to files that this program wrote.

A file name is no proof: ``cases.jsonl`` or ``table.md`` may be the user's. A log is ours if it
starts with ``HEADER``, and any other file if the list of written files has the hash of its content.
The list, the lock and drafts are in ``.rope-ext`` inside the folder. The folder may come from
elsewhere: links in it are refused, and the list is not trusted to name files without their hash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock, Timeout

from rope_ext.command.terminal import first_process
from rope_ext.errors import MeasureError
from rope_ext.saving.drafts import refuse_link

HIDDEN = ".rope-ext"
# By it a log is known as ours: a change would make all earlier logs foreign.
HEADER = b'{"program": "rope_ext", "log": "cases", "format": 1}\n'
"""The first line of every log."""
_LOGS = re.compile(r"cases(\.[1-9][0-9]*)?\.jsonl")


def log_name(rank: int) -> str:
    """Return the log name of a process; the first process's log is the permanent one."""
    return f"cases.{rank}.jsonl" if rank else "cases.jsonl"


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def writing(path: Path, cure: str = "give --output another folder") -> Iterator[None]:
    """Raise a one-line MeasureError if the disk is full or read-only."""
    try:
        yield
    except OSError as error:
        raise MeasureError(f"cannot write to {path}: {error.strerror or error}; {cure}") from None


def refuse_links(folder: Path) -> None:
    """Raise OSError if the hidden folder of ``folder`` or a file in it is a link or a pipe."""
    hidden = folder / HIDDEN
    refuse_link(hidden)
    for path in hidden.rglob("*"):
        refuse_link(path)
        if not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: if the process dies, either the old or the new file exists."""
    hidden = path.parent if path.parent.name == HIDDEN else path.parent / HIDDEN
    refuse_link(hidden)
    hidden.mkdir(exist_ok=True)
    # On the same file system, so that ``replace`` is atomic; hidden, so that it is nobody's file.
    draft = hidden / f"{path.name}.draft"
    draft.unlink(missing_ok=True)  # of a killed run; the target of a link stays
    try:
        with draft.open("xb") as file:  # creates it, and does not follow links
            file.write(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def lock(
    folder: Path, name: str = "", *, option: str = "--output", required: bool = True
) -> Iterator[None]:
    """Lock ``name`` in ``folder``, or all of it, until the block or the process ends."""
    # Of the operating system, which releases it when the process is killed.
    lock = FileLock(folder / HIDDEN / f"{name or 'run'}.lock", blocking=False)
    with writing(folder, f"give {option} another folder"):
        refuse_links(folder)
        (folder / HIDDEN).mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise MeasureError(
                f"{folder / name} is in use by another run; wait for it, or give another {option}"
            ) from None
        except NotImplementedError:
            if required:
                raise MeasureError(
                    f"{folder} is on a file system without locks; give {option} another one"
                ) from None
    try:
        yield
    finally:
        lock.release()


class Folder:
    """A results folder, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self) -> AbstractContextManager[None]:
        return lock(self.path) if first_process() else nullcontext()

    @property
    def logs(self) -> list[Path]:
        """Logs of earlier runs; every process except the first has its own."""
        there = sorted(self.path.iterdir()) if self.path.is_dir() else ()
        named = [path for path in there if _LOGS.fullmatch(path.name) and _is_regular(path)]
        return [path for path in named if _begins(path, HEADER)]

    def check(self, names: Iterable[str]) -> None:
        """Check that these files and logs may be written: they are ours, or do not exist."""
        with writing(self.path):
            refuse_links(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            # Writing fails here, before anything is measured.
            with TemporaryFile(dir=self.path):
                pass
        ours = {*self._ours(self._written()), *(path.name for path in self.logs)}
        for name in (*map(log_name, range(world_size())), *names):
            if os.path.lexists(self.path / name) and name not in ours:
                raise MeasureError(
                    f"{self.path / name} is not what this program wrote; give another --output, "
                    f"or move it away"
                )

    def write(self, contents: Mapping[str, bytes]) -> list[Path]:
        """Write files atomically, by name; returns their paths."""
        # Again, since a run takes hours and the folder may have changed.
        self.check(contents)
        written = self._written()
        new = {name: [_hash(content)] for name, content in contents.items()}
        # If the process dies, a file is the old or the new one: both are ours.
        either = {name: [*written.get(name, ()), *hashes] for name, hashes in new.items()}
        with writing(self.path, "make room, or give --output another folder"):
            self._remember({**written, **either})
            for name, content in contents.items():
                replace_file(self.path / name, content)
            self._remember({**written, **new})
        return [self.path / name for name in contents]

    def clear(self) -> None:
        """Delete the logs and the files that were written here and not changed since."""
        with writing(self.path):
            refuse_links(self.path)
            for path in (*self.logs, *(self.path / name for name in self._ours(self._written()))):
                path.unlink(missing_ok=True)
            self._remember({})

    @property
    def _list(self) -> Path:
        return self.path / HIDDEN / "files.json"

    def _written(self) -> dict[str, list[str]]:
        """Return the hashes of the files written here, by name; empty if the list is not valid."""
        try:
            files = json.loads(self._list.read_bytes())["files"]
            # Names alone: a list from elsewhere could say "../file".
            return {Path(name).name: list(map(str, hashes)) for name, hashes in files.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}

    def _ours(self, written: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the names of files that still have a content that was written here."""
        there = [name for name in written if _is_regular(self.path / name)]
        return [name for name in there if _hash((self.path / name).read_bytes()) in written[name]]

    def _remember(self, written: Mapping[str, Sequence[str]]) -> None:
        text = json.dumps({"program": "rope_ext", "files": written}, indent=1, sort_keys=True)
        replace_file(self._list, text.encode())


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _begins(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Log:
    """An append-only log of JSON lines, from which an interrupted run resumes.

    After ``header``, each line is on disk before the next is computed. An unfinished last line is
    skipped when reading, and removed before appending. ``cure`` is for errors.
    """

    def __init__(self, path: Path, header: bytes, cure: str) -> None:
        self.path = path
        self.header = header
        self.cure = cure

    def open(self) -> None:
        """Start the log, or remove the unfinished last line of an existing one."""
        with writing(self.path, self.cure):
            refuse_link(self.path)
            if not self.path.exists():
                replace_file(self.path, self.header)
                return
            with self.path.open("rb+") as file:
                # A line without an end was cut by a crash, and would damage the next one.
                file.truncate(file.read().rfind(b"\n") + 1)

    def add(self, line: bytes) -> None:
        """Append a line of :func:`to_line`."""
        left = line
        # Unbuffered: a buffer would be written again when the file is closed after an error.
        with writing(self.path, self.cure), self.path.open("ab", buffering=0) as file:
            while left:  # an almost full disk may write part of a line
                left = left[file.write(left) :]

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace all lines at once: a crash leaves the old file or the new one."""
        replace_file(self.path, self.header + b"".join(lines))


def to_line(entry: Mapping[str, Any]) -> bytes:
    return (json.dumps(entry) + "\n").encode()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all lines that are JSON objects, including the header; damaged lines are skipped."""
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry
