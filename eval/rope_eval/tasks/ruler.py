"""RULER's 13 tasks, implemented from its description and compared with its code.

The score of a prompt is the fraction of the references in the answer, ignoring case; for a question
with several right answers, one is enough (arXiv 2404.06654). docs/evaluate.md lists the differences
from the authors' code.
"""

from __future__ import annotations

import math
import random
import string
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from rope_eval.cases import Case, Questions
from rope_eval.data.prompts import Frame, encode, longest
from rope_eval.data.text import many_words
from rope_eval.settings import Settings
from rope_eval.tasks.answering import HOTPOTQA, SQUAD, Answering
from rope_eval.tasks.base import (
    Draw,
    Prompts,
    Task,
    answer_tokens,
    named_parts,
    number_of_prompts,
    option,
    register,
)
from rope_eval.tasks.haystack import NOISE, Needles, insert, read_haystack
from rope_ext.errors import OptionError

SUITE = "RULER"
SIZE = 13
EXAMPLE_LAYOUT = 42
"""Seed of the chain's positions in the example of ``vt``; 42 is RULER's default seed."""

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
class VariableTracking(Prompts):
    """Chains ``VAR B = VAR A``: which variables hold the number? One chain of four hops."""

    name: str = "vt"
    tokens: int = 30
    hops: int = 4
    about: ClassVar[str] = "share of the 5 variables of a chain of assignments in repeated noise"

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        rng = random.Random(f"vt:{draw.number}")
        least = self.hops + 1
        # One example for all prompts, as in RULER; only its names and its number change.
        fixed = self._writer(3, random.Random("vt:example"), EXAMPLE_LAYOUT)
        solved = self._writer(3, rng, EXAMPLE_LAYOUT)
        asked = self._writer(5, rng)

        def build(lines: int, shown: int) -> array:
            text, lead, names = solved(shown)
            example = f"{text}{lead} {' '.join(names)}\n\n"
            text, lead, _ = asked(lines)
            return frame.whole(example + text, lead, keep_space=True)[0]

        # As in RULER: 500 tokens with its question and the start of its answer.
        shown, _ = longest(
            lambda lines: encode(frame.tokenizer, "".join(fixed(lines)[:2])), 500, least
        )
        if len(build(least, shown)) + self.tokens > length:
            shown = least  # RULER's example does not fit into such short prompts
        _, ids = self.fill(lambda lines: build(lines, shown), length, least)
        return self.case(length, draw, ids, answers=asked(least)[2])

    def _writer(
        self, letters: int, rng: random.Random, layout: int | None = None
    ) -> Callable[[int], tuple[str, str, list[str]]]:
        """Return a function of the number of noise lines: text and question, lead, and answer.

        Names have ``letters`` letters; ``layout`` is the seed of the chain's positions; None
        samples them.
        """
        names: dict[str, None] = {}
        while len(names) <= self.hops:  # ends: 26 ** letters names
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        listed = list(names)
        value = rng.randrange(10000, 99999)
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


class Counts(NamedTuple):
    """How often ``cwe`` repeats common words and others, also in its example, which has ``words``
    different words.
    """

    often: int
    others: int
    words: int
    example: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.often} and {self.others} times"


MANY = Counts(often=30, others=3, words=40, example=(10, 3))
FEW = Counts(often=6, others=1, words=20, example=(3, 1))
ROOM = 4096
"""Length in tokens from which RULER uses ``MANY``."""


