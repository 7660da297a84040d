"""The report: curves, paired intervals, costs, and published rankings for comparison.

Every sentence on it is computed from the numbers.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lab.laboratory import log
from lab.laboratory.model import ROPE
from lab.laboratory.paired import LEAST, Difference, difference
from lab.laboratory.plots import panels, picture_of
from lab.laboratory.published import PUBLISHED, hold
from lab.laboratory.results import (
    AT,
    FAR,
    FOUND,
    LONGER,
    PEAK,
    SECONDS,
    SPEED,
    BySeed,
    Results,
)
from lab.laboratory.tasks import MOST
from rope_eval.plots.style import require_matplotlib
from rope_eval.reports.page import Cell, Row, Section, Table, render
from rope_eval.versions import versions

PAGE = "laboratory.html"
NUMBERS = "laboratory.json"
TABLES = "laboratory.md"
PICTURE = "laboratory.png"
_NONE = "\u2013"
_SAME = "the same"
_SHARES = (-3.0, 103.0)  # axis limits in percent
_MOST_NAMES = 8  # in a sentence


def contents(
    settings: Mapping[str, Any], cells: Mapping[log.Cell, Mapping[str, Any]]
) -> dict[str, bytes]:
    """The page, its numbers, its tables in Markdown, and the losses by length, by file name.

    Raises:
        MeasureError: matplotlib is not installed.
    """
    require_matplotlib()
    results = Results(settings, cells)
    sections = [_glance(results)]
    if results.lengths:
        sections += [_loss(results), _retrieval(results)]
    if results.tasks:
        sections.append(_tasks(results))
    sections.append(_training(results))
    if results.choices:
        sections.append(_rates(results))
    sections.append(_published(results))
    page = render(
        "One small decoder, one position encoding at a time",
        sentences=_lead(results),
        notes=_notes(results),
        sections=sections,
        settings=json.dumps({"settings": dict(settings), "versions": versions()}, indent=1),
        essentials=[_essentials(settings)],
    )
    numbers = {
        "settings": dict(settings),
        "measures": results.measures,
        "cells": [{"cell": vars(cell)} | dict(record) for cell, record in cells.items()],
    }
    tables = [
        f"### {table.title or section.name}\n\n{table.markdown()}\n\n{' '.join(table.sentences)}\n"
        for section in sections
        for table in section.tables
    ]
    files = {
        PAGE: page.encode(),
        NUMBERS: json.dumps(numbers, indent=1).encode(),
        TABLES: "\n".join(tables).encode(),
    }
    if results.lengths:
        files[PICTURE] = sections[1].pictures[0].content
    return files


def _essentials(settings: Mapping[str, Any]) -> str:
    """Settings and versions that belong to every quoted number."""
    told = [f"{name} {_words(value)}" for name, value in settings.items()]
    known = versions()
    told += [f"{name} {known[name]}" for name in ("rope_ext", "torch", "transformers", "python")]
    return f"Settings and versions: {', '.join(told)}."


def _words(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _lead(results: Results) -> list[str]:
    """The conclusions, computed: setting, loss within and beyond, words, problems, cost."""
    s = results.settings
    seeds = len(results.seeds)
    problems = f" and {s['problem_steps']} on problems" if results.tasks else ""
    words = [
        f"{s['layers']} layers of width {s['width']}, {s['heads']} heads, {s['steps']} steps on "
        f"text{problems}, {seeds} {'seed' if seeds == 1 else 'seeds'}. "
        f"Initial weights, rows and their order are identical; only the encoding "
        f"{'and its chosen learning rates differ' if results.choices else 'differs'}."
    ]
    kinds = [
        (AT, False, "the lowest loss at the trained length"),
        (FAR, False, f"the lowest loss at {_longest(results)} bytes"),
        (FOUND, True, f"the most words found at {_longest(results)} bytes"),
        (LONGER, True, f"the most problems of more than {MOST} items solved"),
    ]
    for measure, rising, told in kinds:
        by = results.measures.get(measure, {})
        values = _means(by)
        if len(values) < 2:
            continue
        order = sorted(values, key=lambda name: values[name], reverse=rising)
        best = order[0]
        value = _number(measure, values[best])
        # Equal as shown, since further digits tell nothing.
        ties = [name for name in order if _number(measure, values[name]) == value]
        if rising and value == _number(measure, 0):
            words.append(f"None: {told.removeprefix('the most ')}.")
        elif rising and len(ties) > 1:
            words.append(f"{len(ties)} tie for {told} ({value}): {', '.join(sorted(ties))}.")
        else:
            also = _also(by, order, seeds)
            words.append(f"{best} has {told} ({value}){also}.")
    seconds = _means(results.measures[SECONDS])
    if ROPE in seconds and len(seconds) > 1:
        dear = max(seconds, key=lambda name: seconds[name])
        words.append(
            f"A training step takes up to {seconds[dear] / seconds[ROPE]:.2f} times as long as "
            f"with {ROPE} ({dear})."
        )
    return words


def _also(by: Mapping[str, BySeed], order: Sequence[str], seeds: int) -> str:
    """Name those that are not clearly worse than the first, and those with too few seeds."""
    near = []
    few = []
    for name in order[1:]:
        found = difference(by[name], by[order[0]])
        if found and not found.clear:
            (few if found.low is None else near).append(name)
    also = f"; no clear difference from it: {_some(near)}" if near else ""
    # With few seeds of all, the notes say so once.
    also += f"; too few seeds to tell: {_some(few)}" if few and seeds >= LEAST else ""
    return also


def _some(names: list[str]) -> str:
    """The first of many names, and the number of the others."""
    if len(names) <= _MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"


def _notes(results: Results) -> list[str]:
    notes = [f"{name}: {message}." for name, message in results.refused.items()]
    for size, names in sorted(results.ended.items()):
        notes.append(f"No position from {size} on, so no result: {', '.join(sorted(names))}.")
    seeds = len(results.seeds)
    if seeds < 3:
        notes.append(f"Intervals need three seeds; this run has {seeds}.")
    counts = Counter((cell.subject, cell.name) for cell in results.cells)
    short = sorted(f"{name} ({subject})" for (subject, name), n in counts.items() if n < seeds)
    if short:
        notes.append(f"Fewer seeds are finished for {', '.join(short)}.")
    return notes


def _glance(results: Results) -> Section:
    """Quality and cost in one table, ordered by the loss at the longest length."""
    shown = {m: results.measures[m] for m in (AT, FAR, FOUND, LONGER) if results.measures.get(m)}
    order = _means(shown.get(FAR, shown.get(LONGER, {})))
    sign = 1 if FAR in shown else -1
    own = _means(results.cost("own_parameters", results.cost_subject))
    rows = []
    for name in sorted(results.names, key=lambda name: sign * order.get(name, math.inf)):
        trained = name.partition("+")[0]
        seconds, peak = (_means(results.measures[what]) for what in (SECONDS, PEAK))
        relative = seconds[trained] / seconds[ROPE] if {trained, ROPE} <= seconds.keys() else None
        cells = [Cell(name), *(compared(measure, by, name) for measure, by in shown.items())]
        cells += [
            Cell(_NONE if relative is None else f"{relative:.2f}x"),
            Cell(f"{peak[trained] / 2**20:.1f} MiB" if trained in peak else _NONE),
            Cell(f"{own[trained]:.0f}" if trained in own else _NONE),
        ]
        rows.append(Row(tuple(cells)))
    header = ["encoding", *(_title(results, measure) for measure in shown)]
    header += ["time of a step", "memory of a step", "added parameters"]
    return Section(
        "At a glance",
        (
            f"Losses are in nats per byte. Below each number is its difference from {ROPE} with "
            f"the same seed and the 95 % interval (Student's t over seeds; rates in points), bold "
            f"if it excludes zero. With this many comparisons, one in twenty does so by chance. A "
            f"name with a + is the model before the +, evaluated with a method applied after "
            f"training. Costs are the time of a training step relative to {ROPE}, its peak memory "
            f"in tensors, and the additional parameters of the encoding.",
        ),
        [Table("", tuple(header), tuple(rows))],
    )


def _loss(results: Results) -> Section:
    lengths = results.lengths
    s = results.settings
    by = {length: results.text("loss", length) for length in lengths}
    width = lengths[0]
    places = {
        name: {(k + 1) * width: loss for k, loss in enumerate(found)}
        for name, found in results.positions().items()
    }
    y = "loss, nats per byte"
    pictures = [
        picture_of(
            panels(_swapped(by), x="context, bytes", y=y, trained=width, ticks=lengths),
            "loss by length, by kind",
        ),
        picture_of(
            panels(places, x="position in the longest rows, bytes", y=y, trained=width),
            "loss by position, by kind",
        ),
    ]
    return Section(
        name="Text: loss at and beyond the trained length",
        sentences=(
            f"Loss of the last {s['length'] // 2} bytes of the same {s['rows']} rows of held-out "
            f"text, with an increasing context before them. The second picture shows the loss of "
            f"every segment of the longest rows. Lines end where they leave the panel.",
        ),
        tables=[_table(by, AT, "bytes")],
        pictures=pictures,
    )


def _retrieval(results: Results) -> Section:
    lengths = results.lengths
    by = {length: results.text("retrieval", length) for length in lengths}
    sentences = [
        "A word of three tokens that does not occur in text is inserted anywhere and asked for at "
        f"the end, {results.settings['rows']} times at each length; chance is 1 in 17576."
    ]
    none = [name for name, mean in _means(by[lengths[0]]).items() if mean < 0.5]
    if none:
        sentences.append(
            f"Not learned in these steps (less than half of the words are found within the "
            f"trained length): {', '.join(none)}. Ignore their numbers beyond it."
        )
    figure = panels(
        _swapped(by, 100),
        x="context, bytes",
        y="words found, %",
        trained=lengths[0],
        ticks=lengths,
        limits=_SHARES,
    )
    return Section(
        name="Text: retrieval",
        sentences=tuple(sentences),
        tables=[_table(by, FOUND, "bytes")],
        pictures=[picture_of(figure, "words found by length, by kind")],
    )


def _tasks(results: Results) -> Section:
    tasks = results.tasks
    items = results.items
    longer = [n for n in items if n > MOST]
    within = [n for n in items if n <= MOST]
    tables = []
    for title, sizes in (
        (f"Up to {MOST} items, as trained", within),
        (f"More than {MOST}", longer),
    ):
        by = {task: results.exact(task, sizes) for task in tasks}
        by |= {"all": results.all_tasks(sizes)} if len(tasks) > 1 else {}
        tables.append(_table(by, measure=LONGER, unit="", title=title))
    sentences = [
        f"One model for all tasks, trained on up to {MOST} items. A problem is solved if every "
        f"token of its answer is the most likely one. The picture shows the mean over tasks, the "
        f"line the largest trained size."
    ]
    for task in tasks:
        means = _means(results.exact(task, within))
        learned = [name for name, mean in means.items() if mean >= 0.5]
        if len(learned) < len(means):
            sentences.append(
                f"{task}: {', '.join(learned) or 'none'} solve at least half within the trained "
                f"size; ignore the numbers of all others beyond it."
            )
    by_items = {n: results.all_tasks([n]) for n in items}
    figure = panels(_swapped(by_items, 100), x="items", y="solved, %", trained=MOST, limits=_SHARES)
    return Section(
        name="Length generalization",
        sentences=tuple(sentences),
        tables=tables,
        pictures=[picture_of(figure, "problems solved by items, by kind")],
    )


def _rates(results: Results) -> Section:
    """Chosen and tried learning rates by subject."""
    return Section(
        "Learning rates",
        (
            f"Chosen for every encoding, on text and on problems apart, by the training loss on "
            f"held-out rows that are not reported, with a seed of its own, in "
            f"{results.settings.get('choosing_share', 0):.0%} of the steps: first the rate of the "
            f"encoding's own parameters, then the size of its initial tables if they are random, "
            f"then the rate of the model. All are factors of the defaults; while the first or last "
            f"value is the best, another one beyond it is tried, at most twice. Other rates may be "
            f"better for all steps.",
        ),
        [_choices(f"On {subject}", found) for subject, found in results.choices.items()],
    )


def _choices(title: str, choices: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for name, record in choices.items():
        chosen = record["chosen"]
        tried = record["tried"]
        losses = {_rates_of(one): one["loss"] for one in tried}
        default = losses.get((1.0, 1.0, 1.0), math.inf)
        best = losses[_rates_of(chosen)]
        curve = ", ".join(
            f"{one['encoding']:g}: {one['loss']:.3f}"
            for one in sorted(tried, key=lambda one: one["encoding"])
            if (one["model"], one["initial"]) == (1.0, 1.0)
        )
        cells = [f"{chosen['model']:g}", f"{chosen['encoding']:g}", f"{chosen['initial']:g}"]
        if not record["own"]:
            cells[1:] = [_NONE, _NONE]
            curve = _NONE
        cells += [f"{default:.3f}", f"{best:.3f}", str(len(tried)), curve]
        rows.append(Row((Cell(name), *map(Cell, cells))))
    header = ("", "rate of the model", "rate of the encoding", "initial tables")
    header += (
        "loss with the defaults",
        "loss as chosen",
        "trainings",
        "loss by the encoding's rate",
    )
    return Table(title, header, tuple(rows))


def _rates_of(record: Mapping[str, float]) -> tuple[float, float, float]:
    return record["model"], record["encoding"], record["initial"]


def _training(results: Results) -> Section:
    """Training loss curves by subject, and the steps to reach RoPE's loss."""
    pictures = []
    for subject in sorted({cell.subject for cell in results.cells}, reverse=True):
        lines = {
            name: {
                step: statistics.fmean(losses)
                for step, losses in curve.items()
                if step >= results.settings["steps"] / 10
            }
            for name, curve in results.curves(subject).items()
        }
        figure = panels(lines, "step", "training loss, nats")
        pictures.append(picture_of(figure, f"training loss by step on {subject}, by kind"))
    rows = [
        Row((Cell(name), compared(SPEED, results.measures[SPEED], name)))
        for name in results.measures.get(SPEED, {})
    ]
    tables = [Table("", ("encoding", "steps to the loss of RoPE at half-time"), tuple(rows))]
    return Section(
        name="Training: how fast",
        sentences=(
            "Loss on all scored tokens, mean over seeds; for text, including answers. How fast an "
            "encoding learns: the steps until its training loss on text is that of RoPE of the "
            "same seed after half of the steps, interpolated between means of a twentieth of "
            "them. None: some seed never gets there.",
        ),
        tables=tables if rows else [],
        pictures=pictures,
    )


