"""Finds tokens without an embedding: a tokenizer may have more tokens than its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from recipes.stream import DataError
from rope_eval.data.prompts import beginning
from rope_ext.errors import OptionError

_NAMED = 3  # tokens in a message
_FIX = (
    "give --model a folder with more embeddings (model.resize_token_embeddings(len(tokenizer))), "
    "or with the tokenizer that the model was trained with"
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Args:
        tokenizer: tokenizer of the model.
        embeddings: number of tokens that the model has an embedding of.
    """

    tokenizer: Any
    embeddings: float

    @cached_property
    def beyond(self) -> dict[int, str]:
        """The tokens without an embedding, by id."""
        ids = self.tokenizer.get_vocab().items()
        return dict(sorted((id, token) for token, id in ids if id >= self.embeddings))

    def require_written(self, chat: bool) -> None:
        """Raise OptionError if a token that is written into rows of any text has no embedding.

        ``chat``: rows are conversations, with tokens of the chat template.
        """
        ids = {*beginning(self.tokenizer), self.tokenizer.eos_token_id}
        if chat:
            template = str(self.tokenizer.chat_template)
            ids |= {id for id, token in self.beyond.items() if token in template}
        missing = {id: token for id, token in self.beyond.items() if id in ids}
        if missing:
            raise OptionError(
                f"rows would have the tokens {_named(missing)}, and the model has "
                f"{self.embeddings} embeddings; {_FIX}"
            )

    def note(self) -> str | None:
        """Return what to know before training on text with tokens without an embedding, or None."""
        if not self.beyond:
            return None
        return (
            f"the tokenizer has tokens beyond the model's {self.embeddings} embeddings, such as "
            f"{_named(self.beyond)}: text that contains them cannot be trained on"
        )

    def require(self, ids: torch.Tensor) -> None:
        """Raise DataError if a token of a batch has no embedding."""
        largest = int(ids.max())
        if largest >= self.embeddings:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise DataError(
                f"a row has the token {_named({largest: token})}, and the model has "
                f"{self.embeddings} embeddings; remove it from the data, or {_FIX}"
            )


def _named(tokens: dict[int, str]) -> str:
    return ", ".join(f"{token!r} ({id})" for id, token in list(tokens.items())[:_NAMED])


@dataclass(frozen=True)
class Embedded:
    """Collates rows into a batch, of tokens with an embedding only.

    Where a token has none, a model fails with an error of the device, which names no token.
    """

    collate: Callable[[Sequence[Any]], dict[str, torch.Tensor]]
    vocabulary: Vocabulary

    def __call__(self, rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        batch = self.collate(rows)
        self.vocabulary.require(batch["input_ids"])
        return batch
