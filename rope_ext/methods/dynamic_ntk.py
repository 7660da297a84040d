from typing import Any, Literal

import torch

from rope_ext.methods.kinds import DynamicMethod, Rope, register


@register
class DynamicNTK(DynamicMethod):
    """NTK-aware scaling by the sequence length; no scaling within the trained length.

    ``b' = b * a ** (d / (d - 2))`` for a sequence of ``l`` tokens. Plain transformers loads the
    saved checkpoint. ``dynamic_yarn`` does the same with YaRN's frequencies.

    Args:
        alpha: ``"transformers"``: ``a = s l / L - (s - 1)``, which grows faster than the sequence
            (13 for ``s = 4`` at ``l = 4 L``); ``"ratio"``: ``a = l / L``. At least 1.
        mode: ``"fixed"`` uses one base per sequence, so that cached decoding equals recomputation;
            ``"growing"`` reproduces transformers, where cached keys keep that of earlier bases.

    emozilla 2023; YaRN, arXiv 2309.00071, section 3.3.
    """

    name = "dynamic_ntk"
    aliases = ("dynamic",)
    paper = "emozilla 2023"
    summary = "no fine-tuning; outputs for short prompts do not change"

    alpha: Literal["transformers", "ratio"] = "transformers"
    mode: Literal["fixed", "growing"] = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "growing":
            like_transformers = self.alpha == "transformers"
            self.require("alpha", like_transformers, "'transformers' with mode='growing'")
            for option in ("length", "attention_factor", "temperature"):
                self.require(option, getattr(self, option) is None, "None with mode='growing'")

    def base_scale(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        """``b' / b`` for each of ``lengths`` (tokens)."""
        alpha = lengths / rope.length
        if self.alpha == "transformers":
            alpha = self.factor * alpha - (self.factor - 1)
        return alpha.clamp(min=1) ** rope.ntk_exponent

    def inv_freq_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        return rope.with_base_times(self.base_scale(rope, lengths))

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        if self.is_dynamic:  # transformers' alpha with s = 1 is the plain ratio l / L
            factor = self.factor if self.alpha == "transformers" else 1
            return {"rope_type": "dynamic", "factor": float(factor)}
        scale = float(self.base_scale(rope, self._fixed(rope)))
        return {"rope_type": "default", "rope_theta": rope.base * scale}
