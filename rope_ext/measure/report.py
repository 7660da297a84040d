"""The results of a comparison: a table, JSON, CSV and two pictures."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rope_ext.measure import figures
from rope_ext.measure.cells import Cell
from rope_ext.measure.compare import Plan
from rope_ext.measure.summary import (
    Estimate,
    Scores,
    estimate_perplexity,
    estimate_rate,
    gather,
    number,
    percent,
    recommend,
)

_NAME, _COLUMN = 18, 22  # widths, characters


@dataclass(frozen=True)
class Report:
    """A comparison and what follows from it.

    Args:
        plan: what was asked for.
        cells: every cell of the plan, measured.
    """

    plan: Plan
    cells: Sequence[Cell]

    @cached_property
    def scores(self) -> dict[str, Scores]:
        """All values, by method."""
        return gather(self.cells)

    @cached_property
    def perplexity(self) -> dict[tuple[str, int], Estimate]:
        """By (method, length)."""
        return {
            (cell.method, cell.length): estimate_perplexity(cell.values, self.plan.settings.seed)
            for cell in self.cells
            if cell.kind == "perplexity"
        }

    @cached_property
    def passkey(self) -> dict[tuple[str, int], Estimate]:
        """By (method, length), all depths together."""
        return {
            (method, length): estimate_rate(scores.passes_at(length))
            for method, scores in self.scores.items()
            for length in self.plan.lengths
        }

    @cached_property
    def passkey_by_depth(self) -> dict[tuple[str, int, int], Estimate]:
        """By (method, length, depth bin)."""
        return {
            (cell.method, cell.length, cell.depth): estimate_rate(cell.values)
            for cell in self.cells
            if cell.kind == "passkey"
        }

    @cached_property
    def recommendation(self) -> str:
        """One sentence; see ``recommend`` for the rule."""
        return recommend(self.scores, self.plan.trained, self.plan.settings.seed)

    @property
    def definition(self) -> str:
        """What the numbers are, for under the table."""
        plan, settings = self.plan, self.plan.settings
        text = ", ".join(map(str, settings.texts)) or "Python's standard library (held-out files)"
        return (
            f"First line of a row: perplexity of the last {plan.windows.scored} tokens of a window "
            f"of that many tokens; every length scores the same tokens, only the context before "
            f"them grows. {len(plan.windows.texts)} windows of {text}, bootstrap intervals over "
            f"windows. Second line: share of {settings.trials} passkeys at each of "
            f"{settings.depths} depths that greedy decoding writes out, Wilson intervals. All "
            f"intervals are 95 %, all methods get the same texts and prompts. Trained length "
            f"{plan.trained} tokens, factor {settings.factor:g}."
        )

    def print(self) -> None:
        """Print the table, its definition and the recommendation.

        A terminal too narrow for all lengths gets several tables; a file gets long lines.
        """
        lengths = self.plan.lengths
        console, fit = wide_console(_NAME + _COLUMN * len(lengths)), len(lengths)
        if console.is_terminal:
            fit = max(1, (console.width - _NAME) // _COLUMN)
        for start in range(0, len(lengths), fit):
            console.print(self._table(lengths[start : start + fit]))
        console.print(self.definition, style="dim", highlight=False)
        console.print(f"\n{self.recommendation}", style="bold", highlight=False, markup=False)

    def _table(self, lengths: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for length in lengths:
            trained = "\n(trained)" if length == self.plan.trained else ""
            table.add_column(f"{length} tokens{trained}", no_wrap=True)
        for method in self.plan.methods:
            perplexities = [_interval(self.perplexity[method, length]) for length in lengths]
            rates = [percent(self.passkey[method, length]) for length in lengths]
            rows = [Text(f"{p}\n{r}") for p, r in zip(perplexities, rates, strict=True)]
            table.add_row(method, *rows)
        return table

    def write(self) -> list[Path]:
        """Write ``results.json``, ``cells.csv`` and the pictures; returns their paths."""
        folder, model = self.plan.settings.output, Path(self.plan.settings.model).name
        names = ("results.json", "cells.csv", "perplexity.png", "passkey.png")
        paths = [folder / name for name in names]
        data = json.dumps(self.to_json(), indent=1, default=str)
        paths[0].write_text(data + "\n", encoding="utf-8")
        self._write_csv(paths[1])
        title = f"{model}: perplexity of the same {self.plan.windows.scored} tokens"
        title += " after more and more context"
        figures.draw_perplexity(self.perplexity, self.plan.trained, title, paths[2])
        title = f"{model}: passkeys found, %"
        figures.draw_passkey(self.passkey_by_depth, self.plan.trained, title, paths[3])
        return paths

    def to_json(self) -> dict[str, Any]:
        """Everything about the comparison as plain data."""
        plan = self.plan
        return {
            "recommendation": self.recommendation,
            "definition": self.definition,
            "notes": plan.notes,
            "settings": asdict(plan.settings),
            "methods": plan.methods,
            "trained_length": plan.trained,
            "scored_tokens": plan.windows.scored,
            "identity": plan.identity,
            "summary": [
                {
                    "method": method,
                    "length": length,
                    "perplexity": _plain(self.perplexity[method, length]),
                    "passkey": _plain(self.passkey[method, length]),
                }
                for method in plan.methods
                for length in plan.lengths
            ],
            "cells": [cell.to_json() for cell in self.cells],
        }

    def _write_csv(self, path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            columns = ["value", "low", "high", "count", "seconds"]
            table.writerow(["kind", "method", "length", "depth_bin", *columns])
            for cell in self.cells:
                if cell.kind == "perplexity":
                    estimate = self.perplexity[cell.method, cell.length]
                else:
                    estimate = self.passkey_by_depth[cell.method, cell.length, cell.depth]
                place = [cell.kind, cell.method, cell.length, cell.depth]
                table.writerow([*place, *asdict(estimate).values(), cell.seconds])


def wide_console(width: int) -> Console:
    """The terminal; or, where the output goes elsewhere, lines of at least ``width``."""
    console = Console()
    return console if console.is_terminal else Console(width=max(width, console.width))


def _interval(estimate: Estimate) -> str:
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def _plain(estimate: Estimate) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {k: v if v < math.inf else None for k, v in asdict(estimate).items()}
