"""Training rows that ask for facts stated earlier in the same row.

Training on text alone can cost a model its retrieval: hardly any token of a text depends on a token
far away, so the loss does not protect this ability. A small share of retrieval rows does. Their
wording differs from every task in eval/rope_eval, so that those tasks remain a fair test.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice
from operator import and_, eq
from typing import Any

from rope_eval.data.prompts import encode
from rope_ext.errors import OptionError

WORDINGS = (  # how a fact is stated, and how it is asked for
    ("Parcel {name} has the tracking code {value}.", "Tracking code of parcel {name}: {value}."),
    ("To reach {name}, dial {value}.", "Which extension reaches {name}? It is {value}."),
    ("Room {value} is reserved for {name}.", "{name} stays in room {value}."),
    ("We filed {name} under {value}.", "Where did we file {name}? Under {value}."),
    ("{name}: {value}", "{name}: {value}"),
    ("{value} = {name}", "code({name}) = {value}"),
)
_FIRST = "amber cedar copper crimson ivory marble maple olive paper scarlet silver willow"
_SECOND = "anchor basket bridge candle compass garden harbour ladder lantern meadow river tower"
NAMES = tuple(f"{first} {second}" for first in _FIRST.split() for second in _SECOND.split())
_LONGEST_VALUE = 8
_PASSAGE = (20, 200)  # tokens
_ANSWERS = 0.5
"""The answers of a row weigh as much as this share of a row of text."""
_PART = 4
"""At most a quarter of a row states facts, and at most a quarter asks for them."""


Weighted = tuple[Sequence[int], Sequence[float]]
"""Tokens, and the weight of the loss of each."""


@dataclass(frozen=True)
class RetrievalRows:
    """Adds facts and questions to a share of the rows.

    Facts are stated at random places in the text, each on its own line, and asked for at the end in
    random order. Statements take up to an eighth to a quarter of the row (drawn at random), and so
    do questions. The row drops its last tokens for them and keeps its length. In half of these rows
    the text is one passage, repeated.

    Facts and questions have no loss, because nothing predicts a random value; repeated text has
    none either. The answers are few: together they weigh as much as half a row of text.

    Args:
        tokenizer: tokenizer of the model.
        share: share of the rows, from 0 to 1.
    """

    tokenizer: Any
    share: float

    def require_room(self, length: int) -> None:
        """Raise OptionError if rows of ``length`` tokens cannot hold a fact."""
        longest = max(NAMES, key=len)
        value = "0" * _LONGEST_VALUE
        lines = (self._line(text, longest, value) for pair in WORDINGS for text in pair)
        least = _PART * max(map(len, lines))
        if length < least:
            raise OptionError(
                f"--retrieval_share {self.share:g} needs rows of at least {least} tokens with this "
                f"tokenizer, and --length is {length}; give a longer --length, or leave it out"
            )

    def __call__(self, ids: Sequence[int], rng: random.Random) -> Weighted:
        """Return the row with its weights: unchanged, or with facts in it and the same length."""
        if rng.random() >= self.share:
            return ids, [1.0] * len(ids)
        most = len(ids) // _PART
        room = rng.randint(most // 2, most)
        said, asked = rng.choice(WORDINGS)
        stated: list[list[int]] = []
        questions: list[tuple[list[int], list[bool]]] = []
        for name in rng.sample(NAMES, len(NAMES)):
            value = _value(rng)
            stated.append(self._line(said, name, value))
            questions.append(self._question(asked, name, value))
            sizes = sum(map(len, stated)), sum(len(question) for question, _ in questions)
            if max(sizes) > room and stated[1:]:
                del stated[-1], questions[-1]
                break
        shuffled = zip(*rng.sample(questions, len(questions)), strict=True)
        end, answered = (list(chain.from_iterable(parts)) for parts in shuffled)
        text = ids[: len(ids) - len(end) - sum(map(len, stated))]
        weight = 1.0
        if rng.random() < 0.5:  # as repetitive as the filler of passkey prompts
            size = rng.randint(*_PASSAGE)
            text = list(islice(cycle(text[:size]), len(text)))
            weight = 0.0
        # Never before the first token, which may be a start token.
        places = sorted(rng.randint(1, len(text)) for _ in stated)
        row: list[int] = []
        weights: list[float] = []
        cuts = zip([0, *places], [*places, len(text)], [*stated, []], strict=True)
        for start, stop, fact in cuts:
            row += [*text[start:stop], *fact]
            weights += [weight] * (stop - start) + [0.0] * len(fact)
        share = _ANSWERS * len(ids) / sum(answered)
        return row + end, weights + [share * one for one in answered]

    def _line(self, wording: str, name: str, value: str) -> list[int]:
        return encode(self.tokenizer, "\n" + wording.format(name=name, value=value) + "\n")

    def _question(self, wording: str, name: str, value: str) -> tuple[list[int], list[bool]]:
        """Tokens of a question with its answer, and which of them spell the answer."""
        ids = self._line(wording, name, value)
        # Split at a character that occurs in no wording.
        before, after = ("\n" + wording + "\n").format(name=name, value="\0").split("\0")
        head = encode(self.tokenizer, before)
        tail = encode(self.tokenizer, after)[::-1]
        # A token with letters of both belongs to the answer.
        # Lengths of the common beginning and end.
        first = sum(accumulate(map(eq, ids, head), and_))
        last = sum(accumulate(map(eq, ids[::-1], tail), and_))
        return ids, [first <= i < len(ids) - last for i in range(len(ids))]


def _value(rng: random.Random) -> str:
    """Four to eight digits, or letters with a probability of 1/4."""
    pool = string.digits if rng.random() < 0.75 else string.ascii_lowercase
    return "".join(rng.choices(pool, k=rng.randint(4, _LONGEST_VALUE)))
