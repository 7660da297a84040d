"""The log of finished cells: one line each, appended by every process as cells finish."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.laboratory.rates import SEED
from rope_eval.folder import writing
from rope_ext.errors import MeasureError

_MARK = {"program": "rope_ext", "log": "laboratory", "format": 3}
_RATES = "rates for "


@dataclass(frozen=True, order=True)
class Cell:
    """One model by subject, encoding and seed, or one choice of rates."""

    subject: str
    name: str
    seed: int

    @classmethod
    def rates(cls, subject: str, name: str) -> Cell:
        """The cell that chooses the rates of an encoding for a subject."""
        return cls(_RATES + subject, name, SEED)

    @property
    def chooses_for(self) -> str:
        """The subject that this cell chooses rates for; empty if it trains a model to report."""
        return self.subject.removeprefix(_RATES) if self.subject.startswith(_RATES) else ""

    def __str__(self) -> str:
        return f"{self.subject}, {self.name}, seed {self.seed}"


class Log:
    """Cells of one run in a folder.

    Args:
        folder: directory, which need not exist.
        settings: settings shared by all cells.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, dict(settings)

    def files(self) -> list[Path]:
        """Log files of all processes.

        Raises:
            MeasureError: one was not written by this program, or has other settings.
        """
        found = sorted(self.folder.glob("laboratory*.jsonl"))
        for path in found:
            self._check(path)
        return found

    def read(self) -> dict[Cell, dict[str, Any]]:
        """Read the finished cells; a truncated last line is ignored."""
        cells = {}
        for path in self.files():
            for line in path.read_text(encoding="utf-8").splitlines()[1:]:
                try:
                    record = json.loads(line)
                    cells[Cell(**record.pop("cell"))] = record
                except (ValueError, KeyError, TypeError):
                    continue
        return cells

    def append(self, rank: int, cell: Cell, record: Mapping[str, Any]) -> None:
        """Append a cell durably to the file of a process.

        Raises:
            MeasureError: it cannot be written.
        """
        name = f"laboratory.{rank}.jsonl" if rank else "laboratory.jsonl"
        path = self.folder / name
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [] if path.exists() else [_MARK | {"settings": self.settings}]
            lines.append({"cell": vars(cell)} | dict(record))
            with path.open("ab+") as file:
                file.seek(max(0, file.tell() - 1))
                cut_off = file.read() not in (b"", b"\n")
                text = "".join(json.dumps(line) + "\n" for line in lines)
                file.write(b"\n" * cut_off + text.encode())
                file.flush()
                os.fsync(file.fileno())

    def _check(self, path: Path) -> None:
        try:
            with path.open(encoding="utf-8") as file:
                first = json.loads(file.readline())
            there = first.pop("settings")
        except (OSError, ValueError, KeyError, AttributeError):
            first, there = None, {}
        if first != _MARK:
            raise MeasureError(
                f"{path} is not a log of this program; move it away, or give another --output"
            )
        changed = [name for name in self.settings if there.get(name) != self.settings[name]]
        if changed:
            told = _told(changed, self.settings, there)
            raise MeasureError(
                f"{path} was begun with other settings ({told}); give those, or another --output"
            )


def settings_of(folder: Path) -> dict[str, Any] | None:
    """The settings of the log in a folder; None if there is no log."""
    for path in sorted(folder.glob("laboratory*.jsonl")):
        try:
            with path.open(encoding="utf-8") as file:
                first = json.loads(file.readline())
            if {name: first.get(name) for name in _MARK} == _MARK:
                return first["settings"]
        except (OSError, ValueError, AttributeError, KeyError):
            continue
    return None


def _told(names: Iterable[str], now: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {there.get(name)!r}, now {now[name]!r}" for name in names)
