"""Needles in a haystack: magic numbers hidden in noise, in a text, or among other needles.

The wording and the variants are those of RULER (arXiv 2404.06654, section 3.1 and appendix B);
sentences, keys and values are from Python's documentation, or from your file.
"""

from __future__ import annotations

import random
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, cycle, islice
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case
from rope_eval.data.prompts import Frame
from rope_eval.data.text import pairs, python_documentation, read_texts, sentences
from rope_eval.settings import Settings
from rope_eval.tasks.base import Draw, Prompts, Task, answer_tokens, option, register
from rope_ext.errors import OptionError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRO = (
    "{some} special magic {values} {are} hidden within the following text. Make sure to memorize "
    "it. I will quiz you about the {values} afterwards."
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ASK = "\nWhat {all} the special magic {values} for {query} mentioned in the provided text?"
LEAD = " The special magic {values} for {query} mentioned in the provided text {are}"

Word = Literal["words", "numbers", "uuids"]
DEPTHS = tuple(round(100 * place / 39) for place in range(40))
"""RULER's needle positions in a text, percent of its sentences."""


def make(kind: Word, rng: random.Random) -> str:
    """A random key or value: an adjective and a noun, seven digits, or a UUID."""
    if kind == "words":
        return rng.choice(pairs())
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(kind: Word, count: int, rng: random.Random, taken: Iterable[str] = ()) -> list[str]:
    """Add ``count`` random values to those ``taken``, all different; the taken ones come first."""
    found = dict.fromkeys(taken)
    count += len(found)
    if kind == "words" and count > len(pairs()):
        raise OptionError(
            f"{count} needles need as many keys, of {len(pairs())}; give shorter --lengths"
        )
    while len(found) < count:  # ends: there are millions of the other kinds
        found[make(kind, rng)] = None
    return list(found)


def boundary(pieces: Sequence[str], depth: float) -> int:
    """Return the index between pieces that is nearest to this share of their characters."""
    ends = [0, *accumulate(map(len, pieces))]
    return min(range(len(ends)), key=lambda place: abs(ends[place] - depth * ends[-1]))


def insert(pieces: Sequence[str], needles: Sequence[str], places: Sequence[int]) -> list[str]:
    """Insert each needle before the piece at its index."""
    joined: list[str] = []
    start = 0
    for index in sorted(range(len(needles)), key=places.__getitem__):
        joined += [*pieces[start : places[index]], needles[index]]
        start = places[index]
    return joined + list(pieces[start:])


def read_haystack(sources: Sequence[str]) -> dict[str, Any]:
    """Read a text for a haystack; returns the text and its source, as options of ``Needles``."""
    if not sources:
        return {}
    return {"text": "\n\n".join(read_texts(sources, "--haystack")), "source": ", ".join(sources)}


@dataclass(frozen=True)
class Needles(Prompts):
    """The task in all variants, including ``needle`` and the ``niah`` tasks of ``ruler``.

    ``haystack`` is one repeated line (``noise``), ``text`` (None: Python's documentation) from
    ``source``, or other ``needles``. Of ``keys`` keys with ``values`` values each, ``queries`` are
    asked for. ``depths`` apply to the first needle. With ``ruler``, a text starts at its first
    sentence, with needles at ``DEPTHS``, or before distinct lines; otherwise anywhere.
    """

    haystack: Literal["noise", "text", "needles"] = "text"
    text: str | None = None
    source: str = "Python's documentation"
    ruler: bool = False
    keys: int = 1
    queries: int = 1
    values: int = 1
    key_kind: Word = "words"
    value_kind: Word = "numbers"

    @property
    def about(self) -> str:
        where = {"noise": "repeated noise", "text": self.source, "needles": "other needles"}
        return (
            f"share of {self.queries * self.values} of {self.keys * self.values} {self.value_kind} "
            f"in {where[self.haystack]} that the model writes down in {self.tokens} tokens"
        )

    @cached_property
    def _stock(self) -> list[str]:
        return (python_documentation() if self.text is None else self.text).split()

    def _hay(self, owner: Mapping[str, str], rng: random.Random) -> Callable[[int], list[str]]:
        """Return a function that builds a haystack of a size; ``owner``: keys by value."""
        if self.haystack == "noise":
            return lambda units: [NOISE] * units
        if self.haystack == "needles":
            seed = rng.getrandbits(64)
            taken = list(dict.fromkeys(owner.values()))

            def others(units: int) -> list[str]:
                # New generators in each call: a larger haystack begins with the lines of a
                # smaller one, so that its length grows with its size.
                keys = distinct(self.key_kind, count=units, rng=random.Random(seed), taken=taken)
                values = distinct(
                    self.value_kind, count=units, rng=random.Random(seed + 1), taken=owner
                )
                return list(map(self._needle, keys[len(taken) :], values[len(owner) :]))

            return others
        stock = self._stock
        begins = [0, *(at for at, word in enumerate(stock[:-1], 1) if word[-1] in ".!?")]
        start = 0 if self.ruler else rng.choice(begins)
        turned = [*stock[start:], *stock[:start]]
        return lambda units: sentences(" ".join(islice(cycle(turned), units)))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        """Build a prompt with all needles in the largest haystack that fits."""
        rng = random.Random(f"{self.name}:{draw.number}")
        keys = distinct(self.key_kind, self.keys, rng)
        values = distinct(self.value_kind, self.keys * self.values, rng)
        owner = {value: keys[index // self.values] for index, value in enumerate(values)}
        queried = keys[: self.queries]
        needles = [self._needle(key, value) for value, key in owner.items()]
        several = self.queries * self.values > 1
        words = {
            "values": self.value_kind if several else self.value_kind[:-1],
            "query": ", ".join(queried[:-1]) + ", and " + queried[-1]
            if len(queried) > 1
            else queried[0],
            "some": "Some" if several else "A",
            "are": "are" if several else "is",
            "all": "are all" if several else "is",
        }
        hay = self._hay(owner, rng)
        placed = self._places(len(needles), draw.depth, rng)
        joint = " " if self.haystack == "text" else "\n"

        def build(units: int) -> array:
            lines = hay(units)
            context = joint.join(insert(lines, needles, placed(lines)))
            content = f"{INTRO.format(**words)}\n{context}{ASK.format(**words)}"
            return frame.whole(content, LEAD.format(**words), keep_space=True)[0]

        # RULER puts needles before distinct lines, so there must be enough lines.
        least = len(needles) if self.ruler and self.haystack != "text" else 0
        _, ids = self.fill(build, length, least)
        return self.case(
            length, draw, ids, answers=[one for one in values if owner[one] in queried]
        )

    def _places(
        self, count: int, depth: float | None, rng: random.Random
    ) -> Callable[[Sequence[str]], list[int]]:
        """Return the line after each needle, for a haystack of any size."""
        seed = rng.getrandbits(64)
        if self.ruler and self.haystack == "text":
            percent = rng.sample(DEPTHS, count)
            return lambda lines: [int(len(lines) * (one / 100)) for one in percent]
        if self.ruler:
            return lambda lines: random.Random(seed).sample(range(len(lines)), count)
        # Shares of the haystack, so that needles keep their depth when it grows.
        shares = [rng.random() for _ in range(count)]

        def anywhere(lines: Sequence[str]) -> list[int]:
            places = [int(share * (len(lines) + 1)) for share in shares]
            return places if depth is None else [boundary(lines, depth), *places[1:]]

        return anywhere


@register
@dataclass(frozen=True)
class Needle(Task):
    """Several needles, distractors, any text; the first needle is placed at all depths."""

    name: ClassVar[str] = "needle"

    trials: int = option(10, "prompts for each length and depth")
    depths: int = option(5, "depth bins of equal width")
    needles: int = option(1, "number of needles to retrieve")
    distractors: int = option(0, "number of distractors", least=0)
    haystack: tuple[str, ...] = option(
        (),
        "file, folder or hf:ID/CONFIG:SPLIT; repeatable; or noise, or needles. Default: Python's "
        "documentation",
    )
    new_tokens: int | None = answer_tokens()

    def parts(self, settings: Settings) -> Sequence[Task]:
        named = len(self.haystack) == 1 and self.haystack[0] in ("noise", "needles")
        hay: dict[str, Any] = (
            {"haystack": self.haystack[0]} if named else read_haystack(self.haystack)
        )
        tokens = 16 + 16 * self.needles if self.new_tokens is None else self.new_tokens
        keys = self.needles + self.distractors
        return [
            Needles(
                name="needle",
                trials=self.trials,
                tokens=tokens,
                depths=self.depths,
                keys=keys,
                queries=self.needles,
                **hay,
            )
        ]
