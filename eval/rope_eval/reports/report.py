"""The results of a run: tables, JSON, CSV, Markdown, pictures and one page that holds it all."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from rich import box
from rich.measure import Measurement
from rich.table import Table as RichTable

from rope_eval.cases import Outcome, dump
from rope_eval.next_commands import calibration_command, text_words, training_command
from rope_eval.plots import results as figures
from rope_eval.reports import page
from rope_eval.reports.intervals import CONFIDENCE, rate_interval
from rope_eval.reports.page import BOLD, Cell, Row, Table
from rope_eval.reports.recommendation import MAX_COST, Evidence, gather, recommend
from rope_eval.reports.summary import (
    Estimate,
    cost,
    difference,
    estimate,
    estimate_perplexity,
    interval,
    is_clear,
    percent,
    signed,
)
from rope_eval.reports.training import DEFINITION, Training
from rope_eval.run.plan import PAGE, RESULTS, TABLES, Plan
from rope_eval.systems import System, under
from rope_eval.tasks.base import Task, options
from rope_eval.tasks.passkey import MIN_FOUND
from rope_eval.tasks.perplexity import Perplexity
from rope_ext.advice.building import model_of
from rope_ext.command.arguments import command_words
from rope_ext.command.method_options import UNPATCHED, built
from rope_ext.command.terminal import unused, wide_console
from rope_ext.engines import engines_for
from rope_ext.errors import RopeExtError
from rope_ext.methods import reach

EFFECTIVE = 0.856
"""Llama-2-7B's own RULER average at 4k, which the paper takes for "the length works"."""

_MORE = {"windows": 64, "trials": 20}
"""Options of a comparison that decides more than the default; one that does not ends there."""


def engines_of(
    systems: Sequence[System], compose: bool | str, trained_length: int | None
) -> dict[str, tuple[str, ...]]:
    """The engines that can serve a model under each of its methods, by label; no weights are read.

    There are none for a family without a causal language model, or one that refuses the method.
    """
    found: dict[str, tuple[str, ...]] = {system.label: () for system in systems}
    try:
        model = model_of(systems[0].model)
    except RopeExtError:
        return found
    for system in systems:
        if built(
            system.method, system.options
        ).replaces_attention:  # whose layers no engine computes
            continue
        with (
            suppress(RopeExtError),
            under(model, system.method, system.options, compose, trained_length),
        ):
            found[system.label] = engines_for(model)
    return found


@dataclass(frozen=True)
class Section:
    """One task or suite."""

    name: str
    definition: str
    tables: Sequence[Table]


