"""What the evidence says: tables for the pages, a picture, and the numbers behind ``recommend``.

Intervals are 95 % over documents, of the differences to another row on the same documents
(``rope_eval.reports.intervals.mean_interval``; none below four documents); for prompts they are
exact binomial ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rope_eval.evidence.measure import BUCKET, VARIANTS
from rope_eval.evidence.questions import TASKS
from rope_eval.log import read_lines
from rope_eval.plots.style import (
    UNPATCHED_STYLE,
    bare,
    figure_of,
    legend_below,
    mark_trained,
    save,
    style_of,
)
from rope_eval.reports.intervals import mean_interval, rate_interval
from rope_ext.methods import build_method

TRAINED = {"SmolLM2-135M-Instruct": 8192, "gemma-3-270m": 32768}
SPANS = {"1x": (0, 1), "1.25x": (1, 1.25), "1.5x": (1.25, 1.5), "2x": (1.75, 2)}
"""Positions behind each column, in trained lengths: up to the length that names it."""
DRAWN = ("unpatched", "yarn", "ntk", "rerope", "self_extend", "pi")


@dataclass(frozen=True)
class Evidence:
    """The measured cells of one model.

    Args:
        model: its name.
        lines: of the log, without those of refusals.
    """

    model: str
    lines: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Read a log of :class:`rope_eval.evidence.measure.Measurement`."""
        lines = [line for line in read_lines(path) if "task" in line and "refused" not in line]
        return cls(lines[0]["model"], lines)

    @property
    def trained(self) -> int:
        return TRAINED[self.model]

    @cached_property
    def documents(self) -> list[str]:
        """Names, in the order of measurement."""
        return list(dict.fromkeys(x["document"] for x in self.lines if x["document"] is not None))

    def rows(self) -> list[str]:
        """Methods with default options that reached 2 times the length, as measured."""
        found = [x for x in self.lines if x["method"] == "unpatched" or _plain(x)]
        names = dict.fromkeys(str(x["method"]) for x in found if x["task"] == "loss")
        return [name for name in names if self.losses(name, "2x")]

    def losses(
        self, method: str, span: str, options: Mapping[str, Any] | None = None, factor: float = 2
    ) -> dict[str, float]:
        """Mean loss of each document at the positions of a column, nats.

        Methods that depend on the length take the forward of exactly that length; within the
        trained length those are the unpatched model.
        """
        begin, end = (round(share * self.trained) for share in SPANS[span])
        if factor == 4:
            begin, end = (round(share * self.trained) for share in (3.5, 4))
        by_length = options is None and _depends_on_length(method)
        if by_length and span == "1x" and method != "lampe":
            return self.losses("unpatched", span)
        found: dict[str, float] = {}
        for line in self.lines:
            if line["task"] != "loss" or line["method"] != method:
                continue
            if options is None and method != "unpatched" and not _plain(line, factor):
                continue
            if options is not None and line["options"] != {"factor": factor, **options}:
                continue
            last = min(end, line["length"])  # string reaches a little less than 2 times
            if line["length"] < 0.98 * end or (by_length and line["length"] > end):
                continue
            part = line["losses"][begin // BUCKET : last // BUCKET]
            # The shortest forward that reaches so far: each document once.
            if line["document"] not in found or line["length"] == last:
                found[line["document"]] = sum(part) / len(part)
        return found

    def perplexity(self, method: str, span: str, **more: Any) -> str:
        """Perplexity over documents; empty where it was not measured."""
        found = self.losses(method, span, **more)
        return f"{math.exp(sum(found.values()) / len(found)):.3g}" if found else ""

    def change(self, one: Mapping[str, float], other: Mapping[str, float]) -> str:
        """Change of perplexity from ``other`` to ``one`` on the same documents, percent."""
        gaps = [one[name] - other[name] for name in one if name in other]
        if not gaps:
            return ""
        percent = [100 * (math.exp(sum(gaps) / len(gaps)) - 1)]
        ends = mean_interval(gaps)
        if ends is None:
            return f"{percent[0]:+.1f} %"
        low, high = (100 * (math.exp(end) - 1) for end in ends)
        return f"{percent[0]:+.1f} % [{low:+.1f}, {high:+.1f}]"

    def prompts(
        self, method: str, task: str, length: float, options: Mapping[str, Any] | None = None
    ) -> tuple[int, int] | None:
        """Prompts answered, and their number, at ``length`` trained lengths."""
        for line in self.lines:
            same = line["method"] == method and line["task"] == task
            plain = method == "unpatched" or _plain(line, 4 if length > 2 else 2)
            right = plain if options is None else line["options"] == {"factor": 2, **options}
            if same and right and line["length"] == round(length * self.trained):
                return sum(line["right"]), len(line["right"])
        return None

    def seconds(self, method: str) -> float | None:
        """Median seconds of one forward of the longest length under factor 2, with its loss."""
        found = sorted(
            line["seconds"]
            for line in self.lines
            if line["task"] == "loss"
            and line["method"] == method
            and line["length"] >= 1.9 * self.trained
            and line["length"] <= 2 * self.trained
            and (method == "unpatched" or _plain(line))
        )
        return found[len(found) // 2] if found else None


def _plain(line: Mapping[str, Any], factor: float = 2) -> bool:
    given = line["options"]
    return set(given) == {"factor"} and math.ceil(given["factor"]) == factor


def _depends_on_length(method: str) -> bool:
    if method == "unpatched":
        return False
    return method == "lampe" or build_method(method, factor=1.9).is_dynamic


def table(evidence: Evidence) -> str:
    """Perplexity by position, the cost within the trained length, and prompts answered."""
    columns = [f"{int(SPANS[span][1] * evidence.trained):,}" for span in SPANS]
    head = ["method", *columns, "within the length", "against yarn at 2x"]
    head += ["passkeys 1.5x, 2x", "fruits 1.5x, 2x", "seconds"]
    rows = [head, ["---"] * len(head)]
    unpatched, yarn = (evidence.losses("unpatched", "1x"), evidence.losses("yarn", "2x"))
    order = sorted(evidence.rows(), key=lambda name: _mean(evidence.losses(name, "2x")))
    for name in ["unpatched", *(name for name in order if name != "unpatched")]:
        row = [name if name == "unpatched" else f"`{name}`"]
        row += [evidence.perplexity(name, span) for span in SPANS]
        inside = evidence.losses(name, "1x")
        row.append("" if name == "unpatched" else evidence.change(inside, unpatched))
        far = evidence.losses(name, "2x")
        row.append("" if name == "yarn" else evidence.change(far, yarn))
        for task in TASKS:
            row.append(" ".join(_share(evidence.prompts(name, task, x)) for x in (1.5, 2)).strip())
        seconds = evidence.seconds(name)
        row.append("" if seconds is None else f"{seconds:.2f}")
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def quadruple(evidence: Evidence) -> str:
    """At 4 times the length, factor 4: perplexity and prompts; empty if nothing was measured."""
    rows = []
    for name in evidence.rows():
        shown = evidence.perplexity(name, "2x", factor=4)
        if shown:
            prompts = [_share(evidence.prompts(name, task, 4)) for task in TASKS]
            value = _mean(evidence.losses(name, "2x", factor=4))
            rows.append((value, f"| `{name}` | {shown} | {' | '.join(prompts)} |\n"))
    if not rows:
        return ""
    head = "| method | perplexity | passkeys | fruits |\n| --- | --- | --- | --- |\n"
    return head + "".join(row for _, row in sorted(rows)).replace("`unpatched`", "unpatched")


def variants(evidence: Evidence) -> str:
    """Other settings against the defaults of their methods."""
    lines = [
        "| setting | within the length | at 2x | fruits at 2x, default | with it |\n",
        "| --- | --- | --- | --- | --- |\n",
    ]
    for method, options in VARIANTS:
        parts = [
            evidence.change(evidence.losses(method, span, options), evidence.losses(method, span))
            for span in ("1x", "2x")
        ]
        if not any(parts):
            continue
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        prompts = [_share(evidence.prompts(method, TASKS[1], 2, each)) for each in (None, options)]
        lines.append(f"| `{method}`, `{text}` | {' | '.join([*parts, *prompts])} |\n")
    return "".join(lines) if len(lines) > 2 else ""


def summary(evidence: Evidence) -> dict[str, Any]:
    """The numbers behind ``recommend``: plain data, one entry for each method."""
    methods = {}
    unpatched = evidence.losses("unpatched", "1x")
    for name in evidence.rows():
        inside, far = evidence.losses(name, "1x"), evidence.losses(name, "2x")
        gaps = [inside[document] - unpatched[document] for document in inside]
        methods[name] = {
            "within": round(100 * (math.exp(sum(gaps) / len(gaps)) - 1), 1) if gaps else None,
            "perplexity": float(f"{math.exp(_mean(far)):.3g}"),
            "loss": round(_mean(far), 4),
            "passkeys": evidence.prompts(name, "passkey", 2),
            "needles": evidence.prompts(name, "needle", 2),
        }
    return {
        "model": evidence.model,
        "trained": evidence.trained,
        "documents": len(evidence.losses("unpatched", "2x")),
        "methods": methods,
    }


def draw(path: Path, evidence: Sequence[Evidence]) -> None:
    """Draw perplexity by position, factor 2, one panel for each model."""
    figure = figure_of(5 * len(evidence), 3.6)
    panels = figure.subplots(1, len(evidence), squeeze=False)[0]
    numbers = []
    for axes, found in zip(panels, evidence, strict=True):
        for index, name in enumerate(name for name in DRAWN if name in found.rows()):
            rows = [
                line["losses"]
                for line in found.lines
                if line["task"] == "loss"
                and line["method"] == name
                and line["length"] == 2 * found.trained
                and (name == "unpatched" or _plain(line))
            ]
            step = max(1, found.trained // 16 // BUCKET)
            means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
            points = [
                math.exp(sum(means[at : at + step]) / step) for at in range(0, len(means), step)
            ]
            places = [BUCKET * step * (at + 1) for at in range(len(points))]
            style = UNPATCHED_STYLE if name == "unpatched" else style_of(index - 1)
            axes.plot(places, points, label=name, **style | {"markersize": 4})
            numbers.append({"model": found.model, "method": name, "perplexity": points})
        axes.set_yscale("log")
        axes.set_title(found.model, loc="left", fontsize=11, pad=17)
        axes.set_xlabel("position, tokens")
        axes.set_ylabel("perplexity")
        bare(axes)
        mark_trained(axes, [found.trained], 2 * found.trained)
    legend_below(figure, panels[0])
    save(figure, path, numbers)


def put(path: Path, name: str, text: str) -> None:
    """Replace what is between the marks ``name`` in a page.

    Raises:
        ValueError: the page has no such marks.
    """
    page = path.read_text(encoding="utf-8")
    begin, end = f"<!-- evidence: {name} -->\n", "<!-- end of evidence -->"
    pattern = re.compile(rf"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{path} has no mark {begin.strip()}")
    page = pattern.sub(lambda _: f"{begin}{text}{end}", page)
    path.write_text(page, encoding="utf-8")


def write(root: Path) -> None:
    """Put the numbers in ``docs/evidence/*.jsonl`` into the pages and into ``recommend``."""
    found = [Evidence.read(path) for path in sorted((root / "docs/evidence").glob("*.jsonl"))]
    found.sort(key=lambda one: list(TRAINED).index(one.model))
    for one in found:
        name = one.model.partition("-")[0].lower()
        page = root / "docs" / "evidence.md"
        put(page, f"{name} 2x", f"\n{table(one)}\n")
        put(page, f"{name} 4x", f"\n{quadruple(one)}\n")
        put(page, f"{name} settings", f"\n{variants(one)}\n")
    data = json.dumps([summary(one) for one in found], indent=1) + "\n"
    (root / "rope_ext/advice/evidence.json").write_text(data, encoding="utf-8")
    draw(root / "docs/evidence.png", found)


def _mean(found: Mapping[str, float]) -> float:
    return sum(found.values()) / len(found)


def _share(found: tuple[int, int] | None) -> str:
    if found is None:
        return ""
    right, count = found
    low, high = rate_interval(right, count)
    return f"{right}/{count} [{100 * low:.0f}, {100 * high:.0f}]"
