"""Which keys and which blocks of queries and keys a band covers, in closed form."""

from __future__ import annotations

import torch

from rope_ext.methods.geometry import ChunkGap, Distance, Geometry, Sinks


def extent(geometry: Geometry, queries: int, keys: int, start: int = 0) -> slice:
    """The keys that any query sees in a band; an empty slice if there are none.

    The queries are the last of the keys, key 0 is token ``start``.
    """
    end = start + keys
    first, last = start, end - 1  # tokens
    query = end - queries  # the first one
    if isinstance(geometry, ChunkGap):
        size = geometry.size
        if geometry.first > 0:
            last = min(last, ((end - 1) // size - geometry.first + 1) * size - 1)
        if geometry.last is not None:
            first = max(first, (query // size - geometry.last) * size)
    else:
        near = max(geometry.first, 0)
        last = min(last, end - 1 - near)
        if isinstance(geometry, Sinks):
            last = min(last, geometry.count - 1)
        elif geometry.last is not None:
            seeing = max(query, start + near)  # the first query that sees a key
            first = max(first, seeing - geometry.last + 1)
            last = last if near < geometry.last else first - 1
    return slice(first - start, max(last + 1, first) - start)


def seen_by_all(geometry: Geometry, first: int, last: int, keys: slice, start: int = 0) -> slice:
    """Those of ``keys`` that every query sees in a band; an empty slice if there are none.

    Args:
        geometry: which keys queries see in the band.
        first: the first query, in tokens.
        last: the last query.
        keys: indices of keys.
        start: the token of key 0.
    """
    low, high = keys.start + start, keys.stop + start
    if isinstance(geometry, ChunkGap):
        size = geometry.size
        high = min(high, first + 1, (first // size - geometry.first + 1) * size)
        if geometry.last is not None:
            low = max(low, (last // size - geometry.last) * size)
    else:
        high = min(high, first - geometry.first + 1)
        if isinstance(geometry, Sinks):
            high = min(high, geometry.count)
        elif geometry.last is not None:
            low = max(low, last - geometry.last + 1)
    low, high = max(low - start, keys.start), min(high - start, keys.stop)
    return slice(low, max(high, low))


def positions_seen(geometry: Geometry, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of the keys that queries see in a band, where positions count from 0.

    Args:
        geometry: which keys queries see in the band.
        query: positions of the queries, int64; negative ones see nothing.

    Returns:
        The first position that each query sees and one past the last, in the shape of ``query``;
        nothing is seen where the second is not larger. The first may be negative.
    """
    start = torch.zeros_like(query)
    if isinstance(geometry, ChunkGap):
        chunk, size = query // geometry.size, geometry.size
        first = start if geometry.last is None else (chunk - geometry.last) * size
        return first, ((chunk - geometry.first + 1) * size).minimum(query + 1)
    end = query - max(geometry.first, 0) + 1
    if isinstance(geometry, Sinks):
        return start, end.clamp(max=geometry.count)
    return start if geometry.last is None else query - geometry.last + 1, end


def blocks(
    geometry: Geometry, query: torch.Tensor, key: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a block of queries may see any key, and sees every key, of a block of keys.

    Args:
        geometry: which keys queries see in the band.
        query: the first token of each block of queries, int64, ``[blocks of queries, 1]``.
        key: the first token of each block of keys, ``[blocks of keys]``.
        size: tokens in a block.

    Returns:
        Two bool tensors, ``[blocks of queries, blocks of keys]``. The first may be True for blocks
        where nothing is seen; the second is exact.
    """
    least, most = query - key - size + 1, query - key + size - 1  # distances
    if isinstance(geometry, ChunkGap):
        chunk = geometry.size
        near = query // chunk - (key + size - 1) // chunk  # the least gap of chunks
        far = (query + size - 1) // chunk - key // chunk
        some = (most >= 0) & (far >= geometry.first)
        every = (least >= 0) & (near >= geometry.first)
        if geometry.last is not None:
            some, every = some & (near <= geometry.last), every & (far <= geometry.last)
        return some, every
    first = max(geometry.first, 0) if isinstance(geometry, Distance) else geometry.first
    some, every = most >= first, least >= first
    if isinstance(geometry, Sinks):
        some, every = some & (key < geometry.count), every & (key + size <= geometry.count)
    elif geometry.last is not None:
        some, every = some & (least < geometry.last), every & (most < geometry.last)
    return some, every