def _published(results: Results) -> Section:
    tables = []
    for published in PUBLISHED:
        held = hold(published, results.measures.get(published.measure, {}))
        if held is None:
            continue
        ours, sentences = held
        told = published.told or {name: f"{v:g}" for name, v in published.values.items()}
        rows = tuple(
            Row((Cell(name), Cell(told[name]), Cell(_number(published.measure, mean))))
            for name, mean in ours.items()
        )
        header = ("encoding", "published", f"here: {_title(results, published.measure)}")
        tables.append(
            Table(title=published.source, header=header, rows=rows, sentences=tuple(sentences))
        )
    sentences = [
        "Published results with other models and data, compared with the same encodings here. "
        "Where the two disagree, model size, data and training length differ, too."
    ]
    if not tables:
        sentences = ["Fewer than two encodings of any published ranking are finished."]
    return Section("Published rankings for comparison", tuple(sentences), tables)


def _table(
    by: Mapping[Any, Mapping[str, BySeed]], measure: str, unit: str, title: str = ""
) -> Table:
    """Means over seeds, each with its difference from RoPE."""
    names = dict.fromkeys(name for table in by.values() for name in table)
    rows = [Row((Cell(n), *(compared(measure, by[k], n) for k in by))) for n in names]
    header = ("encoding", *(f"{k} {unit}".strip() for k in by))
    return Table(
        title=title,
        header=header,
        rows=tuple(rows),
        sentences=("Bold: the 95 % interval excludes zero.",),
    )


