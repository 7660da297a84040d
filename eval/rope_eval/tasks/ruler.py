"""RULER's 13 tasks, implemented from its description and compared with its code.

Retrieval (``niah_*``), variable tracking (``vt``), common words (``cwe``), frequent words (``fwe``)
and question answering (``qa_1``, ``qa_2``) of RULER (arXiv 2404.06654). The score of a prompt is
the fraction of the references in the answer, ignoring case; for a question with several right
answers, one is enough. The effective length, defined over all 13 tasks, is the longest one up to
which their average is at least 85.6 %.

docs/evaluate.md lists the differences from the authors' code. Texts, words and
questions come with Python or are made up here, unless you pass their files.
"""

from __future__ import annotations

import math
import random
import string
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Frame, encode, longest
from rope_eval.data.words import many_words
from rope_eval.settings import Settings
from rope_eval.tasks.answering import HOTPOTQA, SQUAD, Answering, Source
from rope_eval.tasks.base import Kind, Task, answer_tokens, named_parts, option, register
from rope_eval.tasks.haystack import NOISE, Needles, insert, read_haystack, too_long
from rope_ext.errors import OptionError

SUITE, SIZE = "RULER", 13
EXAMPLE_LAYOUT = 42
"""Seed of where the chain stands in the example of ``vt``; 42 is RULER's default for everything."""

VT_INTRO = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
VT_ASK = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
VT_LEAD = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)
CWE_INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_ASK = "\nQuestion: What are the 10 most common words in the above list?"
CWE_LEAD = " Answer: The top 10 words that appear most often in the list are:"
FWE_INTRO = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. "
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
    """A task of random parts; subclasses build one prompt.

    Args:
        trials: prompts for each length.
        tokens: maximum answer length in tokens; part of the length.
    """

    kind: ClassVar[Kind] = "rate"
    suite: ClassVar[str | None] = SUITE
    suite_size: ClassVar[int | None] = SIZE
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
        definition = f"{self.about}; {self.trials} prompts, exact intervals"
        return Questions(cases, definition)

    def prompt(self, frame: Frame, length: int, rng: random.Random) -> tuple[array, Sequence[str]]:
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

    def prompt(self, frame: Frame, length: int, rng: random.Random) -> tuple[array, Sequence[str]]:
        # One example for all prompts, as in RULER; only its names and its number change.
        fixed = self._writer(3, random.Random("vt:example"), EXAMPLE_LAYOUT)
        solved = self._writer(3, rng, EXAMPLE_LAYOUT)

        def shown(lines: int) -> str:
            text, lead, names = solved(lines)
            return f"{text}{lead} {' '.join(names)}\n\n"

        # As long as in RULER: 500 tokens with its question and the beginning of its answer.
        def tokens(lines: int) -> list[int]:
            return encode(frame.tokenizer, "".join(fixed(lines)[:2]))

        lines, _ = longest(tokens, 500, self.hops + 1)
        asked = self._writer(5, rng)

        def build(lines_: int) -> array:
            text, lead, _ = asked(lines_)
            return frame.whole(example + text, lead, keep_space=True)[0]

        example = shown(lines)
        _, ids = longest(build, length - self.tokens, self.hops + 1)
        if len(ids) + self.tokens > length:
            # RULER's own example does not fit into so short a prompt: the shortest one there is.
            example = shown(self.hops + 1)
            _, ids = longest(build, length - self.tokens, self.hops + 1)
        if len(ids) + self.tokens > length:
            raise too_long(self.name, len(ids) + self.tokens, length)
        return ids, asked(self.hops + 1)[2]

    def _writer(
        self, letters: int, rng: random.Random, layout: int | None = None
    ) -> Callable[[int], tuple[str, str, list[str]]]:
        """Of so many lines of noise: the text and its question, and what the answer is.

        Args:
            letters: of a name.
            rng: of names and number, and of the layout unless that is given.
            layout: seed of the lines that the chain stands before.
        """
        names: dict[str, None] = {}
        while len(names) <= self.hops:  # ends: 26 ** letters names
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        listed, value = list(names), rng.randrange(10000, 99999)
        seed = rng.getrandbits(64) if layout is None else layout
        chain = [f"VAR {listed[0]} = {value}"]
        # The space at the end is RULER's.
        chain += [f"VAR {b} = VAR {a} " for a, b in pairwise(listed)]

        def text(lines: int) -> tuple[str, str, list[str]]:
            places = sorted(random.Random(seed).sample(range(lines), len(chain)))
            context = "\n".join(insert([NOISE] * lines, chain, places))
            words = VT_INTRO + context + VT_ASK.format(value=value)
            return words, VT_LEAD.format(value=value, count=self.hops + 1), listed

        return text


