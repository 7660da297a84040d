"""MRCR without a download: asks for the n-th of several identical requests.

A conversation contains 2, 4 or 8 requests for the same kind of text about the same topic, among
others for another kind or topic; the model has to repeat the answer to the n-th of them. Requests,
question and scoring are those of the data set openai/mrcr (its card, and section 3.2 of arXiv
2409.12640). The answers in the conversation are sentences from Python's documentation; those of the
data set were written by GPT-4o, and are much longer. The conversation is one text of ``User:`` and
``Assistant:``, also for chat models, without a solved example.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count
from typing import ClassVar

from rope_eval.cases import require_positive
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, option, register
from rope_eval.tasks.story import Piece, Story, Stream, Told, among, documentation, stock
from rope_ext.command.arguments import parse_lengths
from rope_ext.errors import OptionError

FORMS = ("poem", "short story", "blog post", "news article", "riddle", "speech", "letter", "song")
TOPICS = (
    *("apples", "birds", "bridges", "clouds", "dogs", "forests", "gardens", "glass", "horses"),
    *("islands", "kites", "lamps", "maps", "mirrors", "music", "oceans", "paper", "rivers"),
    *("rocks", "salt", "tapirs", "time", "trains", "winter"),
)
ASK = (
    "User: Prepend {prefix} to the {nth} (1 indexed) {form} about {topic}. Do not include any "
    "other text in your response."
)


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th`` ..."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


@dataclass(frozen=True)
class Repeated:
    """The similarity of the text and the answer, or 0 if the text does not begin with the prefix.

    Args:
        answer: the prefix and the text to repeat.
        prefix: of both, not compared.
        begun: whether the prompt has begun the answer, so that a space may follow.
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
class Conversation(Told):
    """A conversation with identical requests.

    Args:
        needles: number of identical requests.
        words: minimum number of words in each answer to them.
        text: sentences for the answers; None uses Python's documentation.
    """

    needles: int = 2
    words: int = 24
    text: Sequence[str] | None = None

    @property
    def about(self) -> str:
        """What is measured, for a reader of the results."""
        return (
            f"likeness (SequenceMatcher's ratio, 0 without the prefix) of what is written and one "
            f"of {self.needles} answers to the same request in a conversation"
        )

    def story(self, rng: random.Random, chat: bool) -> Story:
        """Requests and answers."""
        form, topic = rng.choice(FORMS), rng.choice(TOPICS)
        drawn = (" ".join(self._words(rng)) for _ in range(100 * self.needles))
        found: dict[str, None] = {}
        for answer in drawn:
            found[answer] = None
            if len(found) == self.needles:
                break
        answers = list(found)
        if len(answers) < self.needles:
            raise OptionError(
                f"the text has {len(answers)} different answers for {self.needles} requests; give "
                f"--haystack a longer one"
            )
        asked = rng.randrange(self.needles)
        prefix = "".join(rng.choices(string.ascii_letters + string.digits, k=10))
        turns = [f"{_request(form, topic)}{answer}" for answer in answers]
        places = [rng.random() for _ in turns]
        stream = Stream(self._others(rng, form, topic))
        ask = ASK.format(prefix=prefix, nth=ordinal(asked + 1), form=form, topic=topic)
        end = ask if chat else f"{ask}\nAssistant:"

        def compose(words: int) -> str:
            return "\n\n".join([*among(stream.take(words), turns, places), end])

        answer = prefix + answers[asked]
        return Story(compose, (answer,), Repeated(answer, prefix, not chat), sorted(places)[asked])

    def _words(self, rng: random.Random) -> list[str]:
        """Sentences that follow each other, from a random one on."""
        text = self.text or documentation()
        at, words = rng.randrange(len(text)), []
        while len(words) < self.words:
            words += text[at % len(text)].split()
            at += 1
        return words

    def _others(self, rng: random.Random, form: str, topic: str) -> Iterator[Piece]:
        """Requests for another form, another topic or both, each with its answer."""
        for number in count():
            other = rng.choice([one for one in FORMS if one != form])
            elsewhere = rng.choice([one for one in TOPICS if one != topic])
            near = [(other, topic), (form, elsewhere), (other, elsewhere)][number % 3]
            yield Piece(_request(*near), self._words(rng))


def _request(form: str, topic: str) -> str:
    return f"User: write a {form} about {topic}\nAssistant: "


@register
@dataclass(frozen=True)
class Mrcr(Task):
    """MRCR for several numbers of needles.

    Args:
        mrcr_needles: comma-separated numbers of identical requests.
        mrcr_words: minimum number of words in each answer to them.
        trials: prompts for each number of needles and length.
        haystack: files, folders or data sets; by default Python's documentation.
        new_tokens: maximum answer length in tokens; None: as many as the longest answer needs.
    """

    name: ClassVar[str] = "mrcr"
    kind: ClassVar[Kind] = "rate"

    mrcr_needles: str = option("2,4,8", "comma-separated numbers of identical requests")
    mrcr_words: int = option(24, "minimum number of words in each answer to them")
    trials: int = option(20, "prompts for each number of needles and length")
    haystack: tuple[str, ...] = option((), "text for the haystacks; repeatable")
    new_tokens: int | None = answer_tokens()

    def __post_init__(self) -> None:
        require_positive(mrcr_words=self.mrcr_words)

    def parts(self, settings: Settings) -> Sequence[Task]:
        """A task for each number of needles.

        Raises:
            OptionError: they are no numbers.
            MeasureError: a text is missing or empty.
        """
        counts = sorted(set(parse_lengths(self.mrcr_needles, "--mrcr-needles")))
        if not counts or counts[0] < 1:
            raise OptionError(
                f"mrcr_needles={self.mrcr_needles!r} is not valid; give numbers from 1 on, as 2,4,8"
            )
        text = stock(self.haystack)
        return [
            Conversation(f"{self.name}_{n}", self.trials, self.new_tokens, n, self.mrcr_words, text)
            for n in counts
        ]
