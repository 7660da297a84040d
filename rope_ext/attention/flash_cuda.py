"""Bands with the flash attention kernel of CUDA: half precision, one call per tile.

Unlike the kernel of the CPU, this one aligns the last row with the last key for any number of
rows, has a window, and takes fewer key heads than query heads. So a band of distances is one call,
and a band of chunks is one call for all whole chunks. Each call returns the log-sum-exp of its
rows, with which the outputs are merged; the backward pass gives each call the GLOBAL output and
log-sum-exp.

Tests run on a CPU, with a stand-in for the two operators of torch; ``python -m lab.benchmarks.gpu``
compares the operators themselves with float64.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rope_ext.attention import cards, fused, products
from rope_ext.attention.call import Call, RotatedBand, Rotation, part_of
from rope_ext.attention.extent import extent
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry, Sinks

_COLUMNS = 256
"""The most columns of a head; they must be a multiple of 8."""


def refusal(query: torch.Tensor, value: torch.Tensor, call: Call, card: cards.Card) -> str | None:
    """Why the kernel cannot have a call on this card; None: it can."""
    columns = max(query.shape[-1], value.shape[-1])
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it has float16 and bfloat16 on a GPU, and this is {query.dtype}"
    if columns % 8 or columns > _COLUMNS:
        return f"it has heads of a multiple of 8 up to {_COLUMNS} columns, and these have {columns}"
    if call.softcap is not None:
        return "it has no soft cap"
    if call.bias is not None:
        return "it has no bias on a GPU"
    if card.capability < cards.AMPERE:
        return f"it needs a GPU of capability 8.0 or later, and this one has {card.version}"
    return None


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    left: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, ``[batch, queries, heads, columns]`` like the inputs, and log-sum-exp.

    The latter is ``[batch, heads, queries]``.

    If ``causal``, the last query sees the last key and the ``left`` ones before it (None: all),
    and the window of every other query is shifted by its distance from the last.
    """
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0 if causal else None,
    )[:2]


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    left: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; ``out`` and ``lse`` are over the keys of all calls."""
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # dropout state
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        causal,
        unused,
        unused,
        scale=scale,
        window_size_left=left,
        window_size_right=0 if causal else None,
    )


def tiles(geometry: Geometry, queries: int, keys: int, start: int = 0) -> list[Tile]:
    """The tiles of a band; the queries are the last of the keys, key 0 is token ``start``."""
    if isinstance(geometry, ChunkGap):
        found = _chunks(geometry, queries, keys, start)
    elif isinstance(geometry, Sinks):
        found = _sinks(queries, keys, geometry.first, min(geometry.count - start, keys))
    else:
        part = extent(geometry, queries, keys, start)
        row = max(geometry.first - (keys - queries), 0)  # the first query that sees a key
        found = [_causal(row, queries - row, part.start, part.stop - part.start)]
    return _batched(tile for tile in found if tile.rows > 0 and tile.keys > 0)


def _causal(row: int, rows: int, key: int, keys: int) -> Tile:
    return Tile(row, rows, key, keys, causal=rows > 1)


def _sinks(queries: int, keys: int, first: int, count: int) -> Iterator[Tile]:
    """Of the first ``count`` keys, those at least ``first`` tokens away."""
    seen = keys - queries + 1 - max(first, 0)  # by the first query, if it is positive
    row = max(1 - seen, 0)  # the first query that sees a key
    growing = min(queries, max(count - seen + 1, row))  # from here on all `count` are seen
    yield _causal(row, growing - row, 0, seen + growing - 1)
    yield Tile(growing, queries - growing, 0, count)


def _chunks(geometry: ChunkGap, queries: int, keys: int, start: int) -> Iterator[Tile]:
    size = geometry.size
    end = start + keys
    for chunk in range((end - queries) // size, (end - 1) // size + 1):
        row = max(chunk * size, end - queries)
        rows = min((chunk + 1) * size, end) - row
        low = start if geometry.last is None else max((chunk - geometry.last) * size, start)
        if geometry.first <= 0:
            yield _causal(row - end + queries, rows, low - start, row - low + rows)
        else:
            high = (chunk - geometry.first + 1) * size
            yield Tile(row - end + queries, rows, low - start, high - low)


def _batched(found: Iterable[Tile]) -> list[Tile]:
    """Equal tiles at equal steps, merged into one."""
    runs: dict[tuple, list[Tile]] = {}
    for tile in found:
        run = runs.setdefault((tile.rows, tile.keys, tile.causal, tile.key - tile.row), [])
        if run and run[-1].blocks == 1:
            run[-1] = replace(run[-1], blocks=2, step=tile.row - run[-1].row)
        elif run and tile.row == run[-1].row + run[-1].blocks * run[-1].step:
            run[-1] = replace(run[-1], blocks=run[-1].blocks + 1)
        else:
            run.append(tile)
    return [tile for run in runs.values() for tile in run]


def farthest_key(geometry: Geometry) -> int | None:
    if isinstance(geometry, Distance) and geometry.last is not None:
        return geometry.last - max(geometry.first, 0) - 1
    return None


@dataclass(frozen=True)
class Tile:
    """Rectangles of queries and keys: ``blocks`` equal ones, each ``step`` tokens after the last.

    Args:
        row, rows: first query (counted from the first one given) and number of queries.
        key, keys: first key and number of keys.
        causal: whether the last row sees the last key, and every row before it one key less.
    """

    row: int
    rows: int
    key: int
    keys: int
    causal: bool = False
    blocks: int = 1
    step: int = 1


class _Part:
    """A tile of a band.

    ``rows`` and ``keys`` are the tokens of all its blocks, whose rows are adjacent.
    """

    def __init__(self, tile: Tile, band: RotatedBand, scale: float) -> None:
        self.tile = tile
        self.rows = (tile.row, tile.blocks * tile.rows)
        self.keys = (tile.key, (tile.blocks - 1) * tile.step + tile.keys)
        self.rotations = tuple(
            part_of(rotation, slice(first, first + count))
            for rotation, (first, count) in ((band.query, self.rows), (band.key, self.keys))
        )
        far = farthest_key(band.geometry) if tile.causal else None
        self.asked = tile.causal, far, scale

    def row(self, x: torch.Tensor) -> torch.Tensor:
        return x.narrow(2, *self.rows)

    def unrotated(
        self, query: torch.Tensor, key: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Rotation]]:
        yield self.row(query), self.rotations[0]
        yield key.narrow(2, *self.keys), self.rotations[1]

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch * blocks, rows, heads, columns]``, as the kernel takes it."""
        return x.transpose(1, 2).unflatten(1, (self.tile.blocks, -1)).flatten(0, 1)

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.transpose(1, 2).unfold(1, self.tile.keys, max(self.tile.step, 1))
        return blocks.movedim(-1, 2).flatten(0, 1)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Found:
        """Attention of its rows on its keys; query and key are rotated, and its own."""
        value = self.of_keys(value.narrow(2, *self.keys))
        out, lse = forward(self.of_rows(query), self.of_keys(key), value, *self.asked)
        batch = len(query)
        lse = lse.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2)
        return _Found(*self.rows, out.reshape(batch, -1, *out.shape[2:]), lse)

    def differentiate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        grad: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of its rotated queries and keys, and of its values."""
        batch = len(grad)
        of_rows = self.row(lse).unflatten(2, (self.tile.blocks, -1)).transpose(1, 2)
        of_query, *of_keys = backward(
            self.of_rows(self.row(grad)).contiguous(),
            self.of_rows(query),
            self.of_keys(key),
            self.of_keys(value.narrow(2, *self.keys)),
            self.of_rows(self.row(out)).contiguous(),
            of_rows.flatten(0, 1).contiguous(),
            *self.asked,
        )
        of_query = of_query.reshape(batch, -1, *of_query.shape[2:]).transpose(1, 2)
        of_key, of_value = (self._together(x.unflatten(0, (batch, -1))) for x in of_keys)
        return of_query, of_key, of_value

    def _together(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, blocks, keys, heads, columns]``, summed where keys overlap."""
        if x.shape[1] == 1:
            return x[:, 0].transpose(1, 2)
        batch, blocks, keys, heads, columns = x.shape
        total = x.new_zeros(batch, self.keys[1], heads, columns)
        for first in range(0, keys, self.tile.step):
            part = x[:, :, first : first + self.tile.step]
            count = part.shape[2]
            into = total[:, first:].unfold(1, count, self.tile.step)[:, :blocks].movedim(-1, 2)
            into.add_(part)
        return total.transpose(1, 2)


