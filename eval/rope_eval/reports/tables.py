"""Builds a report's tables: one or two for every suite and task."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from rope_eval.reports.intervals import CONFIDENCE
from rope_eval.reports.page import BOLD, Cell, Row, Section, Table
from rope_eval.reports.results import EFFECTIVE, Results
from rope_eval.reports.summary import Estimate, is_clear, percent, shown, signed
from rope_eval.tasks.base import Task
from rope_ext.command.method_options import UNPATCHED


def sections(results: Results) -> Iterator[Section]:
    """Yield sections for suites and tasks; the first sentence defines the numbers."""
    for suite in results.suites:
        yield Section(suite, (_suite_definition(results, suite),), [_suite_table(results, suite)])
    questions, models = results.plan.questions, results.plan.settings.models
    for task in results.plan.tasks:
        definition = "; ".join(sorted({questions[m, task.name].definition for m in models}))
        tables = [_task_table(results, task), *_difference_tables(results, task)]
        yield Section(task.name, (definition[0].upper() + definition[1:],), tables)


def _suite_definition(results: Results, suite: str) -> str:
    tasks, name = results.suites[suite], results.threshold(suite)
    size = tasks[0].suite_size
    some = "" if name is None or len(tasks) == size else f" of {size}"
    parts = [f"mean of {len(tasks)}{some} tasks, each counting alike"]
    if name is not None:
        parts.append(
            f"{name}: the longest up to which that mean is at least {EFFECTIVE:.1%}"
            + ("; an effective length is defined over all of them" if some else "")
            + " (arXiv 2404.06654)"
        )
    return f"{'; '.join(parts)}, exact intervals"


def _suite_table(results: Results, suite: str) -> Table:
    lengths, name = results.plan.lengths, results.threshold(suite)
    rows = []
    for system in results.plan.systems:
        values = [percent(results.average(suite, system.name, n), 1) for n in lengths]
        if name is not None:
            longest = results.holds_up_to(suite, system.name)
            values.insert(0, f"below {lengths[0]}" if longest is None else str(longest))
        rows.append(Row(tuple(map(Cell, (system.name, *values))), system.method == UNPATCHED))
    header = ("method", *([name] if name else []), *(f"{n} tokens" for n in lengths))
    return Table("", header, tuple(rows))


def _task_table(results: Results, task: Task) -> Table:
    """Build a table with systems as rows; columns: cost within the trained length, then lengths."""
    systems, lengths = results.plan.systems, results.plan.lengths
    trained = {system.trained for system in systems}
    references = sorted({n for n in map(results.reference, systems) if n is not None})
    header = ["method", *(f"{n} tokens{' (trained)' * (n in trained)}" for n in lengths)]
    if references:
        unit = "%" if task.kind == "loss" else "points"
        header.insert(1, f"cost at {' / '.join(map(str, references))}, {unit} (+: worse)")
    rows, compared = [], 0
    for system in systems:
        cost = results.costs.get((task.name, system.name))
        compared += cost is not None
        cells = [Cell(system.name), *([_gap(cost)] if references else [])]
        values = [results.estimates[task.name, system.name, n] for n in lengths]
        cells += [Cell(shown(value, task.kind)) for value in values]
        rows.append(Row(tuple(cells), system.method == UNPATCHED))
    words = (f"Cost: {_chance(compared)}",) if compared else ()
    return Table("", tuple(header), tuple(rows), words)


def _difference_tables(results: Results, task: Task) -> Iterator[Table]:
    gaps = results.differences
    for model in results.plan.settings.models:
        systems = [s for s in results.plan.systems if s.model == model]
        names = [s.name for s in systems]
        count = sum((task.name, *pair) in gaps for pair in combinations(names, 2))
        if not count:
            continue
        trained = systems[0].trained
        unit = "% of perplexity" if task.kind == "loss" else "percentage points"
        longer = results.plan.lengths[-1] > trained
        where = f"beyond {trained} tokens" if longer else "all lengths"
        rows = [
            Row((Cell(one), *(_gap(gaps.get((task.name, one, other))) for other in names[1:])))
            for one in names[:-1]
        ]
        title = f"Row less column on identical cases, {where} ({unit})"
        yield Table(title, ("", *names[1:]), tuple(rows), (BOLD, _chance(count)))


def _gap(gap: Estimate | None) -> Cell:
    return Cell("") if gap is None else Cell(signed(gap), is_clear(gap))


def _chance(count: int) -> str:
    """State how many comparisons would be bold if all systems were equal."""
    return (
        f"{count} comparison{'s' * (count != 1)}: if there were no differences, about "
        f"{(1 - CONFIDENCE) * count:.2g} would be bold by chance."
    )
