"""Rows of a benchmark's data, from a published file or from the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ext.errors import MeasureError, first_line


@dataclass(frozen=True)
class Row:
    """One row; what reads a field raises MeasureError if it is missing or has another type.

    Args:
        data: by field name.
        where: file and row number, from 1, for errors.
        option: the command-line option that named the file.
    """

    data: Mapping[str, Any]
    where: str
    option: str

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def value(self, name: str) -> Any:
        """The field, with any type."""
        if name not in self:
            known = ", ".join(map(repr, self.data)) or "none"
            raise MeasureError(
                f"{self.where} has no field {name!r} but {known}; give {self.option} the data as "
                f"they are published"
            )
        return self.data[name]

    def text(self, name: str) -> str:
        """The field, a string."""
        return self._of(name, isinstance(self.value(name), str), "a string")

    def key(self, name: str) -> str | int:
        """The field, an identifier of rows."""
        return self._of(name, type(self.value(name)) in (str, int), "a string or a whole number")

    def texts(self, name: str) -> list[str]:
        """The field, a list of strings, or of lists of strings; a string counts as a list."""
        value = self.value(name)
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = [one for several in value for one in several]
        right = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
        self._of(name, bool(right), "some strings")
        return value

    def rows(self, name: str) -> list[Row]:
        """The field, a list of objects."""
        value = self.value(name)
        right = isinstance(value, list) and all(isinstance(one, dict) for one in value)
        place = f"{self.where}, {name}"
        found = enumerate(self._of(name, right, "a list of objects"), 1)
        return [Row(one, f"{place} {number}", self.option) for number, one in found]

    def row(self, name: str) -> Row:
        """The field, an object."""
        value = self._of(name, isinstance(self.value(name), dict), "an object")
        return Row(value, f"{self.where}, {name}", self.option)

    def _of(self, name: str, right: bool, wanted: str) -> Any:
        if not right:
            raise self.wrong(name, wanted)
        return self.data[name]

    def wrong(self, name: str, wanted: str) -> MeasureError:
        """The error for a field with another type than ``wanted``."""
        shown = repr(self.data[name])
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return MeasureError(
            f"{self.where}: the field {name!r} must hold {wanted}, it is {shown}; give "
            f"{self.option} the data as they are published"
        )


def read_rows(source: str, option: str, most: int | None = None) -> list[Row]:
    """All rows of a data set.

    Args:
        source: a file: ``.json`` (a list, or an object with the list in ``data``), ``.jsonl`` or
            ``.parquet``; or ``hf:ID``, ``hf:ID/CONFIG:SPLIT`` for the Hub or a folder that
            ``datasets`` reads, with the split ``test`` by default.
        option: the command-line option, for errors.
        most: rows to stream from the Hub; None: all, which are stored.

    Raises:
        MeasureError: it cannot be read, or has no rows.
    """
    if source.startswith("hf:"):
        found = _hub(source[3:], option, most)
    elif Path(source).suffix == ".parquet":
        found = _load(source, option, "parquet", data_files=source, split="train")
    else:
        found = _json(Path(source), option)
    if not found:
        raise MeasureError(f"{source} holds no rows; give {option} another file")
    if not all(isinstance(one, dict) for one in found):
        raise MeasureError(
            f"{source} holds something else than a list of objects; give {option} the data as "
            f"they are published"
        )
    return [Row(one, f"{source}, row {number}", option) for number, one in enumerate(found, 1)]


def _json(path: Path, option: str) -> list[Any]:
    where = str(path)
    try:
        content = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".jsonl":
            data = []
            for number, line in enumerate(content.split("\n"), 1):
                where = f"{path}, line {number}"
                data += [json.loads(line)] if line.strip() else []
            return data
        data = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MeasureError(
            f"{where} is not JSON ({first_line(error)}); give {option} the data as they are "
            f"published"
        ) from None
    except (OSError, ValueError) as error:  # the latter: not UTF-8, or no name of a file
        reason = getattr(error, "strerror", None) or first_line(error)
        raise MeasureError(
            f"cannot read {path} ({reason}); give {option} a file, or hf:ID/CONFIG:SPLIT"
        ) from None
    data = data.get("data") if isinstance(data, dict) else data
    if not isinstance(data, list):
        raise MeasureError(
            f'{path} holds neither a list nor an object with one in "data"; give {option} the '
            f"data as they are published (a file with a line for each row is called .jsonl)"
        )
    return data


def _hub(name: str, option: str, most: int | None) -> list[Any]:
    name, _, split = name.partition(":")
    path, config = name, None
    if not Path(name).is_dir() and name.count("/") > 1:
        owner, dataset, config = name.split("/", 2)
        path = f"{owner}/{dataset}"
    more = {} if most is None else {"most": most, "streaming": True}
    return _load(f"hf:{name}", option, path, config, split=split or "test", **more)


def _load(source: str, option: str, *what: Any, most: int | None = None, **how: Any) -> list[Any]:
    datasets = load_datasets()
    try:
        data = datasets.load_dataset(*what, **how)
        return list(data if most is None else data.take(most))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise MeasureError(
            f"cannot read {source} ({first_line(error)}); give {option} a file, or "
            f"hf:ID/CONFIG:SPLIT"
        ) from None


def load_datasets() -> Any:
    """The package ``datasets``, without progress bars."""
    try:
        import datasets
    except ImportError:
        raise MeasureError(
            "these data need datasets, which is not installed; "
            'install it with: pip install "rope-ext[eval]"'
        ) from None
    datasets.disable_progress_bars()
    return datasets
