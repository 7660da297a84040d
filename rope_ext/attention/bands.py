"""Banded attention in plain PyTorch operations: any device, dtype, positions, mask and scores.

Blocks of queries attend to their visible keys, with one softmax over all bands. The backward pass
recomputes each block, so memory is linear in the number of keys. In float64 it is the reference
that every kernel is tested against.
"""

import contextlib
import functools
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from rope_ext.attention.call import (
    Call,
    Places,
    RotatedBand,
    by_distance,
    each_table,
    part_of,
    wide,
)
from rope_ext.encodings.base import Block
from rope_ext.methods.geometry import extent

ROWS = 256
"""Maximum number of queries in a block."""
NUMBERS = 2**20
"""Logits in a block, including those of scores: 4 MiB in float32, but at least 8 queries."""
_recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def attend(
    query: Tensor, key: Tensor, value: Tensor | None, call: Call, places: Places | None = None
) -> Tensor:
    """Compute the attention of :class:`Call`; ``places`` are positions that are not consecutive.

    ``value=None`` returns the weights, ``[batch, heads, queries, keys]``, float32 or better: a row
    sums to one minus the weight of its sink, and is zero for a query that sees no key.
    """
    scores = call.scores
    if scores is not None and places is not None and max(places.query.dim(), places.key.dim()) > 1:
        rows = [_of_row(call, places, row) for row in range(len(query))]
        values = [None if value is None else value[n : n + 1] for n in range(len(query))]
        each = zip(query.split(1), key.split(1), values, rows, strict=True)
        return torch.cat(
            [attend(q, k, v, call=of_row, places=at) for q, k, v, (of_row, at) in each]
        )
    encoding, learned = scores or (None, {})
    tensors = (query, key, value, call.sinks, call.bias, *learned.values())
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    width = heads if encoding is None else heads + encoding.pair_width(heads)
    rows = min(ROWS, max(8, NUMBERS // max(batch * keys * width, 1)))
    at = places or Places.following(call, query, key)
    # A graph has its own way to recompute, and would trace into the checkpoint.
    recomputes = trains and not is_compiling()
    outs = []
    with _without_autocast(query):
        for first in range(0, queries, rows):
            block = slice(first, min(first + rows, queries))
            counted = None if places else keys - queries + block.stop
            given = (call, at, block, counted, tuple(learned), *tensors)
            outs.append(_recomputed(_block, *given) if recomputes else _block(*given))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _of_row(call: Call, places: Places, row: int) -> tuple[Call, Places]:
    """Select one row of a batch, since scores need positions that all rows share."""

    def of(x: Tensor, least: int) -> Tensor:
        return x if x.dim() < least else x[row if len(x) > 1 else 0]

    def table(x: Tensor) -> Tensor:
        return of(x, 4).flatten(0, -3)[0] if x.dim() > 2 else x

    bands = [
        RotatedBand(band.geometry, each_table(band.query, table), each_table(band.key, table))
        for band in call.bands
    ]
    mask = None if places.mask is None else of(places.mask, 4)
    at = replace(places, query=of(places.query, 2), key=of(places.key, 2), mask=mask, visible=None)
    return replace(call, bands=bands), at


class _Visible(NamedTuple):
    """The keys of a band that a block of queries sees."""

    keys: slice  # from the first to the last key that any of the queries sees
    seen: Tensor | None  # bool, broadcast to their logits; None: every query sees all of them


def _visible(call: Call, places: Places, rows: slice, counted: int | None) -> list[_Visible]:
    """Return, for each band, what the queries in ``rows`` see.

    ``counted``: number of keys up to the last query, if positions are consecutive.
    """
    name = rows.start, rows.stop, *(band.geometry for band in call.bands)
    if places.visible is not None and name in places.visible:
        return places.visible[name]
    found = []
    for band in call.bands:
        keys = slice(0, places.key.shape[-1])
        if counted is not None:
            count = rows.stop - rows.start
            room = keys.stop
            keys = extent(band.geometry, queries=count, keys=counted, start=call.start, room=room)
        seen: Tensor | None = places.sees(band.geometry, rows, keys)
        if places.visible is not None and seen.device.type == "cpu" and not is_compiling():
            index = seen.flatten(0, -2).any(0).nonzero()  # read once for all layers
            keys = slice(int(index[0]), int(index[-1]) + 1) if len(index) else slice(0, 0)
            seen = seen[..., keys]
            seen = None if bool(seen.all()) else seen
        found.append(_Visible(keys, seen))
    if places.visible is not None:
        places.visible[name] = found
    return found


def _block(
    call: Call,
    places: Places,
    rows: slice,
    counted: int | None,
    names: tuple[str, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    *learned: Tensor,
) -> Tensor:
    """Compute the output of the queries ``rows``; for ``counted`` see :func:`_visible`.

    Every tensor is an argument, also those in ``call``, so that a checkpoint sees them. ``names``
    are those of ``learned``, the parameters of an encoding that makes the logits.
    """
    query = query[:, :, rows]
    batch, heads, count = query.shape[:3]
    visible = _visible(call=call, places=places, rows=rows, counted=counted)
    every = zip(call.bands, visible, strict=True)
    parts = [(band, part) for band, part in every if part.keys.stop > part.keys.start]
    parts.sort(key=lambda part: part[1].keys.start)  # neighbors make one product with the values
    if not parts:
        columns = key.shape[2] if value is None else value.shape[-1]
        dtype = key.dtype if value is None else value.dtype
        return query.new_zeros(batch, heads, count, columns, dtype=dtype)
    encoding = None if call.scores is None else call.scores[0]
    given = dict(zip(names, learned, strict=True))
    block = None
    found = []
    for band, part in parts:
        logits, block = _of_band(
            call=call,
            places=places,
            band=band,
            part=part,
            rows=rows,
            counted=counted,
            query=query,
            key=key,
            bias=bias,
            given=given,
        )
        found.append(logits)
    weights = _softmax(found, sinks)
    spans = [part.keys for _, part in parts]
    out = _spread(weights, spans, key.shape[2]) if value is None else _sum(weights, spans, value)
    if encoding is not None and block is not None and value is not None:
        more = encoding.more(weights[..., : block.key.shape[2]], block, given)
        out = out if more is None else out + more.to(out.dtype)
    some = [part.seen.any(-1, keepdim=True) for _, part in parts if part.seen is not None]
    if len(some) == len(parts):  # else a band shows something to every query
        out = out * torch.stack(torch.broadcast_tensors(*some)).any(0)
    return out


def _of_band(
    call: Call,
    places: Places,
    band: RotatedBand,
    part: _Visible,
    rows: slice,
    counted: int | None,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    given: dict[str, Tensor],
) -> tuple[Tensor, Block | None]:
    """Return the masked logits of a band, ``[batch, heads, rows, keys]``.

    ``query`` are those in ``rows``, and ``key`` are all keys. If an encoding makes the logits from
    ``given``, its learned parameters and constants, also return what it made them of.
    """
    batch, heads, count = query.shape[:3]
    kv_heads = key.shape[1]
    keys, seen = part
    to = wide(query) if query.device.type == "cpu" else query.dtype  # saves a cast
    q = call.pairs.rotate(query, part_of(band.query, rows), to)
    k = call.pairs.rotate(key[:, :, keys], part_of(band.key, keys), to)
    q = q.reshape(batch, kv_heads, heads // kv_heads * count, q.shape[-1])  # no key is read twice
    # Not always contiguous: on a GPU, products are computed transposed.
    logits = _logits(q, k).reshape(batch, heads, count, k.shape[2]) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    block = None
    if call.scores is not None:  # then the call has one band
        block = Block(
            query=query.to(wide(query)),
            key=key[:, :, keys].to(wide(key)).repeat_interleave(heads // kv_heads, 1),
            content=logits,
            query_at=places.query[rows],
            key_at=places.key[keys],
            visible=logits.new_ones((), dtype=torch.bool) if seen is None else seen,
            scale=call.scale,
        )
        logits = call.scores[0].logits(block, given)
    if bias is not None and counted is None:
        logits = logits + places.biased(bias, rows, keys, ahead=call.ahead)
    elif bias is not None and counted is not None:
        size = keys.stop - keys.start
        first = counted - count - keys.start + call.ahead
        logits = logits + by_distance(bias, first=first, queries=count, keys=size)
    if seen is not None:
        # The lowest finite number, not -inf, so that a row without keys gets no NaN.
        logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    return logits, block


def _softmax(found: list[Tensor], sinks: Tensor | None) -> Tensor:
    """Return the weights over the keys of all bands; a sink takes its share and has no value."""
    logits = found[0] if len(found) == 1 else torch.cat(found, -1)
    if sinks is None:
        return logits.softmax(dim=-1)
    column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1]


def _split(weights: Tensor, spans: list[slice]) -> tuple[Tensor, ...]:
    """Split weights by ``spans`` of keys."""
    return weights.split([keys.stop - keys.start for keys in spans], -1)


def _spread(weights: Tensor, spans: list[slice], keys: int) -> Tensor:
    """Return the weights of all ``keys``, zero for those that no band shows."""
    parts = zip(spans, _split(weights, spans), strict=True)
    return functools.reduce(
        torch.add, [F.pad(own, (span.start, keys - span.stop)) for span, own in parts]
    )


def _sum(weights: Tensor, spans: list[slice], value: Tensor) -> Tensor:
    """Return the weighted sum of values, ``[batch, heads, queries, columns]``."""
    batch, heads, count, _ = weights.shape
    kv_heads, columns = value.shape[1::2]
    if all(a.stop == b.start for a, b in pairwise(spans)):  # one product
        spans = [slice(spans[0].start, spans[-1].stop)]
    outs = []
    for span, own in zip(spans, _split(weights, spans), strict=True):
        own = own.to(value.dtype).reshape(batch, kv_heads, heads // kv_heads * count, own.shape[-1])
        outs.append(_product(own, value[:, :, span]).reshape(batch, heads, count, columns))
    return functools.reduce(torch.add, outs)


def _logits(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key.mT`` in float32 or better, ``[rows, heads, queries, keys]``."""
    to = wide(query)
    if query.is_cuda and query.dtype == key.dtype != to and not torch.is_grad_enabled():
        # Tensor cores accumulate in float32 anyway; no gradients or CPU kernel with out_dtype.
        # Computed transposed: rows an odd number of keys apart would take ten times as long.
        found = torch.bmm(key.flatten(0, 1), query.flatten(0, 1).mT, out_dtype=to)
        return found.mT.unflatten(0, query.shape[:2])
    return _product(query.to(to), key.to(to).mT)


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Disable autocast, which would round operands and results to half precision."""
    device = x.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    """Not for devices such as meta, where ``torch.is_autocast_enabled`` raises an error."""
    return torch.amp.is_autocast_available(device)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``a @ b`` in four dimensions as a single operation, also in a graph.

    For a single row, inductor would decompose it into a sum of products and recompute ``a`` for
    each of them. With ``beta=0`` the first argument of ``baddbmm`` is never read, but a scalar
    would be expanded to a full tensor first.
    """
    if not is_compiling():
        return a @ b
    nothing = a.new_empty(*a.shape[:-1], b.shape[-1])
    parts = (x.flatten(0, 1) for x in (nothing, a, b))
    return torch.baddbmm(*parts, beta=0).view(nothing.shape)
