from typing import Any

import torch

from rope_ext.methods.kinds import FrequencyMethod, Rope, register


@register
class NTK(FrequencyMethod):
    """Uses a larger base: the slowest pair is divided by ``factor``, the fastest is unchanged.

    ``b' = b * s ** (d / (d - 2))`` with the rotary dimension ``d``. Use it untrained up to factor
    4, or with an engine that only lets you set the base. Pairs in between are divided by less than
    ``factor``, so the usable context is shorter than you asked for: choose a larger factor.

    bloc97 2023; YaRN, arXiv 2309.00071, section 3.1.
    """

    name = "ntk"
    aliases = ("ntk_aware", "ntk_static")
    paper = "bloc97 2023"
    summary = "moderate factors without fine-tuning; changes only the base"

    def base_scale(self, rope: Rope) -> float:
        return float(self.factor) ** rope.ntk_exponent

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.with_base_times(self.base_scale(rope))

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": rope.base * self.base_scale(rope)}
