"""Fourier position embedding."""

from __future__ import annotations

import math

import torch

from lab.laboratory.scratch.base import Positions, Shape

_GAIN = 0.3
"""Of the random coefficients: the smallest of the released ones (60 million parameters)."""


class FoPE(Positions):
    """RoPE with a Fourier series in each pair, and no frequency below one rotation in training.

        cos_p(t) = sum_w C[h, w, p] cos(t w),  sin_p(t) = sum_w S[h, w, p] sin(t w),  w >= 2 pi / L

    ``C`` and ``S`` are one at the pair's own frequency plus random numbers, drawn once for each
    layer and head, and not trained. At most half of the pairs have a series; cosine and sine of the
    others are 1, as released: position zero times the square root of 2.

    Hua et al. 2024, arXiv 2412.17739; the authors' ``FourierEmbedding`` with their
    configuration ``eye_xavier_norm_0_3-sep_basis_head-ignore_clamp_zero``.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        # Slower pairs complete no rotation in training; they get no frequency.
        self.theta = theta = self.theta[self.theta >= 2 * math.pi / shape.length]
        count = min(len(theta), shape.columns // 4)
        own = torch.zeros(len(theta), count)
        for place, frequency in enumerate(range(0, len(theta), math.ceil(len(theta) / count))):
            own[frequency, place] = 1
        for name in ("of_cos", "of_sin"):
            drawn = torch.empty(shape.heads, len(theta), count)
            self.register_buffer(name, own + torch.nn.init.xavier_normal_(drawn, gain=_GAIN))

    def turns(self, inputs: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = t[:, None, :, None] * self.theta
        parts = (angle.cos() @ self.of_cos, angle.sin() @ self.of_sin)
        rest = self.shape.columns // 2 - self.of_cos.shape[-1]
        cos, sin = (torch.nn.functional.pad(part, (0, rest), value=1.0) for part in parts)
        return cos, sin
