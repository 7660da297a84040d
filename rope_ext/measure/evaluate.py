"""The whole of an evaluation, from the settings to the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rope_ext.measure.folder import first_process
from rope_ext.measure.plan import Plan, prepare
from rope_ext.measure.reports.report import Report
from rope_ext.measure.reports.terminal import progress, quiet, tell
from rope_ext.measure.run import run
from rope_ext.measure.settings import Settings
from rope_ext.measure.tasks.base import Task
from rope_ext.plots.style import require_matplotlib


def evaluate(settings: Settings, tasks: Sequence[Task]) -> Report | None:
    """Check, measure, print and write; None in every process but the first.

    Raises:
        RopeExtError: see ``prepare`` and ``run``.
    """
    require_matplotlib()
    quiet()
    plan = prepare(settings, tasks)
    for note in plan.notes:
        tell(f"note: {note}", "yellow")
    with plan.folder.held():
        with progress() as shown:
            bar = shown.add_task(_extent(plan) if first_process() else "", total=None)
            try:
                outcomes = run(
                    plan,
                    lambda work: shown.advance(bar, work),
                    lambda work: shown.update(bar, total=work),
                )
            except KeyboardInterrupt:
                shown.stop()
                kept = f"finished cases are in {settings.output}"
                tell(f"stopped; {kept}, --resume goes on from there")
                sys.exit(130)
        if outcomes is None:
            return None
        report = Report(plan, outcomes)
        paths = report.write()
    report.print()  # whatever becomes of it, the files are there
    for path in paths:
        tell(f"wrote {path}")
    return report


def _extent(plan: Plan) -> str:
    total, left = plan.size
    return f"{left} cases" + (f" ({total - left} more are known)" if left < total else "")
