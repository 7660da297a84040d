"""Writes evidence as tables in the docs, a plot, and data for ``recommend``.

Intervals are 95 % over documents, of the differences to another row on the same documents; for
prompts they are exact binomial ones.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.evidence import retrieval_page
from lab.evidence.measure import BUCKET, VARIANTS, depends_on_length
from lab.evidence.questions import TASKS
from lab.evidence.retrieval import FACTORS
from rope_eval.folder import read_lines
from rope_eval.plots import style
from rope_eval.reports.intervals import mean_interval, rate_interval
from rope_eval.reports.summary import bold_if_clear, rate_difference
from rope_ext.advice.evidence import three_digits

TRAINED = {"SmolLM2-135M-Instruct": 8192, "gemma-3-270m": 32768}
SHAPES = {
    "SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "num_attention_heads": 4,
    },
}
"""What the configurations of these models say, by which ``recommend`` knows them."""
SPANS = {"0.25x": (0, 0.25), "1x": (0, 1), "1.25x": (1, 1.25), "1.5x": (1.25, 1.5), "2x": (1.75, 2)}
"""Positions of each column, in trained lengths: up to the length that names it."""
FRONT = {
    "unpatched": "",
    "yarn": "serving with other engines, fine-tuning",
    "dynamic_yarn": "mostly short prompts, without training",
    "self_extend": "retrieval, without training",
    "rerope": "texts of any length, without training",
}
"""Rows of the front page, and when to choose each."""
FAR = "2x"
NOT_DECODED = "\N{DAGGER}"
"""Marks prompts that were scored after a lead-in, in one forward."""
PLURALS = {"passkey": "passkeys", "needle": "fruits", "multikey": "multi-key"}
COMMON = ("passkey", "needle")
"""Tasks of every method; the others are asked of the front page's only."""
DRAWN = ("unpatched", "self_extend")
"""Lines of the plots; YaRN's would cover the second."""
LABELS = {"unpatched": "unpatched", "self_extend": "Self-Extend"}


def is_decoded(line: Mapping[str, Any]) -> bool:
    return "written" in line


