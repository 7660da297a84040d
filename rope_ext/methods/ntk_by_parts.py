from typing import Annotated

import torch

from rope_ext.methods.checked import Number
from rope_ext.methods.kinds import FrequencyMethod, Rope, register


@register
class NTKByParts(FrequencyMethod):
    """Divides slow pairs by ``factor`` and keeps fast ones, with a linear ramp in rotations.

    With ``r_i`` rotations of a pair within the trained length,
    ``g = clip((r_i - alpha) / (beta - alpha), 0, 1)`` and ``h = (1 - g) theta / s + g theta``. This
    is YaRN with the ramp of the paper and without the temperature.

    Args:
        alpha: pairs with fewer rotations are divided by ``factor``.
        beta: pairs with more rotations keep their frequency.

    YaRN, arXiv 2309.00071, section 3.2, definition 2.
    """

    name = "ntk_by_parts"
    aliases = ("by_parts",)
    summary = "ablations of YaRN: the same ramp without the temperature"
    candidates = {"alpha": (1.0, 2.0, 4.0), "beta": (16.0, 32.0, 64.0)}

    alpha: Annotated[float, Number(minimum=0)] = 1.0
    beta: Annotated[float, Number(above="alpha")] = 32.0

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.interpolated(rope.rotation_ramp(self.alpha, self.beta), self.factor)
