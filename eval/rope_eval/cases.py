"""Cases and outcomes: questions to a model, and their results, one line per case."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rope_eval.folder import HEADER, Log, read_lines, to_line
from rope_ext.errors import MeasureError, OptionError

Mode = Literal["argmax", "loss", "rank", "write"]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Documents to rank for questions, as tokens with their prompt and special tokens.

    ``closing`` is the number of special tokens at the end of each, which it keeps when it is cut.
    """

    documents: tuple[array, ...]
    closing: int = 0

    @cached_property
    def digest(self) -> str:
        """A digest of all documents."""
        found = hashlib.sha256()
        for document in self.documents:
            # With lengths: the same tokens, divided otherwise, are other documents.
            found.update(len(document).to_bytes(8, "little") + document.tobytes())
        return found.hexdigest()[:16]

    def cut(self, window: int) -> list[array]:
        """Return the documents without what is beyond ``window`` tokens."""
        kept = window - self.closing
        return [
            one if len(one) <= window else one[:kept] + one[len(one) - self.closing :]
            for one in self.documents
        ]


@dataclass(frozen=True)
class Case:
    """One question to a model; it does not depend on methods, so all get identical cases.

    ``seed`` determines everything random, ``length`` is the requested context with the answer, and
    ``depth`` the position of the answer, from 0 (start) to 1 (end), sampled from its ``bin``. Cases
    of one document, or of one question, share a ``group``, over which intervals are; 0 is a
    question of its own.

    * ``argmax``: greedy decoding must choose the last ``count`` tokens of ``ids``, found out by one
      teacher-forced forward.
    * ``loss``: their mean negative log likelihood, or that of the tokens at the positions ``only``.
      The case's weight is the number of tokens, or ``weight``.
    * ``write``: up to ``count`` tokens are generated after ``ids``, and ``answers`` are searched
      in them, or ``judge`` scores the text from 0 to 1: a frozen dataclass that can be called,
      whose fields belong to the case.
    * ``rank``: ``ids`` are a question for an embedder; of the ``candidates``, the document at the
      index ``right`` must have the most similar embedding.
    """

    task: str
    length: int
    seed: int
    mode: Mode
    count: int
    ids: array = field(repr=False)
    answers: tuple[str, ...] = ()
    depth: float | None = None
    bin: int | None = None
    group: int = 0
    weight: int | None = None
    only: tuple[int, ...] = field(default=(), repr=False)
    judge: Callable[[str], float] | None = field(default=None, repr=False)
    candidates: Candidates | None = field(default=None, repr=False)
    right: int | None = None

    def __post_init__(self) -> None:
        if self.judge is not None and not is_dataclass(self.judge):  # its repr would be an address
            raise OptionError(
                f"the judge {self.judge!r} of a case of {self.task} is no dataclass, so --resume "
                f"could not tell it from another; make it one whose fields say how it scores"
            )

    @property
    def key(self) -> str:
        """The expected answer of a case that has one."""
        return self.answers[0]

    @property
    def tokens(self) -> int:
        if self.candidates is not None and self.right is not None:
            return len(self.ids) + len(self.candidates.documents[self.right])
        return len(self.ids) + (self.count if self.mode == "write" else 0)

    @cached_property
    def prompt(self) -> str:
        """A digest of the model's input and of the scoring."""
        how = (self.mode, self.count, self.answers, self.only)
        # Only what is set: a field that is added later leaves the digests of older logs alone.
        how += () if self.judge is None else (self.judge,)
        how += () if self.weight is None else ("weight", self.weight)
        how += () if self.candidates is None else (self.candidates.digest, self.right)
        text = self.ids.tobytes() + repr(how).encode()
        return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class Questions:
    """All cases of a task for one model, in order, and what defines the numbers."""

    cases: Sequence[Case]
    definition: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """A finished case under one method; a line of the log.

    ``key`` is a digest of everything that determines the rest, ``value`` the share of the answers
    found or the mean loss in nats per token, and ``tokens`` what it counts as.
    """

    key: str
    system: str
    task: str
    length: int
    bin: int | None
    depth: float | None
    seed: int
    prompt: str
    answers: tuple[str, ...]
    group: int
    value: float
    tokens: int
    written: str | None = None

    def to_line(self) -> bytes:
        """Return a line of the log; an infinite loss becomes None, since JSON has no infinity."""
        value = self.value if math.isfinite(self.value) else None
        return to_line({**asdict(self), "value": value})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of ``to_line``, of the line as JSON."""
        value = math.inf if data["value"] is None else data["value"]
        return cls(**{**data, "answers": tuple(data["answers"]), "value": value})


@dataclass(frozen=True)
class Result:
    """The outcome of a case without its key; see ``Outcome``."""

    value: float
    tokens: int
    written: str | None = None


def tail(case: Case) -> int:
    return len(case.ids) - min(case.only) if case.only else case.count


def loss(case: Case, losses: Any) -> Result:
    """Return the mean of the scored tokens' ``losses``, a tensor; NaN counts as infinite."""
    losses = losses.nan_to_num(nan=math.inf, posinf=math.inf)
    scored = losses[-case.count :]
    if case.only:
        # ``only`` counts from the first token of the row, ``losses`` from the first that is scored.
        first = len(case.ids) - len(losses)
        scored = losses[[place - first for place in case.only]]
    return Result(float(scored.mean()), len(scored) if case.weight is None else case.weight)


def share_found(case: Case, written: str) -> float:
    """Score text with the judge, or by the share of answers in it, ignoring case, as RULER."""
    if case.judge is not None:
        return float(case.judge(written))
    text = written.lower()
    return sum(answer.lower() in text for answer in case.answers) / len(case.answers)


def digest(*determinants: Any) -> str:
    """Return a short digest of these values, the same in every process."""
    # Logs on disk have these digests: another form of the text makes all of them stale.
    text = json.dumps(determinants, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def dump(data: Any) -> str:
    """Return JSON with sorted keys, so that equal results are equal bytes."""
    return json.dumps(data, indent=1, sort_keys=True, default=str) + "\n"


def read_outcomes(paths: Sequence[Path]) -> dict[str, Outcome]:
    """Read the outcomes of some logs by key; lines that are not outcomes are skipped."""
    outcomes = {}
    for path in paths:
        try:
            lines = list(read_lines(path))
        except OSError as error:
            raise MeasureError(
                f"cannot read {path}: {error.strerror}; give --output another folder"
            ) from None
        for data in lines:
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                outcome = Outcome.from_json(data)
                # A later line is of a run that repeated an unfinished batch.
                outcomes[outcome.key] = outcome
    return outcomes


def case_log(path: Path) -> Log:
    """Open a log of outcomes, each on disk before the next; it need not exist."""
    cure = "make room or give --output another folder; --resume keeps what is finished"
    return Log(path, HEADER, cure)


def require_positive(**values: int | None) -> None:
    """Raise OptionError for a value below 1; None passes."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} is not valid; it must be at least 1")
