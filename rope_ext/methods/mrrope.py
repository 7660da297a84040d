"""MrRoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from rope_ext.methods.kinds import FrequencyMethod
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope


@register
@dataclass(frozen=True, kw_only=True)
class MrRoPE(FrequencyMethod):
    """YaRN's three parts with a mixed radix between them, and YaRN's ``0.1 ln(s) + 1``.

    The frequencies are the digits of a position in a number system. Between the last pair with
    more than ``beta_fast`` turns, which is kept, and the first with fewer than ``beta_slow``,
    which is divided by ``factor``, every pair has a larger radix than trained: all by as much
    (``"uni"``), or each by more than the one before (``"pro"``). Where no pair turns that often
    the fastest is kept, as in YaRN; where none turns that rarely, the one after the slowest would
    be the first that is divided in full.

    Args:
        beta_fast: turns in the trained context; the paper's alpha.
        beta_slow: turns in the trained context; the paper's beta.
        mode: ``"pro"`` divides pair ``t`` of the ``n`` between the two by ``factor`` to the power
            ``t (t + 1) / (n (n + 1))``, ``"uni"`` to the power ``t / n``.

    Tian et al. 2026, arXiv 2601.22181, section 3; its formulas, and the authors' own code.
    """

    name: ClassVar[str] = "mrrope"
    paper: ClassVar[str] = "arXiv 2601.22181"
    use: ClassVar[str] = "no fine-tuning; YaRN with more of the stretch on the slow pairs"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mode: Literal["pro", "uni"] = "pro"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("beta_slow", above=0)
        self.require_number("beta_fast", above=self.beta_slow)
        self.require_choice("mode", "pro", "uni")

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        slow, fast = (1.0, 2.0, 4.0), (16.0, 32.0, 64.0)
        return {**super().grids(rope), "beta_slow": slow, "beta_fast": fast}

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
        return 0.1 * math.log(self.factor) + 1.0
