"""Results of a calibration, as text, a plot, and JSON that can be loaded again."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rope_eval.folder import writing
from rope_eval.plots import style
from rope_eval.tasks.passkey import TEACHER_FORCED
from rope_ext.advice.recommend import FORMAT, NAME, calibration_in
from rope_ext.config.record import method_from_json, method_to_json, option_texts, patch_call
from rope_ext.methods import Method

SCALAR = "attention_factor"
"""The option that every calibration tries first, and that plots show."""


@dataclass(frozen=True)
class Trial:
    """A method with all options, and its scores on one half of the data.

    ``far`` (at the target length), ``inside`` (at the trained length) and ``answers`` are losses in
    nats per token, ``found_inside`` and ``found_beyond`` shares of answers; None without prompts.
    """

    method: Method
    attention_factor: float
    far: float
    inside: float
    answers: float | None
    found_inside: float | None
    found_beyond: float | None

    @property
    def score(self) -> float:
        """The objective: the loss of the text plus that of the answers."""
        return self.far + (self.answers or 0.0)


@dataclass(frozen=True)
class Change:
    """A score before and after, in nats or as a share, and the 99 % interval of the difference."""

    before: float
    after: float
    low: float
    high: float

    @property
    def percent(self) -> str:
        """The change of a perplexity, with its interval."""
        value, low, high = (
            f"{100 * math.expm1(min(gap, 700)):+.1f}"
            for gap in (self.after - self.before, self.low, self.high)
        )
        return f"{value} % [{low}, {high}]"

    @property
    def worse(self) -> bool:
        return not self.low <= 0

    @property
    def better(self) -> bool:
        return self.high < 0


@dataclass(frozen=True)
class Choice:
    """The result for one method.

    ``tried`` has all scores on the selection half, the published default's first. ``judged`` are
    the changes on the other half, by the fields of :class:`Trial`; ``reasons`` keep the default.
    """

    published: Method
    proposed: Method
    judged: Mapping[str, Change]
    reasons: tuple[str, ...]
    tried: tuple[Trial, ...]

    @property
    def method(self) -> Method:
        """The proposal if it is better beyond noise, else the published default."""
        return self.published if self.reasons else self.proposed

    @property
    def trial(self) -> Trial:
        """The scores of :attr:`method` on the selection half."""
        return next(trial for trial in self.tried if trial.method == self.method)


@dataclass(frozen=True)
class Calibration:
    """The options that a calibration found for one or more methods; ``print`` it.

    ``prompts`` are those of each length in the half that tests, ``rows`` the sequences that ran
    through the model, and ``inside`` is the loss of the unpatched model within its trained length
    on that half. ``arguments`` are those of :func:`rope_ext.patch` besides the method.
    """

    model: str
    trained_length: int
    target_length: int
    scored: int
    seed: int
    cost: float
    prompts: int
    rows: int
    inside: float
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Choice:
        """The choice for the best method on the selection half."""
        return min(self.choices, key=lambda choice: choice.trial.score)

    @property
    def method(self) -> Method:
        """The best method, for :func:`rope_ext.patch`."""
        return self.best.method

    @property
    def call(self) -> str:
        return patch_call(self.method, **self.arguments)

    @property
    def sentence(self) -> str:
        """What to do, and why, from the half of the data not used for selection."""
        best = self.best
        if best.reasons:
            return f"Keep the published default: {self.call}; {' and '.join(best.reasons)}."
        return f"{self.call}: {', '.join(self._said(best))}."

    def _said(self, choice: Choice) -> Iterator[str]:
        """Format the scores of a proposal next to those of the published default."""
        judged = choice.judged
        changed = choice.proposed != choice.published

        def loss(name: str) -> str:
            change = judged[name]
            more = f" -> {perplexity(change.after)} ({change.percent})" if changed else ""
            return f"{perplexity(change.before)}{more}"

        def share(name: str) -> str:
            change = judged[name]
            prompts = self.prompts
            more = f" -> {round(change.after * prompts)}" if changed else ""
            return f"{round(change.before * prompts)}{more} of {prompts}"

        yield f"perplexity of the last {self.scored} of {self.target_length} tokens {loss('far')}"
        if "found_beyond" in judged:
            yield (
                f"{TEACHER_FORCED} at {self.target_length} tokens {share('found_beyond')}, at "
                f"{self.trained_length} {share('found_inside')}"
            )
        yield (
            f"perplexity within {self.trained_length} tokens {loss('inside')}, unpatched "
            f"{perplexity(self.inside)}"
        )

    def __str__(self) -> str:
        candidates = sum(len(choice.tried) for choice in self.choices)
        lines = [
            f"{self.model}: {self.trained_length} -> {self.target_length} tokens, {candidates} "
            f"candidates, {self.rows} forwards of one row; in brackets, 99 % intervals",
            self.sentence,
        ]
        for choice in self.choices:
            lines.append(f"  {choice.published.name}({', '.join(option_texts(choice.proposed))}):")
            lines += [f"    {text}" for text in self._said(choice)]
            if choice.reasons:
                lines.append(f"    the published default stays: {' and '.join(choice.reasons)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def plot(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        """Draw loss and retrieval against the attention factor as a PNG, to a path or open file.

        Raises:
            MeasureError: matplotlib is not installed, or the file cannot be written.
        """
        style.require_matplotlib()
        target = Path(path) if isinstance(path, (str, os.PathLike)) else path
        with writing(Path(str(path)), "give another path"):
            draw(self.choices, trained=self.trained_length, target=self.target_length, path=target)

    def to_json(self) -> str:
        """Return everything as JSON; :meth:`load` reads it from a file."""
        data = {"program": "rope_ext", NAME: FORMAT, "sentence": self.sentence, **_plain(self)}
        text = json.dumps({**data, "method": _plain(self.method)}, indent=1)
        # JSON has no infinity; this number reads back as one. Strings end in a quote.
        return re.sub("(?m)Infinity(?=,?$)", "1e999", text) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration file, or the one in a folder.

        Raises:
            MeasureError: it does not exist, or this version's calibration did not write it.
        """
        with calibration_in(path) as data:
            data = {"arguments": {}, **data}  # earlier ones have none
            given = {one.name: data[one.name] for one in fields(cls)}
            choices = tuple(map(_choice, given["choices"]))
            read = cls(**{**given, "choices": choices, "notes": tuple(given["notes"])})
            str(read)  # check that numbers are numbers
            return read


