import math
from dataclasses import dataclass

import torch

from rope_ext.encodings.base import Bounds, Encoding, Heads, Learned
from rope_ext.methods.kinds import register

_LEAST = 0.01
"""Lower bound of all parameters in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class _Kerple(Encoding):
    begins = 0.0, 0.0  # r1 and r2 are initialized uniformly from 0 to these
    most_r2 = math.inf

    @property
    def bounds(self) -> Bounds:
        return {"r1": (_LEAST, math.inf), "r2": (_LEAST, self.most_r2)}

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        drawn = (most * torch.rand(heads.count) for most in self.begins)
        return {f"r{i}": value.clamp(min=_LEAST) for i, value in enumerate(drawn, 1)}


@register
class KerpleLog(_Kerple):
    """Replaces RoPE with a learned bias per head: ``-r1 ln(1 + r2 d)``.

    Both parameters are at least 0.01; ``r1`` is drawn from [0, 2] and ``r2`` from [0, 1]: seed
    torch for reproducible results. Each layer has its own parameters, as in DAPE's code; in
    KERPLE's code, all layers share them.

    Chi et al. 2022, arXiv 2205.09921.
    """

    name = "kerple_log"
    aliases = ("kerple",)
    summary = "a learned penalty, logarithmic in the distance; needs training"
    begins = 2.0, 1.0

    def bias(self, distance: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
        r1, r2 = (learned[name].to(distance)[:, None] for name in ("r1", "r2"))
        return -r1 * torch.log1p(r2 * distance)


@register
class KerplePower(_Kerple):
    """Replaces RoPE with a learned bias per head: ``-r1 d^r2``.

    Both are at least 0.01, and ``r2`` at most 2; ``r1`` is drawn from [0, 1], ``r2`` from [0, 2].

    Chi et al. 2022, arXiv 2205.09921.
    """

    name = "kerple_power"
    summary = "a learned penalty, a power of the distance; needs training"
    begins = 1.0, 2.0
    most_r2 = 2.0

    def bias(self, distance: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
        r1, r2 = (learned[name].to(distance)[:, None] for name in ("r1", "r2"))
        return -r1 * distance**r2
