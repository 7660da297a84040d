"""xPos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.encodings.base import Encoding
from rope_ext.methods.geometry import Distance
from rope_ext.methods.kinds import Band, own
from rope_ext.methods.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class XPos(Encoding):
    """The rotation as it is, and every pair fades with the distance: ``zeta_i ** (d / 512)``.

    ``zeta_i = (2 i / D + gamma) / (1 + gamma)`` for pair ``i`` of ``D`` rotary columns, the
    fastest first and so the one that fades most.

    Args:
        gamma: share that the fastest pair keeps, before it is divided by ``1 + gamma``.
        scale_base: tokens over which a pair fades by its ``zeta``.

    Sun et al. 2022, arXiv 2212.10554.
    """

    name: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "arXiv 2212.10554"
    use: ClassVar[str] = "a rotation whose pairs fade with the distance; to be trained with"

    gamma: float = 0.4
    scale_base: float = 512.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("gamma", above=0, maximum=1e3)
        self.require_number("scale_base", minimum=16)

    def bands(self) -> tuple[Band, ...]:
        return (Band(Distance(0, None), own, own),)

    def growth(self, pairs: int) -> torch.Tensor:
        share = torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
        zeta = (share + self.gamma) / (1 + self.gamma)
        return zeta.log() / self.scale_base
