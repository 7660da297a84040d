"""Passkey retrieval: a random number hidden in repetitive text, asked for at the end.

There are two prompts. ``published`` is that of Landmark Attention (arXiv 2305.16300, its
``run_test.py``), also used by YaRN (arXiv 2309.00071): five lines, filler that is cut anywhere,
keys from 1 to 50000. ``inline`` has the same sentences, none of them cut, in one paragraph, and
keys of five digits. The bundled checkpoint was trained on ``inline``.

A case is scored by one teacher-forced forward: it passes if the argmax equals the key at every
token of the key, which is exactly when greedy decoding would go on with the key. If the tokenizer
has a separate token for the space before a digit, the space is given: a chat model that would
rather begin with a colon has still found the key. The report counts such answers. With ``generate``
the answer is decoded: ten tokens, of which the first number counts (``published``), or as many as
the key has (``inline``).
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Filler, Frame, longest
from rope_eval.data.words import NOUNS
from rope_eval.tasks.base import Kind, Task, option, register
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
"""Share that the unpatched model must find within its trained length for passkeys to count."""

PROMPTS = ("auto", "published", "inline")
TRAINED_ON = "passkey_prompt"
"""Field of ``tokenizer_config.json``: the prompt that a checkpoint was trained on."""


def own_prompt(tokenizer: Any) -> str:
    """The prompt of ``auto``: what the checkpoint says it was trained on, or ``published``."""
    given = getattr(tokenizer, "init_kwargs", {}).get(TRAINED_ON)
    return given if given in PROMPTS else "published"


@dataclass(frozen=True)
class FirstNumber:
    """Scores the first number in the text, as in the authors' code."""

    number: int

    def __call__(self, written: str) -> float:
        found = re.search(r"[0-9]+", written)
        return float(found is not None and found.group().lstrip("0") == str(self.number))


class PasskeyPrompts:
    """Builds ``inline`` prompts for one tokenizer.

    Args:
        tokenizer: of the model.
        frame: around the prompt; by default that of a base model.
        words: whether keys are words instead of numbers.
    """

    default_digits: ClassVar[int | None] = 5

    def __init__(self, tokenizer: Any, frame: Frame | None = None, words: bool = False) -> None:
        self._tokenizer, self._words = tokenizer, words
        self._frame = frame or Frame.from_tokenizer(tokenizer, "no")

    @cached_property
    def _filler(self) -> Filler:
        return Filler(self._tokenizer, FILLER)

    def minimum_length(self, digits: int | None = None) -> int:
        """Fewest tokens that hold a prompt without any filler, answer included."""
        digits = digits or self.default_digits
        return len(self._whole("9" * (digits or 5))[0])

    def case(
        self,
        length: int,
        depth: float,
        seed: int,
        digits: int | None = None,
        generate: bool = False,
        bin: int | None = None,
    ) -> Case:
        """One prompt of ``length`` tokens with its answer, needle at ``depth``.

        It may be a few tokens shorter where so little filler fits that no choice adds up.

        Args:
            length: tokens.
            depth: 0 is the start, 1 the end.
            seed: of the key.
            digits: of the key; None: as the prompt has it.
            generate: whether the case is to be decoded instead of teacher-forced.
            bin: noted in the case.

        Raises:
            OptionError: ``length`` cannot hold the frame.
        """
        digits = digits or self.default_digits
        rng = random.Random(f"{seed}:{length}:{depth}:{digits}")
        key = rng.choice(NOUNS) if self._words else self._key(rng, digits)
        least = len(self._whole(key)[0])
        if least > length:
            raise OptionError(
                f"a passkey prompt needs at least {least} tokens with this tokenizer, got length "
                f"{length}; give longer --lengths"
            )
        ids, count = self._fill(length, depth, key)
        lead = 0
        while not self._tokenizer.decode([ids[lead - count]]).strip():
            lead += 1
        case = Case(
            *("passkey", length, seed, "argmax", count - lead, ids, (key,), depth, bin),
            whole=True,
            lead=lead,
        )
        return self._to_write(case) if generate else case

    def _key(self, rng: random.Random, digits: int | None) -> str:
        return "".join(rng.choice("0123456789") for _ in range(digits or 5))

    def _to_write(self, case: Case) -> Case:
        return replace(case, mode="write", ids=case.ids[: -case.count])

    def _fill(self, length: int, depth: float, key: str) -> tuple[array, int]:
        def made(sentences: Sequence[str], breaks: int) -> tuple[array, int]:
            cut = round(depth * len(sentences))
            return self._whole(key, "\n" * breaks + "".join(sentences[:cut]), sentences[cut:])

        parts: tuple[Sequence[str], int] = ((), 0)
        best = made(*parts)
        wanted = length - len(best[0])
        for _ in range(8):  # where tokens reach across sentences their lengths do not add up
            tried = self._filler.fill(max(0, wanted))
            found = made(*tried)
            wanted += length - len(found[0])
            if len(best[0]) < len(found[0]) <= length:
                parts, best = tried, found
            if len(best[0]) == length:
                return best
        # Line breaks may be one token together.
        more = (made(parts[0], parts[1] + count) for count in range(1, 9))
        return next((found for found in more if len(found[0]) == length), best)

    def _whole(self, key: str, before: str = "", after: Sequence[str] = ()) -> tuple[array, int]:
        content = INTRO + before + NEEDLE.format(key=key) + "".join(after) + ASK
        return self._frame.whole(content, LEAD, key)


