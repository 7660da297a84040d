"""Passkey retrieval: a random number hidden in repetitive text, asked for at the end.

``published`` prompts are those of Landmark Attention (arXiv 2305.16300, its ``run_test.py``) and
YaRN (arXiv 2309.00071): five lines, filler that is cut anywhere, keys from 1 to 50000. ``inline``
has the same sentences, none of them cut, in one paragraph, and keys of five digits, as the bundled
checkpoint was trained.

A prompt is answered by greedy decoding. A model with a chat template is asked for the number only
and nothing of the answer is given, so the key is searched in what it writes. A base model continues
the lead-in ``The pass key is``, with the space after it where the tokenizer makes that a token of
its own, and the first number that it writes counts, as in the authors' code.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar, Literal

from rope_eval.cases import Case, Questions
from rope_eval.data.prompts import Frame, blanks
from rope_eval.data.text import NOUNS
from rope_eval.tasks.base import Task, draws, fill, number_of_prompts, option, register
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
ASK = "\nWhat is the pass key?"
LEAD = " The pass key is"
QUESTION = ASK + LEAD
CHAT_ANSWER = 24
"""Tokens decoded of a chat model's answer, which may be a sentence around the key."""
TEACHER_FORCED = "answers ranked first after a lead-in (not decoded)"
"""What one forward with the answer in it counts, in words; calibration and search do so."""
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


@dataclass(frozen=True)
class WholeAnswer:
    """Scores 1 if the answer is in the text, not as part of a longer word or number."""

    answer: str

    def __call__(self, written: str) -> float:
        text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", written)  # 12,345 is 12345
        whole = rf"(?<!\w){re.escape(self.answer)}(?!\w)"
        return float(re.search(whole, text, re.IGNORECASE) is not None)


@dataclass(frozen=True)
class KeyPrompt:
    """A prompt for a hidden ``answer``: ``ids`` without it, and its tokens after a lead-in.

    ``spelled`` is empty for a chat model, which is given no lead-in and may word its answer freely.
    """

    ids: array
    spelled: array