class _Found(NamedTuple):
    """Attention of some rows on some of their keys.

    Args:
        row, rows: the first row, and how many there are.
        out: ``[batch, rows, heads, columns]``.
        lse: log-sum-exp, ``[batch, heads, rows]``.
    """

    row: int
    rows: int
    out: torch.Tensor
    lse: torch.Tensor


def _back(rotation: Rotation) -> Rotation:
    return rotation and (rotation[0], -rotation[1])


def _parts(query: torch.Tensor, key: torch.Tensor, call: Call) -> list[_Part]:
    return [
        _Part(tile, band, call.scale)
        for band in call.bands
        for tile in tiles(band.geometry, query.shape[2], key.shape[2], call.start)
    ]


def merge(out: torch.Tensor, lse: torch.Tensor, *given: Any) -> None:
    """Write the attention of some rows on disjoint keys to ``out`` and ``lse``.

    Args:
        out: see :class:`_Found`; of these rows.
        lse: likewise.
        given: their outputs on some of the keys, as many log-sum-exps, and the sinks of
            :class:`Call` or None.
    """
    count = len(given) // 2
    outs, logs, sinks = given[:count], list(given[count:-1]), given[-1]
    if sinks is not None:  # a sink acts as a key without a value
        logs.append(sinks[:, None].to(lse.dtype).expand_as(lse))
    total = functools.reduce(torch.logaddexp, logs)
    least = total.clamp(min=torch.finfo(total.dtype).min)  # rows that see nothing
    weights = ((log - least).exp().transpose(1, 2)[..., None] for log in logs)
    out.copy_(functools.reduce(torch.add, map(torch.mul, outs, weights)))
    lse.copy_(total)


