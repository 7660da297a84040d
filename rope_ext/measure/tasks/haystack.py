"""Needles in a haystack: magic numbers hidden in noise, in a text, or among other needles.

The wording and the variants are those of RULER (arXiv 2404.06654, section 3.1 and appendix B);
sentences, keys and values come from what ships with Python, or from a file of one's own. Every
part is tokenised alone, so that the size of a haystack follows from a sum and not from a search.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, ClassVar, Literal

from rope_ext.errors import OptionError
from rope_ext.measure.cases import Case, Questions, require_positive
from rope_ext.measure.prompts import Frame, encode, joined
from rope_ext.measure.tasks.base import Kind, Task
from rope_ext.measure.text import library_words, python_documentation, read_texts, sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRO = (
    "{some} special magic {values} {are} hidden within the following text. Make sure to memorize "
    "it. I will quiz you about the {values} afterwards."
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ASK = "\nWhat {are} the special magic {values} for {query} mentioned in the provided text?"
LEAD = " The special magic {values} for {query} mentioned in the provided text {is_are}"

Word = Literal["words", "numbers", "uuids"]


def make(kind: Word, rng: random.Random) -> str:
    """A random key or value: two words, seven digits, or a UUID."""
    if kind == "words":
        return "-".join(rng.choices(library_words(), k=2))
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(kind: Word, count: int, rng: random.Random) -> list[str]:
    """``count`` of them, none twice."""
    found: dict[str, None] = {}
    while len(found) < count:  # ends: there are millions of each kind
        found[make(kind, rng)] = None
    return list(found)


def fill(pieces: Iterator[list[int]], budget: int) -> list[list[int]]:
    """Pieces in order that fit into ``budget`` tokens; it ends when a dozen in a row do not."""
    taken: list[list[int]] = []
    missed = 0
    while missed < 12:
        piece = next(pieces)
        if len(piece) <= budget:
            taken.append(piece)
            budget -= len(piece)
            missed = 0
        else:
            missed += 1
    return taken


def boundary(pieces: Sequence[list[int]], depth: float) -> int:
    """The place between pieces that is nearest to this share of their tokens."""
    ends = [0, *accumulate(map(len, pieces))]
    return min(range(len(ends)), key=lambda place: abs(ends[place] - depth * ends[-1]))


def insert(
    pieces: Sequence[list[int]], needles: Sequence[list[int]], places: Sequence[int]
) -> Iterator[int]:
    """The tokens of all pieces, with each needle before the piece at its place."""
    order = sorted(range(len(needles)), key=places.__getitem__)
    start = 0
    for index in order:
        yield from chain(*pieces[start : places[index]], needles[index])
        start = places[index]
    yield from chain(*pieces[start:])


def too_long(name: str, least: int, length: int) -> OptionError:
    """The error for a length that a prompt cannot fit into."""
    return OptionError(
        f"a {name} prompt needs at least {least} tokens with this tokenizer, got length {length}; "
        f"give longer --lengths"
    )


def read_haystack(sources: Sequence[str]) -> dict[str, Any]:
    """The sentences of a haystack and where they are from, as options of ``Needles``.

    Raises:
        MeasureError: a text is missing or empty.
    """
    if not sources:
        return {}
    text = [sentence for part in read_texts(sources) for sentence in sentences(part)]
    return {"text": text, "source": ", ".join(sources)}


@dataclass(frozen=True)
class Needles(Task):
    """The task, in all variants; ``needle`` and the ``niah`` tasks of ``ruler`` are some.

    Args:
        name: of the task.
        haystack: ``noise``: one line over and over; ``text``: ``sentences``; ``needles``: other
            needles.
        text: sentences of the haystack, where it is a text; None takes Python's documentation.
        source: where they are from, for a reader of the results.
        keys: keys in the haystack, those that are not asked for being distractors.
        queries: keys that are asked for.
        values: of each key.
        key_kind: what a key is.
        value_kind: what a value is.
        trials: prompts for each length (and depth bin).
        depths: bins of equal width for the first needle that is asked for; 0 puts it anywhere.
        tokens: that the model may write; they are part of the length.
        suite: that the task is averaged with.
    """

    kind: ClassVar[Kind] = "rate"

    name: str
    haystack: Literal["noise", "text", "needles"] = "text"
    text: Sequence[str] | None = None
    source: str = "Python's documentation"
    keys: int = 1
    queries: int = 1
    values: int = 1
    key_kind: Word = "words"
    value_kind: Word = "numbers"
    trials: int = 10
    depths: int = 0
    tokens: int = 128
    suite: str | None = None

    def __post_init__(self) -> None:
        require_positive(trials=self.trials, queries=self.queries, tokens=self.tokens)
        require_positive(depths=self.depths or None)
        if self.keys < self.queries:
            raise OptionError(f"{self.queries} keys cannot be asked for, there are {self.keys}")

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts.

        Raises:
            OptionError: a length cannot hold a prompt.
        """
        pieces = self._pieces(frame)
        cases = []
        for length in lengths:
            for depth in range(max(1, self.depths)):
                rng = random.Random(f"{self.name}:{seed}:{length}:{self.depths}:{depth}")
                for _ in range(self.trials):
                    number = rng.randrange(2**40)
                    place = (depth + rng.random()) / self.depths if self.depths else None
                    case = self._case(frame, pieces, length, number, place, depth)
                    cases.append(case)
        where = {
            "noise": "repeated noise",
            "text": self.source,
            "needles": "other needles",
        }[self.haystack]
        at = f" at each of {self.depths} depths" if self.depths else ""
        definition = (
            f"share of {self.queries * self.values} {self.value_kind} (of "
            f"{self.keys * self.values} hidden in {where}) that the model writes down in "
            f"{self.tokens} tokens; {self.trials} prompts{at}, Wilson intervals"
        )
        return Questions(cases, definition)

    def _pieces(self, frame: Frame) -> Callable[[random.Random], Iterator[list[int]]]:
        """Endless pieces of haystack, from a random place on."""
        tokenizer = frame.tokenizer
        if self.haystack == "noise":
            line = encode(tokenizer, f"\n{NOISE}")
            return lambda rng: iter(lambda: line, None)
        if self.haystack == "text":
            text = sentences(python_documentation()) if self.text is None else self.text
            stock = tokenizer([f" {s}" for s in text], add_special_tokens=False)["input_ids"]

            def from_text(rng: random.Random) -> Iterator[list[int]]:
                at = rng.randrange(len(stock))
                while True:
                    yield stock[at % len(stock)]
                    at += 1

            return from_text

        def others(rng: random.Random) -> Iterator[list[int]]:
            while True:
                lines = [
                    self._needle(make(self.key_kind, rng), make(self.value_kind, rng))
                    for _ in range(64)
                ]
                yield from tokenizer(lines, add_special_tokens=False)["input_ids"]

        return others

    def _needle(self, key: str, value: str) -> str:
        space = " " if self.haystack == "text" else "\n"
        return space + NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _case(
        self,
        frame: Frame,
        pieces: Callable[[random.Random], Iterator[list[int]]],
        length: int,
        seed: int,
        depth: float | None,
        bin: int,
    ) -> Case:
        rng = random.Random(f"{self.name}:{seed}")
        keys = distinct(self.key_kind, self.keys, rng)
        values = distinct(self.value_kind, self.keys * self.values, rng)
        owned = {key: values[i * self.values :][: self.values] for i, key in enumerate(keys)}
        asked = keys[: self.queries]
        answers = [value for key in asked for value in owned[key]]
        needles = [
            encode(frame.tokenizer, self._needle(key, value))
            for key in keys
            for value in owned[key]
        ]
        intro, ask, lead = self._wording(asked)
        start = [*frame.head, *encode(frame.tokenizer, intro)]
        if self.haystack == "text":
            start += encode(frame.tokenizer, "\n")
        end, _ = frame.ask(ask, lead)
        least = len(start) + len(end) + sum(map(len, needles)) + self.tokens
        if least > length:
            raise too_long(self.name, least, length)
        hay = fill(pieces(rng), length - least)
        places = [rng.randint(0, len(hay)) for _ in needles]
        if depth is not None:
            places[0] = boundary(hay, depth)
        ids = joined(start, insert(hay, needles, places), end)
        return Case(
            task=self.name,
            length=length,
            seed=seed,
            mode="write",
            count=self.tokens,
            ids=ids,
            answers=tuple(answers),
            depth=depth,
            bin=bin if self.depths else None,
        )

    def _wording(self, asked: Sequence[str]) -> tuple[str, str, str]:
        """Introduction, question and beginning of the answer."""
        several = self.queries * self.values > 1
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        words: dict[str, Any] = {
            "values": self.value_kind if several else self.value_kind[:-1],
            "query": query,
            "some": "Some" if several else "A",
            "is_are": "are" if several else "is",
        }
        intro = INTRO.format(are="are" if several else "is", **words)
        return intro, ASK.format(are="are all" if several else "is", **words), LEAD.format(**words)
