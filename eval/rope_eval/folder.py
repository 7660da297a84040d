"""Access to a results folder: one run at a time, and only to files that this program wrote.

A file name alone proves nothing: ``cases.jsonl`` or ``table.md`` may belong to the user. A log is
ours if it begins with ``HEADER``, and any other file if its digest is in the list of written files.
The list, the lock and drafts are in ``.rope-ext`` inside the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout

from rope_ext.command.terminal import first_process
from rope_ext.errors import MeasureError

HIDDEN = ".rope-ext"
HEADER = b'{"program": "rope_ext", "log": "cases", "format": 1}\n'
"""The first line of every log."""
_LOGS = re.compile(r"cases(\.[1-9][0-9]*)?\.jsonl")


def log_name(rank: int) -> str:
    """The log of a process; the log of the first process is the permanent one."""
    return f"cases.{rank}.jsonl" if rank else "cases.jsonl"


def world_size() -> int:
    """Number of processes launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def writing(path: Path, cure: str = "give --output another folder") -> Iterator[None]:
    """Tell of a disk that is full or read-only in one line.

    Raises:
        MeasureError: instead of OSError.
    """
    try:
        yield
    except OSError as error:
        raise MeasureError(f"cannot write to {path}: {error.strerror}; {cure}") from None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file at once: whenever the process dies, the old file is there or the new one."""
    hidden = path.parent if path.parent.name == HIDDEN else path.parent / HIDDEN
    hidden.mkdir(exist_ok=True)
    draft = hidden / f"{path.name}.draft"
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def lock(
    folder: Path, name: str = "", *, option: str = "--output", required: bool = True
) -> Iterator[None]:
    """Keep every other process out of what is called ``name`` in ``folder``, or out of the folder.

    The lock is the operating system's: that of a process that was killed is gone with it.

    Args:
        folder: it need not exist.
        name: of what is locked; empty: all of the folder.
        option: the command-line option that names it, for errors.
        required: False goes on without a lock on a file system that has none.

    Raises:
        MeasureError: another one is in it, with its process, machine and since when.
    """
    hidden = folder / HIDDEN
    holder = hidden / f"{name or 'run'}.holder"
    lock = FileLock(hidden / f"{name or 'run'}.lock")
    cure = f"give {option} another folder"
    with writing(folder, cure):
        hidden.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise MeasureError(
                f"{folder / name} is in use by another run{_known(holder)}; wait for it, or give "
                f"another {option}"
            ) from None
        except NotImplementedError:
            if required:
                raise MeasureError(
                    f"{folder} is on a file system without locks; give {option} a folder on "
                    f"another one"
                ) from None
    try:
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        text = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        with writing(folder, cure):
            holder.write_text(text, encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _known(holder: Path) -> str:
    """Who holds a lock, if that can be read; it may just be writing it down."""
    try:
        text = holder.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f" ({text})" if text else ""


def is_log(path: Path) -> bool:
    """Whether this program began that file."""
    try:
        with path.open("rb") as file:
            return file.read(len(HEADER)) == HEADER
    except OSError:
        return False


class Folder:
    """A results folder.

    Args:
        path: of the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._holds = 0

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out; of processes launched together, the first does so for all.

        Whoever holds it may do so once more.

        Raises:
            MeasureError: another run is in it.
        """
        outermost = self._holds == 0 and first_process()
        with lock(self.path) if outermost else nullcontext():
            self._holds += 1
            try:
                yield
            finally:
                self._holds -= 1

    @property
    def logs(self) -> list[Path]:
        """Logs of earlier runs; every process except the first has its own."""
        if not self.path.is_dir():
            return []
        return sorted(p for p in self.path.iterdir() if _LOGS.fullmatch(p.name) and is_log(p))

    def check(self, names: Iterable[str]) -> None:
        """Check that these files may be written.

        Args:
            names: of reports and similar files; those of logs are added.

        Raises:
            MeasureError: the folder is not writable, or this program did not write one of the
                files.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.path):
                pass
        for name in map(log_name, range(world_size())):
            if os.path.lexists(self.path / name) and not is_log(self.path / name):
                raise _foreign(self.path / name)
        known = self._known()
        for name in names:
            if os.path.lexists(self.path / name) and not self._owns(name, known):
                raise _foreign(self.path / name)

    def write(self, contents: Mapping[str, bytes]) -> list[Path]:
        """Write files atomically, by name; returns their paths.

        The list is written before and after them, so that it includes every file even if the
        process is killed in between.

        Raises:
            MeasureError: one of them cannot be written.
        """
        self.check(contents)
        known = self._known()
        new = {name: [_digest(content)] for name, content in contents.items()}
        both = {name: known.get(name, []) + digests for name, digests in new.items()}
        with writing(self.path, "make room, or give --output another folder"):
            self._remember(known | both)
            for name, content in contents.items():
                replace_file(self.path / name, content)
            self._remember(known | new)
        return [self.path / name for name in contents]

    def clear(self) -> None:
        """Delete only the files that this program wrote."""
        known = self._known()
        ours = [self.path / name for name in known if self._owns(name, known)]
        with writing(self.path):
            for path in (*self.logs, *ours):
                path.unlink()
            self._remember({})

    def _owns(self, name: str, known: Mapping[str, list[str]]) -> bool:
        path = self.path / name
        return path.is_file() and _digest(path.read_bytes()) in known.get(name, ())

    @property
    def _list(self) -> Path:
        return self.path / HIDDEN / "files.json"

    def _known(self) -> dict[str, list[str]]:
        """Digests of files written here, by name; empty if the list cannot be read."""
        try:
            files = json.loads(self._list.read_text(encoding="utf-8"))["files"]
            return {Path(name).name: list(map(str, digests)) for name, digests in files.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}

    def _remember(self, files: Mapping[str, list[str]]) -> None:
        text = json.dumps({"program": "rope_ext", "files": files}, indent=1, sort_keys=True)
        replace_file(self._list, text.encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _foreign(path: Path) -> MeasureError:
    return MeasureError(
        f"{path} is not what this program wrote, or was changed since; it would be lost: move it "
        f"away, or give another --output"
    )
