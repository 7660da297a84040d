"""Which keys a query sees: the shapes into which position maps divide the causal triangle."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Distance:
    """Keys at a distance of ``first`` to ``last - 1`` tokens; None: all from ``first`` on."""

    first: int
    last: int | None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which keys a query has in this band; token positions, broadcast against each other."""
        distance = query - key
        seen = distance >= max(self.first, 0)
        return seen if self.last is None else seen & (distance < self.last)


@dataclass(frozen=True)
class ChunkGap:
    """Keys ``first`` to ``last`` (inclusive) chunks of ``size`` tokens before the query's own."""

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
    """The first ``count`` tokens of a sequence, where they are at least ``first`` tokens away."""

    count: int
    first: int

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """As :meth:`Distance.sees`."""
        return (query - key >= self.first) & (key < self.count)


Geometry = Distance | ChunkGap | Sinks
