from typing import Annotated

import torch

from rope_ext.encodings.base import Encoding, Learned
from rope_ext.methods.checked import Base, Whole
from rope_ext.methods.kinds import register


@register
class Sandwich(Encoding):
    """Replaces RoPE with a bias: the inner product of two sinusoidal positions.

    ``(sum_i cos(d / base^(2i / width)) - width / 2) / (8h / H)`` for head ``h = 1 .. H`` and
    ``i = 1 .. width / 2``: the first heads have the shortest range.

    Args:
        width: width of the sinusoidal positions, an even number; 128 is best in the paper.
        base: base of their frequencies.

    Chi et al. 2023, arXiv 2212.10356. The divisors of the heads are those of NVIDIA NeMo's
    implementation, which uses the head dimension instead of 128.
    """

    name = "sandwich"
    summary = "products of sinusoidal positions as a bias; needs training"

    width: Annotated[int, Whole(2, parity="even")] = 128
    base: Base = 10000.0

    def bias(self, distance: torch.Tensor, heads: int, learned: Learned) -> torch.Tensor:
        exact = distance.double()  # float32 would round the angles
        total = torch.zeros_like(exact)
        for i in range(1, self.width // 2 + 1):  # one at a time, so memory stays small
            total += torch.cos(exact * self.base ** (-2 * i / self.width)) - 1
        ratio = 8 / heads * torch.arange(1, heads + 1, dtype=exact.dtype, device=exact.device)
        return (total / ratio[:, None]).to(distance)
