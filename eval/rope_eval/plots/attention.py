"""What a model attends to, and with: its own queries and keys, over a text.

No attention kernel returns its weights. Here the layers show queries and keys as they are about to
attend with them, under a patch or without one, and the weights of the last few queries are made
densely: memory grows with the length, not with its square.
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
from rope_ext.position.attend import Dense, watched
from rope_ext.position.layers import find_layouts
from rope_ext.rotary.sites import evaluating, sees_window, text_config, text_decoder

FIRST = 4
"""Tokens that take attention for being first, whatever they say (arXiv 2309.17453, section 3)."""

QUERIES = 256
"""Tokens at the end of a window whose attention is looked at."""

_NUMBERS = 2**24  # weights that exist at a time
Row = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Shares:
    """Where the last tokens of some windows look.

    Args:
        edges: where bins of distance begin and end, tokens, ``[bins + 1]``.
        shares: of all attention, float64, ``[layers, bins]``: mean over windows, queries and
            heads, the first tokens left out.
        first: the share of the first tokens, and of learned sinks where layers have those,
            ``[layers]``. With ``shares`` it makes one.
    """

    edges: tuple[int, ...]
    shares: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True, eq=False)
class Resultants:
    """How long the mean query and the mean key of every head are, before their rotation.

    A rotary pair is a complex number, turned by ``x theta_i`` at distance x. Where queries and
    keys lie close to their means, the logit at distance x is about ``sum_i |E q_i| |E k_i| cos(x
    theta_i + arg E q_i - arg E k_i)``: Mao et al. 2026, arXiv 2604.04921, section 3.2.

    Args:
        weights: ``E q_i`` times the conjugate of ``E k_i`` and the scale of the logits:
            complex128, ``[heads of all layers, pairs]``.
        query, key: mean resultant lengths ``|E q| / E |q|``, ``[heads of all layers]``: 1 where
            all vectors are parallel, 0 where they point anywhere (section 3.1 there, as in
            circular statistics).
    """

    weights: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor

    def logits(self, distance: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Logits of mean queries and keys at ``distance``, float64, ``[heads, distances]``.

        Args:
            distance: tokens, ``[distances]``, or ``[distances, pairs]`` where they differ.
            frequencies: radians per token of every pair, ``[pairs]``.
        """
        angles = frequencies.unsqueeze(-1) * (distance.mT if distance.ndim == 2 else distance)
        return self.weights.real @ angles.cos() - self.weights.imag @ angles.sin()


def choose_windows(tokenizer: Any, text: Sequence[Path | str], length: int, count: int) -> Windows:
    """Up to ``count`` stretches of ``length`` tokens, as :class:`Perplexity` chooses them.

    Raises:
        MeasureError: a text is missing, unreadable or too short.
        OptionError: ``count`` or ``length`` is of no use.
    """
    task = Perplexity(text=tuple(text), windows=count)
    return task.choose(Frame.from_tokenizer(tokenizer, "no"), (length,), seed=0, option="--length")


def octaves(trained: int, length: int) -> tuple[int, ...]:
    """Edges of octaves of distance up to ``length``, one of them at the trained length."""
    octaves = {round(trained * 2.0**k) for k in range(-trained.bit_length(), length.bit_length())}
    return tuple(sorted({0, 1, length} | {edge for edge in octaves if 0 < edge < length}))


