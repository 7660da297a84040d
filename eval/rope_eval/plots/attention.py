"""Measures attention weights of a model on a text.

Attention kernels do not return weights. So queries and keys are captured right before attention,
patched or not, and the weights of the last few queries are computed densely: memory is linear in
the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_eval.data.prompts import Frame
from rope_eval.tasks.perplexity import Perplexity, Windows
from rope_ext.errors import UnsupportedModelError
from rope_ext.position.attend import watched
from rope_ext.position.tensors import Dense
from rope_ext.rotary.sites import evaluating, sees_window, text_config, text_decoder

FIRST = 4
"""Number of initial tokens that act as attention sinks (arXiv 2309.17453, section 3)."""

QUERIES = 256
"""Number of queries at the end of a window whose attention weights are measured."""

WEIGHTS_AT_ONCE = 2**24  # attention weights in memory at a time
Row = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Shares:
    """How the last tokens of some windows distribute their attention over distances.

    Args:
        edges: edges of the distance bins in tokens, ``[bins + 1]``.
        shares: share of the attention in each bin, float64, ``[layers, bins]``: the mean over
            windows, queries and heads, without the first tokens.
        first: share of the first tokens and of learned sinks, if any, ``[layers]``. With ``shares``
            it adds up to 1.
    """

    edges: tuple[int, ...]
    shares: torch.Tensor
    first: torch.Tensor


def choose_windows(tokenizer: Any, text: Sequence[Path | str], length: int, count: int) -> Windows:
    """Choose up to ``count`` windows of ``length`` tokens, as :class:`Perplexity` does.

    Raises:
        MeasureError: a text is missing, unreadable or too short.
        OptionError: ``count`` or ``length`` is not valid.
    """
    task = Perplexity(text=tuple(text), windows=count)
    return task.choose(Frame.from_tokenizer(tokenizer, "no"), (length,), seed=0, option="--length")


def octaves(trained: int, length: int) -> tuple[int, ...]:
    """Octave edges for distances up to ``length``; the trained length is one of them."""
    octaves = {round(trained * 2.0**k) for k in range(-trained.bit_length(), length.bit_length())}
    return tuple(sorted({0, 1, length} | {edge for edge in octaves if 0 < edge < length}))


def evenly(edges: Sequence[int]) -> torch.Tensor:
    """Share of each bin under uniform attention, float64, ``[bins]``."""
    tokens = edges[-1]
    reach = torch.arange(max(0, tokens - QUERIES), tokens, dtype=torch.float64)[:, None] + 1
    keys = torch.minimum(torch.tensor(edges), (reach - FIRST).clamp(min=0)).diff()
    return (keys / reach).mean(0)


@torch.no_grad()
def by_distance(model: nn.Module, rows: Sequence[Row], edges: Sequence[int]) -> Shares:
    """Average attention of the last :data:`QUERIES` tokens of every row, by distance.

    Sliding-window layers are left out.

    Args:
        model: a model, patched or not.
        rows: token IDs, all rows of the same length.
        edges: edges of the bins, from :func:`octaves`.

    Raises:
        UnsupportedModelError: the layers do not use transformers' attention interface.
    """
    decoder, device = text_decoder(model), cast(PreTrainedModel, model).device
    layers: dict[nn.Module, list[torch.Tensor]] = {}
    inner = torch.tensor(edges[1:-1])

    def look(module: nn.Module, dense: Dense, window: int | None) -> None:
        heads, tokens = dense.query.shape[1:3]
        across = tokens != dense.key.shape[2]
        if across or sees_window(text_config(decoder), module, window):
            return
        total = torch.zeros(len(edges), dtype=torch.float64)
        layers.setdefault(module, []).append(total)
        places, size = torch.arange(tokens), max(1, WEIGHTS_AT_ONCE // (heads * tokens))
        first = max(0, tokens - QUERIES)
        for start in range(first, tokens, size):
            queries = slice(start, min(start + size, tokens))
            given = dense.weights(queries)[0].mean(0).cpu().double() / (tokens - first)
            distance = (places[queries, None] - places).clamp(min=0)
            place = torch.bucketize(distance, inner, right=True)
            place[:, :FIRST] = len(edges) - 1
            total.index_add_(0, place.flatten(), given.flatten())
            total[-1] += (len(given) / (tokens - first)) - given.sum()  # share of learned sinks

    with evaluating(decoder), watched(decoder, look):
        for row in rows:
            decoder(input_ids=torch.tensor([row], device=device), use_cache=False)
    if not layers:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: cannot observe its attention layers, because they do not "
            f"use transformers' attention interface"
        )
    shares = torch.stack([torch.stack(calls).mean(0) for calls in layers.values()])
    return Shares(tuple(edges), shares[:, :-1], shares[:, -1])
