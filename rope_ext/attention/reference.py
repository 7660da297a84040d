"""The two-band attention written densely: slow, obvious, and what every kernel is tested against.

Also what runs where no fast kernel can: a soft cap, a mask of one's own, irregular positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rope_ext.attention.bands import Band, Pairs


def weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bands: Sequence[Band],
    pairs: Pairs,
    *,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
    temperature: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """How much every query gives to every key, where each band turns both in its own way.

    Args:
        query: ``[batch, heads, queries, columns]``, before any rotation.
        key: ``[batch, kv_heads, keys, columns]``; ``heads`` is a multiple of ``kv_heads``.
        bands: disjoint; a key in no band of a query is hidden from it.
        pairs: the columns that turn together.
        query_positions: int64, ``[queries]``, in tokens, in any order and with any gaps.
        key_positions: the same of the keys.
        scale: factor of all logits.
        temperature: factor of each query, ``[queries]`` (log-n scaling).
        softcap: logits become ``softcap * tanh(logit / softcap)``.
        sinks: one further logit per head, ``[heads]``, that takes weight and gives no value.
        mask: bool, broadcast to ``[batch, heads, queries, keys]``; False hides.

    Returns:
        ``[batch, heads, queries, keys]``, float32 or better. A row sums to one, less what its
        sink takes; it is zero for a query that sees no key.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if temperature is not None:
        query = (query * temperature[:, None]).to(query.dtype)
    logits = query.new_zeros((*query.shape[:3], key.shape[2]))
    visible = torch.zeros(logits.shape[2:], dtype=torch.bool, device=query.device)
    for band in bands:
        seen = band.geometry.sees(query_positions[:, None], key_positions)
        turned = pairs.rotate(query, band.query) @ pairs.rotate(key, band.key).mT
        logits = torch.where(seen, turned * scale, logits)
        visible = visible | seen
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        visible = visible & mask
    # The lowest finite number, not -inf: a row without any key has no weights, but no NaN either.
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if sinks is not None:
        column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, column), dim=-1)
    return logits.softmax(dim=-1)[..., : key.shape[2]] * visible


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bands: Sequence[Band],
    pairs: Pairs,
    **asked: Any,
) -> torch.Tensor:
    """Attention with the :func:`weights` that ``asked`` makes.

    ``value`` is ``[batch, kv_heads, keys, value_columns]``, the result ``[batch, heads, queries,
    value_columns]``.
    """
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return weights(query, key, bands, pairs, **asked).to(value.dtype) @ value


def attend_blocked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bands: Sequence[Band],
    pairs: Pairs,
    *,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
    temperature: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block: int = 256,
) -> torch.Tensor:
    """:func:`attend` over ``block`` queries at a time: memory is linear in the number of keys.

    With gradients each block is computed again in the backward pass.
    """
    queries = query.shape[2]

    def rows(x: torch.Tensor, start: int, dim: int) -> torch.Tensor:
        """The block's part of ``x``, all of it where it is broadcast over the queries."""
        return x if x.shape[dim] == 1 else x.narrow(dim, start, min(block, queries - start))

    def one(start: int, *tensors: torch.Tensor | None) -> torch.Tensor:
        query, key, value, temperature, sinks = tensors
        parts = [
            replace(band, query=band.query and tuple(rows(t, start, 0) for t in band.query))
            for band in bands
        ]
        return attend(
            rows(query, start, 2),
            key,
            value,
            parts,
            pairs,
            query_positions=rows(query_positions, start, 0),
            key_positions=key_positions,
            scale=scale,
            temperature=None if temperature is None else rows(temperature, start, 0),
            softcap=softcap,
            sinks=sinks,
            mask=mask if mask is None or mask.dim() < 2 else rows(mask, start, -2),
        )

    tensors = (query, key, value, temperature, sinks)
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
        return torch.cat([one(start, *tensors) for start in range(0, queries, block)], dim=2)
    return torch.cat(
        [
            checkpoint(one, start, *tensors, use_reentrant=False, preserve_rng_state=False)
            for start in range(0, queries, block)
        ],
        dim=2,
    )
