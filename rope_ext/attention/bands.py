"""Banded attention in plain PyTorch operations: any device, dtype, positions, mask and scores.

Blocks of queries attend to their visible keys, with one softmax over all bands. The backward pass
recomputes each block, so memory is linear in the number of keys. In float64 it is the reference
that every kernel is tested against.
"""

import contextlib
import functools
from dataclasses import replace
from itertools import pairwise

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
        return torch.cat([attend(q, k, v, *of_row) for q, k, v, of_row in each])
    encoding, learned = scores or (None, {})
    tensors = (query, key, value, call.sinks, call.bias, *learned.values())
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    width = heads if encoding is None else heads + encoding.pair_width(heads)
    rows = min(ROWS, max(8, NUMBERS // max(batch * keys * width, 1)))
    at = places or Places.following(call, query, key)
    outs = []
    with _without_autocast(query):
        for first in range(0, queries, rows):
            block = slice(first, min(first + rows, queries))
            counted = None if places else keys - queries + block.stop
            given = (call, at, block, counted, tuple(learned), *tensors)
            kept = not trains or is_compiling()
            outs.append(_block(*given) if kept else _recomputed(_block, *given))
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
    at = replace(places, query=of(places.query, 2), key=of(places.key, 2), mask=mask, made=None)
    return replace(call, bands=bands), at


def _shown(
    call: Call, places: Places, rows: slice, counted: int | None
) -> list[tuple[slice, Tensor | None]]:
    """For each band, the keys that any query in ``rows`` sees, and a mask; None: all are visible.

    ``counted``: number of keys up to the last query, if positions are consecutive.
    """
    name = rows.start, rows.stop, *(band.geometry for band in call.bands)
    if places.made is not None and name in places.made:
        return places.made[name]
    found: list[tuple[slice, Tensor | None]] = []
    for band in call.bands:
        keys = slice(0, places.key.shape[-1])
        if counted is not None:
            count = rows.stop - rows.start
            room = keys.stop
            keys = extent(band.geometry, count, counted, call.start, room)
        seen = places.sees(band.geometry, rows, keys)
        if places.made is not None and seen.device.type == "cpu" and not is_compiling():
            index = seen.flatten(0, -2).any(0).nonzero()  # read once for all layers
            keys = slice(int(index[0]), int(index[-1]) + 1) if len(index) else slice(0, 0)
            seen = seen[..., keys]
            seen = None if bool(seen.all()) else seen
        found.append((keys, seen))
    if places.made is not None:
        places.made[name] = found
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
    """Compute the output of the queries ``rows``; for ``counted`` see :func:`_shown`."""
    query = query[:, :, rows]
    batch, heads, count = query.shape[:3]
    kv_heads = key.shape[1]
    grouped = heads // kv_heads * count
    to = wide(query) if query.device.type == "cpu" else query.dtype  # saves a cast
    found = []
    block = None
    encoding = call.scores and call.scores[0]
    given = dict(zip(names, learned, strict=True))
    shown = zip(call.bands, _shown(call, places, rows, counted), strict=True)
    parts = [x for x in shown if x[1][0].stop > x[1][0].start]
    parts.sort(key=lambda part: part[1][0].start)
    if not parts:
        columns = key.shape[2] if value is None else value.shape[-1]
        return query.new_zeros(
            batch, heads, count, columns, dtype=(key if value is None else value).dtype
        )
    for band, (keys, seen) in parts:
        q = call.pairs.rotate(query, part_of(band.query, rows), to)
        k = call.pairs.rotate(key[:, :, keys], part_of(band.key, keys), to)
        q = q.reshape(batch, kv_heads, grouped, q.shape[-1])  # no key is read twice
        # Not always contiguous: on a GPU, products are computed transposed.
        logits = _logits(q, k).reshape(batch, heads, count, k.shape[2]) * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if encoding is not None:  # with one band
            every = key[:, :, keys].to(wide(key)).repeat_interleave(heads // kv_heads, 1)
            at = places.query[rows], places.key[keys]
            visible = logits.new_ones((), dtype=torch.bool) if seen is None else seen
            block = Block(query.to(wide(query)), every, logits, *at, visible, call.scale)
            logits = encoding.logits(block, given)
        if bias is not None:
            if counted is None:
                logits = logits + places.biased(bias, rows, keys, call.ahead)
            else:
                size = keys.stop - keys.start
                first = counted - count - keys.start + call.ahead
                logits = logits + by_distance(bias, first, count, size)
        # The lowest finite number, not -inf, so that a row without keys gets no NaN.
        lowest = torch.finfo(logits.dtype).min
        found.append(logits if seen is None else logits.masked_fill(~seen, lowest))
    logits = found[0] if len(found) == 1 else torch.cat(found, -1)
    if sinks is None:
        weights = logits.softmax(dim=-1)
    else:
        column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, column), dim=-1).softmax(dim=-1)
    outs = []
    spans = [keys for _, (keys, _) in parts]
    if value is not None and all(a.stop == b.start for a, b in pairwise(spans)):  # one product
        spans = [slice(spans[0].start, spans[-1].stop)]
    sizes = [keys.stop - keys.start for keys in spans] + [1] * (sinks is not None)
    for keys, own in zip(spans, weights.split(sizes, -1), strict=False):
        if value is None:
            outs.append(F.pad(own, (keys.start, key.shape[2] - keys.stop)))
            continue
        own = own.to(value.dtype).reshape(batch, kv_heads, grouped, own.shape[-1])
        outs.append(_product(own, value[:, :, keys]).reshape(batch, heads, count, value.shape[-1]))
    out = functools.reduce(torch.add, outs)
    if encoding is not None and block is not None and value is not None:
        more = encoding.more(weights[..., : block.key.shape[2]], block, given)
        out = out if more is None else out + more.to(out.dtype)
    if all(seen is not None for _, (_, seen) in parts):  # some query may see no key
        some = [seen.any(-1, keepdim=True) for _, (_, seen) in parts if seen is not None]
        out = out * torch.stack(torch.broadcast_tensors(*some)).any(0)
    return out


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
