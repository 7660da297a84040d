import torch

from rope_ext.methods.checked import Positive
from rope_ext.methods.kinds import DynamicMethod, Rope, register
from rope_ext.methods.yarn import BETAS, BetaFast, YaRN


@register
class DynamicYaRN(DynamicMethod):
    """YaRN whose factor follows the sequence length: ``s = max(1, l / L)`` for ``l`` tokens.

    Every sequence keeps the frequencies it starts with; under ``generate``, these are for the
    prompt plus ``max_new_tokens``. Other engines use one set for all sequences: pass ``length=``.

    Args:
        beta_fast: pairs with more rotations within the trained length keep their frequency.
        beta_slow: pairs with fewer rotations are divided by ``s``.
        truncate: round the ends of the ramp outwards.

    YaRN, arXiv 2309.00071, section 3.3 ("Dynamic Scaling").
    """

    name = "dynamic_yarn"
    summary = "YaRN for mixed lengths; outputs for short prompts do not change"
    candidates = BETAS

    beta_fast: BetaFast = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True

    def inv_freq_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        ramp = {name: getattr(self, name) for name in ("beta_fast", "beta_slow", "truncate")}
        kept = YaRN(factor=1, **ramp).kept(rope)  # the ramp does not depend on the factor
        factor = (lengths / rope.length).clamp(min=1).unsqueeze(-1)
        return rope.interpolated(kept, factor)

    def own_scaling_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        return 0.1 * (lengths / rope.length).clamp(min=1).log() + 1.0