def compared(measure: str, by: Mapping[str, BySeed], name: str) -> Cell:
    """The mean of a model over seeds and, below it, its difference from RoPE with an interval."""
    mean = _means(by).get(name)
    if mean is None or name == ROPE:
        return Cell(_NONE if mean is None else _number(measure, mean))
    found = difference(by[name], by.get(ROPE, {}))
    if found and found.low is not None and _is_share(measure):
        # The share with RoPE is ``mean - found.mean``: no difference leads beyond 0 or 1.
        found = found.within(-(mean - found.mean), 1 - (mean - found.mean))
    told = _signed(measure, found)
    return Cell(_number(measure, mean), bool(found and found.clear and told != _SAME), told)


def _means(by: Mapping[str, BySeed]) -> dict[str, float]:
    return {name: statistics.fmean(seeds.values()) for name, seeds in by.items() if seeds}


def _is_share(measure: str) -> bool:
    return "words" in measure or "problems" in measure


def _number(measure: str, value: float) -> str:
    if _is_share(measure):
        return f"{100 * value:.0f} %"
    if measure == SPEED:
        return f"{value:.0f}"
    return f"{value:.3g} s" if measure == SECONDS else f"{value:.3f}"


def _signed(measure: str, found: Difference | None) -> str:
    if found is None:
        return ""
    share = _is_share(measure)
    times = 100 if share else 1
    form = "+.0f" if share or measure == SPEED else "+.3f"
    told = [f"{times * v:{form}}" for v in (found.mean, found.low, found.high) if v is not None]
    told = ["0" if float(one) == 0 else one for one in told]
    if set(told) == {"0"}:
        return _SAME
    return told[0] if found.low is None else f"{told[0]} ({told[1]} to {told[2]})"


def _longest(results: Results) -> int:
    return results.lengths[-1] if results.lengths else 0


def _title(results: Results, measure: str) -> str:
    """The name of a measure, including its length."""
    if not results.lengths:
        return measure
    first = results.lengths[0]
    last = results.lengths[-1]
    return {
        AT: f"loss at {first}",
        FAR: f"loss at {last}",
        FOUND: f"words found at {last}",
        LONGER: f"problems > {MOST} items",
    }.get(measure, measure)


def _swapped(
    by: Mapping[int, Mapping[str, BySeed]], times: float = 1
) -> dict[str, dict[int, float]]:
    """Means by name and size, from seeds by size and name."""
    lines: dict[str, dict[int, float]] = {}
    for size, table in by.items():
        for name, mean in _means(table).items():
            lines.setdefault(name, {})[size] = times * mean
    return lines
