import math

import torch

from rope_ext.encodings.base import Encoding, Heads, Learned
from rope_ext.methods.kinds import register


@register
class ALiBi(Encoding):
    """Replaces RoPE with a slope per head: ``-m_h |i - j|``, which is ``-m_h (i - j)`` if causal.

    The slopes of H heads are ``2^(-8h/H)``, ``h = 1 .. H``. If H is not a power of two, those of
    the power below come first, then every second one of the power above, as in the authors' code.

    Args:
        learned: train the slopes of each layer, which start from these values. They have no bounds;
            the paper (section 3) found that learned slopes do not extrapolate well.

    Press et al. 2022, arXiv 2108.12409.
    """

    name = "alibi"
    summary = "a penalty that grows with the distance; needs training"

    learned: bool = False

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        return {"slope": slopes(heads.count).float()} if self.learned else {}

    def bias(self, distance: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
        slope = learned["slope"] if self.learned else slopes(heads)
        return -slope.to(distance)[:, None] * distance


def slopes(heads: int) -> torch.Tensor:
    """``m_h`` of all heads: float64, ``[heads]``."""
    above = 2 ** (math.floor(math.log2(heads)) + 1)
    found = 2.0 ** (-8 / above * torch.arange(1, above + 1, dtype=torch.float64, device="cpu"))
    return torch.cat((found[1::2], found[::2]))[:heads]
