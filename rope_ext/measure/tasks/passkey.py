"""Passkey retrieval: a random number hidden in repetitive text, asked for at the end.

The wording is the published one (Landmark Attention, arXiv 2305.16300, used again by YaRN,
arXiv 2309.00071). A case is scored by one teacher-forced forward: the trial passes when the
argmax equals the key at every answer token, which is exactly when greedy decoding would
write the key. With ``generate`` it really is decoded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from rope_ext.errors import OptionError
from rope_ext.measure.cases import Case, Questions, require_positive
from rope_ext.measure.prompts import Filler, Frame, encode, joined
from rope_ext.measure.tasks.base import Kind, Task, option, register

INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
    "them. I will quiz you about the important information there."
)
FILLER = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
ASK, LEAD = "\nWhat is the pass key?", " The pass key is"
QUESTION = ASK + LEAD


class PasskeyPrompts:
    """Builds passkey prompts for one tokenizer, each part tokenised once.

    Args:
        tokenizer: of the model.
        frame: around the prompt; by default that of a base model.
    """

    def __init__(self, tokenizer: Any, frame: Frame | None = None) -> None:
        self._tokenizer = tokenizer
        self._frame = frame or Frame.of(tokenizer, "no")
        self._intro = encode(tokenizer, INTRO)
        self._filler = Filler(tokenizer, FILLER)

    def minimum_length(self, digits: int = 5) -> int:
        """Fewest tokens that hold a prompt without any filler, answer included."""
        key = "9" * digits
        needle = encode(self._tokenizer, NEEDLE.format(key=key))
        asked, _ = self._frame.ask(ASK, LEAD, key)
        return len(self._frame.head) + len(self._intro) + len(needle) + len(asked)

    def case(
        self,
        length: int,
        depth: float,
        seed: int,
        digits: int = 5,
        generate: bool = False,
        bin: int | None = None,
    ) -> Case:
        """One prompt of exactly ``length`` tokens with its answer, needle at ``depth``.

        Args:
            length: tokens.
            depth: 0 is the start, 1 the end.
            seed: of the key.
            digits: of the key.
            generate: whether the case is to be decoded instead of teacher-forced.
            bin: noted in the case.

        Raises:
            OptionError: ``length`` cannot hold the frame.
        """
        rng = random.Random(f"{seed}:{length}:{depth}:{digits}")
        key = "".join(rng.choice("0123456789") for _ in range(digits))
        needle = encode(self._tokenizer, NEEDLE.format(key=key))
        asked, count = self._frame.ask(ASK, LEAD, key)
        head = self._frame.head
        budget = length - len(head) - len(self._intro) - len(needle) - len(asked)
        if budget < 0:
            raise OptionError(
                f"a passkey prompt needs at least {length - budget} tokens with this tokenizer, "
                f"got length {length}; give longer --lengths"
            )
        sentences, breaks = self._filler.fill(budget)
        cut = round(depth * len(sentences))
        before, after = chain(*sentences[:cut]), chain(*sentences[cut:])
        blank = self._filler.newline * breaks
        ids = joined(head, self._intro, blank, before, needle, after, asked)
        mode = "write" if generate else "argmax"
        return Case(
            task="passkey",
            length=length,
            seed=seed,
            mode=mode,
            count=count,
            ids=ids[:-count] if generate else ids,
            answers=(key,),
            depth=depth,
            bin=bin,
            whole=True,
        )


@register
@dataclass(frozen=True)
class Passkey(Task):
    """The task: a grid of lengths and depths.

    Every trial has a key of its own and a depth drawn within its bin. All follow from the seed,
    so that every method is asked the same questions.

    Args:
        trials: prompts for each length and depth bin.
        depths: bins of equal width.
        digits: of each key.
        generate: decode instead of teacher-forcing.
    """

    name: ClassVar[str] = "passkey"
    kind: ClassVar[Kind] = "rate"

    trials: int = option(10, "prompts for each length and depth")
    depths: int = option(5, "depth bins of equal width")
    digits: int = option(5, "of each key, such as 5 or 10")
    generate: bool = option(False, "decode with a cache, instead of teacher-forcing")

    def __post_init__(self) -> None:
        require_positive(trials=self.trials, depths=self.depths, digits=self.digits)

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts.

        Raises:
            OptionError: a length cannot hold a prompt.
        """
        prompts = PasskeyPrompts(frame.tokenizer, frame)
        cases = []
        for length in lengths:
            for depth in range(self.depths):
                rng = random.Random(f"passkey:{seed}:{length}:{self.depths}:{depth}")
                for _ in range(self.trials):
                    place = (depth + rng.random()) / self.depths
                    case = prompts.case(
                        length, place, rng.randrange(2**40), self.digits, self.generate, depth
                    )
                    cases.append(case)
        writes = "writes" if self.generate else "would write"
        definition = (
            f"share of {self.trials} keys of {self.digits} digits at each of {self.depths} depths "
            f"that greedy decoding {writes} out in full, Wilson intervals"
        )
        return Questions(cases, definition)
