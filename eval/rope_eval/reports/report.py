"""Prints reports, and writes them as JSON, CSV, Markdown, plots and an HTML page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from rich import box
from rich.measure import Measurement
from rich.table import Table as RichTable

from rope_eval.cases import dump
from rope_eval.options import option_fields
from rope_eval.plots import results as figures
from rope_eval.reports import page
from rope_eval.reports.advice import Advice
from rope_eval.reports.intervals import CONFIDENCE
from rope_eval.reports.page import BOLD, Cell, Row, Section, Table
from rope_eval.reports.results import EFFECTIVE, Results
from rope_eval.reports.summary import Estimate, is_clear, percent, shown, signed
from rope_eval.run.plan import PAGE, RESULTS, TABLES
from rope_eval.systems import short_name
from rope_eval.tasks.base import Task
from rope_ext.command.arguments import UNPATCHED
from rope_ext.command.terminal import plain, wide_console
from rope_ext.quoting import in_csv, in_markdown, printable


@dataclass(frozen=True)
class Report(Advice):
    """A run and its report."""

    @cached_property
    def sections(self) -> list[Section]:
        """Sections of the page; the first sentence of each defines its numbers."""
        return list(_sections(self))

    @property
    def notes(self) -> list[str]:
        return [*self.plan.notes, *self.warnings]

    @property
    def title(self) -> str:
        return f"{self._names}: {', '.join(section.name for section in self.sections)}"

    @property
    def _names(self) -> str:
        return ", ".join(map(short_name, self.plan.settings.models))

    @cached_property
    def essentials(self) -> list[str]:
        """Conditions to quote with every number: settings, tasks, versions."""
        identity = next(iter(self.plan.identities.values()))
        rows = [*self._conditions(identity), f"seed {self.plan.settings.seed}"]
        for model, used in self.plan.chat.items():
            of = f" for {model}" if len(self.plan.chat) > 1 else ""
            rows.append(f"{'' if used else 'no '}chat template{of}")
        versions = identity["versions"]
        told = [f"{n} {versions[n]}" for n in ("rope_ext", "torch", "transformers", "python")]
        return [
            *self.reading,
            f"Settings: {', '.join(rows)}.",
            f"Tasks: {', '.join(dict.fromkeys(map(_asked, self.plan.tasks)))}.",
            f"Versions: {', '.join(told)}.",
        ]

    def _conditions(self, identity: Mapping[str, Any]) -> list[str]:
        """What was measured: servers, or methods, adapter, dtype and device in this process."""
        settings = self.plan.settings
        served = [f"{s.served_model_name} served at {s.url}" for s in settings.servers]
        if served:
            return [*served, f"prompts by {settings.api}"]
        of = "float32" if identity["device"] == "cpu" else "of the checkpoint"
        rows = [f"factor {settings.factor:g}"]
        rows += [system.label for system in self.plan.systems if system.label != system.method]
        rows += [f"adapter {short_name(settings.adapter)}"] if settings.adapter else []
        if settings.trained_length is not None:
            rows.append(f"trained length {settings.trained_length}")
        if settings.compose:
            rows.append(f"compose {'raise' if settings.compose == 'raise' else 'stack'}")
        rows += [f"dtype {settings.dtype}" + f" ({of})" * (settings.dtype == "auto")]
        rows += [f"attention {settings.attn}"] if settings.attn else []
        return [*rows, f"device {identity['device']}"]

    def print(self) -> None:
        """Print the tables, their definitions and the recommendation; without wrapping in files."""
        console = wide_console(80)
        for section in self.sections:
            table = _rich(section.name, section.tables[0])
            if not console.is_terminal:
                whole = console.options.update(max_width=10**4)
                console.width = max(console.width, Measurement.get(console, whole, table).maximum)
            console.print(table)
            console.print(plain(f"{printable(section.sentences[0])}.\n"), style="dim")
        parts = dict.fromkeys(self.essentials, "dim")
        notes = (*self.plan.refusals, *self.warnings)
        parts |= dict.fromkeys((f"Note: {note}." for note in notes), "yellow")
        parts |= dict.fromkeys(map("- {}".format, self.recommendations), "bold")
        for part, style in parts.items():
            console.print(plain(printable(part)), style=style)

    def write(self) -> list[Path]:
        """Write JSON, CSV, Markdown, plots and the page; returns their paths."""
        pictures = list(self._draw())
        texts = (dump(self.to_json()), self._csv(), self.markdown(), self.page(pictures))
        contents = {
            name: text.encode() for name, text in zip((RESULTS, *TABLES, PAGE), texts, strict=True)
        }
        contents |= {f"{name}.png": content for _, name, content in pictures}
        return self.plan.folder.write(contents)

    def markdown(self) -> str:
        """Return all tables in Markdown, to paste into a model card."""
        parts = []
        for section in self.sections:
            name = in_markdown(section.name)
            definition = in_markdown(section.sentences[0])
            parts += [f"### {name}", section.tables[0].markdown(), f"{definition}."]
        if self.recommendations:
            parts.append("\n".join(f"* {in_markdown(one)}" for one in self.recommendations))
        parts += [f"Next: `{in_markdown(line)}`" for line in self.next_lines]
        parts += [f"Note: {in_markdown(note)}." for note in self.notes]
        parts.append(f"95 % intervals. {in_markdown(' '.join(self.essentials))}")
        return "\n\n".join(parts) + "\n"

    def page(self, pictures: Sequence[tuple[str, str, bytes]]) -> str:
        """Build one HTML file with plots, whose names start with that of their section."""
        told = f"Intervals are 95 %. All methods get the same texts and prompts. {BOLD}"
        sections = []
        for one in self.sections:
            shown = [
                page.Picture(f"{name} of {self.title}", content)
                for place, name, content in pictures
                if place == one.name
            ]
            sections.append(
                Section(
                    name=one.name,
                    sentences=(f"{one.sentences[0]}. {told}",),
                    tables=one.tables,
                    pictures=shown,
                )
            )
        data = self.to_json()
        settings = {name: data[name] for name in ("settings", "systems", "tasks", "identities")}
        notes = [f"Note: {note}." for note in self.notes]
        return page.render(
            self.title,
            sentences=self.recommendations,
            notes=notes,
            sections=sections,
            settings=dump(settings),
            essentials=self.essentials,
            next_lines=self.next_lines,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data, without single cases, which are in the log."""
        plan = self.plan
        named = ("name", "model", "method", "adapted", "label", "options")
        return {
            "recommendations": self.recommendations,
            "next": self.next_lines,
            "definitions": {section.name: section.sentences[0] for section in self.sections},
            "notes": self.notes,
            "chat_template": plan.chat,
            "refused": plan.refused,
            "settings": plan.settings.to_json(),
            "systems": [
                {
                    **{name: getattr(system, name) for name in named},
                    "trained_length": system.trained,
                    "reference_length": self.reference(system),
                }
                for system in plan.systems
            ],
            "lengths": plan.lengths,
            "tasks": [
                {"name": t.name, "kind": t.kind, "suite": t.suite, "options": task_options(t)}
                for t in plan.tasks
            ],
            "identities": plan.identities,
            "summary": _rows(("task", "system", "length"), self.estimates),
            "costs": [
                {**row, "positive_is": "worse"} for row in _rows(("task", "system"), self.costs)
            ],
            "differences": _rows(("task", "system", "less"), self.differences),
            "suites": {
                suite: {system.name: self._suite(suite, system.name) for system in plan.systems}
                for suite in self.suites
            },
        }

    def _suite(self, suite: str, system: str) -> dict[str, Any]:
        lengths = self.plan.lengths
        name = self.threshold(suite)
        found: dict[str, Any] = {
            "average": {str(n): _numbers(self.average(suite, system, n)) for n in lengths}
        }
        if name is not None:
            key = "effective_length" if name == "effective length" else "threshold_up_to"
            found[key] = self.holds_up_to(suite, system)
        return found

    def _csv(self) -> str:
        """Every estimate, and rates by depth, with the options of its system and task."""
        options_of_task = {task.name: task_options(task) for task in self.plan.tasks}
        names = dict.fromkeys(name for values in options_of_task.values() for name in values)
        systems = {system.name: system for system in self.plan.systems}
        settings = self.plan.settings
        rows = []
        for place, value in self.estimates.items():
            system = systems[place[1]]
            own = options_of_task[place[0]]
            more = {"model": system.model, "method": system.method, "options": system.options}
            more |= {"trained_length": system.trained, "seed": settings.seed}
            more |= {"dtype": settings.dtype} | {name: own.get(name) for name in names}
            bins = {key[3]: cell for key, cell in self.by_depth.items() if key[:3] == place}
            for depth, cell in {"": value, **bins}.items():
                at = dict(zip(("task", "system", "length"), place, strict=True))
                row = {**at, "depth_bin": depth, **asdict(cell), **more}
                rows.append({name: in_csv(_plain(each)) for name, each in row.items()})
        table = csv.DictWriter(file := io.StringIO(newline=""), rows[0])
        table.writeheader()
        table.writerows(rows)
        return file.getvalue()

    def _draw(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield (task or suite, name, PNG) of every plot."""
        trained = {system.name: system.trained for system in self.plan.systems}
        rates = {}
        draw_losses = partial(figures.draw_lines, kind="loss")
        draw_rates = partial(figures.draw_lines, kind="rate")
        for task in self.plan.tasks:
            title = f"{self._names}: {task.name}"
            part = {p[1:]: e for p, e in self.estimates.items() if p[0] == task.name}
            if task.kind == "rate":
                rates[task.name] = part
                if bins := {p[1:]: e for p, e in self.by_depth.items() if p[0] == task.name}:
                    draw_depths = partial(figures.draw_depths, title=f"{title}, % found")
                    yield task.name, task.name, _png(draw_depths, bins, trained)
                continue
            panels = {f"{title} by length": part}
            yield task.name, task.name, _png(draw_losses, panels, trained)
        if rates:
            where = next(iter([*self.suites, *rates]))
            yield where, "rates", _png(draw_rates, rates, trained)


def _png(draw: Callable[..., None], estimates: Mapping, trained: Mapping[str, int]) -> bytes:
    """Return what ``draw`` saves to a file, of estimates and of trained lengths by system."""
    file = io.BytesIO()
    draw(file, estimates, trained=trained)
    return file.getvalue()


def _rich(name: str, table: Table) -> RichTable:
    title = plain(printable(name), "table.title")
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for header in table.header:
        header = printable(header).replace(" (trained)", "\n(trained)").replace(", ", ",\n")
        shown.add_column(plain(header), overflow="fold")
    for row in table.rows:
        shown.add_row(*(plain(printable(cell.text)) for cell in row.cells))
    return shown


def _rows(names: Sequence[str], estimates: Mapping[Any, Estimate | None]) -> list[dict[str, Any]]:
    return [
        {**dict(zip(names, key, strict=True)), **_numbers(value)}
        for key, value in estimates.items()
        if value is not None
    ]


def _numbers(value: Estimate) -> dict[str, float | None]:
    """Replace infinity, which JSON does not have."""
    return {k: None if v == math.inf else v for k, v in asdict(value).items()}


def task_options(task: Task) -> dict[str, Any]:
    return {one.name: getattr(task, one.name) for one in option_fields(type(task))}


_UNSET = (None, False, (), [], "")


def _asked(task: Task) -> str:
    """The name of a task, with its options that are set."""
    values = {k: v for k, v in task_options(task).items() if v not in _UNSET}
    said = ", ".join(f"{name}={_short(value)}" for name, value in values.items())
    return f"{task.name} ({said})" if said else task.name


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _plain(value: Any) -> Any:
    """Format a value for a CSV cell: lists and dicts as JSON."""
    return json.dumps(value, default=str) if isinstance(value, (Mapping, tuple, list)) else value


# Tables


def _sections(results: Results) -> Iterator[Section]:
    """Yield sections for suites and tasks; the first sentence defines the numbers."""
    for suite in results.suites:
        yield Section(suite, (_suite_definition(results, suite),), [_suite_table(results, suite)])
    questions = results.plan.questions
    models = results.plan.settings.models
    for task in results.plan.tasks:
        definition = "; ".join(sorted({questions[m, task.name].definition for m in models}))
        tables = [_task_table(results, task), *_difference_tables(results, task)]
        yield Section(task.name, (definition[0].upper() + definition[1:],), tables)


def _suite_definition(results: Results, suite: str) -> str:
    tasks = results.suites[suite]
    name = results.threshold(suite)
    size = tasks[0].suite_size
    some = "" if name is None or len(tasks) == size else f" of {size}"
    parts = [f"mean of {len(tasks)}{some} tasks, each counting alike"]
    if name is not None:
        parts.append(
            f"{name}: the longest up to which that mean is at least {EFFECTIVE:.1%}"
            + ("; an effective length is defined over all of them" if some else "")
            + " (arXiv 2404.06654)"
        )
    return "; ".join(parts)


def _suite_table(results: Results, suite: str) -> Table:
    lengths = results.plan.lengths
    name = results.threshold(suite)
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
    systems = results.plan.systems
    lengths = results.plan.lengths
    trained = {system.trained for system in systems}
    references = sorted({n for n in map(results.reference, systems) if n is not None})
    header = ["method", *(f"{n} tokens{' (trained)' * (n in trained)}" for n in lengths)]
    if references:
        unit = "%" if task.kind == "loss" else "points"
        header.insert(1, f"cost at {' / '.join(map(str, references))}, {unit} (+: worse)")
    rows = []
    compared = 0
    for system in systems:
        cost = results.costs.get((task.name, system.name))
        compared += cost is not None
        cells = [Cell(system.name), *([_gap(cost)] if references else [])]
        values = [results.estimates[task.name, system.name, n] for n in lengths]
        cells += [Cell(shown(value, task.kind)) for value in values]
        rows.append(Row(tuple(cells), system.method == UNPATCHED))
    words = (f"Cost: {_chance(compared)}",) if compared else ()
    return Table(title="", header=tuple(header), rows=tuple(rows), sentences=words)


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
        yield Table(
            title=title, header=("", *names[1:]), rows=tuple(rows), sentences=(BOLD, _chance(count))
        )


def _gap(gap: Estimate | None) -> Cell:
    return Cell("") if gap is None else Cell(signed(gap), is_clear(gap))


def _chance(count: int) -> str:
    """State how many comparisons would be bold if all systems were equal."""
    return (
        f"{count} comparison{'s' * (count != 1)}: if there were no differences, about "
        f"{(1 - CONFIDENCE) * count:.2g} would be bold by chance."
    )
