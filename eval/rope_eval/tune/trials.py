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

from rope_eval.folder import Log, read_lines, to_line, writing
from rope_eval.forward import cost
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
    """What methods are measured on; its ``name`` is for the log.

    ``rows`` are windows of the target length, ``inside`` those of the trained length that each is
    cut into, if they count, and ``prompts`` are of both lengths.
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
        """Token ids of everything that is measured, a forward of one row each."""
        return [*self.rows.windows, *(prompt.ids for prompt in self.prompts), *self.pieces]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def work(self) -> float:
        """As :func:`cost`."""
        return sum(cost(len(ids)) for ids in self.tokens)

    def within(self, trained: int) -> Sample:
        """What the unpatched model is measured on: all that is no longer than this."""
        prompts = tuple(prompt for prompt in self.prompts if prompt.length == trained)
        return replace(self, rows=Rows(), prompts=prompts)


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

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[Any]]) -> Scores:
        """The scores in a line of the log, which has None for infinite losses."""
        return cls(**{k: tuple(math.inf if x is None else x for x in v) for k, v in data.items()})


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
        self.log, self.advance, self.show = None, lambda work: None, lambda **changes: None
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
    def progress(self, samples: Sequence[tuple[Sample, int]]) -> Iterator[None]:
        """Say how many forwards are made at most, and show the time that they take.

        ``samples`` come with the number of methods that are measured on each; the unpatched model
        is one more.
        """
        from rope_ext.command.terminal import progress, tell  # rich is not loaded with the package

        rounds = [*samples, *((sample.within(self.rope.length), 1) for sample, _ in samples)]
        forwards = sum(len(sample) * count for sample, count in rounds)
        tokens = sum(len(ids) * count for sample, count in rounds for ids in sample.tokens)
        tell(f"at most {forwards:,} forwards of one row, {tokens:,} tokens")
        with evaluating(self.model), progress() as shown:
            bar = shown.add_task("", total=sum(one.work * count for one, count in rounds))
            self.advance, self.show = partial(shown.advance, bar), partial(shown.update, bar)
            yield

    def scores(self, method: Method | None, sample: Sample) -> Scores:
        """Scores of a method, or within the trained length of the unpatched model.

        Raises:
            RopeExtError: the model does not accept the method, or the log cannot be written.
        """
        sample = sample.within(self.rope.length) if method is None else sample
        trial = {"method": method and method_to_json(method), "sample": sample.name}
        key = json.dumps(trial)
        first = key not in self.done
        self.done.add(key)
        self.forwards += len(sample) * first
        if (known := self.known.get(key)) is not None:
            self.advance(sample.work * first)
            return Scores.from_json(known)
        with (
            nullcontext() if method is None else patched(self.model, method, **self.given.arguments)
        ):
            far = self._losses(sample.rows.windows, self.given.tail)
            pieces = iter(self._losses(sample.pieces, self.rope.length - 1))
            answers = losses_of_answers(self.model, sample.prompts, self.advance)
        inside = [mean([next(pieces) for _ in each]) for each in sample.inside]
        losses, found = zip(*answers, strict=True) if answers else ((), ())
        scores = Scores(tuple(far), tuple(inside), losses, found)
        plain = asdict(scores).items()
        self.known[key] = {k: [None if x == math.inf else x for x in v] for k, v in plain}
        if self.log is not None:
            self.log.add(to_line({**trial, "scores": self.known[key]}))
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
            prompts = sample.within(self.rope.length).prompts
            for prompt, hit in zip(prompts, self.scores(None, sample).found, strict=True):
                hits.setdefault(prompt.hay, []).append(hit)
        left = [hay for hay, found in hits.items() if sum(found) < MIN_FOUND * len(found)]
        easier = "; an easier one may be found: --needle word" * (self.given.needle == "number")
        notes = [
            f"answers hidden in {hay} do not count: within its {self.rope.length} trained tokens "
            f"the unpatched model finds {sum(hits[hay])} of {len(hits[hay])}{easier}"
            for hay in left
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
