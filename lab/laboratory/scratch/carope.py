"""Context-aware rotary position embedding."""

from __future__ import annotations

import math

import torch

from lab.laboratory.scratch.base import Positions, Shape


class CARoPE(Positions):
    """RoPE whose frequencies depend on the token and the head.

        angle_p(t) = sum_(u <= t) f(x_u)^p,  f(x) = 1 / (softplus(x W + c) + 1),  p = 0, 1, ...

    RoPE is ``f = base^(-2 / columns)``, with which training begins: ``W`` is zero, and ``c`` a
    constant. The paper does not say how it starts from RoPE, and its formula has no ``c``. There,
    ``x`` is the token embedding; here, it is the input of the layer.

    Veisi et al. 2025, arXiv 2507.23083, section 2.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.weight = torch.nn.Parameter(torch.zeros(shape.width, shape.heads))
        # The inverse of softplus: with a weight of zero, f is that of RoPE.
        self.constant = math.log(math.expm1(shape.base ** (2 / shape.columns) - 1))

    def turns(self, inputs: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raised = torch.nn.functional.softplus(inputs @ self.weight + self.constant) + 1
        powers = torch.arange(self.shape.columns // 2, device=t.device, dtype=t.dtype)
        angle = (raised.mT[..., None] ** -powers).cumsum(-2)
        return angle.cos(), angle.sin()
