"""Shared by benchmarks with published data: rows, prompts cut to a length, and cases.

A prompt is tokenized as a whole. If it does not fit the length (minus the template and the answer),
it is cut as in its benchmark: in the middle, or at the end of the context. It is never longer than
requested. Shorter rows are not changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Frame, encode, joined
from rope_eval.data.rows import Row
from rope_eval.tasks.base import Kind, Task
from rope_eval.tasks.haystack import too_long
from rope_ext.errors import MeasureError, OptionError, nearest


@dataclass(frozen=True)
class Asked:
    """A row as a prompt.

    Args:
        before, context, after: the prompt in three parts; only the second may be cut at its end.
        answers: right answers, for the results.
        judge: scores a text.
    """

    before: str
    context: str
    after: str
    answers: tuple[str, ...]
    judge: Callable[[str], float]

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.before + self.context + self.after


@dataclass(frozen=True)
class Benchmark(Task):
    """Rows of one data set, each asked at every length; subclasses build the prompts.

    Args:
        name: of the task.
        rows: of the data.
        tokens: maximum answer length in tokens; part of the length.
        samples: rows to ask, sampled at random; None: all.
        cut: where to cut a prompt that is too long: its ``middle``, or the ``end`` of its context.
        about: a description for the results.
    """

    kind: ClassVar[Kind] = "rate"

    name: str
    rows: Sequence[Row]
    tokens: int
    samples: int | None
    about: str
    cut: Literal["middle", "end"] = "middle"

    def __post_init__(self) -> None:
        require_positive(new_tokens=self.tokens, samples=self.samples)

    def asked(self, row: Row, chat: bool, seed: int) -> Asked:
        """The prompt of a row.

        Args:
            row: of the data.
            chat: whether the model is a chat model, for which some benchmarks have other words.
            seed: of the run.

        Raises:
            MeasureError: the row lacks something.
        """
        raise NotImplementedError

    def chosen(self, seed: int) -> Sequence[Row]:
        """The rows to ask, in their order."""
        if self.samples is None or self.samples >= len(self.rows):
            return self.rows
        rng = random.Random(f"{self.name}:{seed}")
        return [self.rows[i] for i in sorted(rng.sample(range(len(self.rows)), self.samples))]

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All rows at every length.

        Raises:
            MeasureError: a row lacks something.
            OptionError: a length cannot hold a prompt.
        """
        cases, shortened = [], dict.fromkeys(lengths, 0)
        around = len(frame.head) + len(frame.tail) + self.tokens
        rows = self.chosen(seed)
        for number, row in enumerate(rows):
            asked = self.asked(row, bool(frame.tail), seed)
            whole = encode(frame.tokenizer, asked.text)
            for length in lengths:
                ids = whole
                if len(whole) + around > length:
                    shortened[length] += 1
                    ids = self._cut(frame.tokenizer, asked, whole, length, length - around)
                cases.append(
                    Case(
                        task=self.name,
                        length=length,
                        seed=number,
                        mode="write",
                        count=self.tokens,
                        ids=joined(frame.head, ids, frame.tail),
                        answers=asked.answers,
                        judge=asked.judge,
                    )
                )
        cases.sort(key=lambda case: case.length)  # stable
        what = "the middle of the prompt" if self.cut == "middle" else "the end of the context"
        counts = ", ".join(f"{count} at {length}" for length, count in shortened.items() if count)
        definition = f"{self.about}; {len(rows)} prompts, exact intervals"
        if counts:
            definition += f"; {what} is left out where a prompt is too long ({counts})"
        return Questions(cases, definition)

    def _cut(
        self, tokenizer: Any, asked: Asked, whole: Sequence[int], length: int, room: int
    ) -> Sequence[int]:
        """At most ``room`` tokens of the prompt."""
        if self.cut == "middle":
            half = room // 2
            if half < 1:
                raise too_long(self.name, length - room + 2, length)
            return [*whole[:half], *whole[-half:]]
        ends = _ends(tokenizer, asked.context)
        keep = len(ends)
        ids = whole
        for _ in range(16):  # cut text may be tokenised otherwise: by a token or two
            keep -= len(ids) - room
            if keep < 0:
                break
            text = asked.before + asked.context[: ends[keep - 1] if keep else 0] + asked.after
            ids = encode(tokenizer, text)
            if len(ids) <= room:
                return ids
        least = length - room + len(encode(tokenizer, asked.before + asked.after))
        raise too_long(self.name, least, length)


def _ends(tokenizer: Any, text: str) -> list[int]:
    """Where each token of a text ends, characters."""
    if not getattr(tokenizer, "is_fast", False):
        raise MeasureError(
            "this tokenizer does not say which text a token stands for, so that no context can be "
            "cut; give longer --lengths, or a model with a fast tokenizer"
        )
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [end for _, end in made["offset_mapping"]]


def named(
    sources: Sequence[str], option: str, known: Sequence[str], default: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """``NAME=SOURCE`` as pairs; a source alone is called what ``default`` makes of it.

    Raises:
        OptionError: nothing is given, or a name is none of ``known``.
    """
    if not sources:
        raise OptionError(f"no data are given; give {option} NAME=FILE with a name of {_of(known)}")
    for text in sources:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = default(text), text
        if name not in known:
            raise OptionError(
                f"{option} {text!r} names no data set that is known{nearest(name, known)}; give "
                f"NAME=FILE with a name of {_of(known)}"
            )
        yield name, source


def _of(known: Sequence[str]) -> str:
    return ", ".join(known)
