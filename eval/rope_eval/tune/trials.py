"""What ``calibrate`` and ``search`` share: scores of methods, their log, and progress.

A run is a function of its seed and of the logged scores: a resumed run is replayed, and what the
log knows is not measured again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rope_eval.folder import writing
from rope_eval.log import Log, read_lines, to_line
from rope_eval.reports.calibration import mean
from rope_eval.tasks.passkey import MIN_FOUND
from rope_eval.tune.fitness import Prompt, Rows, losses_at_end, losses_of_answers
from rope_eval.tune.options import TuneOptions
from rope_ext.config.record import method_to_json
from rope_ext.errors import MeasureError, OptionError
from rope_ext.methods import Method, Rope
from rope_ext.patching import first_site, patched
from rope_ext.rotary.sites import evaluating

ROOM = "make room and give the same again to go on"
FORMAT = 2


@dataclass(frozen=True)
class Sample:
    """What methods are measured on.

    Args:
        name: of the sample, for the log.
        rows: windows of the target length.
        prompts: of the trained and of the target length.
        inside: for each window, those of the trained length that it is cut into, if they count.
    """

    name: str
    rows: Rows
    prompts: tuple[Prompt, ...]
    inside: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def pieces(self) -> list[tuple[int, ...]]:
        """All windows of the trained length."""
        return [piece for pieces in self.inside for piece in pieces]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """Token ids of all windows and prompts."""
        return [*self.rows.windows, *(prompt.ids for prompt in self.prompts)]

    def __len__(self) -> int:
        return len(self.rows.windows) + len(self.pieces) + len(self.prompts)


@dataclass(frozen=True)
class Scores:
    """Scores of a model on a sample: losses in nats per token, and which answers it would write.

    ``far`` and ``inside`` are of every window (the latter a mean over the windows of the trained
    length in it), ``answers`` and ``found`` of every prompt.
    """

    far: tuple[float, ...]
    inside: tuple[float, ...]
    answers: tuple[float, ...]
    found: tuple[bool, ...]

    @property
    def loss(self) -> float:
        """What is minimized: the mean loss of the windows plus that of the answers.

        Text alone does not tell a model that retrieves from one that does not, and answers alone
        do not tell a model that writes well from one that only copies.
        """
        return sum(mean(part) for part in (self.far, self.answers) if part)

    @property
    def finite(self) -> bool:
        """Whether all losses are numbers."""
        return all(map(math.isfinite, (*self.far, *self.inside, *self.answers)))

    def found_at(self, length: int, sample: Sample) -> list[bool]:
        """Which prompts of ``length`` tokens were answered."""
        both = zip(sample.prompts, self.found, strict=True)
        return [hit for prompt, hit in both if prompt.length == length]


class Trials:
    """Measures methods, each once, on a model that is not patched.

    ``path`` is that of the log of this ``kind`` of run, and ``settings`` are what scores depend on.

    Raises:
        MeasureError: the log is of other settings, or cannot be read or written.
    """

    def __init__(
        self,
        model: nn.Module,
        rope: Rope,
        given: TuneOptions,
        path: Path | None,
        kind: str,
        settings: Mapping[str, Any],
    ) -> None:
        self.model, self.rope, self.given = model, rope, given
        self.forwards = 0  # of one row each, made now or before
        self.known: dict[str, Any] = {}
        self.done: set[str] = set()
        self.log, self.advance, self.show = None, lambda rows: None, lambda **changes: None
        if path is None:
            return
        settings = json.loads(json.dumps({"format": FORMAT, **settings}))
        self.log = Log(path, to_line({kind: settings}), ROOM)
        with writing(path, "give another output"):
            if path.exists():
                found, self.known = read_log(path, kind)
                changed = [name for name, value in settings.items() if found.get(name) != value]
                if changed:
                    raise MeasureError(
                        f"{path} is of another {kind} (another {', '.join(changed)}); give the "
                        f"same again to go on with it, or another output"
                    )
        self.log.open()

    @contextmanager
    def progress(self, forwards: int) -> Iterator[None]:
        """Show how many forwards are made at most, and the time that they take."""
        from rope_ext.command.terminal import progress  # rich is not loaded with the package

        with evaluating(self.model), progress() as shown:
            words = f"at most {forwards} forwards of {self.given.target_length} tokens"
            bar = shown.add_task(words, total=forwards)
            self.advance, self.show = partial(shown.advance, bar), partial(shown.update, bar)
            yield

    def scores(self, method: Method | None, sample: Sample) -> Scores:
        """Scores of a method, or within the trained length of the unpatched model.

        Raises:
            RopeExtError: the model does not accept the method, or the log cannot be written.
        """
        if method is None:
            prompts = [p for p in sample.prompts if p.length == self.rope.length]
            sample = replace(sample, rows=Rows((), ()), prompts=tuple(prompts))
        trial = {"method": method and method_to_json(method), "sample": sample.name}
        key = json.dumps(trial)
        first = key not in self.done
        self.done.add(key)
        self.forwards += len(sample) * first
        if (known := self.known.get(key)) is not None:
            self.advance(len(sample) * first)
            return from_json(known)
        with (
            nullcontext() if method is None else patched(self.model, method, **self.given.arguments)
        ):
            far = self._losses(sample.rows.windows, self.given.tail)
            pieces = iter(self._losses(sample.pieces, self.rope.length - 1))
            answers = losses_of_answers(self.model, sample.prompts, self.advance)
        inside = [mean([next(pieces) for _ in each]) for each in sample.inside]
        losses, found = zip(*answers, strict=True) if answers else ((), ())
        scores = Scores(tuple(far), tuple(inside), losses, found)
        self.known[key] = _to_json(scores)
        if self.log is not None:
            self.log.add(to_line({**trial, "scores": _to_json(scores)}))
        return scores

    def _losses(self, rows: Sequence[Sequence[int]], scored: int) -> list[float]:
        return losses_at_end(self.model, rows, scored, self.advance) if scored else []

    def counting(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
        """The samples with the prompts that count, and a note for each hay that does not.

        A hay counts if the unpatched model finds at least half of its prompts within the trained
        length: if it cannot retrieve there, what a method misses says nothing about the method.
        """
        hits: dict[str, list[bool]] = {}
        for sample in samples:
            prompts = [p for p in sample.prompts if p.length == self.rope.length]
            for prompt, hit in zip(prompts, self.scores(None, sample).found, strict=True):
                hits.setdefault(prompt.hay, []).append(hit)
        left = {hay for hay, found in hits.items() if sum(found) < MIN_FOUND * len(found)}
        notes = [
            f"answers hidden in {hay} do not count: within its {self.rope.length} trained tokens "
            f"the unpatched model finds {sum(hits[hay])} of {len(hits[hay])}"
            for hay in hits
            if hay in left
        ]
        return [
            replace(sample, prompts=tuple(p for p in sample.prompts if p.hay not in left))
            for sample in samples
        ], notes


def trained_rope(model: nn.Module, given: TuneOptions) -> Rope:
    """The rotary embedding that ``model`` was trained with.

    Raises:
        OptionError: the target length is not beyond the trained one, or leaves nothing to score.
    """
    rope = first_site(model, given.sliding_layers, given.original_max_position_embeddings).rope
    if given.target_length <= rope.length:
        raise OptionError(
            f"target_length={given.target_length} is not beyond the {rope.length} tokens that "
            f"the model was trained for; give a larger one"
        )
    if given.tail >= given.target_length:
        raise OptionError(
            f"scored={given.tail} is not valid; it must be below "
            f"target_length={given.target_length}, since the first token has no context"
        )
    return rope


def read_log(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and scores of a log.

    Raises:
        MeasureError: it is not a log of this kind.
    """
    lines = list(read_lines(path))
    settings = lines[0].get(kind) if lines else None
    if not isinstance(settings, dict):
        raise MeasureError(f"{path} is not the log of a {kind}; delete it, or give another output")
    trials = [(line, line.pop("scores")) for line in lines[1:] if "scores" in line]
    return settings, {json.dumps(trial): scores for trial, scores in trials}


def _to_json(scores: Scores) -> dict[str, list[Any]]:
    """Plain values, None for infinite losses."""
    return {
        name: [None if x == math.inf else x for x in values]
        for name, values in asdict(scores).items()
    }


def from_json(data: Mapping[str, Sequence[Any]]) -> Scores:
    """The scores in a line of the log."""
    read: Any = {name: tuple(math.inf if x is None else x for x in xs) for name, xs in data.items()}
    return Scores(**read)