@dataclass(frozen=True)
class Evidence:
    """The measured cells of one model: lines of the log, without those of refusals."""

    model: str
    lines: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Evidence:
        lines = [line for line in read_lines(path) if "task" in line and "refused" not in line]
        return cls(lines[0]["model"], lines)

    @property
    def trained(self) -> int:
        return TRAINED[self.model]

    def of(
        self, task: str, method: str, options: Mapping[str, Any] | None = None, factor: float = 2
    ) -> list[Mapping[str, Any]]:
        """Return the lines of a method with these options (besides factor), or its defaults."""

        def same(line: Mapping[str, Any]) -> bool:
            given = line["options"]
            if options is not None:
                return given == {"factor": factor, **options}
            # STRING's default, 1.98, stands among those of 2.
            plain = set(given) == {"factor"} and math.ceil(given["factor"]) == factor
            return method == "unpatched" or plain

        return [x for x in self.lines if (x["task"], x["method"]) == (task, method) and same(x)]

    def rows(self) -> list[str]:
        names = dict.fromkeys(str(x["method"]) for x in self.lines)
        return [name for name in names if any(self.losses(name, span) for span in SPANS)]

    def complete(self) -> list[str]:
        """Return methods that were measured on as many documents as the unpatched model."""
        counts = {span: len(self.losses("unpatched", span)) for span in SPANS}
        return [
            name
            for name in self.rows()
            if any(count == len(self.losses(name, span)) > 0 for span, count in counts.items())
        ]

    def cost(self, method: str) -> str:
        """Return the change of perplexity within the trained length, against no patch."""
        span = "1x" if self.losses(method, "1x") else "0.25x"
        return self.change(self.losses(method, span), self.losses("unpatched", span))

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
        by_length = options is None and depends_on_length(method, factor=1.9)
        if by_length and end <= self.trained and method != "lampe":
            return self.losses("unpatched", span)
        found: dict[str, float] = {}
        for line in self.of("loss", method=method, options=options, factor=factor):
            last = min(end, line["length"])  # string reaches a little less than 2 times
            if line["length"] < 0.98 * end or (by_length and line["length"] > end):
                continue
            # Spans of both models begin and end at a bucket.
            part = line["losses"][begin // BUCKET : last // BUCKET]
            # The shortest forward that reaches this far: each document once.
            if line["document"] not in found or line["length"] == last:
                found[line["document"]] = fmean(part)
        return found

    def perplexity(self, method: str, span: str, **more: Any) -> str:
        """Perplexity over documents; empty where it was not measured."""
        found = self.losses(method, span, **more)
        return three_digits(math.exp(_mean(found))) if found else ""

    def change(self, one: Mapping[str, float], other: Mapping[str, float]) -> str:
        """Change of perplexity from ``other`` to ``one`` on the same documents, percent."""
        gaps = [one[name] - other[name] for name in one if name in other]
        if not gaps:
            return ""
        ends = mean_interval(gaps)
        shown = f"{_percent(fmean(gaps))} %"
        return shown if ends is None else f"{shown} [{_percent(ends[0])}, {_percent(ends[1])}]"

    def prompts(
        self, method: str, task: str, length: float, options: Mapping[str, Any] | None = None
    ) -> tuple[int, int] | None:
        """Prompts answered, and their number, at ``length`` trained lengths."""
        right, _ = self.answers(method, task, length, options)
        return (sum(right), len(right)) if right else None

    def decoded(self, methods: Iterable[str], task: str, length: float) -> bool:
        """Whether the answers of all these methods to the prompts of a task were decoded."""
        return all(self.answers(method, task, length)[1] for method in methods)

    def answers(
        self, method: str, task: str, length: float, options: Mapping[str, Any] | None = None
    ) -> tuple[list[int], bool]:
        """Whether each prompt was answered, and whether the answers were decoded.

        Others were scored by one forward after a lead-in. They count as long as fewer prompts were
        decoded: a run may have stopped early.
        """
        lines = self._at(task, method, length=length, options=options)
        parts = self.parts(method, task, length=length, options=options)
        right = [value for part in parts.values() for value in part]
        scored = next((x["right"] for x in reversed(lines) if not is_decoded(x)), [])
        return (right, True) if right and len(right) >= len(scored) else (scored, False)

    def parts(
        self, method: str, task: str, length: float, options: Mapping[str, Any] | None = None
    ) -> dict[int, list[int]]:
        """Whether each prompt was answered when decoded, by the part of the prompts."""
        # The last line of a part counts, which may have been measured twice.
        lines = self._at(task, method, length=length, options=options)
        return {line["part"]: line["right"] for line in lines if is_decoded(line)}

    def _at(
        self, task: str, method: str, length: float, options: Mapping[str, Any] | None
    ) -> list[Mapping[str, Any]]:
        lines = self.of(task, method, options, factor=4 if length > 2 else 2)
        return [line for line in lines if line["length"] == round(length * self.trained)]

    def seconds(self, method: str) -> float | None:
        """Median seconds of one forward of the longest length under factor 2, with its loss.

        None on a CPU, where other processes affect the time, and where processes shared a GPU.
        """
        found = sorted(
            line["seconds"]
            for line in self.of("loss", method)
            if line["device"] != "cpu"
            and line["seconds"] is not None
            and 1.9 * self.trained <= line["length"] <= 2 * self.trained
        )
        return found[len(found) // 2] if found else None


def table(evidence: Evidence) -> str:
    """Return three narrow tables; some methods are only in ``behind``.

    Perplexity by position; its changes, and the time; prompts answered.
    """
    spans = [span for span in SPANS if evidence.losses("unpatched", span)]
    order = sorted(evidence.complete(), key=lambda name: _mean(evidence.losses(name, spans[-1])))
    methods = ["unpatched", *(name for name in order if name != "unpatched")]
    ends = [f"{int(SPANS[span][1] * evidence.trained):,}" for span in spans]
    positions = [["perplexity up to", *ends]]
    changes = [["method", "within the length", "last column against yarn", "seconds"]]
    asked = [(task, times) for task in COMMON for times in (1.5, 2)]
    prompts = [["method", *(f"{PLURALS[task]} {times}x" for task, times in asked)]]
    for name in methods:
        positions.append([_named(name), *(evidence.perplexity(name, span) for span in spans)])
        if FAR in spans:
            changes.append([_named(name), *_changes(evidence, name)])
            shares = [
                _answered(evidence, method=name, task=task, length=length) for task, length in asked
            ]
            prompts.append([_named(name), *shares])
        else:
            changes.append([_named(name), "" if name == "unpatched" else evidence.cost(name)])
    changes[0] = changes[0][: len(changes[1])]
    return "\n".join(part for part in map(_measured, (positions, changes, prompts)) if part)


def _changes(evidence: Evidence, name: str) -> list[str]:
    """Change of perplexity within the length and against yarn, and seconds of a forward."""
    plain = name == "unpatched"
    far = evidence.change(evidence.losses(name, FAR), evidence.losses("yarn", FAR))
    seconds = evidence.seconds(name)
    return [
        "" if plain else evidence.cost(name),
        "" if plain or name == "yarn" else far,
        "" if seconds is None else f"{seconds:.2f}",
    ]


def _measured(rows: Sequence[Sequence[str]]) -> str:
    """Return a table without the rows and columns that are empty beside their names."""
    head, *rest = rows
    rest = [row for row in rest if any(row[1:])]
    measured = [any(row[column] for row in rest) for column in range(len(head))]
    shown = [list(itertools.compress(row, measured)) for row in (head, *rest)]
    return _table(shown) if rest else ""


def _named(method: str) -> str:
    return method if method == "unpatched" else f"`{method}`"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([lines[0], f"| {' | '.join(['---'] * len(rows[0]))} |\n", *lines[1:]])


def short(evidence: Evidence) -> str:
    """Return the front page's table: four methods, when to choose them, and their cost."""
    head = ["method", "choose it for", f"perplexity at {2 * evidence.trained:,}"]
    # Only what the model wrote is a passkey that it found.
    passkeys = evidence.decoded(FRONT, "passkey", 2)
    head += ["passkeys"] * passkeys + ["cost at short lengths", "time of a forward pass"]
    rows = [head]
    unpatched = evidence.seconds("unpatched")
    for name, reason in FRONT.items():
        seconds = evidence.seconds(name)
        plain = name == "unpatched"
        row = [_named(name), reason]
        row.append(evidence.perplexity(name, FAR))
        found = evidence.prompts(name, "passkey", 2)
        if passkeys and found is not None:
            row.append(f"{found[0]} of {found[1]}")
        row.append("" if plain else evidence.cost(name).partition(" [")[0])
        row.append(f"{seconds / unpatched:.1f}x" if seconds and unpatched else "")
        rows.append(row)
    return _table(rows)


def written(evidence: Evidence) -> str:
    """Return what the front page's methods wrote at twice the length, and how far from YaRN.

    Of each task the parts that every method has decoded; empty if there are none.
    """
    found = {task: _common(evidence, task) for task in TASKS}
    found = {task: rows for task, rows in found.items() if rows}
    if not found:
        return ""
    shares = [["method", *(PLURALS[task] for task in found)]]
    gaps = [["points against yarn", *(PLURALS[task] for task in found)]]
    for name in FRONT:
        row = [rows[name] for rows in found.values()]
        shares.append([_named(name), *(_share((sum(right), len(right))) for right in row)])
        yarn = [rows["yarn"] for rows in found.values()]
        pairs = zip(row, yarn, strict=True)
        if name != "yarn":
            gaps.append([_named(name), *(bold_if_clear(rate_difference(*pair)) for pair in pairs)])
    return f"{_table(shares)}\n{_table(gaps)}"


def _common(evidence: Evidence, task: str) -> dict[str, list[int]]:
    """Decoded answers at twice the length, by method, to the prompts that all of FRONT have."""
    parts = {name: evidence.parts(name, task, length=2) for name in FRONT}
    common = sorted(set.intersection(*map(set, parts.values())))
    every = {name: [right for part in common for right in own[part]] for name, own in parts.items()}
    return every if common else {}


def conditions(evidence: Evidence) -> str:
    line = evidence.lines[0]
    count = len(evidence.losses("unpatched", "0.25x"))
    return (
        f"{evidence.model}, trained on {evidence.trained:,} tokens, in {line['dtype']} on "
        f"{line['device']}: {count} manuals, torch {line['torch']}, transformers "
        f"{line['transformers']}, seed {line['seed']}.\n"
    )


def behind(evidence: Evidence) -> str:
    """Return methods that are clearly behind at 1.5 times the length, and not measured further."""
    rows = [["method", "within the length", "against yarn at 1.5x"]]
    yarn = evidence.losses("yarn", "1.5x")
    for name in evidence.rows():
        found = evidence.losses(name, "1.5x")
        if name not in evidence.complete() and found:
            rows.append([f"`{name}`", evidence.cost(name), evidence.change(found, yarn)])
    return _table(rows) if len(rows) > 1 else ""


def quadruple(evidence: Evidence) -> str:
    """At 4 times the length, factor 4: perplexity and prompts; empty if nothing was measured."""
    rows = []
    for name in evidence.rows():
        if shown := evidence.perplexity(name, "2x", factor=4):
            prompts = [_answered(evidence, method=name, task=task, length=4) for task in TASKS]
            value = _mean(evidence.losses(name, "2x", factor=4))
            rows.append((value, [_named(name), shown, *prompts]))
    head = ["method", "perplexity", *(PLURALS[task] for task in TASKS)]
    return _measured([head, *(row for _, row in sorted(rows))]) if rows else ""


def variants(evidence: Evidence) -> str:
    rows = [["setting", "within the length", "at 2x", "fruits at 2x, default", "with it"]]
    for method, options in VARIANTS:
        parts = [
            evidence.change(evidence.losses(method, span, options), evidence.losses(method, span))
            for span in ("1x", "2x")
        ]
        if any(parts):
            # A window is a share of the trained length there, and tokens for whoever types it.
            typed = {
                name: int(value * evidence.trained) if name == "window" else value
                for name, value in options.items()
            }
            text = ", ".join(f"{name}={value!r}" for name, value in typed.items())
            prompts = [evidence.prompts(method, TASKS[1], 2, each) for each in (None, options)]
            rows.append([f"`{method}`, `{text}`", *parts, *map(_share, prompts)])
    return _table(rows) if len(rows) > 1 else ""


def summary(evidence: Evidence) -> dict[str, Any]:
    """Return data for ``recommend``: one entry for each method, with its numbers by factor."""
    span = "1x" if evidence.losses("unpatched", "1x") else "0.25x"
    unpatched = evidence.losses("unpatched", span)
    methods: dict[str, dict[str, Any]] = {}
    for name in evidence.complete():
        methods[name] = {}
        if inside := evidence.losses(name, span):
            gap = fmean(inside[document] - unpatched[document] for document in inside)
            methods[name]["within"] = _percent(gap)
        for factor in (2, 4):
            if found := _numbers_at(evidence, name, factor):
                methods[name].setdefault("at", {})[str(factor)] = found
    return {
        "model": evidence.model,
        "shape": SHAPES[evidence.model],
        "trained": evidence.trained,
        "within": round(SPANS[span][1] * evidence.trained),
        "documents": len(unpatched),
        "methods": methods,
    }


def _numbers_at(evidence: Evidence, name: str, factor: int) -> dict[str, Any]:
    """Return what was measured of a method at ``factor`` trained lengths, under this factor."""
    numbers: dict[str, Any] = {}
    if far := evidence.losses(name, "2x", factor=factor):
        mean = _mean(far)
        numbers |= {"loss": round(mean, 4), "perplexity": float(f"{math.exp(mean):.3g}")}
    for task in TASKS:
        prompts = evidence.prompts(name, task, factor)
        if prompts is not None:
            decoded = evidence.decoded([name], task, factor)
            numbers[task] = {"found": prompts[0], "of": prompts[1], "decoded": decoded}
    return numbers


def draw(path: Path, evidence: Sequence[Evidence]) -> None:
    """Draw the perplexity by position, one panel below the other, for narrow screens, too.

    The lines of a single model have their names beside them, those of several share a legend.
    """
    evidence = [found for found in evidence if found.losses("unpatched", FAR)]
    figure = style.figure_of(6, 3.3 * len(evidence))
    panels = figure.subplots(len(evidence), 1, squeeze=False)[:, 0]
    ticker = style.ticker()
    for axes, found in zip(panels, evidence, strict=True):
        for index, name in enumerate(DRAWN):
            places, points = _by_position(found, name)
            look = style.UNPATCHED_STYLE if name == "unpatched" else style.style_of(index)
            look = look | {"markersize": 5, "linewidth": 2.2}
            axes.plot(places, points, label=LABELS[name], **look)
            if len(evidence) == 1:
                _name_beside(
                    axes, name=LABELS[name], end=(places[-1], points[-1]), color=look["color"]
                )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=9))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:,g}"))
        axes.minorticks_off()
        axes.xaxis.set_major_locator(ticker.MultipleLocator(found.trained // 2))
        axes.xaxis.set_major_formatter(
            ticker.FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x else "0")
        )
        axes.tick_params(labelsize=12)
        axes.set_title(found.model, loc="left", fontsize=13, pad=17)
        axes.set_xlabel("position, tokens", fontsize=12)
        axes.set_ylabel("perplexity", fontsize=12)
        style.bare(axes)
        style.mark_trained(axes, [found.trained], 2 * found.trained)
    if len(evidence) > 1:
        style.legend_below(figure, panels[0])
    figure.savefig(path, dpi=style.DPI)


def _name_beside(axes: Any, name: str, end: tuple[float, float], color: str) -> None:
    """Write the name of a line near its last point: left of a steep one, above a flat one."""
    left = name == LABELS["unpatched"]
    axes.annotate(
        name,
        end,
        xytext=(-18, -4) if left else (0, 16),
        textcoords="offset points",
        ha="right",
        color=color,
        fontsize=12,
        fontweight="bold",
    )


def _by_position(evidence: Evidence, method: str) -> tuple[list[int], list[float]]:
    """Return positions, and the perplexity of the tokens before each since the last."""
    lines = evidence.of("loss", method)
    far = 2 * evidence.trained
    rows = [line["losses"] for line in lines if line["length"] == far]
    step = max(1, evidence.trained // 16 // BUCKET)
    means = [fmean(column) for column in zip(*rows, strict=True)]
    starts = range(0, len(means), step)
    points = [math.exp(fmean(means[at : at + step])) for at in starts]
    return [BUCKET * step * (number + 1) for number in range(len(points))], points


def put(path: Path, name: str, text: str) -> None:
    """Replace what a page has between the marks of ``name``."""
    page = path.read_text(encoding="utf-8")
    begin = f"<!-- evidence: {name} -->\n"
    end = "<!-- end of evidence -->"
    before, mark, after = page.partition(begin)
    assert mark, f"{path} has no mark {begin.strip()}"
    path.write_text(before + begin + text + end + after.partition(end)[2], encoding="utf-8")


def write(root: Path) -> None:
    """Put the numbers in ``docs/evidence/*.jsonl`` into the pages and into ``recommend``."""
    paths = sorted((root / "docs/evidence").glob("*.jsonl"))
    embedders = [retrieval_page.Retrieved.read(p) for p in paths if retrieval_page.is_retrieval(p)]
    found = [Evidence.read(path) for path in paths if not retrieval_page.is_retrieval(path)]
    found.sort(key=lambda one: list(TRAINED).index(one.model))
    for one in found:
        name = one.model.partition("-")[0].lower()
        page = root / "docs" / "evidence.md"
        put(page, f"{name} conditions", f"\n{conditions(one)}\n")
        put(page, f"{name} 2x", f"\n{table(one)}\n")
        for mark, write in {
            "decoded": written,
            "behind": behind,
            "4x": quadruple,
            "settings": variants,
        }.items():
            if text := write(one):
                put(page, f"{name} {mark}", f"\n{text}\n")
    page = root / "docs" / "evidence.md"
    for one in embedders:
        name = one.model.partition("-")[0]
        put(page, f"{name} conditions", f"\n{retrieval_page.conditions(one)}\n")
        for factor in FACTORS:
            if text := retrieval_page.table(one, factor):
                where = f"At {factor} times the trained length, factor {factor}:"
                put(page, f"{name} {factor}x", f"\n{where}\n\n{text}\n")
    judged = [one for one in found if len(one.losses("unpatched", "2x")) >= 4]
    put(root / "README.md", "table", f"\n{short(judged[0])}\n")
    ranked = (row for row in map(retrieval_page.summary, embedders) if row["methods"])
    every = [*map(summary, judged), *ranked]
    data = json.dumps(every, indent=1) + "\n"
    (root / "rope_ext/advice/evidence.json").write_text(data, encoding="utf-8")
    draw(root / "docs/evidence.png", judged)
    draw(root / "docs/hero.png", judged[:1])


def _mean(found: Mapping[str, float]) -> float:
    return fmean(found.values()) if found else math.inf


def _percent(gap: float) -> str:
    """A difference of losses as a change of perplexity."""
    value = round(100 * (math.exp(gap) - 1), 1)
    # Not "-0.0".
    return f"{value:+.1f}" if value else "0.0"


def _answered(evidence: Evidence, method: str, task: str, length: float) -> str:
    """Return the share of prompts answered, with a mark if they were not decoded."""
    shown = _share(evidence.prompts(method, task, length))
    decoded = evidence.decoded([method], task, length)
    return shown if decoded or not shown else f"{shown} {NOT_DECODED}"


def _share(found: tuple[int, int] | None) -> str:
    if found is None:
        return ""
    right, count = found
    low, high = rate_interval(right, count)
    return f"{right}/{count} [{100 * low:.0f}, {100 * high:.0f}]"