def _choice(data: Mapping[str, Any]) -> Choice:
    published, proposed = (method_from_json(data[name]) for name in ("published", "proposed"))
    tried = [Trial(**{**one, "method": method_from_json(one["method"])}) for one in data["tried"]]
    judged = {name: Change(**change) for name, change in data["judged"].items()}
    return Choice(
        published=published,
        proposed=proposed,
        judged=judged,
        reasons=tuple(data["reasons"]),
        tried=tuple(tried),
    )


def _plain(data: Any) -> Any:
    if isinstance(data, Method):
        return method_to_json(data)
    data = vars(data) if is_dataclass(data) else data
    if isinstance(data, Mapping):
        return {name: _plain(value) for name, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, (list, tuple)) else data


def perplexity(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):.4g}"  # larger ones overflow a float


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def draw(choices: Sequence[Choice], trained: int, target: int, path: Path | BinaryIO) -> None:
    """Save a PNG by attention factor: perplexity and, if measured, retrieval below it."""
    panels: dict[str, Callable[[Trial], Any]] = {
        "perplexity at the end (lower is better)": lambda t: math.exp(min(t.far, 700))
    }
    if all(t.found_beyond is not None for choice in choices for t in choice.tried):
        panels[f"{TEACHER_FORCED} (higher is better)"] = lambda t: t.found_beyond
    figure = style.figure_of(6.6, 1.4 + 0.2 * len(choices) + 2.9 * len(panels))
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.6}
    star = {"marker": "*", "markersize": 15, "markeredgecolor": "white"}
    for (title, value), axes in zip(panels.items(), grid, strict=True):
        for index, choice in enumerate(choices):
            published = choice.published
            look = style.style_of(index)
            beside = published.options() | {SCALAR: None}
            line = [t for t in choice.tried if t.method.options() | {SCALAR: None} == beside]
            line.sort(key=lambda trial: trial.attention_factor)
            known = option_texts(published)
            new = [t for t in option_texts(choice.method) if t not in known and SCALAR not in t]
            label = published.name + (f" (chosen: {', '.join(new)})" if new else "")
            factors = [trial.attention_factor for trial in line]
            axes.plot(factors, list(map(value, line)), label=label, linewidth=1.5, markersize=4,
                      **look)  # fmt: skip
            for trial, mark in ((choice.tried[0], ring), (choice.trial, star)):
                axes.plot(trial.attention_factor, value(trial), linestyle="none",
                          color=look["color"], zorder=3, **mark)  # fmt: skip
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("attention factor (on cos and sin)")
        style.bare(axes)
    grid[0].set_yscale("log")
    style.log_axis(grid[0])
    for axes in grid[1:]:
        axes.set_ylim(-0.04, 1.04)
        axes.yaxis.set_major_formatter(style.ticker().PercentFormatter(1))
    figure.suptitle(
        f"{trained} \u2192 {target} tokens, on the half of the text used for selection\n"
        f"(ring: published default, star: chosen)",
        fontsize=11,
    )
    style.legend_below(figure, grid[0])
    figure.savefig(path, dpi=160, format="png")
