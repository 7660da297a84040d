"""Questions about documents among many others: ``qa_1`` and ``qa_2`` of RULER.

The documents of a question are in random order among others from the same data set: SQuAD 2.0 or
HotpotQA (distractor setting), read from a file of yours, or made-up facts (``facts``). If a
question has several right answers, one is enough.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.facts import like_hotpotqa, like_squad
from rope_eval.data.prompts import Frame, longest
from rope_eval.tasks.base import Kind, Task
from rope_eval.tasks.haystack import too_long
from rope_ext.errors import MeasureError, OptionError, first_line

ONLY = "Only give me the answer and do not output any other words."
INTRO = (
    f"Answer the question based on the given documents. {ONLY}\n\n"
    f"The following are given documents.\n\n"
)
ASK = f"\n\nAnswer the question based on the given documents. {ONLY}\n\nQuestion: "
LEAD = " Answer:"


@dataclass(frozen=True)
class AnyOf:
    """Scores 1 if any of the answers is in the text, ignoring case."""

    answers: tuple[str, ...]

    def __call__(self, written: str) -> float:
        text = written.lower()
        return float(any(answer.lower() in text for answer in self.answers))


@dataclass(frozen=True)
class Asked:
    """A question: its answers, the documents it needs, and preferred distractors."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A data set: its name, how to read its file, and its made-up replacement."""

    name: str
    option: str
    read: Callable[[Any], tuple[list[Asked], list[str]]]
    made_up: Callable[[], Any]


def _squad(data: Any) -> tuple[list[Asked], list[str]]:
    """Every answerable question, with the other paragraphs of its article as near ones."""
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({part["context"] for parts in articles for part in parts})
    number = {text: index for index, text in enumerate(documents)}
    asked = []
    for parts in articles:
        article = [number[part["context"]] for part in parts]
        for part in parts:
            own = number[part["context"]]
            near = tuple(index for index in article if index != own)
            asked += [
                Asked(qa["question"], tuple(a["text"] for a in qa["answers"]), (own,), near)
                for qa in part["qas"]
                if not qa.get("is_impossible", False)
            ]
    return asked, documents


def _hotpotqa(data: Any) -> tuple[list[Asked], list[str]]:
    """Every question, with all ten documents that come with it."""
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in one["context"]] for one in data]
    documents = sorted({text for context in texts for text in context})
    number = {text: index for index, text in enumerate(documents)}
    asked = [
        Asked(one["question"], (one["answer"],), tuple(number[text] for text in context))
        for one, context in zip(data, texts, strict=True)
    ]
    return asked, documents


SQUAD = Source("SQuAD", "squad", _squad, like_squad)
HOTPOTQA = Source("HotpotQA", "hotpotqa", _hotpotqa, like_hotpotqa)


def read(source: Source, path: str | None) -> tuple[list[Asked], list[str]]:
    """Questions and documents of a file, or made-up ones.

    Raises:
        MeasureError: the file cannot be read, or holds something else.
    """
    if path is None:
        asked, documents = source.read(source.made_up())
        return _spread(asked), documents
    try:
        asked, documents = source.read(json.loads(Path(path).read_text(encoding="utf-8-sig")))
        strings = [text for one in asked for text in (one.question, *one.answers)]
        # Unanswered ones would score nothing, and what is no text has no tokens.
        right = all(type(text) is str for text in strings) and all(one.answers for one in asked)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {first_line(error)}"
        raise MeasureError(
            f"cannot read {path} as {source.name} ({reason}); give --{source.option} a file as its "
            f"authors publish it"
        ) from None
    if not asked or not right:
        raise MeasureError(
            f"{path} holds no questions with answers; give --{source.option} another file"
        )
    return asked, documents


def _spread(asked: Sequence[Asked]) -> list[Asked]:
    """One question about each set of documents, of another kind each time, before a second one."""
    sets: dict[frozenset[int], list[Asked]] = {}
    for one in asked:
        sets.setdefault(frozenset((*one.needed, *one.near)), []).append(one)
    turned = [
        [*own[at % len(own) :], *own[: at % len(own)]] for at, own in enumerate(sets.values())
    ]
    return [one for turn in zip_longest(*turned) for one in turn if one is not None]


@dataclass(frozen=True)
class Answering(Task):
    """Question answering on one data set.

    Args:
        name: of the task.
        source: data set.
        path: its file; None makes up questions.
        trials: prompts for each length: the first questions of the file, as in RULER.
        tokens: maximum answer length in tokens; part of the length.
        suite, suite_size: see ``Task``.
    """

    kind: ClassVar[Kind] = "rate"

    name: str
    source: Source = SQUAD
    path: str | None = None
    trials: int = 20
    tokens: int = 32
    suite: str | None = None
    suite_size: int | None = None

    def __post_init__(self) -> None:
        require_positive(trials=self.trials, new_tokens=self.tokens)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts.

        Raises:
            OptionError: a length cannot hold a prompt, or there are too few questions.
            MeasureError: the file cannot be read.
        """
        asked, documents = read(self.source, self.path)
        if self.trials > len(asked):
            raise OptionError(
                f"{self.path} has {len(asked)} questions, and trials={self.trials} are asked for; "
                f"give fewer --trials"
            )
        cases = [
            self._case(frame, length, one, documents, random.Random(f"{self.name}:{seed}:{at}"))
            for length in lengths
            for at, one in enumerate(asked[: self.trials])
        ]
        name = self.path or "made-up facts"
        definition = (
            f"share of {self.trials} questions that the model answers from documents among others "
            f"of {name}, in random order, exact intervals"
        )
        return Questions(cases, definition, tuple(self._notes(asked[: self.trials])))

    def _notes(self, asked: Sequence[Asked]) -> Iterator[str]:
        if self.path is None:
            yield (
                f"{self.name} asks about made-up facts, not about {self.source.name}: published "
                f"numbers need --{self.source.option} FILE"
            )
        count = len({one.needed for one in asked})
        if count < len(asked):
            yield (
                f"{self.name}: the {len(asked)} questions are about {count} "
                f"document{'s' * (count > 1)}, and intervals that take them as independent are "
                f"too narrow"
            )

    def _case(
        self,
        frame: Frame,
        length: int,
        asked: Asked,
        documents: Sequence[str],
        rng: random.Random,
    ) -> Case:
        number, seed = rng.randrange(2**40), rng.getrandbits(64)
        near = rng.sample(asked.near, len(asked.near))
        known = {*asked.needed, *asked.near}
        far = [index for index in range(len(documents)) if index not in known]
        rng.shuffle(far)
        order = list(dict.fromkeys((*asked.needed, *near, *far)))

        def build(count: int) -> array:
            # More than there are: all of them again, as in RULER.
            chosen = [order[place % len(order)] for place in range(count)]
            random.Random(seed).shuffle(chosen)
            listed = (f"Document {i}:\n{documents[n]}" for i, n in enumerate(chosen, 1))
            content = INTRO + "\n\n".join(listed) + ASK + asked.question
            return frame.whole(content, LEAD, keep_space=True)[0]

        _, ids = longest(build, length - self.tokens, len(asked.needed))
        if len(ids) + self.tokens > length:
            raise too_long(self.name, len(ids) + self.tokens, length)
        judge = AnyOf(asked.answers)
        return Case(
            self.name, length, number, "write", self.tokens, ids, asked.answers, judge=judge
        )
