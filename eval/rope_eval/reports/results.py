"""Computes numbers from outcomes, shared by tables, plots and text."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, takewhile
from typing import TypeVar

from rope_eval.cases import Outcome
from rope_eval.reports.intervals import rate_interval
from rope_eval.reports.summary import Estimate, difference, estimate, is_clear, signed
from rope_eval.run.plan import Plan
from rope_eval.systems import System
from rope_eval.tasks.base import Task
from rope_eval.tasks.passkey import MIN_FOUND, Passkey
from rope_ext.command.arguments import UNPATCHED

EFFECTIVE = 0.856
"""Llama-2-7B's RULER average at 4k, the paper's threshold for an effective length."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(values: Sequence[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Group values by key, in order of first appearance."""
    groups: dict[K, list[V]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def _said(task: Task, gap: Estimate | None) -> str:
    if gap is None:
        return f"{task.name} cannot be compared"
    unit = "%" if task.kind == "loss" else "points"
    verdict = "cannot tell whether it changed"
    if is_clear(gap):
        verdict = "clearly lower" if gap.value < 0 else "clearly higher"
    return f"{task.name}: {verdict} ({signed(gap)} {unit})"


@dataclass(frozen=True)
class Results:
    """A plan, the outcome of every case of every system, and derived numbers."""

    plan: Plan
    outcomes: Sequence[Outcome]

    @cached_property
    def places(self) -> dict[tuple[str, str, int], list[Outcome]]:
        """Outcomes by (task, system, length)."""
        return grouped(self.outcomes, lambda o: (o.task, o.system, o.length))

    @cached_property
    def estimates(self) -> dict[tuple[str, str, int], Estimate]:
        """Estimates by (task, system, length)."""
        estimates = {}
        for task in self.plan.tasks:
            for system in self.plan.systems:
                for length in self.plan.lengths:
                    place = (task.name, system.name, length)
                    estimates[place] = estimate(self.places[place], task.kind)
        return estimates

    @cached_property
    def by_depth(self) -> dict[tuple[str, str, int, int | None], Estimate]:
        """Rates by (task, system, length, depth bin), for tasks with bins."""
        binned = [outcome for outcome in self.outcomes if outcome.bin is not None]
        cells = grouped(binned, lambda o: (o.task, o.system, o.length, o.bin))
        return {place: estimate(group, "rate") for place, group in cells.items()}

    @cached_property
    def suites(self) -> Mapping[str, list[Task]]:
        """Tasks to average, by suite name."""
        return grouped([t for t in self.plan.tasks if t.suite], lambda task: str(task.suite))

    def average(self, suite: str, system: str, length: int) -> Estimate:
        """Mean over the tasks of a suite; its interval is that of a rate with the same variance."""
        tasks = [self.estimates[task.name, system, length] for task in self.suites[suite]]
        mean = math.fsum(task.value for task in tasks) / len(tasks)
        # The mean of k tasks of n prompts has the variance of a rate of k**2 / sum(1 / n) prompts.
        count = len(tasks) ** 2 / math.fsum(1 / task.count for task in tasks)
        interval = rate_interval(min(mean * count, count), count)
        return Estimate(mean, *interval, sum(task.count for task in tasks))

    def threshold(self, suite: str) -> str | None:
        """The name of the longest length at ``EFFECTIVE``; the effective length needs all tasks."""
        size = self.suites[suite][0].suite_size
        if size is None:
            return None
        whole = len(self.suites[suite]) == size
        return "effective length" if whole else f"{EFFECTIVE:.1%} up to"

    def holds_up_to(self, suite: str, system: str) -> int | None:
        """Return the longest length up to which the suite's average is at least ``EFFECTIVE``."""
        averages = {n: self.average(suite, system, n).value for n in self.plan.lengths}
        return max(takewhile(lambda n: averages[n] >= EFFECTIVE, averages), default=None)

    def reference(self, system: System) -> int | None:
        """The longest length within the trained length, where a method's cost is measured."""
        within = [length for length in self.plan.lengths if length <= system.trained]
        return within[-1] if within else None

    def unpatched(self, system: System) -> System:
        """The system without a method on the same model."""
        same = (s for s in self.plan.systems if s.model == system.model)
        return next(s for s in same if s.method == UNPATCHED)

    @cached_property
    def costs(self) -> dict[tuple[str, str], Estimate | None]:
        """Cost by (task, system) at the reference length, against no patch: + is worse."""
        costs = {}
        for task in self.plan.tasks:
            for system in self.plan.systems:
                length = self.reference(system)
                if system.method == UNPATCHED or length is None:
                    continue
                names = (system.name, self.unpatched(system).name)
                # A positive cost is worse: perplexity that is added, or answers that are lost.
                names = names[::-1] if task.kind == "rate" else names
                costs[task.name, system.name] = self._gap(task, names, [length])
        return costs

    def _gap(self, task: Task, names: Iterable[str], lengths: Sequence[int]) -> Estimate | None:
        """Return what the first of two systems less the second is at these lengths."""
        rows = ([o for n in lengths for o in self.places[task.name, name, n]] for name in names)
        ours, theirs = rows
        return difference(ours, theirs, task.kind)

    @cached_property
    def differences(self) -> dict[tuple[str, str, str], Estimate]:
        """(task, one, other): one minus other on the same cases, beyond the trained length."""
        found = {}
        for task in self.plan.tasks:
            for pair in combinations(self.plan.systems, 2):
                limit = max(system.trained for system in pair)
                lengths = [n for n in self.plan.lengths if n > limit] or self.plan.lengths
                one, other = (system.name for system in pair)
                gap = self._gap(task, (one, other), lengths)
                if gap is not None:
                    found[task.name, one, other] = gap
        return found

    @cached_property
    def trainings(self) -> list[tuple[System, System]]:
        """The systems before and after training an adapter, for each model measured so."""
        trained = [system for system in self.plan.systems if system.adapted]
        return [
            (before, after)
            for before in self.plan.systems
            for after in trained
            if not before.adapted and (before.model, before.method) == (after.model, after.method)
        ]

    def training(self, before: System, after: System) -> str:
        """Describe what training changed beyond and within the trained length."""
        trained = after.trained
        lengths = self.plan.lengths
        parts = {f"beyond {trained} tokens": [n for n in lengths if n > trained]}
        for length in [n for n in lengths if n <= trained][-1:]:
            parts[f"at {length} tokens"] = [length]

        pair = (after.name, before.name)
        said = []
        for where, some in parts.items():
            if some:
                changes = (_said(t, self._gap(t, pair, some)) for t in self.plan.tasks)
                said.append(f"{where}, {' and '.join(changes)}")
        return f"Training under {before.method}: {'; '.join(said)}."

    @property
    def _easier(self) -> str:
        """Options of a passkey that is easier to find than the one that was asked for."""
        task = next(task for task in self.plan.tasks if isinstance(task, Passkey))
        if task.needle == "word":
            return "--digits 3 in place of --needle word"
        return (
            "--needle word" if task.digits and task.digits <= 3 else "--needle word or --digits 3"
        )

    @cached_property
    def warnings(self) -> list[str]:
        low = []
        notes = []
        for system in self.plan.systems:
            length = self.reference(system)
            found = self.estimates.get(("passkey", system.name, length or 0))
            if system.method == UNPATCHED and found is not None and found.value < MIN_FOUND:
                low.append(f"{found.value:.0%} at {length} tokens ({system.name})")
        if low:
            whose = "the model" if self.plan.settings.servers else "the unpatched model"
            notes.append(
                f"within its trained length {whose} finds few passkeys, "
                f"{', '.join(low)}: those beyond say little; try {self._easier}"
            )
        return notes
