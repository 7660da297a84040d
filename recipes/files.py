"""Lists and reads local files of documents: txt, md, jsonl, json and parquet, also as .gz.

A file of which not everything can be read yields one more row with its ``problem``, so that a run
over many files goes on without that part and can name it.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import datasets
import pyarrow.parquet
from datasets import Dataset, Features, IterableDataset, Value

from recipes.contents import code_digest
from recipes.stream import PLACE, PROBLEM, DataError
from rope_ext.errors import RopeExtError, first_line

_COMPRESSED = ".gz"
_PARQUET_ROWS = 64  # rows read at once
_SAVED = ("dataset_info.json", "dataset_dict.json")  # written by datasets' save_to_disk

# What a compressed file that is cut off or damaged raises where it breaks.
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile)
_ESCAPED = "surrogateescape"  # so that a byte that is no UTF-8 spoils its own line only

Row = Mapping[str, Any]


class UnreadableError(RopeExtError):
    """A file, or a line of it, cannot be read."""


@dataclass(frozen=True)
class Entry:
    """A row of a file, or the reason why it cannot be read.

    Args:
        place: file, and the line or row in it.
        row: the row with all of its columns; None if it cannot be read.
        problem: the reason, beginning with the place; empty if it can be read.
        from_arrow: the row comes from an Arrow table, where rows have the same keys.
    """

    place: str
    row: Row | None = None
    problem: str = ""
    from_arrow: bool = False


@dataclass(frozen=True)
class Listing:
    """The files of a directory.

    Args:
        files: files to read, sorted.
        skipped: number of other files by suffix, as written.
        hidden: number of files that are hidden or in a hidden folder, which are not read.
    """

    files: tuple[Path, ...]
    skipped: Counter[str] = field(default_factory=Counter)
    hidden: int = 0

    def __str__(self) -> str:
        others = sum(self.skipped.values())
        left_out = []
        if others:
            kinds = " ".join(sorted(suffix or "none" for suffix in self.skipped))
            left_out.append(f"{others:,} with other suffixes: {kinds}")
        if self.hidden:
            left_out.append(f"{self.hidden:,} hidden")
        total = len(self.files) + others + self.hidden
        if not left_out:
            return f"{total:,} file{'' if total == 1 else 's'}"
        return f"{len(self.files):,} of {total:,} files ({', '.join(left_out)})"


def list_files(path: Path) -> Listing:
    """Return the files to read in a directory, or the file itself, and what is left out.

    Raises:
        DataError: there is no file to read, or a subdirectory is a dataset of ``save_to_disk``.
    """
    inside = (inner for inner in sorted(path.glob("*")) if not inner.name.startswith("."))
    saved = [inner for inner in inside if is_saved(inner)]
    if saved:
        raise DataError(
            f"{path} contains {len(saved):,} dataset{'' if len(saved) == 1 else 's'} of "
            f"save_to_disk, which {'is' if len(saved) == 1 else 'are'} read one at a time; give "
            f"one, such as {saved[0]}, or several with --datasets"
        )
    files: list[Path] = []
    skipped: Counter[str] = Counter()
    hidden = 0
    for file in sorted(_within(path)) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        inside = file.relative_to(path).parts
        if any(part.startswith(".") for part in inside):
            hidden += 1
        elif _kind(file) in SUFFIXES:
            files.append(file)
        else:
            skipped[file.suffix] += 1
    if not files:
        raise DataError(
            f"{path} has no text files; supported suffixes: {', '.join(SUFFIXES)}, also with "
            f"{_COMPRESSED}; it has {Listing((), skipped, hidden)}"
        )
    return Listing(tuple(files), skipped, hidden)


def _within(root: Path) -> Iterator[Path]:
    """All paths in a directory that are not directories, also through links to directories."""
    inside = root.resolve()
    seen = {inside}
    for at, folders, names in os.walk(root, followlinks=True):
        parent = Path(at)
        followed = []
        for name in sorted(folders):
            real = (parent / name).resolve()
            # What is inside is read without the link. Others are read once, so that no loop of
            # links is endless, and not from hidden directories, which are not read.
            hidden = any(part.startswith(".") for part in (parent / name).relative_to(root).parts)
            link = (parent / name).is_symlink()
            if real in seen or (link and (hidden or real.is_relative_to(inside))):
                continue
            seen.add(real)
            followed.append(name)
        folders[:] = followed
        yield from (parent / name for name in names)


def is_saved(path: Path) -> bool:
    """Whether a directory was written by ``save_to_disk`` of datasets."""
    return any((path / name).is_file() for name in _SAVED)


def load_saved(path: Path, split: str, option: str = "--dataset_split") -> Dataset:
    """Load a directory written by ``save_to_disk``, with memory mapping.

    Args:
        path: the directory.
        split: split to load, if it has several.
        option: setting with the split, for the error.

    Raises:
        DataError: it has no such split.
    """
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, Dataset):
        return saved
    if split not in saved:
        known = ", ".join(map(str, saved))
        raise DataError(f"{path} has no split {split!r}; give {option} one of {known}")
    return saved[split]


def load_files(
    files: Sequence[Path],
    column: str,
    *,
    streaming: bool,
    strict: bool,
    convert: Callable[[Entry], str] | None = None,
) -> Dataset | IterableDataset:
    """Load documents in the column ``text``, with ``place``, and reasons in the column ``problem``.

    Args:
        files: files to read.
        column: column with the text, in files that have columns.
        streaming: read while iterating instead of storing everything on disk first.
        strict: raise an error for a file or a line that cannot be read, instead of leaving it out.
        convert: makes the document from a whole entry, instead of ``column``.
    """
    # Sizes, times and code are in the arguments so that datasets does not use what it made of old
    # files, or by old code.
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kind: Any = IterableDataset if streaming else Dataset
    return kind.from_generator(
        _documents,
        features=Features({name: Value("string") for name in ("text", PLACE, PROBLEM)}),
        # datasets splits the only list of these: each file is a shard, whose order is shuffled.
        gen_kwargs={
            "files": states,
            "column": column,
            "strict": strict,
            "convert": convert,
            "code": code_digest(),
        },
    )


def first_entries(files: Sequence[Path], column: str, most: int) -> list[Entry]:
    """Return the first rows that can be read, with all of their columns.

    Raises:
        UnreadableError: nothing can be read.
    """
    found: list[Entry] = []
    problem: UnreadableError | None = None
    for file in files:
        try:
            for entry in read_entries(file, column):
                if entry.row is None:
                    problem = problem or UnreadableError(entry.problem)
                else:
                    found.append(entry)
                if len(found) >= most:
                    return found
        except UnreadableError as error:
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return found


def read_entries(file: Path, column: str) -> Iterator[Entry]:
    """Yield the rows of a file; a text file is one row with its content in ``column``.

    A line that cannot be read is an entry with its problem, and the lines after it follow.

    Raises:
        UnreadableError: the file cannot be read, or not beyond the rows before.
    """
    kind = _kind(file)
    read = 0
    try:
        for entry in _text(file, column) if kind in _TEXTS else _READERS[kind](file):
            yield entry
            read += entry.row is not None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UnreadableError(
            f"{file} is not UTF-8 text: byte {byte:#04x} ({error.reason})"
        ) from None
    except (OSError, *_BROKEN, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, RopeExtError):
            raise
        reason = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
        if read:
            raise UnreadableError(
                f"{file} cannot be read to its end ({reason}); the rest of the file is missing"
            ) from None
        raise UnreadableError(f"{file} cannot be read: {reason}") from None


def _documents(
    files: Sequence[tuple[str, int, int]],
    column: str,
    strict: bool,
    convert: Callable[[Entry], str] | None,
    code: str,
) -> Iterator[dict[str, Any]]:
    """Yield the documents of files, and for each file what is left out of it; or DataError."""
    for name, *_ in files:
        columns: set[str] = set()
        read = 0
        problems: list[str] = []  # of rows
        broken: list[str] = []  # of the file
        try:
            for entry in read_entries(Path(name), column):
                columns |= (entry.row or {}).keys()
                try:
                    text = _text_of(entry, column, convert=convert)
                except DataError as error:
                    # The first rows were checked before: this one differs from them.
                    stop(strict, str(error))
                    problems.append(str(error))
                    continue
                read += 1
                if text is None and column not in columns and convert is None:
                    continue  # perhaps the whole file has none, which is named below
                yield {"text": text, PLACE: entry.place, PROBLEM: None}
        except UnreadableError as error:
            stop(strict, str(error))
            broken.append(str(error))
        if problems:
            broken.insert(0, _of_rows(problems, read))
        if convert is None and columns and column not in columns:
            # The first rows were checked before: other files have it.
            missing = f"{name} has no column {column!r} but {', '.join(sorted(columns))}"
            stop(strict, f"{missing}; rename its own, or give --text_column")
            broken.append(missing)
        if broken:
            yield {"text": None, PLACE: name, PROBLEM: "; ".join(broken)}


def stop(strict: bool, problem: str) -> None:
    """Raise DataError for what could be left out, if ``strict``."""
    if strict:
        raise DataError(f"{problem}; repair or remove it, or give --bad_files skip") from None


def _of_rows(problems: Sequence[str], read: int) -> str:
    """What is left out of a file: the first problem, and the number of rows."""
    rows = "row" if len(problems) == 1 else "rows"
    return f"{problems[0]}; {len(problems):,} {rows} left out, {read:,} read"


def _text_of(entry: Entry, column: str, convert: Callable[[Entry], str] | None) -> str | None:
    if entry.row is None:
        raise DataError(entry.problem)
    if convert is not None:
        return convert(entry)
    text = entry.row.get(column)
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(
            f"{entry.place}: a document is not text but {type(text).__name__}: {text!r:.40}; "
            f"remove it, or give another --text_column"
        )
    return encodable(text)


def encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _kind(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [_COMPRESSED]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _opened(file: Path, errors: str = "strict") -> TextIO:
    if file.suffix.lower() == _COMPRESSED:
        # utf-8-sig: a byte-order mark, as Windows writes it, is neither text nor JSON.
        return gzip.open(file, "rt", encoding="utf-8-sig", errors=errors)
    return file.open(encoding="utf-8-sig", errors=errors)


def _until_break(reading: TextIO) -> tuple[str, Exception | None]:
    """The text of a file, and the error at which a compressed file breaks off, if it does."""
    lines = []
    try:
        for line in reading:
            lines.append(line)  # not extend: these stay where it breaks
    except _BROKEN as error:
        return "".join(lines), error
    return "".join(lines), None


def _text(file: Path, column: str) -> Iterator[Entry]:
    with _opened(file) as reading:
        text, broken = _until_break(reading)
    if text or broken is None:
        yield Entry(str(file), {column: text})
    if broken is not None:
        raise broken


def _lines(file: Path) -> Iterator[Entry]:
    with _opened(file, _ESCAPED) as reading:
        for number, line in enumerate(reading, 1):
            if line.strip():
                yield _entry(line, f"{file}, line {number}")


def _json(file: Path) -> Iterator[Entry]:
    """A list of objects, or an object a line."""
    with _opened(file, _ESCAPED) as reading:
        text, broken = _until_break(reading)
    if text.lstrip().startswith("["):
        if broken is not None:
            raise broken
        for number, found in enumerate(_parsed(text, str(file)), 1):
            yield _checked(found, f"{file}, row {number}")
        return
    try:
        yield _checked(_parsed(text, str(file)), str(file))
    except UnreadableError:
        # An object a line. Not str.splitlines, which also splits at U+2028 within a text.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _entry(line, f"{file}, line {number}")
    if broken is not None:
        raise broken


def _parquet(file: Path) -> Iterator[Entry]:
    compressed = file.suffix.lower() == _COMPRESSED
    number = 0
    with gzip.open(file, "rb") if compressed else file.open("rb") as reading:
        for batch in pyarrow.parquet.ParquetFile(reading).iter_batches(_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield Entry(f"{file}, row {number}", row, from_arrow=True)


def _entry(line: str, place: str) -> Entry:
    """A line of JSON."""
    try:
        return _checked(_parsed(line, place), place)
    except UnreadableError as error:
        return Entry(place, problem=str(error))


def _parsed(text: str, where: str) -> Any:
    escaped = None if text.isascii() else re.search("[\udc80-\udcff]", text)
    if escaped is not None:  # before JSON is read, which may itself escape halves of characters
        byte = ord(escaped[0]) - 0xDC00
        raise UnreadableError(f"{where} is not UTF-8 text: byte {byte:#04x}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{where} is not JSON ({first_line(error)})") from None


def _checked(found: Any, place: str) -> Entry:
    if isinstance(found, dict):
        return Entry(place, found)
    kind = type(found).__name__
    return Entry(place, problem=f"{place} has {kind} where an object is expected")


_TEXTS = (".txt", ".md")
_READERS: dict[str, Callable[[Path], Iterator[Entry]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".parquet": _parquet,
}
SUFFIXES = (*_TEXTS, *_READERS)