def evenly(edges: Sequence[int]) -> torch.Tensor:
    """The shares of attention that gives every token the same, float64, ``[bins]``."""
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
    """Where the last :data:`QUERIES` tokens of every row look, averaged.

    Layers that see a limited window are left out.

    Args:
        model: patched or not.
        rows: token ids, of one length.
        edges: of the bins, as :func:`octaves` makes them.

    Raises:
        UnsupportedModelError: its layers do not go through transformers' attention interface.
    """
    layers: dict[nn.Module, list[torch.Tensor]] = {}
    inner = torch.tensor(edges[1:-1], device="cpu")

    def look(module: nn.Module, dense: Dense) -> None:
        total = torch.zeros(len(edges), dtype=torch.float64, device="cpu")
        layers.setdefault(module, []).append(total)
        heads, tokens = dense.query.shape[1:3]
        places, size = torch.arange(tokens, device="cpu"), max(1, _NUMBERS // (heads * tokens))
        first = max(0, tokens - QUERIES)
        for start in range(first, tokens, size):
            queries = slice(start, min(start + size, tokens))
            given = dense.weights(queries)[0].mean(0).cpu().double() / (tokens - first)
            distance = (places[queries, None] - places).clamp(min=0)
            place = torch.bucketize(distance, inner, right=True)
            place[:, :FIRST] = len(edges) - 1
            total.index_add_(0, place.flatten(), given.flatten())
            total[-1] += (len(given) / (tokens - first)) - given.sum()  # what learned sinks take

    _show(model, rows, look)
    shares = torch.stack([torch.stack(calls).mean(0) for calls in layers.values()])
    return Shares(tuple(edges), shares[:, :-1], shares[:, -1])


def resultants(model: nn.Module, rows: Sequence[Row]) -> Resultants:
    """Mean queries and keys of an unpatched model, over all tokens but the first of every row.

    Args:
        model: of several rotary embeddings, that of layers without a window is looked at.
        rows: token ids, no more than the trained length.

    Raises:
        UnsupportedModelError: where the rotary pairs lie in its layers cannot be proven, or they
            see a window only.
    """
    decoder, site = text_decoder(model), first_site(model)
    try:
        heads = find_layouts(decoder, [site])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: where rotary pairs lie in its attention layers cannot be "
            f"proven, so its own weights cannot be read; draw decay instead, which needs none"
        ) from error
    layers: dict[nn.Module, list[tuple[torch.Tensor, ...]]] = {}
    pair_of: dict[nn.Module, torch.Tensor] = {}

    def look(module: nn.Module, dense: Dense) -> None:
        head = heads.get(module)
        if head is None:
            return
        pair_of[module] = head.pair
        theta = site.loaded.double()[head.pair]
        turned = torch.arange(dense.query.shape[2], device="cpu").unsqueeze(-1) * theta
        means = []
        for x in (dense.query[0] * dense.call.scale, dense.key[0]):
            x = x.cpu().double()
            pairs = torch.complex(x[..., head.pairs.first], x[..., head.pairs.second])
            pairs = (pairs * torch.exp(-1j * turned))[:, FIRST:]
            means += [pairs.mean(1), pairs.abs().square().sum(-1).sqrt().mean(1)]
        layers.setdefault(module, []).append(tuple(means))

    _show(model, rows, look)
    if not layers:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: every layer with a rotary embedding sees a limited window "
            f"only, so there are no long distances in them; draw attention instead"
        )
    weights, lengths = [], []
    for module, calls in layers.items():
        means = (torch.stack(part).mean(0) for part in zip(*calls, strict=True))
        query, of_query, key, of_key = means
        groups = len(query) // len(key)
        key, of_key = (part.repeat_interleave(groups, 0) for part in (key, of_key))
        made = torch.zeros(len(query), len(site.loaded), dtype=torch.complex128, device="cpu")
        weights.append(made.index_add_(1, pair_of[module], query * key.conj()))
        lengths.append((query.norm(dim=-1) / of_query, key.norm(dim=-1) / of_key))
    return Resultants(torch.cat(weights), *map(torch.cat, zip(*lengths, strict=True)))


@torch.no_grad()
def _show(model: nn.Module, rows: Sequence[Row], look: Callable[[nn.Module, Dense], None]) -> None:
    """Run the decoder of ``model`` on every row and ``look`` at its self-attention at full reach.

    Raises:
        UnsupportedModelError: there is none to be seen.
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
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:  # no real mask
        seen, cause = False, error
    if not seen:
        why = "" if cause is None else f" ({cause})"
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: its attention layers cannot be looked into, since they do "
            f"not leave it all to transformers' attention interface{why}"
        ) from cause
