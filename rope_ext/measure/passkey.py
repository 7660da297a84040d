"""Passkey retrieval: a random number hidden in repetitive text, asked for at the end.

The wording is the published one (Landmark Attention, arXiv 2305.16300, used again by YaRN,
arXiv 2309.00071). A case is scored by one teacher-forced forward: the trial passes when the
argmax equals the key at every answer token, which is exactly when greedy decoding would
write the key.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from rope_ext.measure.forward import Advance, tail_logits

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
QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class PasskeyCase:
    """One trial. ``ids`` is prompt plus answer; its last ``answer_tokens`` are the key."""

    length: int
    depth: float
    seed: int
    key: str
    ids: tuple[int, ...]
    answer_tokens: int


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class PasskeyPrompts:
    """Builds passkey prompts for one tokenizer, each part tokenised once.

    Filler is cut at sentence ends, so that a prompt has at most ``length`` tokens, answer
    included, and is short of it by less than one sentence.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._intro = _encode(tokenizer, INTRO)
        self._filler = [_encode(tokenizer, sentence) for sentence in FILLER]
        self._question = _encode(tokenizer, QUESTION)

    def _asked(self, key: str) -> tuple[list[int], int]:
        """Question and key as tokens, and how many of them spell the key."""
        ids = _encode(self._tokenizer, f"{QUESTION} {key}")
        shared = 0
        while shared < len(self._question) and ids[shared] == self._question[shared]:
            shared += 1
        # Where digits stand alone, the space before them is a token of its own: it is given.
        while not self._tokenizer.decode([ids[shared]]).strip():
            shared += 1
        return ids, len(ids) - shared

    def minimum_length(self, digits: int = 5) -> int:
        """Fewest tokens that hold a prompt without any filler."""
        key = "9" * digits
        needle = _encode(self._tokenizer, NEEDLE.format(key=key))
        return len(self._bos) + len(self._intro) + len(needle) + len(self._asked(key)[0])

    def case(self, length: int, depth: float, seed: int, digits: int = 5) -> PasskeyCase:
        """One prompt of at most ``length`` tokens, needle at ``depth`` (0 start, 1 end).

        Raises:
            ValueError: ``length`` cannot hold the frame.
        """
        rng = random.Random(f"{seed}:{length}:{depth}:{digits}")
        key = "".join(rng.choice("0123456789") for _ in range(digits))
        needle = _encode(self._tokenizer, NEEDLE.format(key=key))
        asked, answer_tokens = self._asked(key)
        budget = length - len(self._bos) - len(self._intro) - len(needle) - len(asked)
        if budget < 0:
            raise ValueError(
                f"a passkey prompt needs at least {length - budget} tokens with this tokenizer, "
                f"got length {length}"
            )
        sentences: list[list[int]] = []
        while budget >= len(sentence := self._filler[len(sentences) % len(self._filler)]):
            sentences.append(sentence)
            budget -= len(sentence)
        cut = round(depth * len(sentences))
        before, after = chain.from_iterable(sentences[:cut]), chain.from_iterable(sentences[cut:])
        ids = [*self._bos, *self._intro, *before, *needle, *after, *asked]
        return PasskeyCase(length, depth, seed, key, tuple(ids), answer_tokens)


def passkey_grid(
    tokenizer: Any, lengths: Sequence[int], depths: int, trials: int, seed: int
) -> dict[tuple[int, int], list[PasskeyCase]]:
    """``trials`` prompts for each (length in tokens, depth bin from 0 to ``depths - 1``).

    Every trial has a key of its own and a depth drawn within its bin. All follow from
    ``seed``, so that every method is asked the same questions.

    Raises:
        ValueError: a length cannot hold a prompt.
    """
    prompts = PasskeyPrompts(tokenizer)
    grid = {}
    for length in lengths:
        for depth in range(depths):
            rng = random.Random(f"passkey:{seed}:{length}:{depths}:{depth}")
            grid[length, depth] = [
                prompts.case(length, (depth + rng.random()) / depths, rng.randrange(2**40))
                for _ in range(trials)
            ]
    return grid


def passed(
    model: torch.nn.Module, cases: Sequence[PasskeyCase], batch_tokens: int, advance: Advance
) -> list[bool]:
    """Whether greedy decoding would write the key, for each case."""
    results = [False] * len(cases)
    rows = [(case.ids, case.answer_tokens) for case in cases]
    for index, target, logits in tail_logits(model, rows, batch_tokens, advance):
        results[index] = bool((logits.argmax(-1) == target).all())
    return results
