"""MRCR and multi-hop tracing: facts in other text, without downloads.

``mrcr``: a conversation contains 2, 4 or 8 requests for the same kind of text about the same topic,
among others; the model has to repeat the answer to the n-th of them. Requests, question and scoring
are those of the data set openai/mrcr (its card, and section 3.2 of arXiv 2409.12640). The answers
are sentences from Python's documentation, shorter than those of the data set. The conversation is
one text of ``User:`` and ``Assistant:``, also for chat models, without a solved example.

``hops`` asks for the number at the end of a chain of names, each of which leads to the next, among
other chains of the same length. It is not a published benchmark; the most similar one is RULER's
``vt``, which asks for all names of a chain.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from itertools import chain, count, islice, pairwise
from typing import ClassVar

from rope_eval.cases import Case
from rope_eval.data.prompts import Frame, encode
from rope_eval.data.text import python_documentation, read_texts, sentences
from rope_eval.settings import Settings
from rope_eval.tasks.base import Draw, Prompts, Task, answer_tokens, counts, option, register
from rope_eval.tasks.haystack import distinct, insert
from rope_ext.errors import OptionError


@cache
def documentation() -> tuple[str, ...]:
    """Return the sentences of Python's documentation, without fragments and non-prose."""
    found = sentences(python_documentation())
    return tuple(sentence for sentence in found if 5 <= len(sentence.split()) <= 60)


def stock(sources: Sequence[str]) -> tuple[str, ...] | None:
    """Return the sentences of files, folders or data sets; None if none is given."""
    return tuple(chain.from_iterable(map(sentences, read_texts(sources, "--haystack")))) or None


def following(text: Sequence[str] | None, rng: random.Random) -> Iterator[str]:
    """Return consecutive sentences, from a random one on; None: from Python's documentation."""
    text = text or documentation()
    start = rng.randrange(len(text))
    return (text[at % len(text)] for at in count(start))


def told(
    rng: random.Random, facts: Sequence[str], pieces: Iterator[str], joint: str
) -> tuple[Callable[[int], str], list[float]]:
    """Return a function that inserts facts in order among pieces, and the share before each."""
    shares = sorted(rng.random() for _ in facts)
    units = []

    def text(size: int) -> str:
        # Kept between calls: a longer text begins with the shorter one.
        units.extend(islice(pieces, max(0, size - len(units))))
        places = [int(share * (size + 1)) for share in shares]
        return joint.join(insert(units[:size], facts, places))

    return text, shares


# MRCR

FORMS = ("poem", "short story", "blog post", "news article", "riddle", "speech", "letter", "song")
TOPICS = (
    *("apples", "birds", "bridges", "clouds", "dogs", "forests", "gardens", "glass", "horses"),
    *("islands", "kites", "lamps", "maps", "mirrors", "music", "oceans", "paper", "rivers"),
    *("rocks", "salt", "tapirs", "time", "trains", "winter"),
)
REPEAT = (
    "User: Prepend {prefix} to the {nth} (1 indexed) {form} about {topic}. Do not include any "
    "other text in your response."
)


def ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


@dataclass(frozen=True)
class Repeated:
    """Scores the similarity of text and answer, or 0 without the prefix, which is not compared.

    ``begun``: the prompt already contains the start of the answer, so a space may follow.
    """

    answer: str
    prefix: str
    begun: bool = False

    def __call__(self, written: str) -> float:
        text = written.removeprefix(" ") if self.begun else written
        if not text.startswith(self.prefix):
            return 0.0
        answer = self.answer.removeprefix(self.prefix)
        return SequenceMatcher(None, text.removeprefix(self.prefix), answer).ratio()


@dataclass(frozen=True)
class Conversation(Prompts):
    """Identical requests, each with an answer of at least ``words`` words, as long as it needs."""

    text: Sequence[str] | None = None
    needles: int = 2
    words: int = 24
    roomy: bool = False

    @property
    def about(self) -> str:
        return (
            f"likeness (SequenceMatcher's ratio, 0 without the prefix) of what is written and one "
            f"of {self.needles} answers to the same request in a conversation"
        )

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        rng = random.Random(f"{self.name}:{draw.number}")
        form = rng.choice(FORMS)
        topic = rng.choice(TOPICS)
        answers: list[str] = []
        for _ in range(100 * self.needles):
            if len(answers) < self.needles and (one := self._answer(rng)) not in answers:
                answers.append(one)
        if len(answers) < self.needles:
            raise OptionError(
                f"{self.needles} requests need as many different answers; give a longer --haystack"
            )
        chosen = rng.randrange(self.needles)
        prefix = "".join(rng.choices(string.ascii_letters + string.digits, k=10))
        turns = [_turn(form, topic, answer) for answer in answers]
        text, shares = told(rng, facts=turns, pieces=self._others(rng, form, topic), joint="\n\n")
        words = {"prefix": prefix, "nth": ordinal(chosen + 1), "form": form, "topic": topic}
        end = REPEAT.format(**words)
        chat = frame.around is not None
        lead = "" if chat else "\nAssistant:"
        answer = prefix + answers[chosen]
        draw = draw._replace(depth=shares[chosen])
        own = 8 + len(encode(frame.tokenizer, answer))
        task = replace(self, tokens=own) if self.roomy else self
        _, ids = task.fill(lambda size: frame.whole(f"{text(size)}\n\n{end}", lead)[0], length)
        return task.case(length, draw, ids, [answer], Repeated(answer, prefix, not chat))

    def _answer(self, rng: random.Random) -> str:
        words: list[str] = []
        for sentence in following(self.text, rng):
            words += sentence.split()
            if len(words) >= self.words:
                break
        return " ".join(words)

    def _others(self, rng: random.Random, form: str, topic: str) -> Iterator[str]:
        """Yield requests for another form, topic or both, each with its answer."""
        for number in count():
            other = rng.choice([one for one in FORMS if one != form])
            elsewhere = rng.choice([one for one in TOPICS if one != topic])
            near = [(other, topic), (form, elsewhere), (other, elsewhere)][number % 3]
            yield _turn(*near, self._answer(rng))


