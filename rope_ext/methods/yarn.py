import math
from typing import Annotated, Any, Literal

import torch

from rope_ext.methods.checked import Number, Positive
from rope_ext.methods.kinds import FrequencyMethod, Rope, register
from rope_ext.methods.temperature import yarn_factor

BetaFast = Annotated[float, Number(above="beta_slow")]
BETAS = {"beta_slow": (1.0, 2.0, 4.0), "beta_fast": (16.0, 32.0, 64.0)}


@register
class YaRN(FrequencyMethod):
    """NTK-by-parts plus a temperature: cos and sin are multiplied by ``0.1 ln(s) + 1``.

    It also changes short prompts; ``dynamic_yarn`` does not. The ramp is linear in the index of the
    pair, as in the authors' code, transformers and vLLM, so that checkpoints are interchangeable,
    or in the rotations of a pair, as in the paper: frequencies of Llama 2 differ by up to 73 %.

    Args:
        beta_fast: pairs with more rotations within the trained length keep their frequency.
        beta_slow: pairs with fewer rotations are divided by ``factor``.
        truncate: round the ends of the index ramp outwards (False: gpt-oss). Index ramp only.
        ramp: ``"index"`` as in the released code, ``"rotations"`` as in the paper.
        blend: ``"arithmetic"`` mixes frequencies; ``"harmonic"`` mixes wavelengths,
            ``theta / ((1 - g) s + g)``, as in PoSE (arXiv 2309.10400).

    Peng et al. 2023, arXiv 2309.00071, sections 3.2 and 3.4.
    """

    name = "yarn"
    summary = "fine-tuning, and serving with other engines; works untrained up to factor 4"
    candidates = BETAS

    beta_fast: BetaFast = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    ramp: Literal["index", "rotations"] = "index"
    blend: Literal["arithmetic", "harmonic"] = "arithmetic"

    def kept(self, rope: Rope) -> torch.Tensor:
        """Fraction of each pair's trained frequency that is kept, in [0, 1]."""
        if self.ramp == "rotations":
            return rope.rotation_ramp(self.beta_slow, self.beta_fast)
        low = self._index(rope, self.beta_fast)
        high = self._index(rope, self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        # As in transformers, with its bounds and its 0.001: a ramp without width becomes a step.
        low = max(low, 0)
        high = min(high, rope.dim - 1)
        if low == high:
            high += 0.001
        index = torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu")
        return 1 - ((index - low) / (high - low)).clamp(0, 1)

    @staticmethod
    def _index(rope: Rope, rotations: float) -> float:
        """The (fractional) index of the pair with this many rotations in the trained length."""
        turns = rope.length / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.base))

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        kept = self.kept(rope)
        if self.blend == "harmonic":
            return rope.inv_freq / ((1 - kept) * self.factor + kept)
        return rope.interpolated(kept, self.factor)

    def own_scaling(self, rope: Rope) -> float:
        return yarn_factor(self.factor)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        if self.ramp != "index" or self.blend != "arithmetic":
            return super().rope_parameters(rope)
        parameters = {
            "rope_type": "yarn",
            "factor": float(self.factor),
            "original_max_position_embeddings": rope.length,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "attention_factor": float(self.attention_scaling(rope)),
        }
        return parameters if self.truncate else {**parameters, "truncate": False}
