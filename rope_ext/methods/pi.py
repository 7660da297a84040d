from typing import Any

import torch

from rope_ext.methods.kinds import FrequencyMethod, Rope, register


@register
class PI(FrequencyMethod):
    """Divides every frequency by ``factor``: ``h = theta / s``.

    Use it as a baseline, or where a recipe or an engine requires ``rope_type: linear``. Neighboring
    tokens blur until a few hundred steps of fine-tuning repair it: LLaMA 7B at 8192 tokens has a
    perplexity on PG19 of 16.10 untuned and 6.95 after 1000 steps (Table 3).

    Chen et al. 2023, arXiv 2306.15595, eq. 4; kaiokendev's SuperHOT.
    """

    name = "pi"
    aliases = ("linear", "position_interpolation")
    summary = "the simplest baseline; needs fine-tuning; blurs neighboring tokens"

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.inv_freq / self.factor

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": float(self.factor)}
