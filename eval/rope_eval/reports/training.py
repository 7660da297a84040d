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
from rope_eval.reports.summary import Estimate, difference, estimate, interval, is_clear, signed
from rope_eval.reports.summary import percent as rate
from rope_eval.systems import System
from rope_eval.tasks.base import Task

Places = Mapping[tuple[str, str, int], Sequence[Outcome]]
DEFINITION = (
    "The unpatched model, the model under the adapter's method without its weights, and with them, "
    "on the same cases; the last row is what training changed (perplexity: %, rates: points)"
)


@dataclass(frozen=True)
class Training:
    """One model without a method, before and after training.

    Args:
        unpatched: the system without a method.
        before: under the method, without the adapter.
        after: with the adapter.
        tasks: what was measured.
        lengths: ascending, tokens.
        places: outcomes by (task, system, length).
    """

    unpatched: System
    before: System
    after: System
    tasks: Sequence[Task]
    lengths: Sequence[int]
    places: Places

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
        header = ["method", *(f"{task.name}, {length} tokens" for task, length in places)]
        rows = []
        for system in (self.unpatched, self.before, self.after):
            found = [estimate(self.places[t.name, system.name, n], t.kind) for t, n in places]
            cells = [
                Cell(interval(value) if task.kind == "loss" else rate(value))
                for (task, _), value in zip(places, found, strict=True)
            ]
            rows.append(Row((Cell(system.name), *cells), system is self.unpatched))
        gaps = [self.change(task, [length]) for task, length in places]
        cells = [Cell("" if gap is None else signed(gap), is_clear(gap)) for gap in gaps]
        rows.append(Row((Cell("change by training"), *cells)))
        return Table("", tuple(header), tuple(rows))

    def sentence(self) -> str:
        """What training changed beyond the trained length, and within it."""
        trained = self.after.trained
        within = [n for n in self.lengths if n <= trained]
        beyond = [n for n in self.lengths if n > trained]
        parts = [(f"beyond {trained} tokens", beyond)] if beyond else []
        parts += [(f"at {within[-1]} tokens", within[-1:])] if within else []
        told = [f"{where}, {self._changes(lengths)}" for where, lengths in parts]
        return f"Training under {self.before.method}: {'; '.join(told)}."

    def _changes(self, lengths: Sequence[int]) -> str:
        return " and ".join(_change(task, self.change(task, lengths)) for task in self.tasks)


def _change(task: Task, gap: Estimate | None) -> str:
    if gap is None:
        return f"{task.name} cannot be compared"
    unit = "%" if task.kind == "loss" else "points"
    if not is_clear(gap):
        verdict = "cannot tell whether it changed"
    else:
        verdict = "clearly lower" if gap.value < 0 else "clearly higher"
    return f"{task.name}: {verdict} ({signed(gap)} {unit})"
