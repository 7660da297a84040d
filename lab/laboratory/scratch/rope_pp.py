"""RoPE++: heads for the imaginary part of RoPE's complex product."""

from __future__ import annotations

import torch

from lab.laboratory.scratch.base import Positions, rotate
from rope_ext.errors import OptionError


class RopePP(Positions):
    """Every query twice: rotated as in RoPE, and by a quarter turn less.

        real_ij = s <R(i) q_i, R(j) k_j>,  imaginary_ij = s <R(i) R(-pi / 2) q_i, R(j) k_j>

    Both share keys and values. Subclasses define which projections of the layer change.

    Liu et al. 2025, arXiv 2512.07525; the authors' ``imag1`` (EH) and ``imag2`` (EC).
    """

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, inputs: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.turns(inputs, t)
        # A quarter turn less: cos(a - pi / 2) = sin(a), sin(a - pi / 2) = -cos(a).
        both = (rotate(query, cos, sin), rotate(query, sin, -cos))
        return torch.stack(both, 2).flatten(1, 2), rotate(key, cos, sin)


class RopePPEqualCache(RopePP):
    """As many keys and values as RoPE, twice the heads, and an output projection for them."""

    def prepare(self, attention: torch.nn.Module, initial: float) -> None:
        attention.o_proj = _linear(2 * self.shape.width, self.shape.width, initial)


class RopePPEqualHeads(RopePP):
    """As many heads as RoPE, from half as many queries, keys and values.

    Raises:
        OptionError: the number of heads is odd.
    """

    def prepare(self, attention: torch.nn.Module, initial: float) -> None:
        heads, odd = divmod(self.shape.heads, 2)
        if odd:
            raise OptionError(
                f"rope_pp_eh needs an even number of heads, not {self.shape.heads}; "
                f"use rope_pp_ec, or another number of heads"
            )
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, _linear(self.shape.width, self.shape.width // 2, initial))
        attention.num_heads = attention.num_key_value_heads = heads


def _linear(inputs: int, outputs: int, initial: float) -> torch.nn.Linear:
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    torch.nn.init.normal_(layer.weight, std=initial)
    return layer
