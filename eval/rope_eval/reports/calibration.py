"""Results of a calibration, as text, a picture, and JSON that can be loaded again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rope_eval.folder import writing
from rope_eval.plots.calibration import Line, draw
from rope_eval.plots.style import require_matplotlib
from rope_ext.advice.calibrated import FORMAT, NAME, parsed, read, unreadable
from rope_ext.config.record import method_from_json, method_to_json, option_texts
from rope_ext.errors import MeasureError
from rope_ext.methods import Method

SCALAR = "attention_factor"
"""The option that every calibration tries first, and that pictures show."""


@dataclass(frozen=True)
class Trial:
    """A method, and its scores on one half of the data.

    Args:
        method: with all options.
        attention_factor: that it multiplies cos and sin by.
        far: loss of the last tokens of windows of the target length, nats per token.
        inside: loss within the trained length, nats per token.
        answers: loss of the answer tokens of all prompts, nats per token; None: without prompts.
        found_inside: share of the answers that greedy decoding would write, of prompts of the
            trained length; None: without prompts.
        found_beyond: the same, of those of the target length.
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
        """What is minimized: see :func:`fitness`."""
        return fitness(self.far, self.answers)


def fitness(far: float | None, answers: float | None) -> float:
    """What :func:`rope_ext.calibrate` and :func:`rope_ext.search` minimize, nats per token.

    Text alone does not tell a model that retrieves from one that does not, and answers alone do not
    tell a model that writes well from one that only copies.

    Args:
        far: mean loss of the last tokens of windows of the target length; None: not scored.
        answers: mean loss of the answers to passkey prompts; None: no prompts count.
    """
    return (far or 0.0) + (answers or 0.0)


@dataclass(frozen=True)
class Change:
    """A number before and after, with the 99 % interval of the paired difference.

    Args:
        before: under the published default.
        after: under the proposal.
        low, high: of ``after - before``.
    """

    before: float
    after: float
    low: float
    high: float

    @property
    def percent(self) -> str:
        """The change of a perplexity, with its interval."""
        low, high = _percent(self.low), _percent(self.high)
        return f"{_percent(self.after - self.before)} % [{low}, {high}]"

    @property
    def worse(self) -> bool:
        """Whether the loss rises beyond noise."""
        return not self.low <= 0

    @property
    def better(self) -> bool:
        """Whether the loss falls beyond noise."""
        return self.high < 0


@dataclass(frozen=True)
class Choice:
    """What was found for one method.

    Args:
        published: the method with its published default.
        proposed: the best on the selection half; may be the published default.
        judged: changes on the test half: of ``far``, ``inside``, ``answers`` and
            ``score`` in nats per token, of ``found_inside`` and ``found_beyond`` as shares; see
            :class:`Trial`.
        reasons: why the published default stays; empty if the proposal is better.
        tried: scores of all candidates on the selection half; the published default first.
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

    Args:
        model: class of the decoder.
        trained_length: tokens.
        target_length: tokens.
        scored: tokens at the end of every window whose loss counts.
        seed: random seed of texts, prompts and intervals.
        cost: largest accepted increase of perplexity, as a share.
        prompts: prompts per length in the test half.
        rows: sequences that ran through the model.
        inside: loss of the unpatched model within the trained length on the test half, nats per
            token.
        choices: one for each method.
        notes: remarks and warnings.
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

    @property
    def best(self) -> Choice:
        """Of the method that is best on the half that chooses."""
        return min(self.choices, key=lambda choice: choice.trial.score)

    @property
    def method(self) -> Method:
        """The best method, for :func:`rope_ext.patch`."""
        return self.best.method

    @property
    def call(self) -> str:
        """The call that makes the patch."""
        method = self.method
        return f"rope_ext.patch({', '.join(['model', repr(method.name), *option_texts(method)])})"

    @property
    def sentence(self) -> str:
        """What to do, and why, on the half of the data that did not choose."""
        best = self.best
        if best.reasons:
            return f"Keep the published default: {self.call}; {' and '.join(best.reasons)}."
        return f"{self.call}: {', '.join(self._said(best))}."

    def _said(self, choice: Choice) -> Iterator[str]:
        """The numbers of a proposal beside those of the published default."""
        judged, changed = choice.judged, choice.proposed != choice.published

        def loss(name: str) -> str:
            change = judged[name]
            if not changed:
                return perplexity(change.before)
            return f"{perplexity(change.before)} -> {perplexity(change.after)} ({change.percent})"

        def share(name: str) -> str:
            change, asked = judged[name], self.prompts
            before, after = (f"{round(x * asked)}" for x in (change.before, change.after))
            return f"{before} -> {after} of {asked}" if changed else f"{before} of {asked}"

        yield f"perplexity of the last {self.scored} of {self.target_length} tokens {loss('far')}"
        if "found_beyond" in judged:
            yield (
                f"answers found at {self.target_length} tokens {share('found_beyond')}, at "
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
            texts = ", ".join(option_texts(choice.proposed))
            lines.append(f"  {choice.published.name}({texts}):")
            lines += [f"    {text}" for text in self._said(choice)]
            if choice.reasons:
                lines.append(f"    the published default stays: {' and '.join(choice.reasons)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def plot(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        """Draw loss and retrieval against the attention factor as a PNG.

        Args:
            path: of the PNG, or a file that is open.

        Raises:
            MeasureError: matplotlib is not installed, or the file cannot be written.
        """
        require_matplotlib()
        target = Path(path) if isinstance(path, (str, os.PathLike)) else path
        with writing(Path(str(path)), "give another path"):
            draw([_line(c) for c in self.choices], self.trained_length, self.target_length, target)

    def to_json(self) -> str:
        """All of it; :meth:`from_json` reads it."""
        data = {name: getattr(self, name) for name in _PLAIN}
        data |= {
            "program": "rope_ext",
            NAME: FORMAT,
            "notes": list(self.notes),
            "sentence": self.sentence,
            "method": method_to_json(self.method),
            "choices": [_choice_to_json(choice) for choice in self.choices],
        }
        return json.dumps(_finite(data), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """The inverse of :meth:`to_json`.

        Raises:
            MeasureError: it is none, or of another version.
        """
        try:
            data = parsed(text)
            given = {name: data[name] for name in _PLAIN}
            choices = tuple(map(_choice_from_json, data["choices"]))
            made = cls(**_infinite(given), choices=choices, notes=tuple(data["notes"]))
            str(made)  # every number is one
            return made
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise unreadable(error) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read the file, or the one in that folder.

        Raises:
            MeasureError: there is none, or it is not what a calibration wrote.
        """
        text = read(path)
        try:
            return cls.from_json(text)
        except MeasureError as error:
            raise MeasureError(f"{path}: {error}") from None


