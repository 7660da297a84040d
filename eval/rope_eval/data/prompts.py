"""Prompts: templates around them, and their length.

A prompt is tokenized in one piece, because tokens can span sentence boundaries: in Llama 3 a full
stop and a line break are one token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

from rope_eval.data.templates import render
from rope_ext.errors import OptionError

Chat = Literal["auto", "yes", "no"]
_MARK = "@@CONTENT@@"
Ids = TypeVar("Ids", bound=Sequence[int])
"""Token ids: a list, a tuple or a compact array."""


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenize ``text``, without special tokens."""
    # verbose: or it warns of texts that are longer than its model.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def joined(*parts: Iterable[int]) -> array:
    """Concatenate parts to one compact array of token ids."""
    return array("i", chain(*parts))


def blanks(tokenizer: Any, ids: Sequence[int], count: int) -> int:
    """Count blank tokens at the start of the last ``count``: before digits, they are tokens."""
    return next(n for n in range(count) if tokenizer.decode([ids[n - count]]).strip())


@dataclass(frozen=True)
class Frame:
    """The template around the content of a prompt.

    ``head`` is the beginning-of-sequence token of a base model, and ``around`` the template of a
    chat model, which contains that token. ``model`` is the folder or ID of the model.
    """

    tokenizer: Any
    head: tuple[int, ...]
    around: tuple[str, str] | None = None
    model: str = ""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, chat: Chat = "auto") -> Frame:
        """Return the frame of a tokenizer; ``auto`` uses a chat template if there is one."""
        template = getattr(tokenizer, "chat_template", None)
        if chat == "yes" and not template:
            raise OptionError("this tokenizer has no chat template; give --chat no")
        if chat == "no" or not template:
            return cls(tokenizer, beginning(tokenizer))
        message = [{"role": "user", "content": _MARK}]
        text = render(tokenizer, message, add_generation_prompt=True)
        head, mark, tail = text.partition(_MARK)
        if not mark:
            raise OptionError("the chat template leaves the user's text out; give --chat no")
        return cls(tokenizer, (), (head, tail))

    def whole(
        self, content: str, lead: str = "", answer: str = "", keep_space: bool = False
    ) -> tuple[array, int]:
        """Build a prompt, tokenized in one piece: the user's ``content``, and a ``lead``.

        ``keep_space`` keeps the space before ``lead`` even after a line break of the template, as
        RULER does. Returns token ids, and the number of tokens at their end that the model must
        write to give the ``answer``, including the space before it.
        """
        if self.around is not None:
            before, after = self.around
            # After a line break or space in the template, the answer starts without a space.
            lead = lead.lstrip() if after[-1:].isspace() and not keep_space else lead
            content = before + content + after
        given = encode(self.tokenizer, content + lead)
        if not answer:
            return joined(self.head, given), 0
        ids = encode(self.tokenizer, f"{content}{lead} {answer}")
        pairs = enumerate(zip(given, ids, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), len(given))
        if self.tokenizer.decode(ids[shared:]).strip() != answer:  # it merges with the lead
            ids = [*given, *encode(self.tokenizer, f" {answer}")]
            shared = len(given)
        return joined(self.head, ids), len(ids) - shared


def beginning(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the tokenizer adds before text: one bos token or none."""
    plain = encode(tokenizer, "a")
    special = tokenizer("a", verbose=False)["input_ids"]
    return tuple(special[: special.index(plain[0])]) if plain[0] in special else ()


def longest(
    build: Callable[[int], Ids], budget: int, least: int = 0, most: int | None = None
) -> tuple[int, Ids]:
    """Return the number of parts, and the prompt, of the longest that fits into ``budget``.

    ``build`` creates a prompt from ``least`` to ``most`` parts; it is called a few times, for any
    length. The smallest is returned even if it does not fit.
    """
    low = least
    ids = build(least)
    first = len(ids)
    high = None if most is None else most + 1
    tokens = 1.0  # of a part
    guess = least + 32
    turn = 0
    while len(ids) + tokens <= budget and high != low + 1 and turn < 64:
        if turn:
            guess = low + max(1, int((budget - len(ids)) / tokens))
        if high is not None and (guess >= high or turn > 8):
            guess = (low + high) // 2 if turn > 8 else high - 1
        turn += 1
        # The number of tokens of a part is a guess from the last attempt: first by it, then by
        # halves.
        tried = build(guess)
        if guess - low >= 32 and len(tried) <= len(ids):
            break  # more parts, same tokens
        tokens = max(0.01, (len(tried) - first) / (guess - least))
        if len(tried) <= budget:
            low = guess
            ids = tried
        else:
            high = guess
    return low, ids
