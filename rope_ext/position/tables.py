"""Rotations of queries and keys from their stored positions to the positions of a band."""

from __future__ import annotations

import math
from typing import cast

import torch

from rope_ext.attention.call import Rotation
from rope_ext.methods import Map
from rope_ext.methods.geometry import Geometry
from rope_ext.methods.kinds import at
from rope_ext.rotary.device_cache import cached_on_device


class RotationTable:
    """Cosines and sines of ``to(t) - stored(t)`` for t = 0, 1, 2, ..., computed once on demand.

    Args:
        to: position of queries or keys in the band.
        stored: position that they are rotated to already.
        inv_freq: ``[pairs]``; angles are computed in its dtype.
        pair: index of each pair in the result of maps that differ by pair, int64, ``[pairs]``.
    """

    def __init__(self, to: Map, stored: Map, inv_freq: torch.Tensor, pair: torch.Tensor) -> None:
        self.to, self.stored, self.inv_freq, self.pair = to, stored, inv_freq, pair
        self.idle = to is stored or (to == stored and not callable(to))
        self.constant = not callable(to) and not callable(stored)
        self._made: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy_to(self, device: torch.device) -> None:
        """Copy what does not change to a device."""
        cached_on_device(self, "pair", device)
        cached_on_device(self, "inv_freq", device)

    def about(self, position: int | torch.Tensor) -> RotationTable:
        """The same for tokens around a position: one for all, or one per row, ``[rows, 1]``."""
        return self

    def at(self, t: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """For any positions, ``[tokens, pairs]``."""
        return None if self.idle else self._at(t, dtype)

    def _at(self, t: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        t = t.double()
        by = at(self.to, t) - at(self.stored, t)
        if by.shape[-1] > 1:
            by = by[..., cached_on_device(self, "pair", t.device)]
        angles = by.to(self.inv_freq.dtype) * cached_on_device(self, "inv_freq", t.device)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def between(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """For the positions from ``first`` to ``last - 1``; one row if all are equal."""
        if self.idle:
            return None
        if self.constant:
            first, last = 0, 1
        made = self._made.get((device, dtype))
        if made is None or len(made[0]) < last:
            size = last if made is None else max(last, 2 * len(made[0]))
            with torch.inference_mode(False):  # a table outlives the mode that it is made in
                made = self._at(torch.arange(size, device=device), dtype)
            self._made[device, dtype] = made
        return made[0][first:last], made[1][first:last]


class Decay:
    """Factors ``exp(growth (t - origin))`` in place of cosines: pairs are scaled, not rotated.

    Queries and keys have opposite growths, so the origin cancels in their products. It must be
    close to the queries: then the factors of queries and of the keys they see are at most
    :attr:`MOST`, representable in any dtype, and the factors of distant keys vanish, as they
    should.

    Args:
        growth: growth of the logarithm per token, ``[pairs]``.
        origin: a position, or one per row, ``[rows, 1]``.
    """

    idle = False
    MOST = 16.0
    _LEAST = 1e-26  # negligible times MOST, and not a subnormal number

    def __init__(self, growth: torch.Tensor, origin: int | torch.Tensor = 0) -> None:
        self.growth, self.origin = growth, origin
        self._made: dict[tuple, tuple[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    @classmethod
    def reach(cls, growth: torch.Tensor) -> int:
        """Most tokens that queries with one origin in their middle may be apart."""
        return max(1, math.floor(2 * math.log(cls.MOST) / float(growth.abs().max())))

    def copy_to(self, device: torch.device) -> None:
        """Copy what does not change to a device."""
        cached_on_device(self, "growth", device)

    def about(self, position: int | torch.Tensor) -> Decay:
        """The same with another origin."""
        moved = Decay(self.growth, position)
        moved._made = self._made
        return moved

    def at(self, t: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """For any positions, ``[tokens, pairs]``."""
        exponents = (t - self.origin).double().unsqueeze(-1) * cached_on_device(
            self, "growth", t.device
        )
        # Keys after the last query may be anywhere, and no query sees them.
        numbers = exponents.exp().clamp(self._LEAST, 2 * self.MOST).to(dtype)
        return numbers, torch.zeros_like(numbers)

    def between(
        self, first: int, last: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For the positions from ``first`` to ``last - 1``; one origin for all rows."""
        origin = cast("int", self.origin)
        first, last = first - origin, last - origin
        start, made = self._made.get((device, dtype), (0, None))
        end = start if made is None else start + len(made[0])
        if made is None or first < start or last > end:
            start = 2 * first if first < start else start  # keys move away from the queries
            with torch.inference_mode(False):  # a table outlives the mode that it is made in
                t = torch.arange(start, max(last, end), device=device)
                made = Decay(self.growth).at(t, dtype)
            self._made[device, dtype] = start, made
        return made[0][first - start : last - start], made[1][first - start : last - start]


BandRotations = list[tuple[Geometry, RotationTable | Decay, RotationTable | Decay]]
"""For every band: which keys it shows, and the rotations of queries and of keys."""
