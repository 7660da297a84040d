"""Multi-hop tracing: a chain of names, each of which leads to the next, and the last to a number.

Several chains of the same length are in a text in random order. Each name except the first is in
two facts, so only following the right chain hop by hop finds its number. A chain of one hop is a
needle. This is not a published benchmark; the most similar one is RULER's ``vt``, which asks for
all names of a chain.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rope_eval.cases import require_positive
from rope_eval.settings import Settings
from rope_eval.tasks.base import Kind, Task, answer_tokens, option, register
from rope_eval.tasks.haystack import distinct
from rope_eval.tasks.story import Story, Stream, Told, among, noise, stock
from rope_ext.command.arguments import parse_lengths
from rope_ext.errors import OptionError

INTRO = (
    "Some names are hidden within the following text. Each leads to another name or to a number. "
    "Memorize where they lead. I will quiz you about them afterwards.\n"
)
FACT, END = "{name} leads to {other}.", "{name} leads to the number {other}."
ASK = (
    "\nStart at {name} and follow where it leads, from name to name, until you reach a number. "
    "Which number is it?"
)
LEAD = " Starting at {name}, the number is"


@dataclass(frozen=True)
class OnlyEnd:
    """Scores 1 if the text has the number, and none of those at the ends of other chains.

    Args:
        number: at the end of the chain.
        others: at the ends of the other chains.
    """

    number: str
    others: tuple[str, ...]

    def __call__(self, written: str) -> float:
        wrong = any(other in written for other in self.others)
        return float(self.number in written and not wrong)


@dataclass(frozen=True)
class Chains(Told):
    """Chains with a given number of hops.

    Args:
        hops: number of facts in a chain.
        chains: number of chains, one of which is asked for.
        text: sentences around the facts; None uses Python's documentation.
    """

    hops: int = 1
    chains: int = 4
    text: Sequence[str] | None = None

    @property
    def about(self) -> str:
        """What is measured, for a reader of the results."""
        return (
            f"share of numbers found at the end of a chain (hops: {self.hops}), one of "
            f"{self.chains} being asked for"
        )

    def story(self, rng: random.Random, chat: bool) -> Story:
        """Chains in a text."""
        names = list(distinct("words", self.hops * self.chains, rng))
        numbers = list(distinct("numbers", self.chains, rng))
        facts = []
        for chain, number in enumerate(numbers):
            own = names[chain * self.hops :][: self.hops]
            facts += [FACT.format(name=one, other=two) for one, two in pairwise(own)]
            facts.append(END.format(name=own[-1], other=number))
        rng.shuffle(facts)
        places = [rng.random() for _ in facts]
        stream = Stream(noise(rng, self.text))
        ask = ASK.format(name=names[0]) + ("" if chat else LEAD.format(name=names[0]))

        def compose(words: int) -> str:
            return INTRO + " ".join(among(stream.take(words), facts, places)) + ask

        return Story(compose, (numbers[0],), OnlyEnd(numbers[0], tuple(numbers[1:])))


@register
@dataclass(frozen=True)
class Hops(Task):
    """Multi-hop tracing for several numbers of hops.

    Args:
        hops: comma-separated numbers of hops.
        chains: number of chains in a text, one of which is asked for.
        trials: prompts for each number of hops and length.
        haystack: files, folders or data sets; by default Python's documentation.
        new_tokens: maximum answer length in tokens.
    """

    name: ClassVar[str] = "hops"
    kind: ClassVar[Kind] = "rate"

    hops: str = option("1,2,4", "comma-separated numbers of hops")
    chains: int = option(4, "number of chains, one of which is asked for")
    trials: int = option(20, "prompts for each number of hops and length")
    haystack: tuple[str, ...] = option((), "text for the haystacks; repeatable")
    new_tokens: int | None = answer_tokens()

    def __post_init__(self) -> None:
        require_positive(chains=self.chains)

    def parts(self, settings: Settings) -> Sequence[Task]:
        """A task for each number of hops.

        Raises:
            OptionError: they are no numbers.
            MeasureError: a text is missing or empty.
        """
        counts = sorted(set(parse_lengths(self.hops, "--hops")))
        if not counts or counts[0] < 1:
            raise OptionError(f"hops={self.hops!r} is not valid; give numbers from 1 on, as 1,2,4")
        text = stock(self.haystack)
        tokens = 32 if self.new_tokens is None else self.new_tokens
        return [
            Chains(f"{self.name}_{count}", self.trials, tokens, count, self.chains, text)
            for count in counts
        ]
