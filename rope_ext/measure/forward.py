"""Forwards that ask for the logits of the last few tokens only."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

Advance = Callable[[float], None]


def cost(length: int) -> float:
    """Work of one forward over ``length`` tokens, for progress: linear plus attention."""
    return length + length * length / 4096


def tail_logits(
    model: torch.nn.Module,
    rows: Sequence[tuple[Sequence[int], int]],
    batch_tokens: int,
    advance: Advance,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The logits that predict the last ``tail`` tokens of each row.

    Rows of equal length and tail share a forward of at most ``batch_tokens`` tokens (or one
    row), so nothing is padded. Logits of the other positions are never made where the model
    knows ``logits_to_keep``.

    Args:
        model: a causal language model.
        rows: pairs of token ids and ``tail``, the number of tokens at their end to predict.
        batch_tokens: tokens per forward.
        advance: told the ``cost`` of each batch when it is done.

    Yields:
        index of the row, its target ids ``[tail]`` and logits ``[tail, vocabulary]``.
    """
    sparing = "logits_to_keep" in inspect.signature(model.forward).parameters
    alike = defaultdict(list)
    for index, (ids, tail) in enumerate(rows):
        alike[len(ids), tail].append(index)
    for (length, tail), indices in alike.items():
        size = max(1, batch_tokens // length)
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            ids = torch.tensor([list(rows[index][0]) for index in batch], device=model.device)
            keep = {"logits_to_keep": tail + 1} if sparing else {}
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False, **keep).logits
            for row, index in enumerate(batch):
                yield index, ids[row, -tail:], logits[row, -tail - 1 : -1]
            advance(len(batch) * cost(length))
