from typing import Annotated

import torch

from rope_ext.encodings.base import Encoding
from rope_ext.methods.checked import Number
from rope_ext.methods.geometry import Band, Distance, identity
from rope_ext.methods.kinds import register


@register
class XPos(Encoding):
    """RoPE whose pairs decay with the distance: ``zeta_i ** (d / 512)``.

    ``zeta_i = (2 i / D + gamma) / (1 + gamma)`` for pair ``i`` of ``D`` rotary columns, fastest
    first; the fastest decays most, with the defaults to 0.29 over 512 tokens. The paper's blockwise
    attention is not included.

    Args:
        gamma: what the fastest pair keeps over ``scale_base`` tokens, times ``1 + gamma``.
        scale_base: tokens over which a pair decays by its ``zeta``.

    Sun et al. 2022, arXiv 2212.10554.
    """

    name = "xpos"
    causal_only = "decays with the distance to earlier keys, and would grow with that to later ones"
    summary = "RoPE whose pairs decay with the distance; needs training"

    gamma: Annotated[float, Number(above=0, maximum=1e3)] = 0.4
    scale_base: Annotated[float, Number(minimum=16)] = 512.0

    def bands(self) -> tuple[Band, ...]:
        return (Band(Distance(0, None), identity, identity),)

    def growth(self, pairs: int) -> torch.Tensor:
        share = torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
        zeta = (share + self.gamma) / (1 + self.gamma)
        return zeta.log() / self.scale_base
