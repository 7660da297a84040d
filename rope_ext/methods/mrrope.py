from typing import Literal

import torch

from rope_ext.methods.checked import Positive
from rope_ext.methods.kinds import FrequencyMethod, Rope, register
from rope_ext.methods.temperature import yarn_factor
from rope_ext.methods.yarn import BETAS, BetaFast


@register
class MrRoPE(FrequencyMethod):
    """YaRN with another ramp: slow pairs are divided by more, fast ones by less.

    The last pair with more than ``beta_fast`` rotations is unchanged, and the first with fewer than
    ``beta_slow`` is divided by ``factor``. If no pair rotates that often, the fastest one is
    unchanged, as in YaRN; if none rotates that rarely, the ramp ends one pair after the slowest.
    Cosine and sine are multiplied by ``0.1 ln(s) + 1``.

    Args:
        beta_fast: rotations within the trained length; the paper's alpha.
        beta_slow: rotations within the trained length; the paper's beta.
        mode: ``"pro"`` divides pair ``t`` of the ``n`` in between by ``factor`` to the power
            ``t (t + 1) / (n (n + 1))``, ``"uni"`` to the power ``t / n``.

    Tian et al. 2026, arXiv 2601.22181, section 3, and the authors' code.
    """

    name = "mrrope"
    summary = "no fine-tuning; like YaRN, but slows slow pairs more and fast pairs less"
    candidates = BETAS

    beta_fast: BetaFast = 32.0
    beta_slow: Positive = 1.0
    mode: Literal["pro", "uni"] = "pro"

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        turns = rope.rotations
        last_kept = max(int((turns > self.beta_fast).sum()) - 1, 0)
        first_divided = max(int((turns >= self.beta_slow).sum()), last_kept + 1)
        between = first_divided - last_kept
        index = torch.arange(len(turns), dtype=torch.float64, device="cpu")
        t = (index - last_kept).clamp(0, between)
        power = t / between if self.mode == "uni" else t * (t + 1) / (between * (between + 1))
        return rope.inv_freq / float(self.factor) ** power

    def own_scaling(self, rope: Rope) -> float:
        return yarn_factor(self.factor)
