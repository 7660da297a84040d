"""Training rows for a checkpoint trained from scratch: a mixture of text and exercises.

A model does not learn retrieval from a few megabytes of text alone, so the mixture includes
exercises whose answers are in the row. Only answers have a loss there. A row is a function of
(seed, index), so that a killed run resumes exactly at its last checkpoint.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rope_eval.data.prompts import beginning, encode

Row = tuple[list[int], list[float]]
"""Token IDs, and the loss weight of each."""


class Rows(torch.utils.data.Dataset):
    """Rows of ``length`` tokens with a loss weight per token; row i depends on (seed, i) only.

    Args:
        tokenizer: tokenizer of the checkpoint.
        texts: documents to take excerpts from.
        rows: number of rows.
        seed: random seed.
    """

    length: ClassVar[int]
    """Trained length, tokens."""
    shares: ClassVar[dict[str, float]]
    """Shares of the rows by kind; a kind is the name of a method of this class."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], rows: int, seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.rows = rows
        self.seed = seed
        self.head = list(beginning(tokenizer))
        self.eos = tokenizer.eos_token_id
        self.stream = [token for text in texts for token in [*self.encode(text), self.eos]]

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def __len__(self) -> int:
        return self.rows

    def excerpt(self, rng: random.Random, tokens: int) -> list[int]:
        """Consecutive tokens of the text, from a random place on."""
        start = rng.randrange(len(self.stream) - tokens)
        return self.stream[start : start + tokens]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # Of a text, which random hashes the same way in every process.
        rng = random.Random(f"{self.seed}:{index}")
        kind = rng.choices(list(self.shares), list(self.shares.values()))[0]
        ids, weights = getattr(self, kind)(rng)
        ids = ids[: self.length]
        weights = weights[: self.length]
        missing = self.length - len(ids)
        return {
            "input_ids": torch.tensor(ids + [self.eos] * missing),
            "weights": torch.tensor(weights + [0.0] * missing),
        }

    def text(self, rng: random.Random) -> Row:
        """An excerpt, with a loss on all tokens."""
        size = self.length - len(self.head)
        return [*self.head, *self.excerpt(rng, size)], [0.0] * len(self.head) + [1.0] * size

    def returning(self, rng: random.Random, segment: list[int], given: int) -> Row:
        """A segment that is repeated several times, starting anywhere in its first half.

        The first ``given`` tokens of a repetition only identify it; the others have a loss.
        """
        size = len(segment)
        ids = [*self.head, *segment]
        weights = [0.0] * (len(self.head) + size)
        while len(ids) < self.length:
            gap = rng.choice((0, rng.randrange(self.length // 2)))
            start = rng.randrange(max(1, size // 2))
            ids += self.excerpt(rng, gap) + segment[start:]
            weights += [0.0] * (gap + given) + [1.0] * (size - start - given)
        return ids, weights


@dataclass(frozen=True)
class Checkpoint:
    """One bundled checkpoint.

    Args:
        texts: returns the documents for ``"train"`` or ``"held_out"``.
        tokenizer: creates the tokenizer from the training documents.
        rows: the class of its training rows.
        model: creates the model for a tokenizer, with new weights.
        steps: number of training steps.
        batch_size: rows per step.
        ships_held_out: whether the held-out documents are stored next to the weights, for machines
            that do not have them.
    """

    texts: Callable[[str], list[str]]
    tokenizer: Callable[[list[str]], PreTrainedTokenizerFast]
    rows: type[Rows]
    model: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    steps: int
    batch_size: int = 16
    ships_held_out: bool = False


def common(pattern: str, texts: Sequence[str], most: int) -> list[str]:
    """The most frequent matches of ``pattern``, in descending order."""
    count = Counter(word for text in texts for word in re.findall(pattern, text))
    return [word for word, _ in count.most_common(most)]
