"""Writes files atomically: they are complete or do not exist."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Open a new file for writing, which replaces ``path`` if the block succeeds.

    It is in a temporary folder next to ``path``, so its name cannot clash with other files. Raises
    OSError if ``path`` is a symbolic link.
    """
    refuse_link(path)
    with TemporaryDirectory(dir=path.parent, prefix=".rope-ext-") as folder:
        draft = Path(folder) / path.name
        yield draft
        draft.replace(path)


def refuse_link(path: Path) -> None:
    """Raise OSError for a symbolic link: in a folder from elsewhere, it may lead to any file."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path))


def write_whole(path: Path, text: str) -> None:
    """Write text atomically: if the disk is full, the old file is kept."""
    with draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")


def may_replace(path: Path, mark: str) -> bool:
    """Whether there is no file, or one with this program's ``mark`` near its start."""
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(4096)
    except FileNotFoundError:  # or a dangling link
        return True
    except OSError:  # a directory
        return False
