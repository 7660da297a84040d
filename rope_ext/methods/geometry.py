"""Which keys a query attends to: the shapes into which position maps split the causal triangle."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Distance:
    """Keys at distances from ``first`` to ``last - 1`` tokens; ``last=None`` has no upper end.

    ``first`` is below 0 only where an attention mask shows queries the keys after them.
    """

    first: int
    last: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query attends to a key in this band; token positions, broadcast together."""
        distance = query - key
        seen = distance >= self.first
        return seen if self.last is None else seen & (distance < self.last)


@dataclass(frozen=True)
class ChunkGap:
    """Keys ``first`` to ``last`` (inclusive) chunks of ``size`` tokens before the query's."""

    size: int
    first: int
    last: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """As :meth:`Distance.sees`."""
        gap = query // self.size - key // self.size
        seen = (query >= key) & (gap >= self.first)
        return seen if self.last is None else seen & (gap <= self.last)


@dataclass(frozen=True)
class Sinks:
    """The first ``count`` tokens of a sequence, if they are at least ``first`` tokens away."""

    count: int
    first: int

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """As :meth:`Distance.sees`."""
        return (query - key >= self.first) & (key < self.count)


@dataclass(frozen=True)
class Queries:
    """For the queries from ``begin`` to ``end - 1``, keys at least ``first`` tokens away."""

    first: int
    begin: int
    end: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """As :meth:`Distance.sees`."""
        seen = (query - key >= self.first) & (query >= self.begin)
        return seen if self.end is None else seen & (query < self.end)


Geometry = Distance | ChunkGap | Sinks | Queries
