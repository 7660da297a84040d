"""Runs an evaluation, from the settings to the report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rope_eval.plots.style import require_matplotlib
from rope_eval.progress import progress
from rope_eval.reports.report import Report
from rope_eval.run.plan import prepare
from rope_eval.run.runner import run
from rope_eval.settings import Settings
from rope_eval.tasks.base import Task
from rope_ext.command.terminal import quiet, stoppable, tell, tell_next


def evaluate(settings: Settings, tasks: Sequence[Task]) -> Report | None:
    """Check, measure, print and write; returns None in all processes except the first."""
    with stoppable():
        # First: the report needs it, after hours of measuring.
        require_matplotlib()
        quiet()
        plan = prepare(settings, tasks)
        for note in plan.notes:
            tell(f"note: {note}", "yellow")
        with plan.folder.lock():
            total = sum(1 for system in plan.systems for _ in plan.cases(system))
            left = [case for one in plan.systems for batch in plan.left(one) for case in batch]
            known = f" ({total - len(left)} more are known)" if len(left) < total else ""
            tell(f"{len(left)} cases, {sum(case.tokens for case in left):,} tokens{known}")
            with progress() as shown:
                bar = shown.add_task("", total=None)
                advance = partial(shown.advance, bar)
                outcomes = run(plan, advance, lambda work: shown.update(bar, total=work))
            if outcomes is None:
                return None
            # Still locked: another run must not write between the log and the report of it.
            report = Report(plan.measured(), outcomes)
            paths = report.write()
        report.print()  # the files exist even if this fails
        for path in paths:
            tell(f"wrote {path}")
        tell_next(*report.optional_commands, when="optional")
        tell_next(*report.next_commands)
        return report
