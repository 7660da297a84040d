"""Lists and reads local files of documents: txt, md, jsonl, json and parquet, also as .gz.

A file that cannot be read yields a row with its ``problem``, so that a run over many files goes on
without it and can name it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import datasets
import pyarrow.parquet
from datasets import Dataset, Features, IterableDataset, Value

from recipes.stream import PROBLEM, DataError
from rope_ext.errors import RopeExtError, first_line

_COMPRESSED = ".gz"
_PARQUET_ROWS = 64  # rows read at once
_SAVED = ("dataset_info.json", "dataset_dict.json")  # written by datasets' save_to_disk

Row = Mapping[str, Any]


class UnreadableError(RopeExtError):
    """A file, or a line of it, cannot be read."""


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
            return f"{total:,} file{'s' if total > 1 else ''}"
        return f"{len(self.files):,} of {total:,} files ({', '.join(left_out)})"


def list_files(path: Path) -> Listing:
    """Return the files to read in a directory, or the file itself, and what is left out.

    Raises:
        DataError: there is no file to read.
    """
    files: list[Path] = []
    skipped: Counter[str] = Counter()
    hidden = 0
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
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


def is_saved(path: Path) -> bool:
    """Whether a directory was written by ``save_to_disk`` of datasets."""
    return any((path / name).is_file() for name in _SAVED)


def load_saved(path: Path, split: str) -> Dataset:
    """Load a directory written by ``save_to_disk``, with memory mapping.

    Raises:
        DataError: it has no such split.
    """
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, Dataset):
        return saved
    if split not in saved:
        known = ", ".join(map(str, saved))
        raise DataError(f"{path} has no split {split!r}; give --dataset_split one of {known}")
    return saved[split]


def load_files(
    files: Sequence[Path],
    column: str,
    *,
    streaming: bool,
    strict: bool,
    convert: Callable[[Row], str] | None = None,
) -> Dataset | IterableDataset:
    """Load documents in the column ``text``, and reasons in the column ``problem``.

    Args:
        files: files to read.
        column: column with the text, in files that have columns.
        streaming: read while iterating instead of storing everything on disk first.
        strict: raise an error for a file that cannot be read, instead of a row with its problem.
        convert: makes the document from a whole row, instead of ``column``.
    """
    # Sizes and times are in the arguments so that datasets does not use what it made of old files.
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kind: Any = IterableDataset if streaming else Dataset
    return kind.from_generator(
        _documents,
        features=Features({"text": Value("string"), PROBLEM: Value("string")}),
        # datasets splits the only list of these: each file is a shard, whose order is shuffled.
        gen_kwargs={"files": states, "column": column, "strict": strict, "convert": convert},
    )


def first_rows(files: Sequence[Path], column: str, most: int) -> list[Row]:
    """The first rows of the files that can be read, with all of their columns.

    Raises:
        UnreadableError: no file can be read.
    """
    found: list[Row] = []
    problem: UnreadableError | None = None
    for file in files:
        try:
            found += islice(read_rows(file, column), most - len(found))
        except UnreadableError as error:
            problem = problem or error
        if len(found) >= most:
            break
    if not found and problem is not None:
        raise problem
    return found


def read_rows(file: Path, column: str) -> Iterator[Row]:
    """Yield the rows of a file; a text file is one row with its content in ``column``.

    Raises:
        UnreadableError: the file cannot be read.
    """
    kind = _kind(file)
    try:
        if kind in _TEXTS:
            yield {column: _text(file)}
        else:
            yield from _READERS[kind](file)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UnreadableError(
            f"{file} is not UTF-8 text: byte {byte:#04x} ({error.reason})"
        ) from None
    except (OSError, EOFError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, RopeExtError):
            raise
        reason = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
        raise UnreadableError(f"{file} cannot be read: {reason}") from None


def _documents(
    files: Sequence[tuple[str, int, int]],
    column: str,
    strict: bool,
    convert: Callable[[Row], str] | None,
) -> Iterator[dict[str, Any]]:
    """Yield the documents of files; of a file that cannot be read, the reason, or DataError."""
    for name, *_ in files:
        columns: set[str] = set()
        try:
            for row in read_rows(Path(name), column):
                columns |= row.keys()
                yield {"text": _text_of(row, name, column, convert=convert), PROBLEM: None}
        except UnreadableError as error:
            if strict:
                raise DataError(f"{error}; repair or remove it, or give --bad_files skip") from None
            yield {"text": None, PROBLEM: str(error)}
        if convert is None and columns and column not in columns:
            raise DataError(
                f"{name} has no column {column!r} but {', '.join(sorted(columns))}; rename its "
                f"own, give --text_column, or leave the file out"
            )


def _text_of(row: Row, name: str, column: str, convert: Callable[[Row], str] | None) -> str | None:
    if convert is not None:
        try:
            return convert(row)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
    text = row.get(column)
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(
            f"{name}: a document is not text but {type(text).__name__}: {text!r:.40}; remove it, "
            f"or give another --text_column"
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


def _opened(file: Path) -> TextIO:
    if file.suffix.lower() == _COMPRESSED:
        # utf-8-sig: a byte-order mark, as Windows writes it, is neither text nor JSON.
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig")


def _text(file: Path) -> str:
    with _opened(file) as reading:
        return reading.read()


def _lines(file: Path) -> Iterator[Row]:
    with _opened(file) as reading:
        for number, line in enumerate(reading, 1):
            if line.strip():
                yield _object(_parsed(line, f"{file}, line {number},"), f"{file}, line {number},")


def _json(file: Path) -> Iterator[Row]:
    """A list of objects, or an object a line."""
    with _opened(file) as reading:
        start = reading.read(1)
        while start.isspace():
            start = reading.read(1)
        if start != "[":
            whole = start + reading.read()
            try:
                found = [json.loads(whole)]
            except (ValueError, RecursionError):  # an object a line
                found = [_parsed(line, str(file)) for line in whole.splitlines() if line.strip()]
        else:
            found = _parsed(start + reading.read(), str(file))
    for one in found:
        yield _object(one, str(file))


def _parquet(file: Path) -> Iterator[Row]:
    compressed = file.suffix.lower() == _COMPRESSED
    with gzip.open(file, "rb") if compressed else file.open("rb") as reading:
        for batch in pyarrow.parquet.ParquetFile(reading).iter_batches(_PARQUET_ROWS):
            yield from batch.to_pylist()


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{where} is not JSON ({first_line(error)})") from None


def _object(found: Any, where: str) -> Row:
    if not isinstance(found, dict):
        raise UnreadableError(f"{where} has {type(found).__name__} where an object is expected")
    return found


_TEXTS = (".txt", ".md")
_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".parquet": _parquet,
}
SUFFIXES = (*_TEXTS, *_READERS)
