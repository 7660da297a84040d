"""Results of finished cells by measure, encoding and seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from lab.laboratory.log import Cell
from lab.laboratory.model import ROPE
from lab.laboratory.tasks import MOST

AT = "loss at the trained length"
FAR = "loss at the longest"
TWICE = "loss at twice the trained length"
FOUR_TIMES = "loss at 4 times the trained length"
FOUND = "words found at the longest"
LONGER = "problems longer than trained"
WITHIN = "problems as long as trained"
SECONDS = "seconds per step"
PEAK = "peak memory of a step"
SPEED = "steps to learn"

BySeed = dict[int, float]


class Results:
    """Data for the page.

    Args:
        settings: settings of the run.
        cells: finished cells.
    """

    def __init__(
        self, settings: Mapping[str, Any], cells: Mapping[Cell, Mapping[str, Any]]
    ) -> None:
        self.settings = settings
        self.cells = {cell: record for cell, record in cells.items() if not cell.chooses_for}
        self.choices: dict[str, dict[str, Mapping[str, Any]]] = {}
        """Chosen learning rates, by subject and name."""
        for cell, record in cells.items():
            if cell.chooses_for and "chosen" in record:
                self.choices.setdefault(cell.chooses_for, {})[cell.name] = record
        self.refused: dict[str, str] = {}
        self.ended: dict[str, set[str]] = {}
        """Models without results from some length or size on, by that length or size."""
        for cell, record in self.cells.items():
            if "refused" in record:
                self.refused[f"{cell.name} ({cell.subject})"] = record["refused"]
            unit = "bytes" if cell.subject == "text" else "items"
            for label, read in record.get("read", {}).items():
                for size in list(read["refused"])[:1]:
                    self.ended.setdefault(f"{size} {unit}", set()).add(label)

    def _read(self, subject: str) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
        for cell, record in self.cells.items():
            if cell.subject == subject and "read" in record:
                for label, read in record["read"].items():
                    yield label, cell.seed, read

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({cell.seed for cell in self.cells})

    @cached_property
    def lengths(self) -> list[int]:
        """Evaluated text lengths, tokens."""
        sizes = {int(size) for _, _, read in self._read("text") for size in read["loss"]}
        return sorted(sizes)

    @cached_property
    def tasks(self) -> list[str]:
        for _, _, read in self._read("tasks"):
            return list(read["exact"])
        return []

    @cached_property
    def items(self) -> list[int]:
        sizes = {
            int(n) for _, _, read in self._read("tasks") for n in next(iter(read["exact"].values()))
        }
        return sorted(sizes)

    def text(self, what: str, length: int) -> dict[str, BySeed]:
        """``loss`` or ``retrieval`` at a length, by name and seed."""
        found: dict[str, BySeed] = {}
        for label, seed, read in self._read("text"):
            # Keys of JSON are texts.
            if str(length) in read[what]:
                found.setdefault(label, {})[seed] = read[what][str(length)]
        return found

    def positions(self) -> dict[str, list[float]]:
        """Loss of each segment of the longest rows, averaged over seeds, by name."""
        found: dict[str, list[list[float]]] = {}
        for label, _, read in self._read("text"):
            if read["positions"]:
                found.setdefault(label, []).append(read["positions"])
        return {
            label: [statistics.fmean(p) for p in zip(*rows, strict=True)]
            for label, rows in found.items()
        }

    def exact(self, task: str, sizes: Iterable[int]) -> dict[str, BySeed]:
        """Fraction of problems solved, averaged over common sizes, by name and seed."""
        wanted = [str(size) for size in sizes]
        found = {}
        for label, seed, read in self._read("tasks"):
            if wanted and all(size in read["exact"][task] for size in wanted):
                shares = [read["exact"][task][size] for size in wanted]
                found.setdefault(label, {})[seed] = statistics.fmean(shares)
        return found

    def all_tasks(self, sizes: list[int]) -> dict[str, BySeed]:
        """Mean of :meth:`exact` over tasks."""
        parts = [self.exact(task, sizes) for task in self.tasks]
        return {
            label: {
                seed: statistics.fmean(part[label][seed] for part in parts)
                for seed in parts[0][label]
            }
            for label in (parts[0] if parts else ())
            if all(label in part for part in parts)
        }

    def cost(self, what: str, subject: str) -> dict[str, BySeed]:
        """A cost of training, by name and seed."""
        found: dict[str, BySeed] = {}
        for cell, record in self.cells.items():
            if cell.subject == subject and record.get(what) is not None:
                found.setdefault(cell.name, {})[cell.seed] = record[what]
        return found

    def curves(self, subject: str) -> dict[str, dict[int, list[float]]]:
        """Training losses of all seeds, by name and step."""
        found: dict[str, dict[int, list[float]]] = {}
        for cell, record in self.cells.items():
            if cell.subject == subject:
                for step, loss in record.get("curve", ()):
                    found.setdefault(cell.name, {}).setdefault(step, []).append(loss)
        return found

    def speed(self) -> dict[str, BySeed]:
        """Steps until the training loss on text reaches that of RoPE at half-time, same seed.

        Only encodings for which every seed reaches it.
        """
        curves = {
            c: r["curve"] for c, r in self.cells.items() if c.subject == "text" and "curve" in r
        }
        found: dict[str, BySeed] = {}
        missing = set()
        for cell, curve in curves.items():
            rope = curves.get(Cell(cell.subject, ROPE, cell.seed))
            if rope is None:
                continue
            steps = first_below(curve, _at(rope, rope[-1][0] / 2))
            if steps is None:
                missing.add(cell.name)
            else:
                found.setdefault(cell.name, {})[cell.seed] = steps
        return {name: by for name, by in found.items() if name not in missing}

    @cached_property
    def cost_subject(self) -> str:
        """Text, if it was trained on."""
        return "text" if any(cell.subject == "text" for cell in self.cells) else "tasks"

    @cached_property
    def measures(self) -> dict[str, dict[str, BySeed]]:
        """All results with a single number, by the names that published rankings use."""
        found: dict[str, dict[str, BySeed]] = {}
        if self.lengths:
            trained = self.lengths[0]
            longest = self.lengths[-1]
            found[AT] = self.text("loss", trained)
            found[FAR] = self.text("loss", longest)
            for measure, times in ((TWICE, 2), (FOUR_TIMES, 4)):
                found[measure] = self.text("loss", times * trained)
            found[FOUND] = self.text("retrieval", longest)
        if self.tasks:
            found[WITHIN] = self.all_tasks([n for n in self.items if n <= MOST])
            found[LONGER] = self.all_tasks([n for n in self.items if n > MOST])
        if speed := self.speed():
            found[SPEED] = speed
        found[SECONDS] = self.cost("seconds", self.cost_subject)
        found[PEAK] = self.cost("peak_bytes", self.cost_subject)
        return found

    @cached_property
    def names(self) -> list[str]:
        """All models as evaluated: RoPE first, then in the requested order."""
        labels = [
            label
            for cell, record in self.cells.items()
            for label in record.get("read", {cell.name: None})
        ]
        return sorted(dict.fromkeys(labels), key=lambda label: not label.startswith(ROPE))


def first_below(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The first (interpolated) step at which a curve of ``(step, loss)`` is at most ``loss``."""
    for (before, high), (step, low) in pairwise(curve):
        if low <= loss < high:
            return before + (step - before) * (high - loss) / (high - low)
    return float(curve[0][0]) if curve and curve[0][1] <= loss else None


def _at(curve: Sequence[Sequence[float]], step: float) -> float:
    """The loss of a curve at a step, interpolated."""
    return float(np.interp(step, *zip(*curve, strict=True)))
