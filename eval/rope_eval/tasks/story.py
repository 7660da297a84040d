"""Facts in a stream of other text: prompts that are tokenized as a whole and fill a length.

The stream consists of pieces, and is as long as fits: it is cut after a word, so a prompt is never
longer than requested, and shorter by less than the tokens of the next word (and of the head before
it).
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import ClassVar

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Frame, encode, joined
from rope_eval.data.text import python_documentation, read_texts, sentences
from rope_eval.tasks.base import Kind, Task
from rope_eval.tasks.haystack import too_long


@dataclass(frozen=True)
class Piece:
    """A part of a stream; ``head`` is never cut."""

    head: str
    words: Sequence[str]

    def text(self, count: int | None = None) -> str:
        """The piece with its first ``count`` words, or all."""
        return self.head + " ".join(self.words[:count])


class Stream:
    """An endless sequence of pieces, each made when it is needed."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._made: list[Piece] = []

    def take(self, words: int) -> list[str]:
        """The texts of the first pieces, with that many words in all."""
        taken: list[str] = []
        while words > 0:
            if len(taken) == len(self._made):
                self._made.append(next(self._pieces))
            piece = self._made[len(taken)]
            taken.append(piece.text(words))
            words -= len(piece.words)
        return taken


@cache
def documentation() -> tuple[str, ...]:
    """The sentences of Python's documentation, less fragments and what is no prose."""
    found = sentences(python_documentation())
    return tuple(sentence for sentence in found if 5 <= len(sentence.split()) <= 60)


def stock(sources: Sequence[str]) -> tuple[str, ...] | None:
    """The sentences of files, folders or data sets; None where none is given.

    Raises:
        MeasureError: a text is missing or empty.
    """
    return tuple(chain.from_iterable(map(sentences, read_texts(sources)))) or None


def noise(rng: random.Random, text: Sequence[str] | None = None) -> Iterator[Piece]:
    """Sentences of a text, of Python's documentation by default, from a random place on."""
    text = text or documentation()
    at = rng.randrange(len(text))
    while True:
        yield Piece("", text[at % len(text)].split())
        at += 1


def among(texts: Sequence[str], facts: Sequence[str], places: Sequence[float]) -> list[str]:
    """The texts with the facts between them, in order; a place is a share of the texts."""
    slots: list[list[str]] = [[] for _ in range(len(texts) + 1)]
    for place, fact in zip(sorted(places), facts, strict=True):
        slots[min(int(place * len(slots)), len(texts))].append(fact)
    last = slots.pop()
    return [*chain.from_iterable((*s, t) for s, t in zip(slots, texts, strict=True)), *last]


@dataclass(frozen=True)
class Story:
    """A prompt before its length is known.

    Args:
        compose: builds the prompt with that many words of the stream.
        answers: right answers, for the results.
        judge: scores a text.
        depth: position of the answer, 0 at the start and 1 at the end.
    """

    compose: Callable[[int], str]
    answers: tuple[str, ...]
    judge: Callable[[str], float]
    depth: float | None = None


def filled(frame: Frame, compose: Callable[[int], str], room: int) -> list[int] | int:
    """The longest prompt of at most ``room`` tokens; their least number where even that is more.

    It is searched for by the tokens that a word has had so far, in 16 steps at most.
    """
    best = encode(frame.tokenizer, compose(0))
    least = len(best)
    if least > room:
        return least
    low, high, rate = 0, None, 2.0
    for _ in range(16):
        words = low + max(1, int((room - len(best)) / rate))
        if high is not None and words >= high:
            words = (low + high) // 2
        if words == low:
            break
        ids = encode(frame.tokenizer, compose(words))
        rate = max(1.0, (len(ids) - least) / words)
        if len(ids) <= room:
            low, best = words, ids
        else:
            high = words
    return best


@dataclass(frozen=True)
class Told(Task):
    """A task of stories; subclasses write one.

    Args:
        trials: prompts for each length.
        tokens: maximum answer length in tokens, part of the length; None: eight more than the
            longest answer at a length.
    """

    kind: ClassVar[Kind] = "rate"

    name: str
    trials: int
    tokens: int | None

    def __post_init__(self) -> None:
        require_positive(trials=self.trials, new_tokens=self.tokens)

    @property
    @abstractmethod
    def about(self) -> str:
        """What is measured, for a reader of the results."""

    @abstractmethod
    def story(self, rng: random.Random, chat: bool) -> Story:
        """A story.

        Args:
            rng: everything random follows from it.
            chat: whether the model is a chat model, whose answer is not begun in the prompt.
        """

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts.

        Raises:
            OptionError: a length cannot hold a prompt.
        """
        cases = []
        for length in lengths:
            stories = self._stories(bool(frame.tail), length, seed)
            tokens = self.tokens
            if tokens is None:
                answers = (answer for _, story in stories for answer in story.answers)
                tokens = 8 + max(len(encode(frame.tokenizer, answer)) for answer in answers)
            cases += [self._case(frame, story, length, n, tokens) for n, story in stories]
        definition = f"{self.about}; {self.trials} prompts, exact intervals"
        return Questions(cases, definition)

    def _stories(self, chat: bool, length: int, seed: int) -> list[tuple[int, Story]]:
        """Each with its seed."""
        rng = random.Random(f"{self.name}:{seed}:{length}")
        numbers = [rng.randrange(2**40) for _ in range(self.trials)]
        return [(n, self.story(random.Random(f"{self.name}:{n}"), chat)) for n in numbers]

    def _case(self, frame: Frame, story: Story, length: int, seed: int, tokens: int) -> Case:
        around = len(frame.head) + len(frame.tail) + tokens
        ids = filled(frame, story.compose, length - around)
        if isinstance(ids, int):
            raise too_long(self.name, ids + around, length)
        return Case(
            task=self.name,
            length=length,
            seed=seed,
            mode="write",
            count=tokens,
            ids=joined(frame.head, ids, frame.tail),
            answers=story.answers,
            depth=story.depth,
            judge=story.judge,
        )
