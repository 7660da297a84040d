"""Rotations of queries and keys from their stored positions to the positions of a band."""

from __future__ import annotations

import math

import torch

from rope_ext.attention.call import Rotation
from rope_ext.methods import Map
from rope_ext.methods.geometry import Geometry
from rope_ext.methods.kinds import at
from rope_ext.rotary.device_cache import cached_on_device

Origin = int | torch.Tensor
"""A position that the queries are close to: one for all, or one per row, ``[rows, 1]``."""


class RotationTable:
    """Cosines and sines of ``to(t) - stored(t)`` for t = 0, 1, 2, ..., computed once on demand.

    Args:
        to: position of queries or keys in the band.
        stored: position that they are rotated to already.
        inv_freq: ``[pairs]``; angles are computed in its dtype.
        pair: index of each pair in the result of maps that differ by pair, int64, ``[pairs]``.
    """

    constants = ("pair", "inv_freq")

    def __init__(self, to: Map, stored: Map, inv_freq: torch.Tensor, pair: torch.Tensor) -> None:
        self.to, self.stored, self.inv_freq, self.pair = to, stored, inv_freq, pair
        self.idle = to is stored or (to == stored and not callable(to))
        self.constant = not callable(to) and not callable(stored)
        self._made: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, t: torch.Tensor, dtype: torch.dtype, origin: Origin = 0) -> Rotation:
        """For any positions, ``[tokens, pairs]``."""
        if self.idle:
            return None
        t = t.double()
        by = at(self.to, t) - at(self.stored, t)
        if by.shape[-1] > 1:
            by = by[..., cached_on_device(self, "pair", t.device)]
        angles = by.to(self.inv_freq.dtype) * cached_on_device(self, "inv_freq", t.device)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def between(
        self, first: int, last: int, device: torch.device, dtype: torch.dtype, origin: Origin = 0
    ) -> Rotation:
        """For the positions from ``first`` to ``last - 1``; one row if all are equal."""
        if self.idle:
            return None
        if self.constant:
            first, last = 0, 1
        made = self._made.get((device, dtype))
        if made is None or len(made[0]) < last:
            size = last if made is None else max(last, 2 * len(made[0]))
            with torch.inference_mode(False):  # a table outlives the mode that it is made in
                made = self.at(torch.arange(size, device=device), dtype)
            assert made is not None, "it is not idle"
            self._made[device, dtype] = made
        return made[0][first:last], made[1][first:last]


class Decay:
    """Factors ``exp(growth (t - origin))`` in place of cosines: pairs are scaled, not rotated.

    Queries and keys have opposite growths, so the origin cancels in their products. It must be
    close to the queries: then the factors of queries and of the keys they see are at most
    :attr:`MOST`, representable in any dtype, and the factors of distant keys vanish, as they
    should. In float64 it may be anywhere within 100,000 tokens.

    Args:
        growth: growth of the logarithm per token, ``[pairs]``.
    """

    constants = ("growth",)
    idle = False
    MOST = 16.0
    _LEAST = 1e-26  # negligible times MOST, and not a subnormal number

    def __init__(self, growth: torch.Tensor) -> None:
        self.growth = growth

    @classmethod
    def reach(cls, growth: torch.Tensor) -> int:
        """Most tokens that queries with one origin in their middle may be apart."""
        return max(1, math.floor(2 * math.log(cls.MOST) / float(growth.abs().max())))

    def at(
        self, t: torch.Tensor, dtype: torch.dtype, origin: Origin = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For any positions, ``[tokens, pairs]``."""
        growth = cached_on_device(self, "growth", t.device)
        numbers = ((t - origin).double().unsqueeze(-1) * growth).exp()
        if dtype != torch.float64:  # keys after the last query may be anywhere: no query sees them
            numbers = numbers.clamp(self._LEAST, 2 * self.MOST).to(dtype)
        return numbers, torch.zeros_like(numbers)

    def between(
        self, first: int, last: int, device: torch.device, dtype: torch.dtype, origin: Origin = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For the positions from ``first`` to ``last - 1``."""
        return self.at(torch.arange(first, last, device=device), dtype, origin)


BandRotations = list[tuple[Geometry, RotationTable | Decay, RotationTable | Decay]]
"""For every band: which keys it shows, and the rotations of queries and of keys."""
