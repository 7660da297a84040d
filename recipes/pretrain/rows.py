"""Rows of a checkpoint trained from scratch: text and exercises, mixed, each row from its number.

Retrieval does not form from a few megabytes of text alone, so exercises whose answers stand in the
row are mixed in. Only answers are scored there. A row is a function of (seed, index), so that a
killed run goes on exactly where its last checkpoint stood.
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
"""Token ids, and how much the loss of each counts."""


class Rows(torch.utils.data.Dataset):
    """Rows of ``length`` tokens with a loss weight per token; row i depends on (seed, i) only.

    Args:
        tokenizer: of the checkpoint.
        texts: documents to cut excerpts from.
        rows: how many.
        seed: of all of them.
    """

    length: ClassVar[int]
    """Trained context, tokens."""
    shares: ClassVar[dict[str, float]]
    """Kind of row, which is a method's name -> its share of the rows."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], rows: int, seed: int
    ) -> None:
        self.tokenizer, self.rows, self.seed = tokenizer, rows, seed
        self.head, self.eos = list(beginning(tokenizer)), tokenizer.eos_token_id
        self.stream = [token for text in texts for token in [*self.encode(text), self.eos]]

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def __len__(self) -> int:
        return self.rows

    def excerpt(self, rng: random.Random, tokens: int) -> list[int]:
        start = rng.randrange(len(self.stream) - tokens)
        return self.stream[start : start + tokens]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}:{index}")
        kind = rng.choices(list(self.shares), list(self.shares.values()))[0]
        ids, weights = getattr(self, kind)(rng)
        ids, weights = ids[: self.length], weights[: self.length]
        missing = self.length - len(ids)
        return {
            "input_ids": torch.tensor(ids + [self.eos] * missing),
            "weights": torch.tensor(weights + [0.0] * missing),
        }

    def text(self, rng: random.Random) -> Row:
        """An excerpt, all of it scored."""
        size = self.length - len(self.head)
        return [*self.head, *self.excerpt(rng, size)], [0.0] * len(self.head) + [1.0] * size

    def returning(self, rng: random.Random, segment: list[int], given: int) -> Row:
        """A segment that comes back several times, beginning anywhere in its first half.

        The first ``given`` tokens of a return only say where to look; the others are scored.
        """
        size = len(segment)
        ids, weights = [*self.head, *segment], [0.0] * (len(self.head) + size)
        while len(ids) < self.length:
            gap = rng.choice((0, rng.randrange(self.length // 2)))
            start = rng.randrange(max(1, size // 2))
            ids += self.excerpt(rng, gap) + segment[start:]
            weights += [0.0] * (gap + given) + [1.0] * (size - start - given)
        return ids, weights


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that ships with rope_ext.

    Args:
        texts: its documents, for ``"train"`` or ``"held_out"``.
        tokenizer: made of the documents to train on.
        rows: text and exercises.
        model: with fresh weights, for that tokenizer.
        steps: of how many rows ``batch_size`` says.
        batch_size: rows.
        ships_held_out: whether the held-out documents lie beside the weights, because not every
            machine has them.
    """

    texts: Callable[[str], list[str]]
    tokenizer: Callable[[list[str]], PreTrainedTokenizerFast]
    rows: type[Rows]
    model: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    steps: int
    batch_size: int = 16
    ships_held_out: bool = False


def common(pattern: str, texts: Sequence[str], most: int) -> list[str]:
    """What matches ``pattern`` most often, in that order."""
    count = Counter(word for text in texts for word in re.findall(pattern, text))
    return [word for word, _ in count.most_common(most)]
