"""The sinusoidal positions of the original Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.encodings.base import Learned
from rope_ext.encodings.inputs import Sized, sinusoid
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope


@register
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(Sized):
    """Replaces RoPE with sines and cosines of the position, added to the embeddings.

    ``sin(t / base^(2i / d))`` in column ``2i`` and the cosine in column ``2i + 1``, times a scale.
    The paper multiplies embeddings by ``sqrt(d)`` instead, so that both have a magnitude of 1.

    Args:
        base: wavelengths range from ``2 pi`` to ``2 pi base`` tokens.

    Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """

    name: ClassVar[str] = "sinusoidal"
    paper: ClassVar[str] = "arXiv 1706.03762"
    summary: ClassVar[str] = "adds sines and cosines of the position to embeddings; needs training"

    base: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("base", above=1)

    def p(self, t: torch.Tensor, columns: int, rope: Rope, learned: Learned) -> torch.Tensor:
        return sinusoid(t, columns, self.base)
