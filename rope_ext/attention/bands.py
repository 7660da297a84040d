"""Attention in bands by plain operations of torch: any device, dtype, positions, mask and scores.

Blocks of queries attend to the keys that they see, and the backward pass computes each block again,
so memory is linear in the number of keys. The fused kernels are tested against
:mod:`rope_ext.attention.reference`, and so is this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from rope_ext.attention import products
from rope_ext.attention.call import Block, Call, part_of
from rope_ext.attention.extent import extent
from rope_ext.attention.reference import Places

ROWS = 256
"""Queries of a block at most."""
NUMBERS = 2**22
"""Logits of a block, and what scores compute beside them, at most: 16 MiB in float32."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    places: Places | None = None,
) -> torch.Tensor:
    """Attention as :class:`Call` describes it; ``places`` are positions that do not just count."""
    query, names = (
        call.scale_query(query),
        () if call.scores is None else tuple(call.scores.learned),
    )
    learned = () if call.scores is None else tuple(call.scores.learned.values())
    tensors = (query, key, value, call.sinks, call.bias, *learned)
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    parts = []
    for rows, keys in _blocks(call, places, query, key):
        block = (call, places, names, rows, keys, *tensors)
        if trains and not torch.compiler.is_compiling():
            parts.append(checkpoint(_block, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_block(*block))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _blocks(
    call: Call, places: Places | None, query: torch.Tensor, key: torch.Tensor
) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys that its queries see in any band."""
    (batch, heads, queries), keys = query.shape[:3], key.shape[2]
    width = 0 if call.scores is None else call.scores.width
    count = NUMBERS // max(batch * keys * (heads + width), 1)
    count = max(1, min(count, ROWS))
    for row in range(0, queries, count):
        end = min(row + count, queries)
        seen = slice(0, keys)
        if places is None:
            last = keys - queries + end
            parts = [extent(band.geometry, end - row, last, call.start) for band in call.bands]
            first = min((part.start for part in parts if part.stop > part.start), default=last)
            seen = slice(first, last)
        yield slice(row, end), seen


def _block(
    call: Call,
    places: Places | None,
    names: tuple[str, ...],
    rows: slice,
    keys: slice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    *learned: torch.Tensor,
) -> torch.Tensor:
    """Output of the queries ``rows``, which see no other keys than ``keys``."""
    last = call.start + keys.stop
    query, key, value = query[:, :, rows], key[:, :, keys], value[:, :, keys]
    count, kv_heads = query.shape[2], key.shape[1]
    if places is None:
        at_q = torch.arange(last - count, last, device=query.device)
        at_k = torch.arange(call.start + keys.start, last, device=query.device)
        visible = None
    else:
        at_q, at_k = places.query[rows], places.key
        visible = places.visible(rows)
    seen_in_any = torch.zeros(count, len(at_k), dtype=torch.bool, device=query.device)
    logits = query.new_zeros(*query.shape[:3], len(at_k), dtype=products.wide(query))
    for band in call.bands:
        part = slice(0, len(at_k))
        if places is None:  # counted from the first key of the block
            part = extent(band.geometry, count, len(at_k), call.start + keys.start)
            if part.stop <= part.start:
                continue
        seen = band.geometry.sees(at_q[:, None], at_k[part])
        q = call.pairs.rotate(query, part_of(band.query, rows))
        there = slice(keys.start + part.start, keys.start + part.stop)
        k = call.pairs.rotate(key[:, :, part], part_of(band.key, there))
        q = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # no key is read twice
        found = products.logits(q, k).unflatten(2, (-1, count)).flatten(1, 2) * call.scale
        around = part.start, len(at_k) - part.stop
        if any(around):
            found, seen = (torch.nn.functional.pad(x, around) for x in (found, seen))
        logits = torch.where(seen, found, logits)  # bands are disjoint
        seen_in_any = seen_in_any | seen
    visible = seen_in_any if visible is None else seen_in_any & visible
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    scores, block = call.scores, None
    if scores is not None:
        scores = replace(scores, learned=dict(zip(names, learned, strict=True)))
        wide = products.wide(query)
        every = key.to(wide).repeat_interleave(query.shape[1] // kv_heads, dim=1)
        block = Block(query.to(wide), every, logits, at_q, at_k, visible, call.scale)
        with products.without_autocast(query):
            logits = scores.logits(block)
    if bias is not None:
        logits = logits + bias[:, (at_q[:, None] - at_k).clamp(0, bias.shape[1] - 1)]
    # The lowest finite number, not -inf: a row without any key has no weights, but no NaN either.
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if sinks is not None:
        column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, column), dim=-1)
    weights = logits.softmax(dim=-1)[..., : len(at_k)] * visible
    grouped = weights.to(value.dtype).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    out = products.product(grouped, value).unflatten(2, (-1, count)).flatten(1, 2)
    if scores is None or block is None:
        return out
    with products.without_autocast(query):
        more = scores.more(weights, block)
    return out if more is None else out + more.to(out.dtype)
