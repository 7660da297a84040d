"""Needles in a haystack: magic numbers hidden in noise, in a text, or among other needles.

The wording and the variants are those of RULER (arXiv 2404.06654, section 3.1 and appendix B);
sentences, keys and values are from Python's documentation, or from a file of yours.
"""

from __future__ import annotations

import json
import random
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Frame, longest
from rope_eval.data.text import python_documentation, read_texts, sentences
from rope_eval.data.words import pairs
from rope_eval.tasks.base import Kind, Task
from rope_ext.errors import MeasureError, OptionError, first_line

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRO = (
    "{some} special magic {values} {are} hidden within the following text. Make sure to memorize "
    "it. I will quiz you about the {values} afterwards."
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ASK = "\nWhat {are} the special magic {values} for {query} mentioned in the provided text?"
LEAD = " The special magic {values} for {query} mentioned in the provided text {is_are}"

Word = Literal["words", "numbers", "uuids"]
KINDS = ("noise", "needles")
"""Haystacks that are no text, by name."""
DEPTHS = tuple(round(100 * place / 39) for place in range(40))
"""Where RULER puts needles in a text, percent of its sentences."""


def make(kind: Word, rng: random.Random) -> str:
    """A random key or value: an adjective and a noun, seven digits, or a UUID."""
    if kind == "words":
        return rng.choice(pairs())
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(kind: Word, count: int, rng: random.Random, taken: Iterable[str] = ()) -> list[str]:
    """``count`` more of them than are taken, none twice: those that are taken come first.

    Raises:
        OptionError: there are not so many.
    """
    found = dict.fromkeys(taken)
    if kind == "words" and len(found) + count > len(pairs()):
        raise OptionError(
            f"{len(found) + count} needles need as many keys, and there are {len(pairs())}; give "
            f"shorter --lengths"
        )
    count += len(found)
    while len(found) < count:  # ends: there are millions of the other kinds
        found[make(kind, rng)] = None
    return list(found)


def boundary(pieces: Sequence[str], depth: float) -> int:
    """The place between pieces that is nearest to this share of their characters."""
    ends = [0, *accumulate(map(len, pieces))]
    return min(range(len(ends)), key=lambda place: abs(ends[place] - depth * ends[-1]))


def insert(pieces: Sequence[str], needles: Sequence[str], places: Sequence[int]) -> list[str]:
    """All pieces, with each needle before the piece at its place."""
    made: list[str] = []
    start = 0
    for index in sorted(range(len(needles)), key=places.__getitem__):
        made += [*pieces[start : places[index]], needles[index]]
        start = places[index]
    return made + list(pieces[start:])


def too_long(name: str, least: int, length: int) -> OptionError:
    """The error for a length that a prompt cannot fit into."""
    return OptionError(
        f"a {name} prompt needs at least {least} tokens with this tokenizer, got length {length}; "
        f"give longer --lengths"
    )


def read_haystack(sources: Sequence[str]) -> dict[str, Any]:
    """A text for a haystack and where it is from, as options of ``Needles``.

    Besides what ``read_texts`` takes, a ``.json`` file with a field ``text``, which is how RULER
    keeps its essays.

    Raises:
        MeasureError: a text is missing or empty.
    """
    if not sources:
        return {}
    texts = []
    for source in sources:
        texts += [_json_text(source)] if source.endswith(".json") else read_texts([source])
    return {"text": "\n\n".join(texts), "source": ", ".join(sources)}


def _json_text(path: str) -> str:
    try:
        text = json.loads(Path(path).read_text(encoding="utf-8"))["text"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise MeasureError(
            f'cannot read the text {path} ({reason}); give a JSON object with a field "text"'
        ) from None
    if not isinstance(text, str) or not text.strip():
        raise MeasureError(f"the text {path} is empty; give --haystack a file with text in it")
    return text


@dataclass(frozen=True)
class Needles(Task):
    """The task in all variants, including ``needle`` and the ``niah`` tasks of ``ruler``.

    Args:
        name: of the task.
        haystack: ``noise``: one line repeated; ``text``: ``text``; ``needles``: other needles, all
            different.
        text: of a text haystack; None uses Python's documentation.
        source: where the text is from, for the results.
        ruler: as in RULER: the text from its beginning, with needles at ``DEPTHS``, or before
            lines that are all different. Otherwise the text from a random sentence, with needles
            anywhere. A text is cut after a word.
        keys: number of keys in the haystack; keys that are not asked for are distractors.
        queries: number of keys that are asked for.
        values: number of values for each key.
        key_kind: type of the keys.
        value_kind: type of the values.
        trials: prompts for each length (and depth bin).
        depths: bins of equal width for the first needle that is asked for; 0 places it anywhere.
        tokens: maximum answer length in tokens; part of the length.
        suite: tasks with the same suite are averaged.
        suite_size: see ``Task``.
    """

    kind: ClassVar[Kind] = "rate"

    name: str
    haystack: Literal["noise", "text", "needles"] = "text"
    text: str | None = None
    source: str = "Python's documentation"
    ruler: bool = False
    keys: int = 1
    queries: int = 1
    values: int = 1
    key_kind: Word = "words"
    value_kind: Word = "numbers"
    trials: int = 10
    depths: int = 0
    tokens: int = 128
    suite: str | None = None
    suite_size: int | None = None

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
        cases = []
        stock = self._stock()
        for length in lengths:
            for depth in range(max(1, self.depths)):
                rng = random.Random(f"{self.name}:{seed}:{length}:{self.depths}:{depth}")
                for _ in range(self.trials):
                    number = rng.randrange(2**40)
                    place = (depth + rng.random()) / self.depths if self.depths else None
                    case = self._case(frame, stock, length, number, place, depth)
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
            f"{self.tokens} tokens; {self.trials} prompts{at}, exact intervals"
        )
        return Questions(cases, definition)

    def _stock(self) -> list[str]:
        """The words of the text."""
        if self.haystack != "text":
            return []
        return (python_documentation() if self.text is None else self.text).split()

    def _hay(
        self, stock: Sequence[str], owner: Mapping[str, str], rng: random.Random
    ) -> Callable[[int], list[str]]:
        """The haystack of so many lines, or of so many words; ``owner``: keys by value."""
        if self.haystack == "noise":
            return lambda units: [NOISE] * units
        if self.haystack == "needles":
            lines: list[str] = []
            keys, values = list(dict.fromkeys(owner.values())), list(owner)

            def others(units: int) -> list[str]:
                nonlocal keys, values
                if (more := units - len(lines)) > 0:
                    had = len(keys), len(values)
                    keys = distinct(self.key_kind, more, rng, keys)
                    values = distinct(self.value_kind, more, rng, values)
                    new = zip(keys[had[0] :], values[had[1] :], strict=True)
                    lines.extend(self._needle(key, value) for key, value in new)
                return lines[:units]

            return others
        begins = [0, *(at for at, word in enumerate(stock[:-1], 1) if word[-1] in ".!?")]
        start = 0 if self.ruler else rng.choice(begins)
        turned = [*stock[start:], *stock[:start]]
        return lambda units: sentences(" ".join(islice(cycle(turned), units)))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _case(
        self,
        frame: Frame,
        stock: Sequence[str],
        length: int,
        seed: int,
        depth: float | None,
        bin: int,
    ) -> Case:
        rng = random.Random(f"{self.name}:{seed}")
        keys = distinct(self.key_kind, self.keys, rng)
        values = distinct(self.value_kind, self.keys * self.values, rng)
        owner = {value: keys[index // self.values] for index, value in enumerate(values)}
        asked = keys[: self.queries]
        needles = [self._needle(key, value) for value, key in owner.items()]
        intro, ask, lead = self._wording(asked)
        hay = self._hay(stock, owner, rng)
        placed = self._places(len(needles), depth, rng)
        joint = " " if self.haystack == "text" else "\n"

        def build(units: int) -> array:
            lines = hay(units)
            context = joint.join(insert(lines, needles, placed(lines)))
            return frame.whole(f"{intro}\n{context}{ask}", lead, keep_space=True)[0]

        # RULER's lines with a needle before them are all different: there must be as many.
        least = len(needles) if self.ruler and self.haystack != "text" else 0
        _, ids = longest(build, length - self.tokens, least)
        if len(ids) + self.tokens > length:
            raise too_long(self.name, len(ids) + self.tokens, length)
        return Case(
            task=self.name,
            length=length,
            seed=seed,
            mode="write",
            count=self.tokens,
            ids=ids,
            answers=tuple(value for value in values if owner[value] in asked),
            depth=depth,
            bin=bin if self.depths else None,
        )

    def _places(
        self, count: int, depth: float | None, rng: random.Random
    ) -> Callable[[Sequence[str]], list[int]]:
        """The line that each needle stands before, in a haystack of any size."""
        seed = rng.getrandbits(64)
        if self.ruler and self.haystack == "text":
            percent = rng.sample(DEPTHS, count)
            return lambda lines: [int(len(lines) * (one / 100)) for one in percent]
        if self.ruler:
            return lambda lines: random.Random(seed).sample(range(len(lines)), count)
        shares = [rng.random() for _ in range(count)]

        def anywhere(lines: Sequence[str]) -> list[int]:
            places = [int(share * (len(lines) + 1)) for share in shares]
            return places if depth is None else [boundary(lines, depth), *places[1:]]

        return anywhere

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
