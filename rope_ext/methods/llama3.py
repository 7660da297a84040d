from typing import Annotated, Any

import torch

from rope_ext.methods.checked import Number, Positive
from rope_ext.methods.kinds import Factor, FrequencyMethod, Rope, register


@register
class Llama3(FrequencyMethod):
    """Divides long wavelengths by ``factor`` and keeps short ones, without a temperature.

    A pair keeps its frequency if its wavelength is below ``length / high_freq_factor``, and is
    divided by ``factor`` if it is above ``length / low_freq_factor``, with a smooth transition in
    between. ``compose="raise"`` raises the factor of checkpoints that have it.

    Args:
        low_freq_factor: pairs with fewer rotations within the trained length are divided.
        high_freq_factor: pairs with more rotations keep their frequency.

    Llama 3.1 release (July 2024), ``apply_scaling``, with factor 8 and length 8192.
    """

    name = "llama3"
    aliases = ("llama31", "llama3.1")
    paper = "Llama 3.1 release"
    summary = "the scaling of Llama 3.1: a narrow ramp and no temperature"
    candidates = {"low_freq_factor": (1.0, 2.0), "high_freq_factor": (4.0, 8.0, 16.0)}

    factor: Factor = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Annotated[float, Number(above="low_freq_factor")] = 4.0

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        kept = rope.rotation_ramp(self.low_freq_factor, self.high_freq_factor)
        return rope.interpolated(kept, self.factor)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": float(self.factor),
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
            "original_max_position_embeddings": rope.length,
        }
