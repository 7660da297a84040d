from typing import Any

import torch

from rope_ext.methods.kinds import FrequencyMethod, Rope, register


@register
class PI(FrequencyMethod):
    """Divides every frequency by ``factor``: ``h = theta / s``.

    Neighboring tokens blur until a few hundred steps of fine-tuning repair it. In transformers:
    ``rope_type: linear``.

    Chen et al. 2023, arXiv 2306.15595, eq. 4; kaiokendev's SuperHOT.
    """

    name = "pi"
    aliases = ("linear", "position_interpolation")
    summary = "the simplest baseline; needs fine-tuning; blurs neighboring tokens"

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.inv_freq / self.factor

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": float(self.factor)}