@dataclass(frozen=True)
class Counts:
    """How often ``cwe`` repeats words.

    Args:
        often: repetitions of the common words.
        others: repetitions of all other words.
        words: number of different words in the example.
        example: ``often`` and ``others`` in the example.
    """

    often: int
    others: int
    words: int
    example: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.often} and {self.others} times"


MANY, FEW = Counts(30, 3, 40, (10, 3)), Counts(6, 1, 20, (3, 1))
ROOM = 4096
"""Tokens from which on RULER takes ``MANY``."""


@dataclass(frozen=True)
class CommonWords(Synthetic):
    """A numbered list of words, ten of which are more frequent than all others.

    Args:
        counts: repetitions; None: RULER's for each length, or ``FEW`` if those do not fit.
    """

    name: ClassVar[str] = "cwe"
    about: ClassVar[str] = "share of the 10 words that a numbered list repeats most"

    tokens: int = 120
    common: int = 10
    counts: Counts | None = None

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts; those of one length repeat words equally often.

        Raises:
            OptionError: a length cannot hold a prompt.
        """
        if self.counts is not None:
            return super().questions(frame, lengths, seed)
        cases: list[Case] = []
        taken: dict[Counts, list[int]] = {}
        for length in lengths:
            counts, built = self._built(frame, length, seed)
            taken.setdefault(counts, []).append(length)
            cases += built
        how = ", ".join(f"{one} at {', '.join(map(str, at))} tokens" for one, at in taken.items())
        definition = f"{self.about} ({how}); {self.trials} prompts, exact intervals"
        short = [length for length in taken.get(FEW, ()) if length >= ROOM]
        return Questions(cases, definition, tuple(map(self._note, short)))

    def _built(self, frame: Frame, length: int, seed: int) -> tuple[Counts, Sequence[Case]]:
        """RULER's counts at this length, or fewer where those do not fit, and the prompts."""

        def asked(counts: Counts) -> tuple[Counts, Sequence[Case]]:
            return counts, replace(self, counts=counts).questions(frame, [length], seed).cases

        if length >= ROOM:
            with suppress(OptionError):  # a tokenizer of many tokens a word
                return asked(MANY)
        return asked(FEW)

    def _note(self, length: int) -> str:
        return (
            f"{self.name} at {length} tokens repeats words {FEW}, which is easier: {MANY}, as in "
            f"RULER from {ROOM} tokens on, do not fit with this tokenizer; do not compare it with "
            f"longer lengths or with published numbers"
        )

    def prompt(self, frame: Frame, length: int, rng: random.Random) -> tuple[array, Sequence[str]]:
        counts = self.counts or (MANY if length >= ROOM else FEW)
        seed = rng.getrandbits(64)
        # An entry is a number, a full stop and a word: three tokens at least.
        most = counts.words + length // (3 * counts.others) + self.common
        words = many_words(most, rng)
        example, words = words[: counts.words], words[counts.words :]

        def listed(words: Sequence[str], often: int, seldom: int) -> str:
            entries = [*words[: self.common]] * often + [*words[self.common :]] * seldom
            random.Random(seed).shuffle(entries)
            return CWE_INTRO + _numbered(entries) + CWE_ASK

        # The chat template goes around the example as well, as in RULER.
        before, after = frame.around or ("", "")
        solved = listed(example, *counts.example) + after + CWE_LEAD
        solved += f" {_numbered(example[: self.common])}\n{before}"

        def build(different: int) -> array:
            content = solved + listed(words[:different], counts.often, counts.others)
            return frame.whole(content, CWE_LEAD, keep_space=True)[0]

        _, ids = longest(build, length - self.tokens, self.common + 1, len(words))
        if len(ids) + self.tokens > length:
            raise too_long(self.name, len(ids) + self.tokens, length)
        return ids, words[: self.common]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


ZETA_2 = math.pi**2 / 6  # of the exponent 2, as in RULER


