"""The log of finished cells: one line each, appended by every process as cells finish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.laboratory.rates import SEED
from rope_eval.folder import Log as JsonLines
from rope_eval.folder import read_lines, to_line
from rope_ext.errors import MeasureError

# By it a log is known as ours; a new format refuses older logs.
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
        self.folder = folder
        self.settings = dict(settings)

    def read(self) -> dict[Cell, dict[str, Any]]:
        """Read the finished cells; a truncated last line is ignored.

        Raises:
            MeasureError: a log was not written by this program, or has other settings.
        """
        cells = {}
        for path in sorted(self.folder.glob("laboratory*.jsonl")):
            first, *records = [*read_lines(path)] or [{}]
            there = first.pop("settings", None)
            if first != _MARK or there is None:
                raise MeasureError(
                    f"{path} is not a log of this program; move it away, or give another --output"
                )
            changed = ", ".join(
                f"{name}: {there.get(name)!r}, now {now!r}"
                for name, now in self.settings.items()
                if there.get(name) != now
            )
            if changed:
                raise MeasureError(
                    f"{path} was begun with other settings ({changed}); give those, or another "
                    f"--output"
                )
            cells |= {Cell(**record.pop("cell")): record for record in records}
        return cells

    def append(self, rank: int, cell: Cell, record: Mapping[str, Any]) -> None:
        """Append a cell to the file of a process.

        Raises:
            MeasureError: it cannot be written.
        """
        path = self.folder / (f"laboratory.{rank}.jsonl" if rank else "laboratory.jsonl")
        header = to_line(_MARK | {"settings": self.settings})
        log = JsonLines(path, header, "make room, or give another --output")
        log.open()
        log.add(to_line({"cell": vars(cell)} | dict(record)))
