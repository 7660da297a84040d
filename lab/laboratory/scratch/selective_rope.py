"""Selective rotary position embedding."""

from __future__ import annotations

import torch

from lab.laboratory.scratch.base import Positions, Shape

# Released defaults.
_RANK = 16  # of the projection
_TOKENS = 4  # of the convolution


class SelectiveRoPE(Positions):
    """RoPE whose step from token to token depends on the content.

        angle_p(t) = theta_p sum_(u <= t) g(x_u) (conv(A B x)_(u, p) + exp(b_p))

    ``x`` is the input of the layer, normalized for each head; ``A B`` has rank 16; ``conv`` is a
    causal convolution of each column over 4 tokens; ``g`` is a sigmoid for each head. Of the
    released variants, this is the one with ``b`` and ``g``. With ``b`` alone, it is RoPE.

    Movahedi et al. 2025, arXiv 2511.17388; the authors' ``SelectiveRoPE`` with ``use_gate`` and
    ``use_bias``, but with the base of the model instead of 500,000.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        heads = shape.heads
        pairs = shape.columns // 2
        self.down = torch.nn.Linear(shape.width, _RANK, bias=False)
        self.up = torch.nn.Linear(_RANK, heads * pairs, bias=False)
        columns = heads * pairs
        self.conv = torch.nn.Conv1d(columns, columns, _TOKENS, groups=columns, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(heads, 1, pairs))
        self.gate = torch.nn.Linear(shape.width, heads)

    def turns(self, inputs: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = inputs.unflatten(-1, (self.shape.heads, -1))
        x = torch.nn.functional.normalize(heads, dim=-1).flatten(-2)
        columns = self.up(self.down(x)).mT
        # On the left, so that no token sees a later one.
        step = self.conv(torch.nn.functional.pad(columns, (_TOKENS - 1, 0)))
        step = step.unflatten(1, (self.shape.heads, -1)).mT + self.bias.exp()
        angle = self.theta * (self.gate(x).sigmoid().mT[..., None] * step).cumsum(-2)
        return angle.cos(), angle.sin()