@dataclass(frozen=True)
class FrequentWords(Synthetic):
    """Coded words with frequencies from a zeta distribution: asks for the three most frequent."""

    name: ClassVar[str] = "fwe"
    about: ClassVar[str] = "share of the 3 most frequent words of a coded text"

    tokens: int = 50

    def prompt(self, frame: Frame, length: int, rng: random.Random) -> tuple[array, Sequence[str]]:
        size = max(5, (length - self.tokens) // 50)  # different words, as in RULER
        coded: dict[str, None] = {}
        while len(coded) < size:  # ends: 26 ** 6 words
            coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        words = ["...", *list(coded)[1:]]  # the most frequent one is noise
        seed = rng.getrandbits(64)

        def build(count: int) -> array:
            text = [
                w for w, n in zip(words, self._counts(size, count), strict=True) for _ in range(n)
            ]
            random.Random(seed).shuffle(text)
            content = FWE_INTRO + " ".join(text) + FWE_ASK
            return frame.whole(content, FWE_LEAD, keep_space=True)[0]

        # The fourth of them must occur, and more often than the fifth.
        least = next(n for n in range(1, 10**4) if self._clear(size, n))
        count, ids = longest(build, length - self.tokens, least)
        if len(ids) + self.tokens > length:
            raise too_long(self.name, len(ids) + self.tokens, length)
        if not self._clear(size, count):
            while not self._clear(size, count):
                count -= 1
            ids = build(count)
        return ids, words[1:4]

    def _clear(self, ranks: int, words: int) -> bool:
        """Whether the third answer is more frequent than what follows it."""
        counts = self._counts(min(ranks, 5), words)
        return counts[3] > counts[4]

    def _counts(self, ranks: int, words: int) -> list[int]:
        return [int(words / (rank**2 * ZETA_2)) for rank in range(1, ranks + 1)]


Given = Mapping[str, Any]
IN_SUITE = {"suite": SUITE, "suite_size": SIZE}


def _needles(**options: Any) -> Callable[[Given], Needles]:
    def made(given: Given) -> Needles:
        text = given["haystack"] if options.get("haystack", "text") == "text" else {}
        return Needles(ruler=True, **options, **text, **given["common"], **IN_SUITE)

    return made


def _answering(name: str, source: Source) -> Callable[[Given], Answering]:
    def made(given: Given) -> Answering:
        return Answering(
            name=name, source=source, path=given[source.option], **given["common"], **IN_SUITE
        )

    return made


TASKS: dict[str, Callable[[Given], Task]] = {
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
    "vt": lambda given: VariableTracking(**given["common"]),
    "cwe": lambda given: CommonWords(**given["common"]),
    "fwe": lambda given: FrequentWords(**given["common"]),
    "qa_1": _answering(name="qa_1", source=SQUAD),
    "qa_2": _answering(name="qa_2", source=HOTPOTQA),
}


def made(
    name: str,
    trials: int,
    new_tokens: int | None = None,
    haystack: Given | None = None,
    squad: str | None = None,
    hotpotqa: str | None = None,
) -> Task:
    """One of the tasks; arguments as of ``Ruler``, and a haystack as ``read_haystack`` gives it."""
    common = {"trials": trials} | ({} if new_tokens is None else {"tokens": new_tokens})
    data = {"haystack": haystack or {}, "squad": squad, "hotpotqa": hotpotqa}
    return TASKS[name]({"common": common, **data})


@register
@dataclass(frozen=True)
class Ruler(Task):
    """RULER: all of its tasks, or some.

    Args:
        ruler_tasks: comma-separated names, or ``all``.
        trials: prompts for each task and length.
        haystack: files, folders or data sets; by default Python's documentation. RULER uses its
            ``PaulGrahamEssays.json``.
        squad: file of SQuAD 2.0 for ``qa_1``, in RULER ``dev-v2.0.json``; None makes up questions.
        hotpotqa: file of HotpotQA for ``qa_2``, in RULER ``hotpot_dev_distractor_v1.json``; None
            makes up questions.
        new_tokens: maximum answer length in tokens; None uses RULER's numbers.
    """

    name: ClassVar[str] = "ruler"
    kind: ClassVar[Kind] = "rate"

    ruler_tasks: str = option("all", f"comma-separated: {', '.join(TASKS)}; or all")
    trials: int = option(20, "prompts for each task and length")
    haystack: tuple[str, ...] = option(
        (), "text for the haystacks, such as RULER's PaulGrahamEssays.json; repeatable"
    )
    squad: str | None = option(None, "SQuAD's dev-v2.0.json for qa_1; default: made-up facts")
    hotpotqa: str | None = option(
        None, "HotpotQA's hotpot_dev_distractor_v1.json for qa_2; default: made-up facts"
    )
    new_tokens: int | None = answer_tokens("as in RULER")

    def parts(self, settings: Settings) -> Sequence[Task]:
        """The tasks that are named.

        Raises:
            OptionError: there is no such task.
            MeasureError: a text is missing or empty.
        """
        names = named_parts(self.ruler_tasks, TASKS)
        haystack = read_haystack(self.haystack)
        return [
            made(name, self.trials, self.new_tokens, haystack, self.squad, self.hotpotqa)
            for name in names
        ]
