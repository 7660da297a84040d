"""Resonance RoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.kinds import FrequencyMethod
from rope_ext.methods.registry import build_method, register
from rope_ext.methods.rope import Rope
from rope_ext.methods.temperature import Temperature


@register
@dataclass(frozen=True, kw_only=True)
class Resonance(FrequencyMethod):
    """Wavelengths rounded to whole tokens, on top of any other frequency map.

    A pair whose wavelength is a whole number meets, beyond the trained context, only angles
    that it has seen within it.

    Args:
        on: the map to round: a fixed method's name (built with the same ``factor``) or object.

    Wang et al. 2024, arXiv 2403.00071, section 4.
    """

    name: ClassVar[str] = "resonance"
    aliases: ClassVar[tuple[str, ...]] = ("resonance_rope",)
    paper: ClassVar[str] = "arXiv 2403.00071"
    use: ClassVar[str] = "a refinement of another map (on='yarn'); free to try"

    on: str | FrequencyMethod = "yarn"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.on, str):
            object.__setattr__(self, "on", build_method(self.on, factor=self.factor))
        self.require("on", isinstance(self.on, FrequencyMethod), "a method or a method's name")
        if self.on.adapts:
            raise OptionError(
                f"resonance: on={self.on.name!r} changes with the sequence; give it length=..., "
                f"or choose a fixed method such as 'yarn'"
            )
        self.require("on", not self.on.start_tokens, "a map without start_tokens")
        self.require("factor", self.factor == self.on.factor, f"on's own, {self.on.factor}")

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        wavelength = 2 * math.pi / self.on.inv_freq(rope)
        return 2 * math.pi / wavelength.round()  # inf, and back to 0, for a pair at rest

    def extends(self, rope: Rope) -> bool:
        return self.on.extends(rope)  # rounding slows some pairs by itself

    def own_scaling(self, rope: Rope) -> float:
        return self.on.attention_scaling(rope)

    def own_temperature(self) -> Temperature | None:
        return self.on.own_temperature() if self.on.temperature is None else self.on.temperature
