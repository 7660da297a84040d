"""Passkey retrieval: a random number hidden in repetitive text, asked for at the end.

``published`` prompts are those of Landmark Attention (arXiv 2305.16300, its ``run_test.py``) and
YaRN (arXiv 2309.00071): five lines, filler that is cut anywhere, keys from 1 to 50000. ``inline``
has the same sentences, none of them cut, in one paragraph, and keys of five digits, as the bundled
checkpoint was trained.

A case is scored by one teacher-forced forward: it passes if the argmax equals the key at every
token of the key. If the tokenizer has a separate token for the space before a digit, the prompt
includes it: a chat model that would start with a colon has still found the key. With ``generate``
the answer is decoded: ten tokens (``published``), or as many as the key has (``inline``); the
first number counts, as in the authors' code.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions
from rope_eval.data.prompts import Frame, blanks
from rope_eval.data.text import NOUNS
from rope_eval.tasks.base import Task, draws, fill, option, register
from rope_ext.errors import OptionError

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
MIN_FOUND = 0.5
"""Passkeys count if the unpatched model finds at least this share within its trained length."""

PROMPTS = ("auto", "published", "inline")
TRAINED_ON = "passkey_prompt"
"""Field of ``tokenizer_config.json``: the prompt that a checkpoint was trained on."""


def own_prompt(tokenizer: Any) -> str:
    """Resolve ``auto``: the prompt that the checkpoint was trained on, or ``published``."""
    given = getattr(tokenizer, "init_kwargs", {}).get(TRAINED_ON)
    return given if given in PROMPTS else "published"


@dataclass(frozen=True)
class FirstNumber:
    """Scores the first number in the text, as in the authors' code."""

    number: str

    def __call__(self, written: str) -> float:
        found = re.search(r"[0-9]+", written)
        return float(found is not None and int(found.group()) == int(self.number))


class PasskeyPrompts:
    """Builds prompts for one tokenizer: words or numbers as keys, published or inline prompts."""

    def __init__(
        self,
        tokenizer: Any,
        frame: Frame | None = None,
        words: bool = False,
        published: bool = False,
    ) -> None:
        self.frame = frame or Frame.from_tokenizer(tokenizer, "no")
        self.words, self.published = words, published

    def minimum_length(self, digits: int | None = None) -> int:
        """Minimum number of tokens of a prompt without filler, including the answer."""
        return len(self._whole(0, 0.0, "9" * (digits or 5))[0])

    def case(
        self,
        length: int,
        depth: float,
        seed: int,
        digits: int | None = None,
        generate: bool = False,
        bin: int | None = None,
    ) -> Case:
        """Build a prompt of at most ``length`` tokens with its answer, filled to the sentence.

        ``depth`` is the position of the needle, from 0 (start) to 1 (end); ``seed`` determines the
        key, with ``digits`` digits, or as in the published prompt.
        """
        digits = digits or (None if self.published else 5)
        rng = random.Random(f"{seed}:{length}:{depth}:{digits}")
        if self.words:
            key = rng.choice(NOUNS)
        elif digits is None:
            key = str(rng.randint(1, 50000))
        else:
            key = "".join(rng.choice("0123456789") for _ in range(digits))
        units, _ = fill("passkey", lambda units: self._whole(units, depth, key)[0], length)
        ids, count = self._whole(units, depth, key)
        lead = blanks(self.frame.tokenizer, ids, count)
        case = Case(
            *("passkey", length, seed, "argmax", count - lead, ids, (key,), depth, bin), lead=lead
        )
        if not generate:
            return case
        judge = None if self.words else FirstNumber(key)
        cut, size = (count, max(10, count)) if self.published else (case.count, case.count)
        return replace(case, mode="write", count=size, ids=ids[:-cut], judge=judge, lead=0)

    def _whole(self, units: int, depth: float, key: str) -> tuple[array, int]:
        """Build the prompt with ``units`` characters of filler (``published``), or sentences."""
        cut, needle = round(depth * units), NEEDLE.format(key=key)
        if self.published:
            line = "".join(FILLER)
            filler = (line * (units // len(line) + 1)).strip()
            lines = INTRO, filler[:cut], needle.strip(), filler[: units - cut], ASK.strip()
            return self.frame.whole("\n".join(lines), LEAD, key)
        sentences = list(islice(cycle(FILLER), units))
        content = "".join([INTRO, *sentences[:cut], needle, *sentences[cut:], ASK])
        return self.frame.whole(content, LEAD, key)


@register
@dataclass(frozen=True)
class Passkey(Task):
    """Passkey retrieval on a grid of lengths and depths."""

    name: ClassVar[str] = "passkey"

    trials: int = option(10, "prompts for each length and depth")
    depths: int = option(5, "depth bins of equal width")
    digits: int | None = option(
        None, "digits of each key, such as 3 or 10; default: 5; published keys are 1 to 50000"
    )
    needle: Literal["number", "word"] = option(
        "number", "number, or word: a key that small models can copy"
    )
    generate: bool = option(False, "decode with a cache, instead of teacher-forcing")
    prompt: Literal["auto", "published", "inline"] = option(
        "auto", "published, inline, or auto: the one the checkpoint was trained on, else published"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needle == "word" and self.digits:
            raise OptionError("needle='word' is not valid with digits; leave one of them out")

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        prompt = own_prompt(frame.tokenizer) if self.prompt == "auto" else self.prompt
        published, word = prompt == "published", self.needle == "word"
        keys = f"{self.digits or 5} digits" if self.digits or not published else "up to 50000"
        about = (
            f"share of keys ({'a word' if word else keys}) that greedy decoding "
            f"{'writes' if self.generate else 'would write'} out in full, {prompt} prompt"
        )
        prompts = PasskeyPrompts(frame.tokenizer, frame, word, published)
        cases = [
            prompts.case(
                length, draw.depth or 0.0, draw.number, self.digits, self.generate, draw.bin
            )
            for length, draw in draws(self.name, lengths, seed, self.trials, self.depths)
        ]
        how = f"{self.trials} prompts at each of {self.depths} depths, exact intervals"
        return Questions(cases, f"{about}; {how}")