@dataclass(frozen=True)
class Report:
    """A run and what follows from it.

    Args:
        plan: what was asked for.
        outcomes: of every case of every system.
    """

    plan: Plan
    outcomes: Sequence[Outcome]

    @cached_property
    def places(self) -> dict[tuple[str, str, int], list[Outcome]]:
        """Outcomes by (task, system, length)."""
        places: dict[tuple[str, str, int], list[Outcome]] = {}
        for outcome in self.outcomes:
            places.setdefault((outcome.task, outcome.system, outcome.length), []).append(outcome)
        return places

    @cached_property
    def estimates(self) -> dict[tuple[str, str, int], Estimate]:
        """By (task, system, length)."""
        return {
            place: estimate(self.places[place], task.kind)
            for task in self.plan.tasks
            for system in self.plan.systems
            for length in self.plan.lengths
            for place in [(task.name, system.name, length)]
        }

    @cached_property
    def by_depth(self) -> dict[tuple[str, str, int, int], Estimate]:
        """Rates by (task, system, length, depth bin), where there are bins."""
        cells: dict[tuple[str, str, int, int], list[Outcome]] = {}
        for (task, system, length), outcomes in self.places.items():
            for outcome in outcomes:
                if outcome.bin is not None:
                    cells.setdefault((task, system, length, outcome.bin), []).append(outcome)
        return {place: estimate(group, "rate") for place, group in cells.items()}

    @cached_property
    def suites(self) -> dict[str, list[Task]]:
        """Tasks that are averaged, by the name of the suite."""
        suites: dict[str, list[Task]] = {}
        for task in self.plan.tasks:
            if suite := getattr(task, "suite", None):
                suites.setdefault(suite, []).append(task)
        return suites

    def average(self, suite: str, system: str, length: int) -> Estimate:
        """Mean over the tasks of a suite, each counting alike, as RULER has it.

        Its interval is that of all prompts together, somewhat wide where tasks differ.
        """
        tasks = [self.estimates[task.name, system, length] for task in self.suites[suite]]
        mean = math.fsum(task.value for task in tasks) / len(tasks)
        count = sum(task.count for task in tasks)
        return Estimate(mean, *rate_interval(min(mean * count, count), count), count)

    def threshold(self, suite: str) -> str | None:
        """What the longest length at ``EFFECTIVE`` is called; None where a suite has none.

        It is an effective length where all tasks of RULER are measured, over which it is defined.
        """
        size = self.suites[suite][0].suite_size
        if size is None:
            return None
        whole = len(self.suites[suite]) == size
        return "effective length" if whole else f"{EFFECTIVE:.1%} up to"

    def holds_up_to(self, suite: str, system: str) -> int | None:
        """The longest length up to which the suite's average stays at ``EFFECTIVE`` or above."""
        effective = None
        for length in self.plan.lengths:
            if self.average(suite, system, length).value < EFFECTIVE:
                break
            effective = length
        return effective

    def reference(self, system: System) -> int | None:
        """The longest length within the trained one: where the cost of a method is read off."""
        within = [length for length in self.plan.lengths if length <= system.trained]
        return within[-1] if within else None

    def unpatched(self, system: System) -> System:
        """The system without a method on the same model."""
        return next(
            s for s in self.plan.systems if s.model == system.model and s.method == UNPATCHED
        )

    @cached_property
    def costs(self) -> dict[tuple[str, str], Estimate | None]:
        """By (task, system) at the reference length, against the unpatched model: + is worse."""
        costs = {}
        for task in self.plan.tasks:
            for system in self.plan.systems:
                length = self.reference(system)
                if system.method == UNPATCHED or length is None:
                    continue
                names = (system.name, self.unpatched(system).name)
                method, unpatched = (self.places[task.name, name, length] for name in names)
                costs[task.name, system.name] = cost(method, unpatched, task.kind)
        return costs

    @cached_property
    def differences(self) -> dict[tuple[str, str, str], Estimate]:
        """By (task, one, other): how much one is above the other on identical cases.

        All lengths beyond the trained one together, or all lengths where none is.
        """
        found = {}
        for task in self.plan.tasks:
            for one, other in combinations(self.plan.systems, 2):
                limit = max(one.trained, other.trained)
                lengths = [n for n in self.plan.lengths if n > limit] or self.plan.lengths
                ours, theirs = (
                    [o for n in lengths for o in self.places[task.name, system.name, n]]
                    for system in (one, other)
                )
                gap = difference(ours, theirs, task.kind)
                if gap is not None:
                    found[task.name, one.name, other.name] = gap
        return found

    @cached_property
    def trainings(self) -> list[Training]:
        """One for each model that is measured before and after the training of an adapter."""
        plan = self.plan
        pairs = [
            (before, after)
            for before in plan.systems
            for after in plan.systems
            if after.adapted and not before.adapted
            if (before.model, before.method) == (after.model, after.method)
        ]
        return [
            Training(self.unpatched(before), before, after, plan.tasks, plan.lengths, self.places)
            for before, after in pairs
        ]

    @cached_property
    def recommendations(self) -> list[str]:
        """What to conclude for each model.

        What training changed, where ``before`` and ``adapter`` are measured; elsewhere, given
        perplexity and passkeys, which method to use (see ``recommend``).
        """
        if self.trainings:
            return [
                f"{words}: {training.sentence()}" if words else training.sentence()
                for training in self.trainings
                for words in [training.unpatched.name.removesuffix(UNPATCHED).strip()]
            ]
        return [sentence for sentence, _ in self._advice]

    @property
    def next_commands(self) -> list[list[str]]:
        """What to type next: of an adapter, or by model."""
        settings = self.plan.settings
        if settings.servers:
            return []
        if settings.adapter and (self.trainings or not self._advice):
            return [self._merging]
        return [words for _, words in self._advice] or list(map(self._after, settings.models))

    @property
    def _trains(self) -> bool:
        """Whether the next command trains: a recipe cannot raise the factor of a checkpoint."""
        settings = self.plan.settings
        return settings.finetune and settings.compose != "raise" and settings.adapter is None

    @property
    def optional_commands(self) -> list[list[str]]:
        """What may be typed before: where the next command trains, the calibration of a method."""
        settings = self.plan.settings
        if not (self._trains and self._advice):
            return []
        return [self._calibrating(m, settings.methods[0], finetune=True) for m in settings.models]

    @property
    def _merging(self) -> list[str]:
        adapter = str(self.plan.settings.adapter)
        return ["python", "recipes/merge.py", adapter, "--output", unused("merged")]

    def _after(self, model: str) -> list[str]:
        """The command after tasks that recommend nothing."""
        settings = self.plan.settings
        if all(system.method == UNPATCHED for system in self.plan.systems):
            trained = max(system.trained for system in self.plan.systems)
            longer = max(4 * trained, *settings.lengths)
            return command_words("recommend", model, length=longer)
        return self._comparing(model, settings.lengths, "--output", unused("compared"))

    def _comparing(self, model: str, lengths: Sequence[int], *given: str) -> list[str]:
        """The command that measures the same methods by perplexity and passkeys."""
        settings = self.plan.settings
        words = command_words(
            "compare",
            model,
            method=",".join(settings.methods),
            factor=settings.factor,
            lengths=",".join(map(str, lengths)),
            adapter=settings.adapter,
            option=[
                f"{method}.{name}={value!r}"
                for method, chosen in settings.options.items()
                for name, value in chosen.items()
            ],
            finetune=settings.finetune,
            text=list(self._texts),
            compose=settings.compose,
        )
        return [*words, *given, *self._more]

    def _calibrating(self, model: str, method: str, finetune: bool) -> list[str]:
        more = [*text_words(self._texts), *self._more, *(["--finetune"] if finetune else [])]
        length, output = max(self.plan.settings.lengths), unused("calibrated")
        return calibration_command(
            model, method, length, output, bool(self.plan.settings.compose), more
        )

    def _training(self, model: str, trained: int) -> list[str]:
        settings, method = self.plan.settings, self.plan.settings.methods[0]
        return training_command(
            *(model, method, trained, reach(settings.factor, trained)),
            options=settings.options.get(method),
            compose=bool(settings.compose),
            text=str(self._texts[0]) if self._texts else None,
            cpu=self.plan.identities[model]["device"] == "cpu",
        )

    @cached_property
    def _advice(self) -> list[tuple[str, list[str]]]:
        """For each model, which method to use, and what to type next."""
        names = {task.name for task in self.plan.tasks}
        if self.plan.settings.servers or not names >= {"perplexity", "passkey"}:
            return []
        scores, advice = gather(self.outcomes), []
        for model in self.plan.settings.models:
            ours = [s for s in self.plan.systems if s.model == model]
            if len(ours) > 1:
                table = {s.label: scores[s.name] for s in ours}
                given = (self.plan.settings.compose, self.plan.settings.trained_length)
                patched = [system for system in ours if system.method != UNPATCHED]
                engines = engines_of(patched, *given)
                found = recommend(table, ours[0].trained, engines)
                if found.broken:  # no method mends the weights
                    words = command_words("describe", model)
                else:
                    words = self._next(model, ours[0].trained, found.choice)
                sentence = f"{found} Next: {shlex.join(words)}"
                name = ours[0].name.removesuffix(UNPATCHED).strip()
                advice.append((f"{name}: {sentence}" if name else sentence, words))
        return advice

    def _next(self, model: str, trained: int, choice: Evidence | None) -> list[str]:
        """The command to go on with: train, calibrate or merge what helps, or measure more."""
        settings = self.plan.settings
        if choice is not None and settings.adapter:
            return self._merging
        if self._trains:
            return self._training(model, trained)
        if choice is not None:
            method = next(
                s.method for s in self.plan.systems if s.model == model and s.label == choice.name
            )
            if settings.compose == "raise":  # which a calibration cannot
                engine = next(iter(choice.engines), "transformers")
                patch = {"method": method, "factor": settings.factor, "compose": "raise"}
                return command_words("export", model, **patch, engine=engine)
            return self._calibrating(model, method, finetune=False)
        target = reach(settings.factor, trained)
        tasks = self.plan.tasks
        enough = all(max(getattr(t, n, 0) for t in tasks) >= least for n, least in _MORE.items())
        if max(settings.lengths) <= trained or enough:
            tuned, text = max(settings.lengths) > trained, list(self._texts)
            return command_words("recommend", model, length=target, finetune=tuned, text=text)
        asked = [word for name, value in _MORE.items() for word in (f"--{name}", str(value))]
        longest = [max(settings.lengths)]
        return self._comparing(model, longest, *asked, "--output", unused("more"))

    @property
    def _more(self) -> list[str]:
        """Options that a command for the same model takes over."""
        settings = self.plan.settings
        given = {"dtype": settings.dtype, "device": settings.device}
        given |= {"trained-length": settings.trained_length}
        return [f"--{name}={value}" for name, value in given.items() if value not in (None, "auto")]

    @property
    def _texts(self) -> Sequence[Path | str]:
        """``--text`` as it was given."""
        return next((t.text for t in self.plan.tasks if isinstance(t, Perplexity)), ())

    @cached_property
    def sections(self) -> list[Section]:
        """What the page shows: every training, every suite, then every task."""
        sections = [
            Section("before and after training", DEFINITION, [training.table()])
            for training in self.trainings
        ]
        sections += [
            Section(
                suite,
                self._define(suite),
                [self._suite_table(suite)],
            )
            for suite in self.suites
        ]
        for task in self.plan.tasks:
            definitions = {
                self.plan.questions[model, task.name].definition
                for model in self.plan.settings.models
            }
            definition = "; ".join(sorted(definitions))
            tables = [self._task_table(task), *self._difference_tables(task)]
            sections.append(Section(task.name, definition[0].upper() + definition[1:], tables))
        return sections

    def _define(self, suite: str) -> str:
        tasks, name = self.suites[suite], self.threshold(suite)
        size = tasks[0].suite_size
        some = "" if name is None or len(tasks) == size else f" of {size}"
        parts = [f"mean of {len(tasks)}{some} tasks, each counting alike"]
        if name is not None:
            parts.append(f"{name}: the longest up to which that mean is at least {EFFECTIVE:.1%}")
        if some:
            parts.append("an effective length is defined over all of them (arXiv 2404.06654)")
        elif name is not None:
            parts[-1] += " (arXiv 2404.06654)"
        return f"{'; '.join(parts)}, exact intervals"

    def _task_table(self, task: Task) -> Table:
        """Systems down; the cost within the trained length, then all lengths across."""
        systems, lengths = self.plan.systems, self.plan.lengths
        trained = {system.trained for system in systems}
        shown = interval if task.kind == "loss" else percent
        references = sorted({n for n in map(self.reference, systems) if n is not None})
        at = " / ".join(map(str, references))
        header = ["method", *(f"{n} tokens{' (trained)' * (n in trained)}" for n in lengths)]
        if references:
            unit = "%" if task.kind == "loss" else "points"
            header.insert(1, f"cost at {at}, {unit} (+: worse)")
        rows = []
        for system in systems:
            cells = [Cell(system.name)]
            if references:
                cells.append(self._cost_cell(task, system))
            cells += [Cell(shown(self.estimates[task.name, system.name, n])) for n in lengths]
            rows.append(Row(tuple(cells), system.method == UNPATCHED))
        compared = sum(bool(row.cells[1].text) for row in rows) if references else 0
        words = (f"Cost: {chance(compared)}",) if compared else ()
        return Table("", tuple(header), tuple(rows), words)

    def _cost_cell(self, task: Task, system: System) -> Cell:
        found = self.costs.get((task.name, system.name))
        if found is None:
            return Cell("")
        return Cell(signed(found), is_clear(found))

    def _difference_tables(self, task: Task) -> Iterator[Table]:
        """One table per model: row less column."""
        for model in self.plan.settings.models:
            names = [s.name for s in self.plan.systems if s.model == model]
            if not any((task.name, *pair) in self.differences for pair in combinations(names, 2)):
                continue
            trained = next(s.trained for s in self.plan.systems if s.model == model)
            unit = "% of perplexity" if task.kind == "loss" else "percentage points"
            beyond = (
                f"beyond {trained} tokens" if self.plan.lengths[-1] > trained else "all lengths"
            )
            rows = []
            for index, name in enumerate(names[:-1]):
                cells = [Cell(name)]
                for other in names[1:]:
                    gap = self.differences.get((task.name, name, other))
                    if gap is None or names.index(other) <= index:
                        cells.append(Cell(""))
                    else:
                        cells.append(Cell(signed(gap), is_clear(gap)))
                rows.append(Row(tuple(cells)))
            count = sum(bool(cell.text) for row in rows for cell in row.cells[1:])
            title = f"Row less column on identical cases, {beyond} ({unit})"
            yield Table(title, ("", *names[1:]), tuple(rows), (BOLD, chance(count)))

    def _suite_table(self, suite: str) -> Table:
        lengths, name = self.plan.lengths, self.threshold(suite)
        rows = []
        for system in self.plan.systems:
            values = [percent(self.average(suite, system.name, n), 1) for n in lengths]
            if name is not None:
                longest = self.holds_up_to(suite, system.name)
                values.insert(0, f"below {lengths[0]}" if longest is None else str(longest))
            cells = (system.name, *values)
            rows.append(Row(tuple(map(Cell, cells)), system.method == UNPATCHED))
        columns = [] if name is None else [name]
        header = ("method", *columns, *(f"{n} tokens" for n in lengths))
        return Table("", header, tuple(rows))

    def print(self) -> None:
        """Print the tables, their definitions and the recommendation; a file gets long lines."""
        console = wide_console(80)
        for section in self.sections:
            table = _rich(section.name, section.tables[0])
            if not console.is_terminal:
                whole = console.options.update(max_width=10**4)
                console.width = max(console.width, Measurement.get(console, whole, table).maximum)
            console.print(table)
            console.print(f"{section.definition}.\n", style="dim", highlight=False)
        for part in self.essentials:
            console.print(part, style="dim", highlight=False, markup=False)
        for sentence in (*self.plan.refusals, *self.warnings):
            console.print(f"Note: {sentence}.", style="yellow", highlight=False, markup=False)
        for sentence in self.recommendations:
            console.print(sentence, style="bold", highlight=False, markup=False)

    @property
    def notes(self) -> list[str]:
        """What a reader of the results should know."""
        return [*self.plan.notes, *self.warnings]

    @cached_property
    def warnings(self) -> list[str]:
        """What the results themselves say against their use."""
        low, led, notes = [], [], []
        for system in self.plan.systems:
            length = self.reference(system)
            found = self.estimates.get(("passkey", system.name, length or 0))
            if system.method == UNPATCHED and found is not None and found.value < MIN_FOUND:
                low.append(f"{found.value:.0%} at {length} tokens ({system.name})")
            right = [o for o in self.outcomes if o.system == system.name and o.value == 1]
            right = [o for o in right if o.led is not None]
            if others := sum(not o.led for o in right):
                led.append(f"{others} of {len(right)} ({system.name})")
        if low:
            notes.append(
                f"within its trained length the unpatched model finds few passkeys, "
                f"{', '.join(low)}, so those found beyond say little about a method; try --needle "
                f"word or --digits 3"
            )
        if led:
            notes.append(
                f"digits right, first token wrong: in {', '.join(led)} of the passkeys found, the "
                f"model would begin its answer otherwise than with the space that it is given"
            )
        return notes

    def write(self) -> list[Path]:
        """Write JSON, CSV, Markdown, pictures and the page; returns their paths.

        Raises:
            MeasureError: a file cannot be written, or would replace one that is not ours.
        """
        pictures = list(self._draw())
        texts = (dump(self.to_json()), self._csv(), self.markdown(), self._page(pictures))
        contents = {
            name: text.encode() for name, text in zip((RESULTS, *TABLES, PAGE), texts, strict=True)
        }
        contents |= {f"{name}.png": content for _, name, content in pictures}
        return self.plan.folder.write(contents)

    @property
    def title(self) -> str:
        """Of the page and the pictures."""
        names = ", ".join(Path(model).name for model in self.plan.settings.models)
        return f"{names}: {', '.join(section.name for section in self.sections)}"

    def markdown(self) -> str:
        """All tables, to paste into a model card."""
        parts = []
        for section in self.sections:
            parts += [f"### {section.name}", section.tables[0].markdown(), f"{section.definition}."]
        parts += self.recommendations
        parts += [f"Note: {note}." for note in self.notes]
        parts.append(f"95 % intervals. {' '.join(self.essentials)}")
        return "\n\n".join(parts) + "\n"

    @cached_property
    def essentials(self) -> list[str]:
        """What anyone who quotes a number must quote with it: settings, tasks, versions."""
        settings, identity = self.plan.settings, next(iter(self.plan.identities.values()))
        rows = [f"factor {settings.factor:g}"]
        rows += [system.label for system in self.plan.systems if system.label != system.method]
        rows += [f"adapter {settings.adapter}"] if settings.adapter else []
        dtype = settings.dtype
        if dtype == "auto":
            dtype = f"auto ({'float32' if identity['device'] == 'cpu' else 'of the checkpoint'})"
        rows += [f"seed {settings.seed}", f"dtype {dtype}", f"device {identity['device']}"]
        if settings.url is not None:
            served = [
                f"{server.served_model_name} served at {server.url}" for server in settings.servers
            ]
            rows = [*served, f"prompts by {settings.api}", f"seed {settings.seed}"]
        if self.plan.chat:
            used = {True: "chat template", False: "no chat template"}
            rows += (
                [used[chat] for chat in self.plan.chat.values()]
                if len(self.plan.chat) == 1
                else [f"{used[chat]} for {model}" for model, chat in self.plan.chat.items()]
            )
        versions = identity["versions"]
        told = [f"{n} {versions[n]}" for n in ("rope_ext", "torch", "transformers", "python")]
        asked = []
        for task in self.plan.tasks:
            values = [f"{k}={_short(v)}" for k, v in task_options(task).items() if v not in _UNSET]
            asked.append(f"{task.name} ({', '.join(values)})" if values else task.name)
        return [
            *self.reading,
            f"Settings: {', '.join(rows)}.",
            f"Tasks: {', '.join(dict.fromkeys(asked))}.",
            f"Versions: {', '.join(told)}.",
        ]

    @property
    def reading(self) -> list[str]:
        """How the recommendation relates to the tables, and its rule for a low cost."""
        parts, trained = [], max(system.trained for system in self.plan.systems)
        if not self.recommendations:
            return []
        if len(self.plan.lengths) > 2 or min(self.plan.lengths) > trained:
            parts.append(
                "numbers beyond the trained length, and passkeys within it, are of all lengths "
                "there together"
            )
        if not self.trainings:
            parts.append(
                f'"at most {MAX_COST:.0%}" holds if the upper end of the interval of perplexity '
                f"does, and no more than {100 * MAX_COST:g} points of passkeys are clearly lost"
            )
            if len(self.plan.systems) > len(self.plan.settings.models) + 1:
                parts.append(
                    "intervals of passkey costs and whether methods differ have 95 % for all "
                    "methods together (Bonferroni), and are wider than those of the table, which "
                    "have 95 % each"
                )
        return [f"Summary: {'; '.join(parts)}."] if parts else []

    def to_json(self) -> dict[str, Any]:
        """Everything about the run as plain data, less the single cases, which the log has."""
        plan = self.plan
        return {
            "recommendations": self.recommendations,
            "definitions": {section.name: section.definition for section in self.sections},
            "notes": self.notes,
            "chat_template": plan.chat,
            "refused": plan.refused,
            "settings": plan.settings.to_json(),
            "systems": [
                {
                    "name": system.name,
                    "model": system.model,
                    "method": system.method,
                    "adapted": system.adapted,
                    "label": system.label,
                    "options": system.options,
                    "trained_length": system.trained,
                    "reference_length": self.reference(system),
                }
                for system in plan.systems
            ],
            "lengths": plan.lengths,
            "tasks": [
                {
                    "name": task.name,
                    "kind": task.kind,
                    "suite": task.suite,
                    "options": task_options(task),
                }
                for task in plan.tasks
            ],
            "identities": plan.identities,
            "summary": [
                {"task": task, "system": system, "length": length, **_numbers(value)}
                for (task, system, length), value in self.estimates.items()
            ],
            "costs": [
                {"task": task, "system": system, "positive_is": "worse", **_numbers(value)}
                for (task, system), value in self.costs.items()
                if value is not None
            ],
            "differences": [
                {"task": task, "system": one, "less": other, **_numbers(value)}
                for (task, one, other), value in self.differences.items()
            ],
            "suites": {
                suite: {
                    system.name: {
                        **self._threshold_json(suite, system.name),
                        "average": {
                            str(n): _numbers(self.average(suite, system.name, n))
                            for n in plan.lengths
                        },
                    }
                    for system in plan.systems
                }
                for suite in self.suites
            },
            "curves": [
                {"task": task, "system": system, "up_to": edge, **_numbers(value)}
                for task in [task.name for task in plan.tasks]
                for (system, edge), value in self.curve(task).items()
            ],
        }

    def _threshold_json(self, suite: str, system: str) -> dict[str, int | None]:
        name = self.threshold(suite)
        if name is None:
            return {}
        key = "effective_length" if name == "effective length" else "threshold_up_to"
        return {key: self.holds_up_to(suite, system)}

    def _csv(self) -> str:
        file = io.StringIO(newline="")
        table = csv.writer(file)
        asked = {task.name: task_options(task) for task in self.plan.tasks}
        names = list(dict.fromkeys(name for values in asked.values() for name in values))
        systems = {system.name: system for system in self.plan.systems}
        table.writerow(
            [
                *("task", "system", "length", "depth_bin", "value", "low", "high", "count", "note"),
                *("model", "method", "options", "trained_length", "seed", "dtype", *names),
            ]
        )
        for place, value in self.estimates.items():
            system, settings = systems[place[1]], self.plan.settings
            more = [system.model, system.method, _plain(system.options), system.trained]
            more += [settings.seed, settings.dtype]
            more += [_plain(asked[place[0]].get(name)) for name in names]
            table.writerow([*place, "", *asdict(value).values(), *more])
            bins = [(key, e) for key, e in self.by_depth.items() if key[:3] == place]
            for (*_, depth), cell in bins:
                table.writerow([*place, depth, *asdict(cell).values(), *more])
        return file.getvalue()

    def curve(self, task: str) -> dict[tuple[str, int], Estimate]:
        """Perplexity between two positions of the longest windows, by (system, later one)."""
        curve: dict[tuple[str, int], Estimate] = {}
        for system in self.plan.systems:
            outcomes = self.places[task, system.name, self.plan.lengths[-1]]
            outcomes = [outcome for outcome in outcomes if len(outcome.curve) > 1]
            for index in range(len(outcomes[0].curve) if outcomes else 0):
                losses: dict[int, list[float]] = {}
                for outcome in outcomes:
                    position, total, count = outcome.curve[index]
                    _, less, before = outcome.curve[index - 1] if index else (0, 0.0, 0)
                    entry = losses.setdefault(outcome.group, [0.0, 0])
                    entry[0] += total - less if math.isfinite(total) else math.inf
                    entry[1] += count - before
                means = [total / count for total, count in losses.values()]
                weights = [count for _, count in losses.values()]
                curve[system.name, position] = estimate_perplexity(means, weights)
        return curve

    def _draw(self) -> Iterator[tuple[str, str, bytes]]:
        """(task or suite, name, PNG) of every picture."""
        trained = {system.name: system.trained for system in self.plan.systems}
        names = ", ".join(Path(model).name for model in self.plan.settings.models)
        for task in self.plan.tasks:
            if task.kind == "loss":
                part = {
                    place[1:]: e for place, e in self.estimates.items() if place[0] == task.name
                }
                file = io.BytesIO()
                figures.draw_perplexity(part, trained, f"{names}: {task.name} by length", file)
                yield task.name, task.name, file.getvalue()
                if curve := self.curve(task.name):
                    file = io.BytesIO()
                    title = f"{names}: {task.name} by position in {self.plan.lengths[-1]} tokens"
                    axis = "tokens up to this position, from the one before"
                    first = self.plan.lengths[0]
                    ticks = [4**k for k in range(1, 12) if 2 * 4**k < first]
                    ticks += self.plan.lengths
                    figures.draw_perplexity(curve, trained, title, file, axis, ticks)
                    yield task.name, f"{task.name}_positions", file.getvalue()
            elif part := {p[1:]: e for p, e in self.by_depth.items() if p[0] == task.name}:
                file = io.BytesIO()
                figures.draw_depths(part, trained, f"{names}: {task.name}, % found", file)
                yield task.name, task.name, file.getvalue()
        rates = [task.name for task in self.plan.tasks if task.kind == "rate"]
        part = {place: e for place, e in self.estimates.items() if place[0] in rates}
        if part:
            file = io.BytesIO()
            figures.draw_rates(part, trained, file)
            yield next(iter(self.suites), rates[0]), "rates", file.getvalue()

    def _page(self, pictures: Sequence[tuple[str, str, bytes]]) -> str:
        told = f"Intervals are 95 %. All methods get the same texts and prompts. {BOLD}"
        sections = []
        for section in self.sections:
            mine = [
                page.Picture(f"{name} of {self.title}", content)
                for place, name, content in pictures
                if place == section.name
            ]
            words = (f"{section.definition}. {told}",)
            sections.append(page.Section(section.name, words, section.tables, mine))
        data = self.to_json()
        settings = {name: data[name] for name in ("settings", "systems", "tasks", "identities")}
        notes = [f"Note: {note}." for note in self.notes]
        return page.render(
            *(self.title, self.recommendations, notes, sections, dump(settings), self.essentials)
        )


