"""p-RoPE."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_ext.methods.kinds import FrequencyMethod
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope


@register
@dataclass(frozen=True, kw_only=True)
class PRoPE(FrequencyMethod):
    """Rotates only the fastest fraction ``p`` of the pairs.

    For training from scratch or with extensive fine-tuning: pairs that do not rotate carry meaning
    at any distance. Without training it does not extend a model.

    Args:
        p: fraction of pairs that rotate, in (0, 1]; rounded down to whole pairs.

    Barbero et al. 2024, arXiv 2410.06205, section 6; transformers calls it ``proportional``.
    """

    name = "p_rope"
    aliases = ("proportional",)
    paper = "arXiv 2410.06205"
    summary = "training studies: unrotated pairs carry meaning at any distance"

    p: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("p", above=0)
        self.require("p", self.p <= 1, "a number in (0, 1]")

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        index = torch.arange(rope.dim // 2, device="cpu")
        return torch.where(index < int(self.p * (rope.dim // 2)), rope.inv_freq, 0.0)
