"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A new file to write, which takes the place of ``path`` when the block ends well.

    It is in a temporary folder beside ``path``: no name that it has can belong to somebody else.
    A symbolic link stays one, and what it leads to is replaced.
    """
    path = path.resolve()
    with TemporaryDirectory(dir=path.parent, prefix=".rope-ext-") as folder:
        draft = Path(folder) / path.name
        yield draft
        draft.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Write a text at once: on a full disk, the file before stays."""
    with draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")


def may_replace(path: Path, mark: str) -> bool:
    """Whether no file is there, or one that has ``mark`` near its start, as this program writes."""
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(4096)
    except FileNotFoundError:  # also of a link that leads to nothing yet
        return True
    except OSError:  # a directory
        return False