_PLAIN = (
    *("model", "trained_length", "target_length", "scored", "seed", "cost", "prompts", "rows"),
    "inside",
)


def _line(choice: Choice) -> Line:
    """What a picture shows of a method."""
    published, chosen = choice.published, choice.method
    beside = published.options() | {SCALAR: None}
    line = [trial for trial in choice.tried if trial.method.options() | {SCALAR: None} == beside]
    other = [text for text in option_texts(chosen) if text not in option_texts(published)]
    options = [text for text in other if not text.startswith(f"{SCALAR}=")]
    return Line(
        name=published.name,
        points=[_point(trial) for trial in line],
        published=_point(choice.tried[0]),
        chosen=_point(choice.trial),
        options=f" (chosen: {', '.join(options)})" if options else "",
    )


def _point(trial: Trial) -> tuple[float, float, float | None]:
    return trial.attention_factor, math.exp(min(trial.far, 700)), trial.found_beyond


def _choice_to_json(choice: Choice) -> dict[str, Any]:
    return {
        "published": method_to_json(choice.published),
        "proposed": method_to_json(choice.proposed),
        "judged": {name: dataclasses.asdict(change) for name, change in choice.judged.items()},
        "reasons": list(choice.reasons),
        "tried": [_trial_to_json(trial) for trial in choice.tried],
    }


def _choice_from_json(data: Mapping[str, Any]) -> Choice:
    return Choice(
        published=method_from_json(data["published"]),
        proposed=method_from_json(data["proposed"]),
        judged={name: Change(**_infinite(change)) for name, change in data["judged"].items()},
        reasons=tuple(data["reasons"]),
        tried=tuple(map(_trial_from_json, data["tried"])),
    )


def _trial_to_json(trial: Trial) -> dict[str, Any]:
    fields = {f.name: getattr(trial, f.name) for f in dataclasses.fields(trial)}
    return {**fields, "method": method_to_json(trial.method)}


def _trial_from_json(data: Mapping[str, Any]) -> Trial:
    return Trial(**{**_infinite(data), "method": method_from_json(data["method"])})


_INFINITE = "infinite"  # JSON has no infinity


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return f"-{_INFINITE}" if data < 0 else _INFINITE
    return data


def _infinite(data: Mapping[str, Any]) -> dict[str, Any]:
    ends = {_INFINITE: math.inf, f"-{_INFINITE}": -math.inf}
    return {
        name: ends.get(value, value) if isinstance(value, str) else value
        for name, value in data.items()
    }


def perplexity(loss: float) -> str:
    """Of a mean loss in nats per token."""
    return f"{math.exp(min(loss, 700)):.4g}"  # beyond it, a float is not enough


def _percent(difference: float) -> str:
    """The change of a perplexity whose logarithm changes by so much."""
    return f"{100 * math.expm1(min(difference, 700)):+.1f}"


def mean(values: Sequence[float]) -> float:
    """Of some numbers."""
    return sum(values) / len(values)
