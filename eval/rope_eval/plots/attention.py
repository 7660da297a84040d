"""Measures attention weights, queries and keys of a model on a text.

Attention kernels do not return weights. So queries and keys are captured right before attention,
patched or not, and the weights of the last few queries are computed densely: memory is linear in
the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_eval.data.prompts import Frame
from rope_eval.tasks.perplexity import Perplexity, Windows
from rope_ext.errors import UnsupportedModelError
from rope_ext.patching import first_site
from rope_ext.position.attend import watched
from rope_ext.position.layers import find_layouts
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


@dataclass(frozen=True, eq=False)
class Resultants:
    """Mean queries and keys of every head, before the rotation.

    A rotary pair is a complex number, rotated by ``x theta_i`` at distance x. If queries and keys
    are close to their means, the logit at distance x is about ``sum_i |E q_i| |E k_i| cos(x theta_i
    + arg E q_i - arg E k_i)``: Mao et al. 2026, arXiv 2604.04921, section 3.2.

    Args:
        weights: ``E q_i`` times the conjugate of ``E k_i`` times the logit scale, complex128,
            ``[heads of all layers, pairs]``.
        query, key: mean resultant lengths ``|E q| / E |q|``, ``[heads of all layers]``: 1 if all
            vectors are parallel, 0 if their directions cancel out (section 3.1 there, as in
            circular statistics).
    """

    weights: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor

    def logits(self, distance: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Logits of mean queries and keys at ``distance``, float64, ``[heads, distances]``.

        Args:
            distance: in tokens, ``[distances]``, or ``[distances, pairs]`` if pairs differ.
            frequencies: radians per token of each pair, ``[pairs]``.
        """
        angles = frequencies.unsqueeze(-1) * (distance.mT if distance.ndim == 2 else distance)
        return self.weights.real @ angles.cos() - self.weights.imag @ angles.sin()


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
    reach = (
        torch.arange(max(0, tokens - QUERIES), tokens, dtype=torch.float64, device="cpu").unsqueeze(
            1
        )
        + 1
    )
    keys = torch.minimum(torch.tensor(edges, device="cpu"), (reach - FIRST).clamp(min=0)).diff()
    return (keys / reach).mean(0)


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
    layers: dict[nn.Module, list[torch.Tensor]] = {}
    inner = torch.tensor(edges[1:-1], device="cpu")

    def look(module: nn.Module, dense: Dense) -> None:
        total = torch.zeros(len(edges), dtype=torch.float64, device="cpu")
        layers.setdefault(module, []).append(total)
        heads, tokens = dense.query.shape[1:3]
        places, size = (
            torch.arange(tokens, device="cpu"),
            max(1, WEIGHTS_AT_ONCE // (heads * tokens)),
        )
        first = max(0, tokens - QUERIES)
        for start in range(first, tokens, size):
            queries = slice(start, min(start + size, tokens))
            given = dense.weights(queries)[0].mean(0).cpu().double() / (tokens - first)
            distance = (places[queries, None] - places).clamp(min=0)
            place = torch.bucketize(distance, inner, right=True)
            place[:, :FIRST] = len(edges) - 1
            total.index_add_(0, place.flatten(), given.flatten())
            total[-1] += (len(given) / (tokens - first)) - given.sum()  # share of learned sinks

    _show(model, rows, look)
    shares = torch.stack([torch.stack(calls).mean(0) for calls in layers.values()])
    return Shares(tuple(edges), shares[:, :-1], shares[:, -1])


def resultants(model: nn.Module, rows: Sequence[Row]) -> Resultants:
    """Mean queries and keys of an unpatched model, over all tokens except the first of every row.

    Args:
        model: if it has several rotary embeddings, the one of layers without a window is used.
        rows: token IDs, at most the trained length.

    Raises:
        UnsupportedModelError: the layout of the rotary pairs cannot be determined, or all layers
            with RoPE use a sliding window.
    """
    decoder, site = text_decoder(model), first_site(model)
    try:
        heads = find_layouts(decoder, [site])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: cannot determine the layout of the rotary pairs in its "
            f"attention layers; plot decay instead, which needs no weights"
        ) from error
    layers: dict[nn.Module, list[tuple[torch.Tensor, ...]]] = {}
    pair_of: dict[nn.Module, torch.Tensor] = {}

    def look(module: nn.Module, dense: Dense) -> None:
        head = heads.get(module)
        if head is None:
            return
        pair_of[module] = head.pair
        theta = site.loaded.double()[head.pair]
        angles = torch.arange(dense.query.shape[2], device="cpu").unsqueeze(-1) * theta
        means = []
        for x in (dense.query[0] * dense.call.scale, dense.key[0]):
            x = x.cpu().double()
            pairs = torch.complex(x[..., head.pairs.first], x[..., head.pairs.second])
            pairs = (pairs * torch.exp(-1j * angles))[:, FIRST:]
            means += [pairs.mean(1), pairs.abs().square().sum(-1).sqrt().mean(1)]
        layers.setdefault(module, []).append(tuple(means))

    _show(model, rows, look)
    if not layers:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: every layer with RoPE uses a sliding window, so there are "
            f"no long distances; plot attention instead"
        )
    weights, lengths = [], []
    for module, calls in layers.items():
        means = (torch.stack(part).mean(0) for part in zip(*calls, strict=True))
        query, query_norm, key, key_norm = means
        groups = len(query) // len(key)
        key, key_norm = (part.repeat_interleave(groups, 0) for part in (key, key_norm))
        made = torch.zeros(len(query), len(site.loaded), dtype=torch.complex128, device="cpu")
        weights.append(made.index_add_(1, pair_of[module], query * key.conj()))
        lengths.append((query.norm(dim=-1) / query_norm, key.norm(dim=-1) / key_norm))
    return Resultants(torch.cat(weights), *map(torch.cat, zip(*lengths, strict=True)))


@torch.no_grad()
def _show(model: nn.Module, rows: Sequence[Row], look: Callable[[nn.Module, Dense], None]) -> None:
    """Run the decoder on every row and call ``look`` for each full self-attention layer.

    Raises:
        UnsupportedModelError: no such layer can be observed.
    """
    decoder, seen = text_decoder(model), False
    device = cast(PreTrainedModel, model).device

    def shown(module: nn.Module, dense: Dense, window: int | None) -> None:
        nonlocal seen
        across = dense.query.shape[2] != dense.key.shape[2]
        if not across and not sees_window(text_config(decoder), module, window):
            seen = True
            look(module, dense)

    cause = None
    try:
        with evaluating(decoder), watched(decoder, shown):
            for row in rows:
                decoder(input_ids=torch.tensor([row], device=device), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:  # unusual masks
        seen, cause = False, error
    if not seen:
        why = "" if cause is None else f" ({cause})"
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: cannot observe its attention layers, because they do not "
            f"use transformers' attention interface throughout{why}"
        ) from cause
