"""The report: curves, paired intervals, costs, and published rankings for comparison.

Every sentence on it is computed from the numbers.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.laboratory import log
from recipes.laboratory.model import ROPE
from recipes.laboratory.paired import Difference, difference
from recipes.laboratory.published import PUBLISHED, hold
from recipes.laboratory.results import (
    AT,
    FAR,
    FOUND,
    LONGER,
    PEAK,
    SECONDS,
    BySeed,
    Results,
)
from recipes.laboratory.tasks import MOST
from rope_eval.plots.style import (
    bare,
    figure_of,
    legend_below,
    mark_trained,
    require_matplotlib,
    style_of,
)
from rope_eval.reports.page import BOLD, Cell, Picture, Row, Section, Table, render
from rope_eval.versions import versions

PAGE, NUMBERS, TABLES = "laboratory.html", "laboratory.json", "laboratory.md"
_NONE = "\u2013"
WIDTH = 6.6  # of figures in inches: at 400 pixels, 10 points are still 8 pixels


def contents(
    settings: Mapping[str, Any], cells: Mapping[log.Cell, Mapping[str, Any]]
) -> dict[str, bytes]:
    """The page, its numbers, and its tables in Markdown, by file name.

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
    sections += [_training(results), _published(results)]
    page = render(
        "One small decoder, one position encoding at a time",
        _lead(results),
        _notes(results),
        sections,
        json.dumps({"settings": dict(settings), "versions": versions()}, indent=1),
        [_essentials(settings)],
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
    return {
        PAGE: page.encode(),
        NUMBERS: json.dumps(numbers, indent=1).encode(),
        TABLES: "\n".join(tables).encode(),
    }


def _essentials(settings: Mapping[str, Any]) -> str:
    """Settings and versions that belong to every quoted number."""
    told = [f"{name} {_words(value)}" for name, value in settings.items()]
    known = versions()
    told += [f"{name} {known[name]}" for name in ("rope_ext", "torch", "transformers", "python")]
    return f"Settings and versions: {', '.join(told)}."


def _words(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _lead(results: Results) -> list[str]:
    s, seeds = results.settings, len(results.seeds)
    words = [
        f"{s['layers']} layers of width {s['width']}, {s['heads']} heads, {s['steps']} steps on "
        f"text and {s['problem_steps']} on problems, {seeds} {'seed' if seeds == 1 else 'seeds'}. "
        f"Initial weights, rows and their order are identical; only the encoding differs."
    ]
    kinds = [
        (AT, False, "the lowest loss at the trained length"),
        (FAR, False, f"the lowest loss at {_longest(results)} bytes"),
        (FOUND, True, f"the most words found at {_longest(results)} bytes"),
        (LONGER, True, f"the most problems of more than {MOST} items solved"),
    ]
    for measure, rising, told in kinds:
        values = _means(results.measures.get(measure, {}))
        if len(values) < 2:
            continue
        order = sorted(values, key=lambda name: values[name], reverse=rising)
        if rising and values[order[0]] == 0:
            words.append(f"None: {told.removeprefix('the most ')}.")
            continue
        best = order[0]
        by = results.measures[measure]
        near = [
            name
            for name in order[1:]
            if (found := difference(by[name], by[best])) and not found.clear
        ]
        also = f"; no clear difference from it: {', '.join(near)}" if near else ""
        words.append(f"{best} has {told} ({_number(measure, values[best])}){also}.")
    return words


def _notes(results: Results) -> list[str]:
    notes = [f"{name}: {message}." for name, message in results.refused.items()]
    seeds = len(results.seeds)
    if seeds < 3:
        notes.append(f"Intervals need three seeds; this run has {seeds}.")
    counts = {
        (cell.subject, cell.name): sum(
            (c.subject, c.name) == (cell.subject, cell.name) for c in results.cells
        )
        for cell in results.cells
    }
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
        cells = [Cell(name), *(_compared(measure, by, name) for measure, by in shown.items())]
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
    lengths, s = results.lengths, results.settings
    by = {length: results.text("loss", length) for length in lengths}
    figure = figure_of(WIDTH, 7.6)
    above, below = figure.subplots(2, 1)
    _lines(above, results.names, _swapped(by))
    above.set(xscale="log", xlabel="context, bytes", ylabel="loss, nats per byte")
    above.set_xticks(lengths, [str(length) for length in lengths])
    above.minorticks_off()
    places = results.positions()
    width = lengths[0]
    curves = {
        n: {(k + 1) * width: loss for k, loss in enumerate(found)} for n, found in places.items()
    }
    _lines(below, results.names, curves)
    below.set(xlabel="position in the longest rows, bytes", ylabel="loss, nats per byte")
    _limit((above, below), [v for table in by.values() for v in _means(table).values()])
    for axes in (above, below):
        mark_trained(axes, [width], lengths[-1])
    legend_below(figure, above)
    return Section(
        "Text: loss at and beyond the trained length",
        (
            f"Loss of the last {s['length'] // 2} bytes of the same {s['rows']} rows of held-out "
            f"text, with an increasing context before them. The second figure shows the loss of "
            f"every segment of the longest rows.",
        ),
        [_table(by, AT, "bytes")],
        [picture_of(figure, "loss by length and by position")],
    )


def _retrieval(results: Results) -> Section:
    lengths = results.lengths
    by = {length: results.text("retrieval", length) for length in lengths}
    figure = figure_of(WIDTH, 4.6)
    axes = figure.subplots()
    _lines(axes, results.names, _swapped(by, 100))
    axes.set(xscale="log", xlabel="context, bytes", ylabel="words found, %", ylim=(-3, 103))
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    mark_trained(axes, [lengths[0]], lengths[-1])
    legend_below(figure, axes)
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
    return Section(
        "Text: retrieval",
        tuple(sentences),
        [_table(by, FOUND, "bytes")],
        [picture_of(figure, "words found by length")],
    )


def _tasks(results: Results) -> Section:
    tasks, items = results.tasks, results.items
    down = math.ceil(len(tasks) / 2)
    figure = figure_of(WIDTH, 2.6 * down + 1.4)
    grid = figure.subplots(down, min(2, len(tasks)), squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        axes.set_visible(True)
        by = {n: results.exact(task, [n]) for n in items}
        _lines(axes, results.names, _swapped(by, 100))
        axes.set(title=task, ylim=(-3, 103), xlabel="items", ylabel="solved, %")
        axes.axvline(MOST, color="#777777", linewidth=1, zorder=0)
    legend_below(figure, grid.flat[0])
    longer, within = [n for n in items if n > MOST], [n for n in items if n <= MOST]
    tables = []
    for title, sizes in (
        (f"Up to {MOST} items, as trained", within),
        (f"More than {MOST}", longer),
    ):
        by = {task: results.exact(task, sizes) for task in tasks}
        by |= {"all": results.all_tasks(sizes)} if len(tasks) > 1 else {}
        tables.append(_table(by, LONGER, "", title))
    sentences = [
        f"One model for all tasks, trained on up to {MOST} items. A problem is solved if every "
        f"token of its answer is the most likely one. The line marks the largest trained size."
    ]
    for task in tasks:
        unlearned = [n for n, mean in _means(results.exact(task, within)).items() if mean < 0.5]
        if unlearned:
            sentences.append(
                f"{task}: {', '.join(unlearned)} solve less than half even within the trained "
                f"size; ignore their numbers beyond it."
            )
    return Section(
        "Length generalization", tuple(sentences), tables, [picture_of(figure, "solved by items")]
    )


def _training(results: Results) -> Section:
    """Training loss curves, by subject."""
    subjects = sorted({cell.subject for cell in results.cells}, reverse=True)
    figure = figure_of(WIDTH, 2.8 * len(subjects) + 1.4)
    panels = figure.subplots(len(subjects), 1, squeeze=False)[:, 0]
    for axes, subject in zip(panels, subjects, strict=True):
        curves: dict[str, dict[int, list[float]]] = {}
        for cell, record in results.cells.items():
            if cell.subject == subject and "curve" in record:
                for step, loss in record["curve"]:
                    curves.setdefault(cell.name, {}).setdefault(step, []).append(loss)
        lines = {
            n: {step: statistics.fmean(losses) for step, losses in curve.items()}
            for n, curve in curves.items()
        }
        _lines(axes, results.names, lines, markers=False)
        axes.set(title=subject, xlabel="step", ylabel="training loss, nats")
    legend_below(figure, panels[0])
    return Section(
        "Training",
        ("Mean over seeds of the loss on all scored tokens; for text, including answers.",),
        pictures=[picture_of(figure, "training loss by step")],
    )


def _published(results: Results) -> Section:
    tables = []
    for published in PUBLISHED:
        held = hold(published, results.measures.get(published.measure, {}))
        if held is None:
            continue
        told = published.told or {name: f"{v:g}" for name, v in published.values.items()}
        rows = tuple(
            Row((Cell(name), Cell(told[name]), Cell(_number(published.measure, held.ours[name]))))
            for name in held.ours
        )
        header = ("encoding", "published", f"here: {_title(results, published.measure)}")
        tables.append(Table(published.source, header, rows, held.sentences))
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
    rows = [Row((Cell(n), *(_compared(measure, by[k], n) for k in by))) for n in _names(by)]
    header = ("encoding", *(f"{k} {unit}".strip() for k in by))
    return Table(title, header, tuple(rows), (BOLD,))


def _compared(measure: str, by: Mapping[str, BySeed], name: str) -> Cell:
    mean = _means(by).get(name)
    if mean is None or name == ROPE:
        return Cell(_NONE if mean is None else _number(measure, mean))
    found = difference(by[name], by.get(ROPE, {}))
    clear = bool(found and found.clear)
    return Cell(_number(measure, mean), clear, _signed(measure, found))


def _names(by: Mapping[Any, Mapping[str, BySeed]]) -> list[str]:
    return list(dict.fromkeys(name for table in by.values() for name in table))


def _means(by: Mapping[str, BySeed]) -> dict[str, float]:
    return {name: statistics.fmean(seeds.values()) for name, seeds in by.items() if seeds}


def _is_share(measure: str) -> bool:
    return "words" in measure or "problems" in measure


def _number(measure: str, value: float) -> str:
    if _is_share(measure):
        return f"{100 * value:.0f} %"
    return f"{value:.3g} s" if measure == SECONDS else f"{value:.3f}"


def _signed(measure: str, found: Difference | None) -> str:
    if found is None:
        return ""
    if found.mean == found.low == found.high == 0:
        return "the same"
    times, form = (100, "+.0f") if _is_share(measure) else (1, "+.3f")
    ends = (
        "" if found.low is None else f" ({times * found.low:{form}} to {times * found.high:{form}})"
    )
    return f"{times * found.mean:{form}}{ends}"


def _longest(results: Results) -> int:
    return results.lengths[-1] if results.lengths else 0


def _title(results: Results, measure: str) -> str:
    """The name of a measure, including its length."""
    if not results.lengths:
        return measure
    first, last = results.lengths[0], results.lengths[-1]
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


def _lines(
    axes: Any,
    names: Sequence[str],
    lines: Mapping[str, Mapping[int, float]],
    markers: bool = True,
) -> None:
    """Plot one line per name that has data; each name has the same style in every figure."""
    for index, name in enumerate(names):
        if lines.get(name):
            style = style_of(index) if markers else style_of(index) | {"marker": ""}
            sizes, values = list(lines[name]), list(lines[name].values())
            axes.plot(sizes, values, label=name, linewidth=1.5, markersize=4, **style)
    bare(axes)


def _limit(panels: Sequence[Any], values: Sequence[float]) -> None:
    """Set the same limits on all panels so that no outlier compresses the other lines."""
    low, high = min(values), max(values)
    for axes in panels:
        axes.set_ylim(low - 0.05 * (high - low), min(high * 1.05, low + 3))


def picture_of(figure: Any, alt: str) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return Picture(alt, buffer.getvalue())
