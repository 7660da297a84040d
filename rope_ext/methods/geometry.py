"""Bands: which keys a query attends to, and the positions that both are rotated to.

The shapes split what a query sees. All but :class:`Ahead` and :class:`Around` are parts of the
causal triangle.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

At = TypeVar("At", int, torch.Tensor)


@dataclass(frozen=True)
class Distance:
    """Keys at distances from ``first`` to ``last - 1`` tokens; ``last=None`` has no upper end.

    ``first`` is below 0 only where an attention mask lets queries attend to later keys.
    """

    first: int
    last: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query attends to a key in this band; token positions, broadcast together."""
        distance = query - key
        seen = distance >= self.first
        return seen if self.last is None else seen & (distance < self.last)

    def ends(self, query: At) -> tuple[At, At]:
        """The first position that a query sees, which may be negative, and one past the last.

        Neither ever decreases from one query to the next. Keys after the query are left out.
        """
        first = query * 0 if self.last is None else query - self.last + 1
        return first, query - max(self.first, 0) + 1


@dataclass(frozen=True)
class ChunkGap:
    """Keys ``first`` to ``last`` (inclusive) chunks of ``size`` tokens before the query's."""

    size: int
    first: int
    last: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        gap = query // self.size - key // self.size
        seen = (query >= key) & (gap >= self.first)
        return seen if self.last is None else seen & (gap <= self.last)

    def ends(self, query: At) -> tuple[At, At]:
        chunk = query // self.size
        first = query * 0 if self.last is None else (chunk - self.last) * self.size
        return first, query + 1 if self.first <= 0 else (chunk - self.first + 1) * self.size


@dataclass(frozen=True)
class Sinks:
    """The first ``count`` tokens of a sequence, if they are at least ``first`` tokens away."""

    count: int
    first: int

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query - key >= self.first) & (key < self.count)

    def ends(self, query: At) -> tuple[At, At]:
        end = query - max(self.first, 0) + 1
        most = end.clamp(max=self.count) if isinstance(end, torch.Tensor) else min(end, self.count)
        return query * 0, most


@dataclass(frozen=True)
class Queries:
    """For the queries from ``begin`` to ``end - 1``, keys at least ``first`` tokens away."""

    first: int
    begin: int
    end: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (query - key >= self.first) & (query >= self.begin)
        return seen if self.end is None else seen & (query < self.end)

    def ends(self, query: At) -> tuple[At, At]:
        """As :meth:`Distance.ends`; other queries see nothing."""
        late = query < 0 if self.end is None else query >= self.end
        return late * (query + 1), (query >= self.begin) * (query - self.first + 1)


_FAR = 2**40
"""Stands for no upper end in :meth:`Ahead.ends`: larger than any distance."""


@dataclass(frozen=True)
class Ahead:
    """Keys from ``first`` to ``last - 1`` tokens after the query: a mirrored :class:`Distance`.

    ``first`` is at least 1; ``last=None`` has no upper end.
    """

    first: int
    last: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = key - query
        seen = distance >= self.first
        return seen if self.last is None else seen & (distance < self.last)

    def ends(self, query: At) -> tuple[At, At]:
        return query + self.first, query + (_FAR if self.last is None else self.last)


@dataclass(frozen=True)
class Around:
    """Keys less than ``last`` tokens before or after the query; ``last=None``: all keys."""

    last: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = query - key
        if self.last is None:
            return torch.ones_like(distance, dtype=torch.bool)
        return distance.abs() < self.last

    def ends(self, query: At) -> tuple[At, At]:
        if self.last is None:
            return query * 0, query + _FAR
        return query - self.last + 1, query + self.last


Causal = Distance | ChunkGap | Sinks | Queries
Geometry = Causal | Ahead | Around


def extent(
    geometry: Geometry, queries: int, keys: int, start: int = 0, room: int | None = None
) -> slice:
    """The keys that any query may see in a band; exact for one query.

    The queries are the last tokens of the keys; key 0 is token ``start``. ``room``: the number of
    keys if more follow the last query; these are seen in both directions only.
    """
    room = keys if room is None else room
    low = min(max(geometry.ends(start + keys - queries)[0] - start, 0), room)
    high = min(geometry.ends(start + keys - 1)[1] - start, room)
    return slice(low, max(high, low))


Map = Callable[[torch.Tensor], torch.Tensor] | float
"""Maps token positions (float64, ``[...]``) to others, or is one position for all tokens.

The function returns the same shape, or ``[..., pairs]`` with one position per pair.
"""


def identity(t: torch.Tensor) -> torch.Tensor:
    """The position of the token itself."""
    return t


def at(to: Map, t: torch.Tensor) -> torch.Tensor:
    """Map tokens at ``t`` (``[...]``) by ``to``: ``[..., 1]`` or ``[..., pairs]``."""
    put = to(t) if callable(to) else torch.full_like(t, to)
    return put if put.ndim > t.ndim else put.unsqueeze(-1)


@dataclass(frozen=True)
class Band:
    """The keys in one band and the positions used for them."""

    geometry: Geometry  # which keys each query attends to in this band
    query: Map  # position to which a query is rotated
    key: Map  # position to which a key is rotated

    def distances(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Effective distances; NaN where a query does not attend to a key in this band.

        Token positions (float64), broadcast against each other to ``[...]``; returns ``[..., 1]``,
        or ``[..., pairs]`` if every pair has its own.
        """
        used = at(self.query, query) - at(self.key, key)
        return torch.where(self.geometry.sees(query, key).unsqueeze(-1), used, math.nan)


def after(window: int, query: Map, key: Map) -> tuple[Band, Band]:
    """Distances below ``window`` as they are; from there on, by other positions."""
    return Band(Distance(0, window), identity, identity), Band(Distance(window, None), query, key)


def both_ways(bands: tuple[Band, ...]) -> tuple[Band, ...] | None:
    """The same bands for attention in both directions; None if one of them is for causal only.

    A key ahead has the negative distance of the same key behind: ``g(-d) = -g(d)``. This is a
    mirrored band with the positions of query and key swapped. The last band stays the last one.
    """
    doubled: list[Band] = []
    for band in bands:
        geometry = band.geometry
        if isinstance(geometry, Sinks) and geometry.count <= geometry.first:
            doubled.append(band)  # the first tokens, which are never that far ahead
        elif not isinstance(geometry, Distance):
            return None
        elif geometry.first == 0 and band.query == band.key:
            doubled.append(Band(Around(geometry.last), band.query, band.key))
        else:
            mirrored = Ahead(max(geometry.first, 1), geometry.last)
            doubled += [Band(mirrored, band.key, band.query), band]
    return tuple(doubled)


def spans(bands: tuple[Band, ...], length: int) -> torch.Tensor:
    """The largest distance within ``length`` tokens plus one: ``[1]``, or ``[pairs]`` by pair."""
    step = -math.ceil(length / 2**16)  # at most this many query positions
    m = torch.arange(length - 1, -1, step, dtype=torch.float64, device="cpu")
    largest = torch.zeros(1, dtype=torch.float64, device="cpu")
    for band in bands:
        n = band.geometry.ends(m)[0].clamp(min=0)  # the first key has the smallest position
        largest = torch.maximum(largest, band.distances(m, n).nan_to_num(nan=0).amax(0))
    return largest + 1
