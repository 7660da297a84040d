from dataclasses import dataclass
from typing import Annotated

import torch

from rope_ext.encodings.base import Encoding
from rope_ext.methods.checked import Number, not_none
from rope_ext.methods.kinds import Temperature, register


@dataclass(frozen=True, kw_only=True, repr=False)
class DroPETemperature(Temperature):
    """``1 + c ln(max(1, (i + 1) / length))``: 1 within the trained length."""

    name = "drope"

    c: float
    length: int | None = None

    def at(self, t: torch.Tensor) -> torch.Tensor:
        return 1 + self.c * ((t + 1) / not_none(self.length)).log().clamp(min=0)


@register
class DroPE(Encoding):
    """Removes RoPE, and scales queries beyond the trained length.

    Patch a pretrained model, train it briefly at its trained length, then use it on longer texts.
    At position ``i`` queries are multiplied by ``1 + c ln(s)``, where ``s`` is ``i + 1`` divided by
    the trained length, and by 1 within it. The paper uses one number for a whole evaluation.

    Args:
        c: growth of the temperature, 0 for none; 0.1 to 0.4 as published, tuned on held-out text.

    Gelberg et al. 2025, arXiv 2512.12167.
    """

    name = "drope"
    causal_only = "has no order but that of a causal mask"
    summary = "removes RoPE from a pretrained model; needs brief training"

    c: Annotated[float, Number(minimum=0, maximum=10)] = 0.2

    def own_temperature(self) -> Temperature | None:
        return DroPETemperature(c=self.c) if self.c else None
