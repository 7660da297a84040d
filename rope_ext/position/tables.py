"""The rotation from where queries and keys are to where a band wants them."""

from __future__ import annotations

import torch

from rope_ext.attention.call import Turn
from rope_ext.methods import Map
from rope_ext.methods.kinds import at


class Turns:
    """Cosines and sines of ``to(t) - stored(t)`` for t = 0, 1, 2, ..., made once, on demand.

    Args:
        to: where queries or keys are to be.
        stored: where they are.
        inv_freq: ``[pairs]``; its dtype is that of the angles.
        pair: which pairs those are of the ones that the maps may tell apart, int64, ``[pairs]``.
    """

    def __init__(self, to: Map, stored: Map, inv_freq: torch.Tensor, pair: torch.Tensor) -> None:
        self.to, self.stored, self.inv_freq, self.pair = to, stored, inv_freq, pair
        self.idle = to is stored or (to == stored and not callable(to))
        self.constant = not callable(to) and not callable(stored)
        self._made: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, t: torch.Tensor, dtype: torch.dtype) -> Turn:
        """For any positions, ``[tokens, pairs]``."""
        if self.idle:
            return None
        t = t.double()
        by = at(self.to, t) - at(self.stored, t)
        if by.shape[-1] > 1:
            by = by[..., self.pair.to(t.device)]
        angles = by.to(self.inv_freq.dtype) * self.inv_freq.to(t.device)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def between(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> Turn:
        """For the positions from ``first`` to ``last - 1``; one row if all are alike."""
        if self.idle:
            return None
        if self.constant:
            first, last = 0, 1
        made = self._made.get((device, dtype))
        if made is None or len(made[0]) < last:
            size = last if made is None else max(last, 2 * len(made[0]))
            with torch.inference_mode(False):  # a table outlives the mode that it is made in
                made = self.at(torch.arange(size, device=device), dtype)
            self._made[device, dtype] = made
        return made[0][first:last], made[1][first:last]