def key_prompt(
    frame: Frame, content: str, answer: str, kind: str = "number", lead: str = LEAD
) -> KeyPrompt:
    """Return the prompt for an ``answer`` (a ``kind`` of thing) hidden in ``content``.

    ``content`` ends with the question. A chat template gets the request to answer with the ``kind``
    only; without one, the ``lead`` follows.
    """
    if frame.around is not None:
        ids, _ = frame.whole(f"{content} Answer with the {kind} only.")
        return KeyPrompt(ids=ids, spelled=array("i"))
    ids, count = frame.whole(content, lead, answer)
    # A space before the answer that is a token of its own belongs to the lead-in: a model that
    # would begin with a colon or a quotation mark has still found the key.
    count -= blanks(frame.tokenizer, ids, count)
    return KeyPrompt(ids=ids[:-count], spelled=ids[-count:])


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
        self.words = words
        self.published = published

    def minimum_length(self, digits: int | None = None) -> int:
        """Minimum number of tokens of a prompt without filler, including the answer."""
        prompt = self._prompt(0, 0.0, "9" * (digits or 5))
        return len(prompt.ids) + self._answer_tokens(prompt)

    def case(
        self,
        length: int,
        depth: float,
        seed: int,
        digits: int | None = None,
        bin: int | None = None,
    ) -> Case:
        """Build a prompt whose answer is decoded: at most ``length`` tokens with the answer.

        ``depth`` is the position of the needle, from 0 (start) to 1 (end); ``seed`` determines the
        key, with ``digits`` digits, or as in the published prompt. Filler is cut at a sentence.
        """
        key, prompt = self._filled(length, depth, seed, digits=digits)
        # Only a lead-in makes the key the first number of the answer.
        first = prompt.spelled and not self.words
        return Case(
            "passkey",
            length,
            seed,
            mode="write",
            count=self._answer_tokens(prompt),
            ids=prompt.ids,
            answers=(key,),
            depth=depth,
            bin=bin,
            judge=FirstNumber(key) if first else WholeAnswer(key),
        )

    def forward_case(self, length: int, depth: float, seed: int, digits: int | None = None) -> Case:
        """Build the prompt of :meth:`case` with its answer, for one teacher-forced forward.

        Only for prompts with a lead-in: there, greedy decoding begins with the key exactly if each
        token of the key is the argmax, so the forward scores every token that decides.
        """
        key, prompt = self._filled(length, depth, seed, digits=digits)
        if not prompt.spelled:
            raise OptionError(
                "a chat model words its answer freely, so one forward cannot score it; build "
                "PasskeyPrompts without a chat template, or decode the prompts of case()"
            )
        ids = prompt.ids + prompt.spelled
        count = len(prompt.spelled)
        return Case(
            task="passkey",
            length=length,
            seed=seed,
            mode="argmax",
            count=count,
            ids=ids,
            answers=(key,),
            depth=depth,
        )

    def _filled(
        self, length: int, depth: float, seed: int, digits: int | None
    ) -> tuple[str, KeyPrompt]:
        """Return the key, and the longest prompt that fits into ``length`` with its answer."""
        digits = digits or (None if self.published else 5)
        rng = random.Random(f"{seed}:{length}:{depth}:{digits}")
        if self.words:
            key = rng.choice(NOUNS)
        elif digits is None:
            key = str(rng.randint(1, 50000))
        else:
            key = "".join(rng.choice("0123456789") for _ in range(digits))
        tokens = self._answer_tokens(self._prompt(0, depth, key))
        units, _ = fill(
            "passkey",
            build=lambda units: self._prompt(units, depth, key).ids,
            length=length,
            tokens=tokens,
        )
        return key, self._prompt(units, depth, key)

    def _answer_tokens(self, prompt: KeyPrompt) -> int:
        """Return how many tokens are decoded: the key, ten (``published``), or a sentence."""
        if not prompt.spelled:
            return CHAT_ANSWER
        return max(10, len(prompt.spelled)) if self.published else len(prompt.spelled)

    def _prompt(self, units: int, depth: float, key: str) -> KeyPrompt:
        """Build the prompt with ``units`` characters of filler (``published``), or sentences."""
        cut = round(depth * units)
        needle = NEEDLE.format(key=key)
        kind = "word" if self.words else "number"
        if self.published:
            line = "".join(FILLER)
            filler = (line * (units // len(line) + 1)).strip()
            lines = INTRO, filler[:cut], needle.strip(), filler[: units - cut], ASK.strip()
            return key_prompt(self.frame, content="\n".join(lines), answer=key, kind=kind)
        sentences = list(islice(cycle(FILLER), units))
        content = "".join([INTRO, *sentences[:cut], needle, *sentences[cut:], ASK])
        return key_prompt(self.frame, content, answer=key, kind=kind)


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
    prompt: Literal["auto", "published", "inline"] = option(
        "auto", "published, inline, or auto: the one the checkpoint was trained on, else published"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needle == "word" and self.digits:
            raise OptionError("needle='word' is not valid with digits; leave one of them out")

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        prompt = own_prompt(frame.tokenizer) if self.prompt == "auto" else self.prompt
        word = self.needle == "word"
        published = prompt == "published"
        keys = f"{self.digits or 5} digits" if self.digits or not published else "up to 50000"
        if frame.around is not None:
            how = "found in the answer to a question that asks for it only"
        else:
            how = f"written after the lead-in {LEAD.strip()!r}, with the space where it is a token"
        about = (
            f"share of keys ({'a word' if word else keys}) {how}; greedy decoding, {prompt} prompt"
        )
        prompts = PasskeyPrompts(frame.tokenizer, frame, words=word, published=published)
        cases = [
            prompts.case(length, draw.depth or 0.0, draw.number, self.digits, draw.bin)
            for length, draw in draws(
                self.name, lengths, seed, trials=self.trials, depths=self.depths
            )
        ]
        grid = f"{number_of_prompts(self.trials, self.depths)}, exact intervals"
        return Questions(cases, f"{about}; {grid}")