def compute(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, ``[batch, heads, queries, columns]`` and without columns."""
    batch, heads, queries, columns = query.shape
    parts = _parts(query, key, call)
    given = [x for part in parts for x in part.unrotated(query, key)]
    rotated = iter(fused.rotate(call.pairs, *given))  # in one call, which counts for one token
    found = [part.attend(next(rotated), next(rotated), value) for part in parts]
    if len(found) == 1 and found[0].rows == queries and call.sinks is None:
        return found[0].out.transpose(1, 2), found[0].lse
    out = query.new_empty(batch, queries, heads, columns)
    lse = query.new_empty(batch, heads, queries, dtype=products.wide(query))
    edges = {0, queries, *(edge for x in found for edge in (x.row, x.row + x.rows))}
    for row, end in itertools.pairwise(sorted(edges)):
        there = [x for x in found if x.row <= row and end <= x.row + x.rows]
        outs = [x.out[:, row - x.row : end - x.row] for x in there]
        logs = [x.lse[..., row - x.row : end - x.row] for x in there]
        into = out[:, row:end], lse[..., row:end]
        if not there:
            into[0].zero_()
            into[1].fill_(-torch.inf) if call.sinks is None else into[1].copy_(call.sinks[:, None])
        elif len(there) == 1 and call.sinks is None:
            into[0].copy_(outs[0])
            into[1].copy_(logs[0])
        else:
            fused.run(merge, *into, *outs, *logs, call.sinks, kind=(len(there),))
    return out.transpose(1, 2), lse


def differentiate(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value."""
    grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
    grad = grad.to(query.dtype)
    for part in _parts(query, key, call):
        q, k = fused.rotate(call.pairs, *part.unrotated(query, key))
        *of_rotated, of_value = part.differentiate(q, k, grad, value, out, lse)
        back = map(_back, part.rotations)
        of_query, of_key = fused.rotate(call.pairs, *zip(of_rotated, back, strict=True))
        part.row(grads[0]).add_(of_query)
        for total, new in zip(grads[1:], (of_key, of_value), strict=True):
            total.narrow(2, *part.keys).add_(new)
    return tuple(x.to(query.dtype) for x in grads)
