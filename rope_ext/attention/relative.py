"""Fast paths for scores from tables by distance and from the sinusoid of the distance.

Tables (:mod:`rope_ext.encodings.tables`) are constant beyond some distance. There ``<q_i, a>`` is
one number per row, which moves into its log-sum-exp, ``b`` is added to the query, and ``c`` to the
output, so that an ordinary kernel call does the rest. Smaller distances are a narrow band along the
diagonal, computed with plain torch operations in blocks of rows that the backward pass recomputes.

The sinusoid of a distance (:mod:`rope_ext.encodings.transformer_xl`) factors into a part of the
query's position and a part of the key's position, which become additional columns of both.

Memory is linear in the number of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from rope_ext.attention import flash, flex, products, sizes
from rope_ext.attention.call import Call, RotatedBand
from rope_ext.encodings.tables import ByTables
from rope_ext.encodings.transformer_xl import BySinusoid, sinusoid
from rope_ext.methods.geometry import Distance

Tables = Sequence[torch.Tensor | None]
"""Those of queries, of keys and of values, as :class:`ByTables` has them, in float32 or better."""


def _taken(call: Call, query: torch.Tensor, value: torch.Tensor) -> Distance | None:
    """The only band of a call that has scores and nothing else; None for any other call.

    That is a band of distances from 0 on without rotations, without soft cap and bias.
    """
    if query.device.type not in ("cpu", "cuda") or len(call.bands) != 1:
        return None
    if query.device.type == "cuda" and not flex.takes(query, value, call):
        return None
    band, geometry = call.bands[0], call.bands[0].geometry
    if not isinstance(geometry, Distance) or geometry.first != 0:
        return None
    plain = call.softcap is None and call.bias is None
    return geometry if plain and band.query is None and band.key is None else None


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    before: flash.Before = None,
) -> torch.Tensor:
    run = flash.attend if query.device.type == "cpu" else flex.attend
    return run(query, key, value, call, before)


def by_tables(
    scores: ByTables, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor | None:
    """Attention as :class:`Call` describes it; None for calls that this cannot compute."""
    band = _taken(call, query, value)
    if band is None:
        return None
    names, wide = ("of_query", "of_key", "of_value"), products.wide(query)
    tables = [scores.learned[x].to(wide) if x in scores.learned else None for x in names]
    last, most = band.last, key.shape[2]
    if last is not None:
        most = min(last, most)
    rows = max(x.shape[-2] for x in tables if x is not None)
    width = min(max(rows - 1, 1), most)  # the last row goes on; a band has at least one key
    query = call.scale_query(query)
    call = replace(call, scores=None, temperature=None, scale=call.scale * scores.share)
    of_query, of_key, of_value = tables
    shift = None
    if of_value is not None:  # of all values: added to the output in the end
        shift = of_value[-1]
        tables[2] = of_value - shift
    out, lse = _near(query, key, value, call, tables, width, shift)
    if width < most:
        if of_query is not None:
            lse = lse - call.scale * (query * of_query[:, -1:]).sum(-1)
        if of_key is not None:
            query = (query + of_key[:, -1:]).to(query.dtype)
        far = RotatedBand(Distance(width, last), None, None)
        out = _kernel(query, key, value, replace(call, bands=[far], sinks=None), (out, lse))
    return (out if shift is None else out + shift).to(value.dtype)


def by_sinusoid(
    scores: BySinusoid, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor | None:
    """Attention as :class:`Call` describes it; None for calls that this cannot compute."""
    band = _taken(call, query, value)
    if band is None:
        return None
    query, (queries, keys) = call.scale_query(query), (query.shape[2], key.shape[2])
    table = _sinusoid(scores, keys, query)
    rotated = scores.rotated(query, table[keys - queries :])
    query = query + scores.learned["u"].to(query)[:, None]
    if queries == 1:
        return _one_query(query, rotated, key, table, value, call, band.last)
    query = torch.cat((query, rotated), -1)
    key = torch.cat((key, table.expand(*key.shape[:2], -1, -1)), -1)
    if query.is_cuda and not flex.takes(query, value, call):  # of more columns now
        return None
    return _kernel(query, key, value, replace(call, scores=None, temperature=None))


def _sinusoid(scores: BySinusoid, tokens: int, like: torch.Tensor) -> torch.Tensor:
    """That of positions from 0 on: all distances are as from any other first one."""
    room = 1 << max(tokens - 1, 63).bit_length()
    return _sinusoids(scores.base, scores.width_of_sinusoid, room, like.dtype, like.device)[:tokens]


@functools.lru_cache(maxsize=4)
def _sinusoids(
    base: float, width: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    with torch.inference_mode(False):  # kept for calls that train as well
        return sinusoid(torch.arange(tokens, device=device), width, base).to(dtype)


def _one_query(
    query: torch.Tensor,
    rotated: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    last: int | None,
) -> torch.Tensor:
    """:func:`by_sinusoid` for one query, which does not copy the cached keys to extend them."""
    seen = slice(0 if last is None else max(key.shape[2] - last, 0), None)
    by_key, of_place = (  # heads of a key are rows of it
        x[:, :, 0].unflatten(1, (key.shape[1], -1)) for x in (query, rotated)
    )
    places = table[seen].expand(*key.shape[:2], -1, -1)
    logits = products.logits(by_key, key[:, :, seen]) + products.logits(of_place, places)
    logits = logits * call.scale
    if call.sinks is not None:
        sinks = call.sinks.to(logits.dtype).view(key.shape[1], -1, 1)
        logits = torch.cat((logits, sinks.expand(len(query), -1, -1, -1)), -1)
    weights = logits.softmax(-1).to(value.dtype)[..., : key[:, :, seen].shape[2]]
    return (weights @ value[:, :, seen]).flatten(1, 2)[:, :, None]


def _near(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    tables: Tables,
    width: int,
    shift: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over the keys at distances below ``width``, and over the sink.

    Both are of float32 or better, as a kernel has them before it rounds.
    ``shift`` is added to the output later: the sink, which has no value, gives its opposite.
    """
    queries, keys = query.shape[2], key.shape[2]
    farthest_first = torch.arange(width - 1, -1, -1, device=query.device)
    vectors = [
        None if x is None else x[..., farthest_first.clamp(max=x.shape[-2] - 1), :] for x in tables
    ]
    height = min(sizes.NEAR_ROWS, queries)
    several = sizes.NEAR_LOGITS // (query.shape[0] * query.shape[1] * (height + width))
    several = max(several // height, 1) * height
    inputs = (query, key, value, *vectors, call.sinks, shift)
    grads = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    found = []
    for row in range(0, queries, several):
        end = keys - queries + min(row + several, queries)
        first = keys - queries + row - width + 1  # may be before the first key
        seen = slice(max(first, 0), end)
        block = functools.partial(_rows, call.scale, width, height, max(-first, 0))
        of_block = (query[:, :, row : row + several], key[:, :, seen], value[:, :, seen])
        given: list[Any] = [*of_block, *inputs[3:]]
        with products.without_autocast(query):
            if grads:
                part = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                part = block(*given)
        found.append(part)
    out, lse = zip(*found, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def _rows(
    scale: float,
    width: int,
    height: int,
    lacking: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    of_query: torch.Tensor | None,
    of_key: torch.Tensor | None,
    of_value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    shift: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a near band, by blocks of ``height``, as :func:`_near` returns them.

    The last key is that of the last row; the first ``lacking`` keys of the first row are not
    there. Tables are by place, the farthest first: column ``e`` of row ``m`` is key ``m + e``.
    """
    wide = products.wide(query)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    queries, kv_heads = query.shape[2], key.shape[1]
    blocks = -(-queries // height)
    more = blocks * height - queries

    def in_blocks(x: torch.Tensor) -> torch.Tensor:
        """``[batch, kv_heads, blocks, groups, height, ...]``."""
        return (
            F.pad(x, (0, 0, 0, more))
            .unflatten(2, (blocks, height))
            .unflatten(1, (kv_heads, -1))
            .transpose(2, 3)
        )

    def under(x: torch.Tensor) -> torch.Tensor:
        """``[batch, kv_heads, blocks, columns, keys]``: those that a block sees."""
        return F.pad(x, (0, 0, lacking, more)).unfold(2, height + width - 1, height)

    logits = in_blocks(query).flatten(3, 4) @ under(key)
    logits = _diagonals(logits.unflatten(3, (-1, height)))
    if of_query is not None:
        logits = logits + in_blocks(query @ of_query.mT)
    if of_key is not None:
        by_key = of_key.expand(query.shape[1], -1, -1).unflatten(0, (kv_heads, -1))
        by_key = by_key.flatten(1, 2) @ F.pad(key, (0, 0, lacking, 0)).mT
        by_key = _diagonals(by_key.unflatten(2, (-1, width)))  # [..., groups, width, queries]
        logits = logits + in_blocks(by_key.flatten(1, 2).mT)
    logits = logits * scale
    if lacking:
        place = torch.arange(blocks * height, device=query.device)[:, None]
        hidden = place + torch.arange(width, device=query.device) < lacking
        logits = logits.masked_fill(hidden.view(blocks, 1, height, width), -torch.inf)
    lse = logits.logsumexp(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(wide).view(kv_heads, 1, -1, 1, 1)
        lse = torch.logaddexp(lse, sinks)
    weights = torch.exp(logits - lse)
    out = _placed(weights).flatten(3, 4) @ under(value).mT
    out = out.unflatten(3, (-1, height))
    if of_value is not None:
        out = out + weights @ of_value
    if sinks is not None and shift is not None:
        out = out - torch.exp(sinks - lse) * shift

    def in_rows(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :queries]

    return in_rows(out), in_rows(lse)[..., 0]


def _diagonals(x: torch.Tensor) -> torch.Tensor:
    """Of ``[..., rows, columns]``: row ``m`` from column ``m`` on, all equally long."""
    rows, columns = x.shape[-2:]
    x = F.pad(x.flatten(-2), (0, rows)).unflatten(-1, (rows, columns + 1))
    return x[..., : columns - rows + 1]


def _placed(x: torch.Tensor) -> torch.Tensor:
    """The reverse of :func:`_diagonals`, zero elsewhere."""
    rows, width = x.shape[-2:]
    x = F.pad(x, (0, rows)).flatten(-2)[..., : rows * (width + rows - 1)]
    return x.unflatten(-1, (rows, width + rows - 1))
