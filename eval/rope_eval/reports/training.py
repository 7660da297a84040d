"""What a training changed: one table and one sentence, from ``--method before,adapter``.

``before`` is the model under the adapter's method without the adapter's weights, on the same cases.
A change is called lower or higher only where it is clear (``is_clear``), and otherwise "cannot
tell".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rope_eval.cases import Outcome
from rope_eval.reports.page import Cell, Row, Table
from rope_eval.reports.summary import Estimate, difference, estimate, is_clear, shown, signed
from rope_eval.systems import System
from rope_eval.tasks.base import Task

DEFINITION = (
    "The unpatched model, the model under the adapter's method without its weights, and with them, "
    "on the same cases; the last row is what training changed (perplexity: %, rates: points)"
)


@dataclass(frozen=True)
class Training:
    """One model unpatched, under the method ``before`` training, and ``after`` it.

    ``places`` has the outcomes by (task, system, length).
    """

    unpatched: System
    before: System
    after: System
    tasks: Sequence[Task]
    lengths: Sequence[int]
    places: Mapping[tuple[str, str, int], Sequence[Outcome]]

    def change(self, task: Task, lengths: Sequence[int]) -> Estimate | None:
        """How much training raised a perplexity (relative) or a rate, over these lengths."""
        after, before = (
            [o for n in lengths for o in self.places[task.name, system.name, n]]
            for system in (self.after, self.before)
        )
        return difference(after, before, task.kind)

    def table(self) -> Table:
        """Three systems and the change, one column for each task and length."""
        places = [(task, length) for task in self.tasks for length in self.lengths]
        rows = []
        for system in (self.unpatched, self.before, self.after):
            outcomes = [(self.places[task.name, system.name, n], task.kind) for task, n in places]
            cells = [Cell(shown(estimate(*given), given[1])) for given in outcomes]
            rows.append(Row((Cell(system.name), *cells), system is self.unpatched))
        gaps = [self.change(task, [length]) for task, length in places]
        cells = [Cell("" if gap is None else signed(gap), is_clear(gap)) for gap in gaps]
        rows.append(Row((Cell("change by training"), *cells)))
        header = ("method", *(f"{task.name}, {length} tokens" for task, length in places))
        return Table("", header, tuple(rows))

    def sentence(self) -> str:
        """What training changed beyond the trained length, and within it."""
        trained, parts = self.after.trained, {}
        parts[f"beyond {trained} tokens"] = [n for n in self.lengths if n > trained]
        for length in [n for n in self.lengths if n <= trained][-1:]:
            parts[f"at {length} tokens"] = [length]
        said = [
            f"{where}, {' and '.join(_said(t, self.change(t, lengths)) for t in self.tasks)}"
            for where, lengths in parts.items()
            if lengths
        ]
        return f"Training under {self.before.method}: {'; '.join(said)}."


def _said(task: Task, gap: Estimate | None) -> str:
    if gap is None:
        return f"{task.name} cannot be compared"
    unit = "%" if task.kind == "loss" else "points"
    verdict = "cannot tell whether it changed"
    if is_clear(gap):
        verdict = "clearly lower" if gap.value < 0 else "clearly higher"
    return f"{task.name}: {verdict} ({signed(gap)} {unit})"
