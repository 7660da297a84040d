import math
from typing import Any

import torch

from rope_ext.methods.checked import Tokens
from rope_ext.methods.kinds import FrequencyMethod, Rope, register


@register
class Clipped(FrequencyMethod):
    """Slows down the slowest pairs along a half cosine, down to zero (CoPE in the paper).

    The first of the ``pairs`` slowest keeps its frequency, and the last one does not rotate. The
    authors also raise the base, to 10,000,000, and train. The factor only sets the target length.

    Args:
        pairs: number of pairs; None is 20 of 64, as released for Llama-3-8B, and at least 2.

    Li et al. 2026, arXiv 2602.05258; the formula and the number are those of its code.
    """

    name = "clipped"
    summary = "training studies: slows the slowest pairs gradually, down to zero"

    pairs: Tokens | None = None

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        pairs = tuple(round(share * rope.dim / 2) for share in (0.2, 0.3, 0.4, 0.5))
        return {**super().grids(rope), "pairs": pairs}

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        count = rope.dim // 2
        clipped = max(round(20 / 64 * count), 2) if self.pairs is None else self.pairs
        clipped = min(clipped, count)
        angle = torch.linspace(0, math.pi, clipped, dtype=torch.float64, device="cpu")
        kept = torch.ones(count, dtype=torch.float64, device="cpu")
        kept[count - clipped :] = (1 + angle.cos()) / 2
        return rope.inv_freq * kept
