"""Attention in bands by plain operations of torch: any device, dtype, positions, mask and scores.

Blocks of queries attend to the keys that they see, and the backward pass computes each block again,
so memory is linear in the number of keys. The fused kernels are tested against
:mod:`rope_ext.attention.reference`, and so is this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from rope_ext.attention import products
from rope_ext.attention.call import Block, Call, RotatedBand, each_table, part_of
from rope_ext.attention.extent import extent
from rope_ext.attention.reference import Places
from rope_ext.methods.geometry import Geometry

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
    if (
        call.scores is not None
        and places is not None
        and max(places.query.dim(), places.key.dim()) > 1
    ):
        rows = [_of_row(call, places, row) for row in range(len(query))]
        each = zip(*(x.split(1) for x in (query, key, value)), rows, strict=True)
        return torch.cat([attend(*tensors, *of_row) for *tensors, of_row in each])
    query = call.scale_query(query)
    names = () if call.scores is None else tuple(call.scores.learned)
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


def _of_row(call: Call, places: Places, row: int) -> tuple[Call, Places]:
    """Of one row of a batch, whose scores are by tokens that all rows have."""

    def of(x: torch.Tensor, least: int) -> torch.Tensor:
        return x if x.dim() < least else x[row if len(x) > 1 else 0]

    def table(x: torch.Tensor) -> torch.Tensor:
        return of(x, 4).flatten(0, -3)[0] if x.dim() > 2 else x

    bands = [
        RotatedBand(band.geometry, each_table(band.query, table), each_table(band.key, table))
        for band in call.bands
    ]
    mask = None if places.mask is None else of(places.mask, 4)
    at = replace(places, query=of(places.query, 2), key=of(places.key, 2), mask=mask, made=None)
    return replace(call, bands=bands), at


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


class Shown(NamedTuple):
    """What a block of queries sees.

    Args:
        parts: for every band, the range of keys that any query sees in it, and which query sees
            which of them; None: every query sees all.
        visible: what is seen in any band, broadcast to the logits.
        places: the positions.
    """

    parts: list[tuple[slice, torch.Tensor | None]]
    visible: torch.Tensor
    places: Places

    @property
    def whole(self) -> bool:
        """Whether every query sees all keys in all parts."""
        return all(seen is None for _, seen in self.parts)


def _shown(
    call: Call, places: Places | None, rows: slice, keys: slice, device: torch.device
) -> Shown:
    """What the queries ``rows`` see of ``keys``."""
    geometries = tuple(band.geometry for band in call.bands)
    if places is None:
        last = call.start + keys.stop
        t = torch.arange(call.start + keys.start, last, device=device)
        count = rows.stop - rows.start
        parts = [
            extent(geometry, count, len(t), call.start + keys.start) for geometry in geometries
        ]
        return _seen(Places(t[len(t) - count :], t), geometries, slice(None), parts)
    name = rows.start, rows.stop, geometries
    if places.made is None:
        return _seen(places, geometries, rows, None)
    if name not in places.made:
        places.made[name] = _seen(places, geometries, rows, None, reads=device.type == "cpu")
    return places.made[name]


def _seen(
    places: Places,
    geometries: Sequence[Geometry],
    rows: slice,
    parts: Sequence[slice] | None,
    reads: bool = False,
) -> Shown:
    mask, found = places.visible(rows), []
    count = places.query[..., rows].shape[-1]
    visible = torch.zeros(count, places.key.shape[-1], dtype=torch.bool, device=places.key.device)
    reads = reads and not torch.compiler.is_compiling()
    for number, geometry in enumerate(geometries):
        seen = places.sees(geometry, rows)
        seen = seen if mask is None else seen & mask
        visible = visible | seen
        part = slice(0, seen.shape[-1]) if parts is None else parts[number]
        if reads:
            index = seen.flatten(0, -2).any(0).nonzero()
            part = slice(int(index[0]), int(index[-1]) + 1) if len(index) else slice(0, 0)
        shown = seen[..., part]
        found.append((part, None if reads and bool(shown.all()) else shown))
    return Shown(found, visible, places)


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
    query, key, value = query[:, :, rows], key[:, :, keys], value[:, :, keys]
    count, kv_heads, wide = query.shape[2], key.shape[1], products.wide(query)
    shown = _shown(call, places, rows, keys, query.device)
    mine = slice(None) if places is None else rows
    to = wide if query.device.type == "cpu" else query.dtype  # else products cast it once more
    found = []
    for band, (part, seen) in zip(call.bands, shown.parts, strict=True):
        if part.stop <= part.start:
            continue
        q = call.pairs.rotate(query, part_of(band.query, rows), to)
        there = slice(keys.start + part.start, keys.start + part.stop)
        k = call.pairs.rotate(key[:, :, part], part_of(band.key, there), to)
        q = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # no key is read twice
        logits = products.logits(q, k).unflatten(2, (-1, count)).flatten(1, 2) * call.scale
        found.append((part, seen, logits))
    if shown.whole and call.scores is None:
        return _together(call, shown, found, query, value, sinks, bias, mine)
    size = (*query.shape[:3], key.shape[2])
    logits = query.new_zeros(size, dtype=wide)
    for part, seen, own in found:
        around = part.start, size[-1] - part.stop
        seen = torch.ones(part.stop - part.start, dtype=torch.bool) if seen is None else seen
        if any(around):
            own, seen = (torch.nn.functional.pad(x, around) for x in (own, seen))
        logits = torch.where(seen, own, logits)  # bands are disjoint
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    scores, block = call.scores, None
    if scores is not None:
        scores = replace(scores, learned=dict(zip(names, learned, strict=True)))
        every = key.to(wide).repeat_interleave(query.shape[1] // kv_heads, dim=1)
        at = shown.places.query[mine], shown.places.key
        block = Block(query.to(wide), every, logits, *at, shown.visible, call.scale)
        with products.without_autocast(query):
            logits = scores.logits(block)
    if bias is not None:
        logits = logits + shown.places.biased(bias, mine, slice(None))
    # The lowest finite number, not -inf: a row without any key has no weights, but no NaN either.
    logits = logits.masked_fill(~shown.visible, torch.finfo(logits.dtype).min)
    weights = _weights(logits, sinks) * shown.visible
    out = _summed(weights, value)
    if scores is None or block is None:
        return out
    with products.without_autocast(query):
        more = scores.more(weights, block)
    return out if more is None else out + more.to(out.dtype)


def _together(
    call: Call,
    shown: Shown,
    found: Sequence[tuple[slice, Any, torch.Tensor]],
    query: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: slice,
) -> torch.Tensor:
    """The output of queries that see all keys in the parts of ``found``, with one softmax."""
    if not found:
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    logits = found[0][2] if len(found) == 1 else torch.cat([x for *_, x in found], -1)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if bias is not None:
        parts = [shown.places.biased(bias, rows, part) for part, *_ in found]
        logits = logits + torch.cat(parts, -1)
    weights, out, at = _weights(logits, sinks), None, 0
    for part, *_ in found:
        count = part.stop - part.start
        own = _summed(weights[..., at : at + count], value[:, :, part])
        out, at = own if out is None else out + own, at + count
    assert out is not None, "some keys are seen"
    return out


def _weights(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax over keys, of which every head has one more with a sink."""
    if sinks is None:
        return logits.softmax(dim=-1)
    column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1]


def _summed(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``weights @ value``, where heads of weights share a head of values."""
    grouped = weights.to(value.dtype).unflatten(1, (value.shape[1], -1)).flatten(2, 3)
    out = products.product(grouped, value)
    return out.unflatten(2, (-1, weights.shape[2])).flatten(1, 2)
