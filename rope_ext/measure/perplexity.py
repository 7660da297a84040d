"""Perplexity of the same tokens after more and more context.

Definition: a window of ``length`` tokens is the beginning-of-sequence token (once, where the
tokenizer has one) and the ``length - 1`` tokens of text that end at a fixed place. Only its
last ``scored`` tokens count: 256, or half the shortest length asked for, if that is less.
The windows of all lengths end at the same places, so every length scores the very same
tokens and differs in nothing but the context before them. Each token is scored once;
perplexity is ``exp`` of the mean negative log likelihood over all scored tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rope_ext.errors import MeasureError
from rope_ext.measure.forward import Advance, tail_logits

SCORED = 256


@dataclass(frozen=True)
class Windows:
    """Stretches of text, each as long as the longest window needs.

    Args:
        texts: token ids, without the beginning-of-sequence token, one tuple per window.
        bos: what goes before them: one token or none.
        scored: tokens at the end of every window whose likelihood counts.
        joined: whether documents were joined because too few were long enough.
    """

    texts: tuple[tuple[int, ...], ...]
    bos: tuple[int, ...]
    scored: int
    joined: bool

    def at(self, length: int) -> list[tuple[int, ...]]:
        """The windows of ``length`` tokens."""
        return [self.bos + text[len(self.bos) - length :] for text in self.texts]


def choose_windows(
    documents: Sequence[Sequence[int]],
    lengths: Sequence[int],
    count: int,
    bos: int | None,
    eos: int | None,
    seed: int,
) -> Windows:
    """Up to ``count`` windows that do not overlap, spread over as many documents as possible.

    A window lies inside one document. Where that does not give ``count`` windows, all
    documents are joined in order, with ``eos`` between them, and cut instead.

    Args:
        documents: token ids without special tokens.
        lengths: window lengths to come, in tokens.
        count: windows wanted.
        bos: beginning-of-sequence token, or None.
        eos: token between joined documents, or None.
        seed: of the places.

    Raises:
        MeasureError: all documents together are shorter than the longest window.
    """
    prefix = () if bos is None else (bos,)
    size = max(lengths) - len(prefix)
    rng = random.Random(f"windows:{seed}")
    texts = _cut(documents, size, rng)
    joined = len(texts) < count and len(documents) > 1
    if joined:
        gap = [] if eos is None else [eos]
        stream = [token for ids in documents for token in (*ids, *gap)]
        texts = _cut([stream], size, rng)
    if not texts:
        raise MeasureError(
            f"the text has {sum(map(len, documents))} tokens, but a window of "
            f"{max(lengths)} is to be measured; give a longer --text or shorter --lengths"
        )
    return Windows(tuple(texts[:count]), prefix, min(SCORED, min(lengths) // 2), joined)


def _cut(
    documents: Sequence[Sequence[int]], size: int, rng: random.Random
) -> list[tuple[int, ...]]:
    """Stretches of ``size`` tokens in random order, one of every document before a second."""
    rounds: dict[int, list[tuple[int, ...]]] = {}
    for ids in rng.sample(documents, len(documents)):
        pieces = len(ids) // size
        start = rng.randint(0, len(ids) - pieces * size)
        for turn, piece in enumerate(rng.sample(range(pieces), pieces)):
            begin = start + piece * size
            rounds.setdefault(turn, []).append(tuple(ids[begin : begin + size]))
    return [text for turn in sorted(rounds) for text in rounds[turn]]


def window_losses(
    model: torch.nn.Module,
    windows: Sequence[Sequence[int]],
    scored: int,
    batch_tokens: int,
    advance: Advance,
) -> list[float]:
    """Mean negative log likelihood (nats per token) of the last ``scored`` tokens of each window.

    A loss that is not a number counts as infinite: the model gave no distribution at all.
    """
    losses = [math.inf] * len(windows)
    rows = [(ids, scored) for ids in windows]
    for index, target, logits in tail_logits(model, rows, batch_tokens, advance):
        loss = torch.nn.functional.cross_entropy(logits.float(), target).item()
        losses[index] = math.inf if math.isnan(loss) else loss
    return losses
