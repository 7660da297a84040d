"""Rows of a benchmark's data, from a published file or from the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ext.errors import MeasureError, first_line, optional


@dataclass(frozen=True)
class Row:
    """One row; reading a field raises MeasureError if it is missing or has the wrong type.

    ``where`` (file and row number) and ``option`` (which named the file) are used in errors.
    """

    data: Mapping[str, Any]
    where: str
    option: str

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def value(self, name: str, *types: type, wanted: str = "") -> Any:
        """The field, of one of these types if there are any."""
        if name not in self:
            known = ", ".join(map(repr, self.data)) or "none"
            raise MeasureError(
                f"{self.where} has no field {name!r} but {known}; give {self.option} other data"
            )
        if types and type(self.data[name]) not in types:
            raise self.wrong(name, wanted)
        return self.data[name]

    def text(self, name: str) -> str:
        return self.value(name, str, wanted="a string")

    def key(self, name: str) -> str | int:
        """The field, an identifier of rows."""
        return self.value(name, str, int, wanted="a string or a whole number")

    def texts(self, name: str) -> list[str]:
        """The field, a list of strings, or of lists of strings; a string counts as a list."""
        value = self.value(name)
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = [one for several in value for one in several]
        if not (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
            raise self.wrong(name, "some strings")
        return value

    def rows(self, name: str) -> list[Row]:
        value = self.value(name, list, wanted="a list of objects")
        if not all(isinstance(one, dict) for one in value):
            raise self.wrong(name, "a list of objects")
        where = f"{self.where}, {name}"
        return [Row(one, f"{where} {number}", self.option) for number, one in enumerate(value, 1)]

    def row(self, name: str) -> Row:
        return Row(self.value(name, dict, wanted="an object"), f"{self.where}, {name}", self.option)

    def wrong(self, name: str, wanted: str) -> MeasureError:
        """Return the error for a field that is not of the type ``wanted``."""
        shown = repr(self.data[name])
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return MeasureError(
            f"{self.where}: the field {name!r} must hold {wanted}, it is {shown}; give "
            f"{self.option} the data as they are published"
        )


def read_rows(source: str, option: str, most: int | None = None) -> list[Row]:
    """Read all rows of a data set, or stream the first ``most``; ``option`` is for errors.

    ``source`` is a ``.json`` (a list, an object with the list in ``data``, or one row with a
    ``text``), ``.jsonl`` or ``.parquet`` file, or ``hf:ID`` or ``hf:ID/CONFIG:SPLIT`` for the Hub
    or a folder that ``datasets`` reads, with the split ``test`` by default.
    """
    if source.startswith("hf:"):
        name, _, split = source[3:].partition(":")
        path = name
        config = None
        if not Path(name).is_dir() and name.count("/") > 1:
            owner, dataset, config = name.split("/", 2)
            path = f"{owner}/{dataset}"
        found = _load(f"hf:{name}", option, path, config, split=split or "test", most=most)
    elif Path(source).suffix == ".parquet":
        found = _load(source, option, "parquet", data_files=source, split="train")
    else:
        found = _json(Path(source), option)
    if not found:
        raise MeasureError(f"{source} holds no rows; give {option} another file")
    if not all(isinstance(one, dict) for one in found):
        raise MeasureError(
            f"{source} holds something else than a list of objects; give {option} other data"
        )
    return [Row(one, f"{source}, row {number}", option) for number, one in enumerate(found, 1)]


def _json(path: Path, option: str) -> list[Any]:
    """Read a JSON list, or a file of JSON lines; errors name the line and ``option``."""
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
            f"{where} is not JSON ({first_line(error)}); give {option} the published data"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a file name
        reason = getattr(error, "strerror", None) or first_line(error)
        raise MeasureError(
            f"cannot read {path} ({reason}); give {option} a file, or hf:ID/CONFIG:SPLIT"
        ) from None
    if isinstance(data, dict):
        data = [data] if "text" in data else data.get("data")
    if not isinstance(data, list):
        raise MeasureError(
            f'{path} holds neither a list nor an object with one in "data"; give {option} the '
            f"data as they are published (a file with a line for each row is called .jsonl)"
        )
    return data


def _load(source: str, option: str, *what: Any, most: int | None = None, **how: Any) -> list[Any]:
    datasets = optional("datasets", "these data need", "rope-ext[eval]")
    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(*what, streaming=most is not None, **how)
        return list(data if most is None else data.take(most))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise MeasureError(
            f"cannot read {source} ({first_line(error)}); give {option} a file, or hf:ID"
        ) from None