class PublishedPrompts(PasskeyPrompts):
    """Builds ``published`` prompts for one tokenizer; arguments as for ``PasskeyPrompts``."""

    default_digits: ClassVar[int | None] = None

    def _key(self, rng: random.Random, digits: int | None) -> str:
        return super()._key(rng, digits) if digits else str(rng.randint(1, 50000))

    def _to_write(self, case: Case) -> Case:
        judge = None if self._words else FirstNumber(int(case.key))
        ids = case.ids[: -case.count - case.lead]
        return replace(case, mode="write", count=10, ids=ids, judge=judge, whole=False)

    def _fill(self, length: int, depth: float, key: str) -> tuple[array, int]:
        def build(characters: int) -> array:
            return self._frame.whole(*self._text(characters, depth, key), key)[0]

        characters, ids = longest(build, length)
        # A character more may make a token less.
        more = range(characters + 1, characters + 9) if len(ids) < length else ()
        found = next((n for n in more if len(build(n)) == length), characters)
        return self._frame.whole(*self._text(found, depth, key), key)

    def _whole(self, key: str, before: str = "", after: Sequence[str] = ()) -> tuple[array, int]:
        return self._frame.whole(*self._text(0, 0.0, key), key)

    def _text(self, characters: int, depth: float, key: str) -> tuple[str, str]:
        """The five lines with so much filler, up to the last line's answer, and what begins it."""
        before = round(depth * characters)
        line = "".join(FILLER)
        filler = (line * (characters // len(line) + 1)).strip()
        lines = (
            INTRO,
            filler[:before],
            NEEDLE.format(key=key).strip(),
            filler[: characters - before],
            ASK.strip(),
        )
        return "\n".join(lines), LEAD


@register
@dataclass(frozen=True)
class Passkey(Task):
    """Passkey retrieval on a grid of lengths and depths.

    Every trial has its own key, and a depth sampled within its bin. Both follow from the seed, so
    every method gets identical prompts.

    Args:
        trials: prompts for each length and depth bin.
        depths: bins of equal width.
        digits: of each key; None: as defined by the prompt.
        needle: ``number`` or ``word``, which is easier.
        generate: decode instead of teacher-forcing.
        prompt: ``published`` or ``inline``, see the module; ``auto``: the one that the checkpoint
            was trained on if its tokenizer records it (``TRAINED_ON``), else ``published``.
    """

    name: ClassVar[str] = "passkey"
    kind: ClassVar[Kind] = "rate"

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
        require_positive(trials=self.trials, depths=self.depths, digits=self.digits)
        if self.needle not in ("number", "word") or (self.needle == "word" and self.digits):
            raise OptionError(
                f"needle={self.needle!r} is not valid; it must be number, or word without digits"
            )
        if self.prompt not in PROMPTS:
            raise OptionError(
                f"prompt={self.prompt!r} is not valid; it must be one of {', '.join(PROMPTS)}"
            )

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All prompts.

        Raises:
            OptionError: a length cannot hold a prompt.
        """
        prompt = own_prompt(frame.tokenizer) if self.prompt == "auto" else self.prompt
        kind = PasskeyPrompts if prompt == "inline" else PublishedPrompts
        prompts = kind(frame.tokenizer, frame, self.needle == "word")
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
        digits = self.digits or prompts.default_digits
        keys = f"keys of {digits} digits" if digits else "keys from 1 to 50000"
        keys = "keys of one word" if self.needle == "word" else keys
        definition = (
            f"share of {self.trials} {keys} at each of {self.depths} depths that greedy decoding "
            f"{writes} out in full, {prompt} prompt, exact intervals"
        )
        return Questions(cases, definition)