def chance(count: int) -> str:
    """How many of so many comparisons would be bold if all systems were equal."""
    return (
        f"{count} comparison{'s' * (count != 1)}: if there were no differences, about "
        f"{(1 - CONFIDENCE) * count:.2g} would be bold by chance."
    )


def _rich(name: str, table: Table) -> RichTable:
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, title=name, title_justify="left")
    for header in table.header:
        header = header.replace(" (trained)", "\n(trained)").replace(", ", ",\n")
        shown.add_column(header, overflow="fold")
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row.cells))
    return shown


def _numbers(value: Estimate) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {k: None if v == math.inf else v for k, v in asdict(value).items()}


def task_options(task: Task) -> dict[str, Any]:
    """What can be set of a task, such as windows, trials and depths, by the name of the field."""
    return {one.name: getattr(task, one.name) for one in options(type(task))}


_UNSET = (None, False, (), [], "")


def _short(value: Any) -> str:
    """An option of a task in a sentence."""
    many = isinstance(value, (tuple, list))
    return "+".join(map(str, value)) if many else str(value)


def _plain(value: Any) -> Any:
    """A value in a cell of a CSV file: a list or several options as JSON."""
    if isinstance(value, (Mapping, tuple, list)):
        return json.dumps(value, default=str)
    return value
