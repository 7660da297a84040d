"""The RULER tasks that need no download, written from their description.

Retrieval (``niah_*``), variable tracking (``vt``), common words (``cwe``) and frequent words
(``fwe``) of RULER (arXiv 2404.06654); its two question-answering tasks are left out, since they
need other people's data. The score of a prompt is the share of the references that occur in what
the model writes, whatever their case. The effective length is the longest one up to which the
average over the tasks is at least 85.6 %.

What differs from the authors' code: essays, words and keys are taken from what ships with Python
(or from ``--haystack``); numbers are in one prompt only once; a prompt is filled by adding up the
lengths of its parts, so that it is never longer than asked for and short of it by less than one
part, and where it cannot fit that is an error.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

import torch

from rope_ext.errors import OptionError, nearest
from rope_ext.measure.arguments import parse_length, split
from rope_ext.measure.cases import Case, Questions, require_positive
from rope_ext.measure.prompts import Frame, encode, joined
from rope_ext.measure.settings import Settings
from rope_ext.measure.tasks.base import Kind, Task, option, register
from rope_ext.measure.tasks.haystack import NOISE, Needles, fill, insert, read_haystack, too_long
from rope_ext.measure.text import library_words

SUITE = "RULER"

VT_INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
VT_ASK = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
VT_LEAD = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are:"
)
CWE_INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_ASK = "\nQuestion: What are the 10 most common words in the above list?"
CWE_LEAD = " Answer: The top 10 words that appear most often in the list are:"
FWE_INTRO = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words."
)
FWE_ASK = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
FWE_LEAD = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)


@dataclass(frozen=True)
class Synthetic(Task):
    """A task made of random parts; subclasses say how one prompt is built.

    Args:
        trials: prompts for each length.
        tokens: that the model may write; they are part of the length.
    """

    kind: ClassVar[Kind] = "rate"
    suite: ClassVar[str | None] = SUITE
    name: ClassVar[str]
    about: ClassVar[str]

    trials: int
    tokens: int

    def __post_init__(self) -> None:
        require_positive(trials=self.trials, new_tokens=self.tokens)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts.

        Raises:
            OptionError: a length cannot hold a prompt.
        """
        cases = []
        for length in lengths:
            rng = random.Random(f"{self.name}:{seed}:{length}")
            for _ in range(self.trials):
                number = rng.randrange(2**40)
                ids, answers = self.prompt(frame, length, random.Random(f"{self.name}:{number}"))
                case = Case(self.name, length, number, "write", self.tokens, ids, tuple(answers))
                cases.append(case)
        definition = f"{self.about}; {self.trials} prompts, Wilson intervals"
        return Questions(cases, definition)

    def prompt(
        self, frame: Frame, length: int, rng: random.Random
    ) -> tuple[Sequence[int], list[str]]:
        """Token ids, at most ``length`` less ``tokens`` of them, and the references.

        Raises:
            OptionError: they cannot be that few.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class VariableTracking(Synthetic):
    """Chains ``VAR B = VAR A``: which variables hold the number? One chain of four hops."""

    name: ClassVar[str] = "vt"
    about: ClassVar[str] = "share of the 5 variables of a chain of assignments in repeated noise"

    tokens: int = 30
    hops: int = 4

    def prompt(
        self, frame: Frame, length: int, rng: random.Random
    ) -> tuple[Sequence[int], list[str]]:
        tokenizer = frame.tokenizer
        line = encode(tokenizer, f"\n{NOISE}")
        intro = encode(tokenizer, VT_INTRO)
        shown, solved = self._chain(3, rng)  # an example, solved
        words = self._words(shown[0])
        example = [
            *intro,
            *self._hidden(frame, [line] * 6, shown, rng),
            *encode(tokenizer, f"{words[0]}{words[1]} {' '.join(solved)}\n\n"),
        ]
        chain_, names = self._chain(5, rng)
        end, _ = frame.ask(*self._words(chain_[0]))
        start = [*frame.head, *example, *intro]
        least = len(start) + len(end) + self.tokens
        least += sum(len(encode(tokenizer, f"\n{link}")) for link in chain_)
        if least > length:
            raise too_long(self.name, least, length)
        noise = fill(iter(lambda: line, None), length - least)
        return joined(start, self._hidden(frame, noise, chain_, rng), end), names

    def _chain(self, letters: int, rng: random.Random) -> tuple[list[str], list[str]]:
        names: dict[str, None] = {}
        while len(names) <= self.hops:  # ends: 26 ** letters names
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        listed = list(names)
        links = [f"VAR {listed[0]} = {rng.randrange(10000, 100000)}"]
        links += [f"VAR {b} = VAR {a}" for a, b in pairwise(listed)]
        return links, listed

    def _words(self, first: str) -> tuple[str, str]:
        value = first.split(" = ")[1]
        return VT_ASK.format(value=value), VT_LEAD.format(value=value, count=self.hops + 1)

    def _hidden(
        self, frame: Frame, noise: list[list[int]], links: list[str], rng: random.Random
    ) -> list[int]:
        places = sorted(rng.randint(0, len(noise)) for _ in links)
        needles = [encode(frame.tokenizer, f"\n{link}") for link in links]
        return list(insert(noise, needles, places))


@dataclass(frozen=True)
class CommonWords(Synthetic):
    """A numbered list of words, ten of which come more often than all others."""

    name: ClassVar[str] = "cwe"
    about: ClassVar[str] = "share of the 10 words that a numbered list repeats most"

    tokens: int = 120
    common: int = 10

    def prompt(
        self, frame: Frame, length: int, rng: random.Random
    ) -> tuple[Sequence[int], list[str]]:
        if length >= 4096:
            try:
                return self._prompt(frame, length, rng, (30, 3), 40, (10, 3))
            except OptionError:
                pass  # a tokenizer of many tokens a word
        # As in RULER where there is little room: fewer words, and less often.
        return self._prompt(frame, length, rng, (6, 1), 20, (3, 1))

    def _prompt(
        self,
        frame: Frame,
        length: int,
        rng: random.Random,
        repeats: tuple[int, int],
        shown: int,
        example_repeats: tuple[int, int],
    ) -> tuple[Sequence[int], list[str]]:
        tokenizer = frame.tokenizer
        intro = encode(tokenizer, CWE_INTRO)
        words = rng.sample(library_words(), len(library_words()))
        example_words, words = words[:shown], words[shown:]
        entries = self._shuffled(example_words, *example_repeats, rng)
        solved = " ".join(f"{i}. {w}" for i, w in enumerate(example_words[: self.common], 1))
        example = [
            *intro,
            *encode(tokenizer, " ".join(f"{i}. {w}" for i, w in enumerate(entries, 1))),
            *encode(tokenizer, f"{CWE_ASK}{CWE_LEAD} {solved}\n"),
        ]
        end, _ = frame.ask(CWE_ASK, CWE_LEAD)
        start = [*frame.head, *example, *intro]
        budget = length - len(start) - len(end) - self.tokens
        # A list of n different words has a length that can be added up without writing it down.
        sizes = self._sizes(frame, words, budget, *repeats)
        different = sum(size <= budget for size in sizes)
        if different <= self.common:
            least = sizes[self.common] + length - budget
            raise too_long(self.name, least, length)
        entries = self._shuffled(words[:different], *repeats, rng)
        ids = (frame.word(t) for i, w in enumerate(entries, 1) for t in (f" {i}.", f" {w}"))
        return joined(start, chain(*ids), end), words[: self.common]

    def _sizes(
        self, frame: Frame, words: Sequence[str], budget: int, often: int, seldom: int
    ) -> list[int]:
        """Tokens of the list of the first 1, 2, ... words, until it is too long."""
        sizes: list[int] = []
        total = entries = 0
        for index, word in enumerate(words):
            times = often if index < self.common else seldom
            total += times * len(frame.word(f" {word}"))
            total += sum(len(frame.word(f" {entries + i}.")) for i in range(1, times + 1))
            entries += times
            sizes.append(total)
            if total > budget and index >= self.common:
                break
        return sizes

    def _shuffled(
        self, words: Sequence[str], often: int, seldom: int, rng: random.Random
    ) -> list[str]:
        entries = [*words[: self.common]] * often + [*words[self.common :]] * seldom
        rng.shuffle(entries)
        return entries


@dataclass(frozen=True)
class FrequentWords(Synthetic):
    """Coded words whose frequencies follow a zeta distribution: the three that lead."""

    name: ClassVar[str] = "fwe"
    about: ClassVar[str] = "share of the 3 most frequent words of a coded text"

    tokens: int = 50
    alpha: float = 2.0

    def prompt(
        self, frame: Frame, length: int, rng: random.Random
    ) -> tuple[Sequence[int], list[str]]:
        tokenizer = frame.tokenizer
        size = max(5, length // 50)  # different words, as in RULER
        coded: dict[str, None] = {}
        while len(coded) < size:  # ends: 26 ** 6 words
            coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        words = ["...", *list(coded)[1:]]  # the most frequent one is noise
        tokens = [encode(tokenizer, f" {word}") for word in words]
        start = [*frame.head, *encode(tokenizer, FWE_INTRO)]
        end, _ = frame.ask(FWE_ASK, FWE_LEAD)
        budget = length - len(start) - len(end) - self.tokens
        low, high = 1, max(1, 2 * budget)  # of words in the text; each has a token at least
        while low < high:
            middle = (low + high + 1) // 2
            if self._tokens(tokens, middle) <= budget:
                low = middle
            else:
                high = middle - 1
        counts = self._counts(len(words), low)
        while counts[3] == counts[4] > 0:  # the third answer is as frequent as what follows it
            low -= 1
            counts = self._counts(len(words), low)
        if self._tokens(tokens, low) > budget or counts[3] < 1:
            # The fourth of them must occur: more words than its share of a zeta distribution.
            needed = next(n for n in range(1, 10**4) if self._counts(len(words), n)[3] >= 1)
            raise too_long(self.name, self._tokens(tokens, needed) + length - budget, length)
        text = [word for word, times in zip(tokens, counts, strict=True) for _ in range(times)]
        rng.shuffle(text)
        return joined(start, chain(*text), end), words[1:4]

    def _counts(self, ranks: int, words: int) -> list[int]:
        zeta = float(torch.special.zeta(torch.tensor(self.alpha, dtype=torch.float64), 1.0))
        return [int(words * rank**-self.alpha / zeta) for rank in range(1, ranks + 1)]

    def _tokens(self, tokens: Sequence[list[int]], words: int) -> int:
        counts = self._counts(len(tokens), words)
        return sum(n * len(ids) for n, ids in zip(counts, tokens, strict=True))


def _needles(**options: object) -> Callable[..., Needles]:
    def made(trials: int, tokens: int | None, haystack: dict) -> Needles:
        more = {} if tokens is None else {"tokens": tokens}
        text = haystack if options.get("haystack", "text") == "text" else {}
        return Needles(trials=trials, suite=SUITE, **options, **text, **more)

    return made


def _synthetic(cls: type[Synthetic]) -> Callable[..., Synthetic]:
    def made(trials: int, tokens: int | None, haystack: dict) -> Synthetic:
        return cls(trials) if tokens is None else cls(trials, tokens)

    return made


TASKS: dict[str, Callable] = {
    "niah_single_1": _needles(name="niah_single_1", haystack="noise"),
    "niah_single_2": _needles(name="niah_single_2"),
    "niah_single_3": _needles(name="niah_single_3", value_kind="uuids"),
    "niah_multikey_1": _needles(name="niah_multikey_1", keys=4),
    "niah_multikey_2": _needles(name="niah_multikey_2", haystack="needles"),
    "niah_multikey_3": _needles(
        name="niah_multikey_3", haystack="needles", key_kind="uuids", value_kind="uuids"
    ),
    "niah_multivalue": _needles(name="niah_multivalue", values=4),
    "niah_multiquery": _needles(name="niah_multiquery", keys=4, queries=4),
    "vt": _synthetic(VariableTracking),
    "cwe": _synthetic(CommonWords),
    "fwe": _synthetic(FrequentWords),
}


@register
@dataclass(frozen=True)
class Ruler(Task):
    """All of them, or some.

    Args:
        ruler_tasks: names, comma between, or ``all``.
        trials: prompts for each task and length.
        haystack: files, folders or data sets; none means Python's documentation.
        new_tokens: that the model may write; None takes RULER's numbers.
    """

    name: ClassVar[str] = "ruler"
    kind: ClassVar[Kind] = "rate"

    ruler_tasks: str = option("all", f"of {', '.join(TASKS)}, or all")
    trials: int = option(20, "prompts for each task and length")
    haystack: tuple[str, ...] = option((), "text of one's own for the haystacks; repeat")
    new_tokens: int | None = option(
        None, "that the model may write, instead of RULER's numbers", parse_length
    )

    def parts(self, settings: Settings) -> Sequence[Task]:
        """The tasks that are named.

        Raises:
            OptionError: there is no such task.
            MeasureError: a text is missing or empty.
        """
        names = split(self.ruler_tasks)
        for name in names:
            if name not in TASKS and name != "all":
                raise OptionError(
                    f"unknown task {name!r}{nearest(name, TASKS)}; choose of {', '.join(TASKS)} "
                    f"or all"
                )
        haystack = read_haystack(self.haystack)
        return [
            make(self.trials, self.new_tokens, haystack)
            for name, make in TASKS.items()
            if name in names or "all" in names
        ]
