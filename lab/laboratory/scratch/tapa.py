"""Token-aware phase attention."""

from __future__ import annotations

import math

import torch

from lab.laboratory.scratch.base import Positions, attend

_ALPHA = 0.1
"""Exponent of the distance, as published."""


class TAPA(Positions):
    """A logit times the cosine of a phase that depends on the distance and the content.

        logit_ij = <q, k>_A / sqrt(D / 2) cos(2 pi (i - j)^0.1 <q, k>_P / sqrt(D / 2))

    ``A`` is the first half of the ``D`` columns, ``P`` the second. It has no parameters.

    Yu Wang et al. 2025, arXiv 2509.12635, equation 12 with theta = 0.5 and alpha = 0.1.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        inputs: torch.Tensor,
        t: torch.Tensor,
    ) -> torch.Tensor:
        halves = [x.chunk(2, -1) for x in (query, key)]
        scale = (query.shape[-1] / 2) ** -0.5

        def logits(rows: slice) -> torch.Tensor:
            content, phase = (q[..., rows, :] @ k.mT * scale for q, k in zip(*halves, strict=True))
            distance = (t[:, None, rows, None] - t[:, None, None]).clamp(min=0)
            return content * torch.cos(2 * math.pi * distance**_ALPHA * phase)

        return attend(logits, value)
