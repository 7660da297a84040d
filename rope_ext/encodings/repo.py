from typing import Literal

import torch
import torch.nn.functional as F

from rope_ext.encodings.base import STD, Encoding, Learned
from rope_ext.methods.kinds import Rope, register


@register
class RePo(Encoding):
    """RoPE with real-valued positions that each layer computes from its hidden states.

    ``z = (silu(x W_g) * (x W_c)) W_z``, one position for every key head; ``x`` is the input of the
    query and key projections, and ``W_g`` and ``W_c`` map it to an eighth of its columns. Queries
    and keys are rotated by ``z`` instead of their index in the sequence, so only the causal mask
    provides the order. The first 5 of 16 layers keep RoPE; ``layers`` chooses others. Query heads
    that share keys share positions. The paper trains all weights on 50 billion tokens.

    Args:
        positions: ``"learned"``, as published, or ``"shifted"`` for ``t + z``. ``W_z`` then starts
            at zero, so that training starts from the original model.

    Li et al. 2025, arXiv 2512.14391; sizes, layers and initial values are from the authors' code
    and its two configurations (OLMo-2: 5 of 16 layers, 10 of 32).
    """

    name = "repo"
    causal_only = "has no order but that of a causal mask"
    summary = "RoPE with positions computed from hidden states; needs training"
    redefining = ("positions",)

    positions: Literal["learned", "shifted"] = "learned"

    def reached(self, rope: Rope) -> int:
        return rope.length if self.positions == "shifted" else super().reached(rope)

    def span(self, rope: Rope, length: int) -> torch.Tensor:
        if self.positions == "shifted":  # which start as those of the model
            return torch.tensor([length], dtype=torch.float64, device="cpu")
        return super().span(rope, length)

    def default_layers(self, count: int) -> tuple[int, ...]:
        return tuple(range(5 * count // 16, count))

    def initial_positions(self, columns: int, heads: int) -> dict[str, torch.Tensor]:
        inner = max(1, columns // 8)
        shapes = {"gate": (inner, columns), "content": (inner, columns), "position": (heads, inner)}
        weights = {
            name: torch.nn.init.trunc_normal_(torch.empty(shape), std=STD, a=-3 * STD, b=3 * STD)
            for name, shape in shapes.items()
        }
        if self.positions == "shifted":
            weights["position"].zero_()
        return weights

    def places(self, x: torch.Tensor, t: torch.Tensor, learned: Learned) -> torch.Tensor:
        r = F.silu(x @ learned["gate"].mT) * (x @ learned["content"].mT)
        z = (r @ learned["position"].mT).mT
        return t.unsqueeze(-2) + z if self.positions == "shifted" else z
