"""Prompts from parts: every part is tokenised alone, so that lengths add up exactly."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal

from rope_ext.errors import OptionError

Chat = Literal["auto", "yes", "no"]
_MARK = "@@CONTENT@@"


def encode(tokenizer: Any, text: str) -> list[int]:
    """``text`` as tokens, without special ones."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def joined(*parts: Iterable[int]) -> array:
    """All parts as one compact array of token ids."""
    return array("i", chain(*parts))


@dataclass(frozen=True)
class Frame:
    """What goes around the content of a prompt.

    A base model gets the beginning-of-sequence token that its tokenizer puts there, once. A chat
    model gets its template, which holds that token where it belongs, and what comes after the
    question begins the answer in the assistant's turn.

    Args:
        tokenizer: of the model.
        head: tokens before the content.
        tail: tokens after it; none for a base model.
    """

    tokenizer: Any
    head: tuple[int, ...]
    tail: tuple[int, ...] = ()

    @cached_property
    def word(self) -> Callable[[str], tuple[int, ...]]:
        """Encodes a text that comes again and again."""
        return cache(lambda text: tuple(encode(self.tokenizer, text)))

    @classmethod
    def of(cls, tokenizer: Any, chat: Chat = "auto") -> Frame:
        """The frame of this tokenizer; ``auto`` uses a chat template where there is one.

        Raises:
            OptionError: a chat template is asked for and there is none.
        """
        template = getattr(tokenizer, "chat_template", None)
        if chat == "yes" and not template:
            raise OptionError("this tokenizer has no chat template; give --chat no")
        if chat == "no" or not template:
            return cls(tokenizer, beginning(tokenizer))
        message = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        head, mark, tail = text.partition(_MARK)
        if not mark:
            raise OptionError("the chat template leaves the user's text out; give --chat no")
        return cls(tokenizer, tuple(encode(tokenizer, head)), tuple(encode(tokenizer, tail)))

    def ask(self, question: str, lead: str, answer: str = "") -> tuple[list[int], int]:
        """The end of a prompt: the question, the beginning of the answer, the answer.

        Args:
            question: closes the content.
            lead: begins the answer, such as ``" The pass key is"``.
            answer: follows after a space; ``""`` for a prompt that is to be continued.

        Returns:
            Token ids, and how many of them at their end spell the answer.
        """
        if self.tail:
            before = [*encode(self.tokenizer, question), *self.tail]
            lead = lead.lstrip()
        else:
            before, lead = [], question + lead
        given = encode(self.tokenizer, lead)
        if not answer:
            return [*before, *given], 0
        ids = encode(self.tokenizer, f"{lead} {answer}")
        shared = 0
        while shared < len(given) and ids[shared] == given[shared]:
            shared += 1
        if self.tokenizer.decode(ids[shared:]).strip() != answer:  # it merges with the lead
            ids, shared = [*given, *encode(self.tokenizer, f" {answer}")], len(given)
        # Where digits stand alone, the space before them is a token of its own: it is given.
        while not self.tokenizer.decode([ids[shared]]).strip():
            shared += 1
        return [*before, *ids], len(ids) - shared


def beginning(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text: the beginning-of-sequence token or nothing."""
    plain = encode(tokenizer, "a")
    special = tokenizer("a", verbose=False)["input_ids"]
    return tuple(special[: special.index(plain[0])]) if plain[0] in special else ()


class Filler:
    """Sentences that repeat, cut at sentence ends to an exact number of tokens.

    The sentences follow each other in order; the last ones are chosen such that the lengths add
    up. What no choice can reach is filled with line breaks.

    Args:
        tokenizer: of the model.
        sentences: each with the space before it.
    """

    def __init__(self, tokenizer: Any, sentences: Sequence[str]) -> None:
        self.sentences = [encode(tokenizer, sentence) for sentence in sentences]
        self.newline = encode(tokenizer, "\n")[-1:]
        longest = max(map(len, self.sentences))
        # Above this, every sum that the lengths can reach at all is reached (Sylvester).
        self._rest = longest * longest
        self._ways = self._reach(self._rest + longest)

    def _reach(self, most: int) -> list[tuple[int, ...] | None]:
        """Fewest sentences, by index, whose lengths add up to each number of tokens."""
        ways: list[tuple[int, ...] | None] = [()]
        for total in range(1, most + 1):
            choices = [
                (*ways[total - len(sentence)], index)
                for index, sentence in enumerate(self.sentences)
                if len(sentence) <= total and ways[total - len(sentence)] is not None
            ]
            ways.append(min(choices, key=len) if choices else None)
        return ways

    def fill(self, tokens: int) -> tuple[list[list[int]], int]:
        """Sentences of together ``tokens`` tokens, less the number of line breaks to add."""
        chosen: list[list[int]] = []
        while tokens > self._rest:
            chosen.append(self.sentences[len(chosen) % len(self.sentences)])
            tokens -= len(chosen[-1])
        breaks = next(n for n in range(tokens + 1) if self._ways[tokens - n] is not None)
        return chosen + [self.sentences[i] for i in self._ways[tokens - breaks]], breaks