def _turn(form: str, topic: str, answer: str) -> str:
    return f"User: write a {form} about {topic}\nAssistant: {answer}"


@register
@dataclass(frozen=True)
class Mrcr(Task):
    """MRCR for several numbers of needles."""

    name: ClassVar[str] = "mrcr"

    mrcr_needles: str = option("2,4,8", "comma-separated numbers of identical requests")
    mrcr_words: int = option(24, "minimum number of words in each answer to them")
    trials: int = option(20, "prompts for each number of needles and length")
    haystack: tuple[str, ...] = option((), "text for the haystacks; repeatable")
    new_tokens: int | None = answer_tokens("as many as the words need")

    def parts(self, settings: Settings) -> Sequence[Task]:
        text = stock(self.haystack)
        return [
            Conversation(
                name=f"mrcr_{number}",
                trials=self.trials,
                tokens=1 if self.new_tokens is None else self.new_tokens,
                depths=0,
                text=text,
                needles=number,
                words=self.mrcr_words,
                roomy=self.new_tokens is None,
            )
            for number in counts(self.mrcr_needles, "mrcr_needles")
        ]


# Hops

INTRO = (
    "Some names are hidden within the following text. Each leads to another name or to a number. "
    "Memorize where they lead. I will quiz you about them afterwards.\n"
)
FACT = "{} leads to {}."
END = "{} leads to the number {}."
FOLLOW = (
    "\nStart at {} and follow where it leads, from name to name, until you reach a number. "
    "Which number is it?"
)
LEAD = " Starting at {}, the number is"


@dataclass(frozen=True)
class OnlyEnd:
    """Scores 1 if the text contains the number, and no number of the other chains."""

    number: str
    others: tuple[str, ...]

    def __call__(self, written: str) -> float:
        wrong = any(other in written for other in self.others)
        return float(self.number in written and not wrong)


@dataclass(frozen=True)
class Chains(Prompts):
    """Chains with a given number of hops, one of which is asked for."""

    text: Sequence[str] | None = None
    hops: int = 1
    chains: int = 4

    @property
    def about(self) -> str:
        return (
            f"share of numbers found at the end of a chain (hops: {self.hops}), one of "
            f"{self.chains} being asked for"
        )

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        rng = random.Random(f"{self.name}:{draw.number}")
        names = distinct("words", self.hops * self.chains, rng)
        numbers = distinct("numbers", self.chains, rng)
        facts = []
        for at, number in enumerate(numbers):
            own = names[at * self.hops :][: self.hops]
            facts += [FACT.format(*pair) for pair in pairwise(own)]
            facts.append(END.format(own[-1], number))
        rng.shuffle(facts)
        text, _ = told(rng, facts, pieces=following(self.text, rng), joint=" ")
        ask = FOLLOW.format(names[0])
        lead = "" if frame.around is not None else LEAD.format(names[0])
        _, ids = self.fill(lambda size: frame.whole(INTRO + text(size) + ask, lead)[0], length)
        judge = OnlyEnd(numbers[0], tuple(numbers[1:]))
        return self.case(length, draw, ids, answers=numbers[:1], judge=judge)


@register
@dataclass(frozen=True)
class Hops(Task):
    """Multi-hop tracing for several numbers of hops."""

    name: ClassVar[str] = "hops"

    hops: str = option("1,2,4", "comma-separated numbers of hops")
    chains: int = option(4, "number of chains; one is queried")
    trials: int = option(20, "prompts for each number of hops and length")
    haystack: tuple[str, ...] = option((), "text for the haystacks; repeatable")
    new_tokens: int | None = answer_tokens("32")

    def parts(self, settings: Settings) -> Sequence[Task]:
        text = stock(self.haystack)
        return [
            Chains(
                name=f"hops_{number}",
                trials=self.trials,
                tokens=32 if self.new_tokens is None else self.new_tokens,
                depths=0,
                text=text,
                hops=number,
                chains=self.chains,
            )
            for number in counts(self.hops, "hops")
        ]
