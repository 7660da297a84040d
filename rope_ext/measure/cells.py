"""Cells: the units of a comparison, each written down as soon as it is measured."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """One cell to measure.

    Args:
        key: digest of everything that determines the result.
        kind: ``perplexity`` or ``passkey``.
        method: its name, or ``none``.
        length: tokens.
        depth: depth bin of a passkey cell, else None.
    """

    key: str
    kind: str
    method: str
    length: int
    depth: int | None


@dataclass(frozen=True)
class Cell(Task):
    """One finished cell.

    Args:
        values: mean loss of each window (nats per token), or 1 and 0 for each trial.
        seconds: time taken.
    """

    values: tuple[float, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite loss becomes None, since JSON has no infinity."""
        values = [value if math.isfinite(value) else None for value in self.values]
        return {**asdict(self), "values": values}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """The inverse of ``to_json``."""
        values = tuple(math.inf if value is None else value for value in data["values"])
        return cls(**{**data, "values": values})


def digest(*determinants: Any) -> str:
    """A short name for these values, the same in every process."""
    text = json.dumps(determinants, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_cells(path: Path) -> dict[str, Cell]:
    """The cells of a file by key; a last line that a killed run left unfinished is skipped."""
    cells = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            cell = Cell.from_json(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue
        cells[cell.key] = cell
    return cells


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    """Replace the file by these cells, at once: a crash leaves the old file or the new one."""
    lines = [json.dumps(cell.to_json()) + "\n" for cell in cells]
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(lines), encoding="utf-8")
    draft.replace(path)