@dataclass(frozen=True)
class CommonWords(Prompts):
    """A numbered list of words, ten of which are more frequent than all others.

    ``counts``: RULER's for each length if None, or ``FEW`` if those do not fit. The prompts of one
    length repeat words equally often.
    """

    name: str = "cwe"
    tokens: int = 120
    common: int = 10
    counts: Counts | None = None

    @property
    def about(self) -> str:
        how = f"{MANY} from {ROOM} tokens on, else {FEW}" if self.counts is None else self.counts
        return f"share of the 10 words that a numbered list repeats most ({how})"

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        if self.counts is not None:
            return super().questions(frame, lengths, seed)
        cases = []
        notes = []
        many, few = (replace(self, counts=each) for each in (MANY, FEW))
        for length in lengths:
            try:
                part = (many if length >= ROOM else few).questions(frame, [length], seed)
            except OptionError:  # for tokenizers with many tokens per word
                part = few.questions(frame, [length], seed)
                notes.append(
                    f"{self.name} at {length} tokens repeats words {FEW}, which is easier: {MANY}, "
                    f"as in RULER from {ROOM} tokens on, do not fit with this tokenizer; do not "
                    f"compare it with longer lengths or with published numbers"
                )
            cases += part.cases
        definition = f"{self.about}; {number_of_prompts(self.trials)}, exact intervals"
        return Questions(cases, definition, (*notes,))

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        counts = self.counts or FEW
        rng = random.Random(f"cwe:{draw.number}")
        seed = rng.getrandbits(64)
        # An entry is a number, a period and a word: at least three tokens.
        most = counts.words + length // (3 * counts.others) + self.common
        words = many_words(most, rng)
        # The example must not repeat words of the list.
        example = words[: counts.words]
        words = words[counts.words :]

        def listed(words: Sequence[str], often: int, seldom: int) -> str:
            entries = [*words[: self.common]] * often + [*words[self.common :]] * seldom
            random.Random(seed).shuffle(entries)
            return CWE_INTRO + _numbered(entries) + CWE_ASK

        # The chat template also encloses the example, as in RULER.
        before, after = frame.around or ("", "")
        solved = listed(example, *counts.example) + after + CWE_LEAD
        solved += f" {_numbered(example[: self.common])}\n{before}"

        def build(different: int) -> array:
            content = solved + listed(words[:different], counts.often, counts.others)
            return frame.whole(content, CWE_LEAD, keep_space=True)[0]

        _, ids = self.fill(build, length, least=self.common + 1, most=len(words))
        return self.case(length, draw, ids, answers=words[: self.common])


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@dataclass(frozen=True)
class FrequentWords(Prompts):
    """Coded words with frequencies from a zeta distribution: asks for the three most frequent."""

    name: str = "fwe"
    tokens: int = 50
    about: ClassVar[str] = "share of the 3 most frequent words of a coded text"

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        rng = random.Random(f"fwe:{draw.number}")
        size = max(5, (length - self.tokens) // 50)  # different words, as in RULER
        coded: dict[str, None] = {}
        while len(coded) < size:  # ends: 26 ** 6 words
            coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        words = ["...", *list(coded)[1:]]  # the most frequent one is noise
        seed = rng.getrandbits(64)

        def counts(count: int) -> list[int]:
            zeta_2 = math.pi**2 / 6  # with exponent 2, as in RULER
            return [int(count / (rank**2 * zeta_2)) for rank in range(1, size + 1)]

        def clear(count: int) -> bool:
            """Whether the third answer is more frequent than the next word."""
            found = counts(count)
            return found[3] > found[4]

        def build(count: int) -> array:
            repeated = zip(words, counts(count), strict=True)
            text = [word for word, times in repeated for _ in range(times)]
            random.Random(seed).shuffle(text)
            content = FWE_INTRO + " ".join(text) + FWE_ASK
            return frame.whole(content, FWE_LEAD, keep_space=True)[0]

        # The fourth of them must occur, and more often than the fifth.
        least = next(filter(clear, range(1, 10**4)))
        count, ids = self.fill(build, length, least)
        if not clear(count):
            ids = build(next(filter(clear, range(count, least - 1, -1))))
        return self.case(length, draw, ids, answers=words[1:4])


NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"haystack": "noise"},
    "niah_single_2": {},
    "niah_single_3": {"value_kind": "uuids"},
    "niah_multikey_1": {"keys": 4},
    "niah_multikey_2": {"haystack": "needles"},
    "niah_multikey_3": {"haystack": "needles", "key_kind": "uuids", "value_kind": "uuids"},
    "niah_multivalue": {"values": 4},
    "niah_multiquery": {"keys": 4, "queries": 4},
}
COUNTED = {"vt": VariableTracking, "cwe": CommonWords, "fwe": FrequentWords}
QA = {"qa_1": SQUAD, "qa_2": HOTPOTQA}
TASKS = (*NIAH, *COUNTED, *QA)


def build_task(
    name: str,
    trials: int,
    new_tokens: int | None = None,
    haystack: Mapping[str, Any] | None = None,
    **files: str | None,
) -> Task:
    """Build the task of RULER with this name.

    ``trials`` are its prompts at each length, ``new_tokens`` the longest answer (None: RULER's),
    ``haystack`` is from :func:`read_haystack`, and ``files`` are those of the questions, by option.
    """
    common: dict[str, Any] = {"trials": trials, "suite": SUITE, "suite_size": SIZE}
    if new_tokens is not None:
        common["tokens"] = new_tokens
    if name in COUNTED:
        return COUNTED[name](**common)
    if name in QA:
        return Answering(name, source=QA[name], path=files.get(QA[name].option), **common)
    text = (haystack or {}) if "haystack" not in NIAH[name] else {}
    return Needles(name, ruler=True, **NIAH[name], **text, **common)


@register
@dataclass(frozen=True)
class Ruler(Task):
    """RULER: all of its tasks, or some, with its files or without."""

    name: ClassVar[str] = "ruler"

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
        names = named_parts(self.ruler_tasks, TASKS)
        files = {"squad": self.squad, "hotpotqa": self.hotpotqa}
        haystack = read_haystack(self.haystack)
        return [
            build_task(name, self.trials, self.new_tokens, haystack=haystack, **files)
            for name in names
        ]
