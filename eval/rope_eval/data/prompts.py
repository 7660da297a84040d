"""Prompts: templates around them, and their length.

A prompt is tokenized in one piece, like a user's text, because tokens can span sentence boundaries:
in Llama 3 a full stop and a line break are one token. Some tokenizers also add a space at the
beginning of every text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

from rope_ext.errors import OptionError

Chat = Literal["auto", "yes", "no"]
_MARK = "@@CONTENT@@"


Ids = TypeVar("Ids", bound=Sequence[int])
"""Token ids: a list, a tuple or a compact array."""


def encode(tokenizer: Any, text: str) -> list[int]:
    """``text`` as tokens, without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def joined(*parts: Iterable[int]) -> array:
    """Concatenate parts to one compact array of token ids."""
    return array("i", chain(*parts))


@dataclass(frozen=True)
class Frame:
    """The template around the content of a prompt.

    A base model gets the beginning-of-sequence token that its tokenizer adds, once. A chat model
    gets its template, which contains that token, and the answer begins after the question, in the
    assistant's turn.

    Args:
        tokenizer: of the model.
        head: tokens before the content.
        tail: tokens after it; none for a base model.
        around: text of a chat template before and after the content.
    """

    tokenizer: Any
    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    around: tuple[str, str] | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, chat: Chat = "auto") -> Frame:
        """The frame of a tokenizer; ``auto`` uses a chat template if there is one.

        Raises:
            OptionError: a chat template is requested, but there is none.
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
        before, after = (tuple(encode(tokenizer, text)) for text in (head, tail))
        return cls(tokenizer, before, after, (head, tail))

    def whole(
        self, content: str, lead: str = "", answer: str = "", keep_space: bool = False
    ) -> tuple[array, int]:
        """A prompt, tokenized in one piece.

        Args:
            content: of the user's turn, with the question at its end.
            lead: begins the answer, such as ``" The pass key is"``.
            answer: follows after a space; ``""`` for a prompt that the model continues.
            keep_space: keep the space at the start of ``lead`` even if the template ends in a line
                break or a space, as RULER does.

        Returns:
            Token ids, and the number of tokens at their end that the model must write to give the
            answer, including the space before it.
        """
        head: tuple[int, ...] = self.head
        if self.around is not None:
            before, after = self.around
            # After a line break or a space of the template an answer begins without another one.
            lead = lead.lstrip() if after[-1:].isspace() and not keep_space else lead
            head, content = (), before + content + after
        given = encode(self.tokenizer, content + lead)
        if not answer:
            return joined(head, given), 0
        ids = encode(self.tokenizer, f"{content}{lead} {answer}")
        pairs = enumerate(zip(given, ids, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), len(given))
        if self.tokenizer.decode(ids[shared:]).strip() != answer:  # it merges with the lead
            ids, shared = [*given, *encode(self.tokenizer, f" {answer}")], len(given)
        return joined(head, ids), len(ids) - shared

    def ask(self, question: str, lead: str, answer: str = "") -> tuple[list[int], int]:
        """The end of a prompt whose content is token ids: the question and the answer.

        Args:
            question: ends the content.
            lead: begins the answer, such as ``" The pass key is"``.
            answer: follows after a space; ``""`` for a prompt that the model continues.

        Returns:
            Token ids, and the number of tokens at their end that spell the answer.
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
    """Tokens that the tokenizer adds before a text: the beginning-of-sequence token or none."""
    plain = encode(tokenizer, "a")
    special = tokenizer("a", verbose=False)["input_ids"]
    return tuple(special[: special.index(plain[0])]) if plain[0] in special else ()


def longest(
    build: Callable[[int], Ids], budget: int, least: int = 0, most: int | None = None
) -> tuple[int, Ids]:
    """The longest prompt that fits, shorter than ``budget`` by less than an average part.

    Args:
        build: builds the prompt with a number of parts, as token ids; called a few times, for any
            length.
        budget: tokens.
        least: smallest number of parts.
        most: largest number of parts; None: unlimited.

    Returns:
        The number of parts, and the prompt, which is too long if even the smallest does not fit.
    """
    low, ids = least, build(least)
    first, high = len(ids), None if most is None else most + 1
    tokens = 1.0  # of a part
    guess, turn = least + 32, 0
    while len(ids) + tokens <= budget and high != low + 1 and turn < 64:
        if turn:
            guess = low + max(1, int((budget - len(ids)) / tokens))
        if high is not None and (guess >= high or turn > 8):
            guess = (low + high) // 2 if turn > 8 else high - 1
        turn += 1
        tried = build(guess)
        if guess - low >= 32 and len(tried) <= len(ids):
            break  # a tokenizer that makes the same of more
        tokens = max(0.01, (len(tried) - first) / (guess - least))
        if len(tried) <= budget:
            low, ids = guess, tried
        else:
            high = guess
    return low, ids


class Filler:
    """Repeated sentences, cut at sentence ends to a number of tokens.

    The sentences follow each other in order; the last ones are chosen so that the lengths add up.
    Line breaks fill what no choice of sentences can reach.

    Args:
        tokenizer: of the model.
        sentences: each with the space before it.
    """

    def __init__(self, tokenizer: Any, sentences: Sequence[str]) -> None:
        self.sentences = tuple(sentences)
        text = "".join(sentences)

        def tokens(middle: str) -> int:
            return len(encode(tokenizer, text + middle + text))

        self.sizes = [max(1, tokens(sentence) - tokens("")) for sentence in sentences]
        # Above this, every sum that the lengths can reach at all is reached (Sylvester).
        self._rest = max(self.sizes) ** 2
        self._ways = self._reach(self._rest + max(self.sizes))

    def _reach(self, most: int) -> list[tuple[int, ...] | None]:
        """The smallest number of sentences, by index, for each total number of tokens."""
        ways: list[tuple[int, ...] | None] = [()]
        for total in range(1, most + 1):
            choices = [
                (*way, index)
                for index, size in enumerate(self.sizes)
                if size <= total and (way := ways[total - size]) is not None
            ]
            ways.append(min(choices, key=len) if choices else None)
        return ways

    def fill(self, tokens: int) -> tuple[list[str], int]:
        """Sentences with ``tokens`` tokens in total, minus the number of line breaks to add."""
        chosen: list[int] = []
        while tokens > self._rest:
            chosen.append(len(chosen) % len(self.sizes))
            tokens -= self.sizes[chosen[-1]]
        breaks = next(n for n in range(tokens + 1) if self._ways[tokens - n] is not None)
        chosen += self._ways[tokens - breaks] or ()
        return [self.sentences[index] for index in chosen], breaks
