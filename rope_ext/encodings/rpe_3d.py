from dataclasses import replace
from typing import Annotated

import torch

from rope_ext.encodings.base import Encoding
from rope_ext.methods.checked import Number, Tokens, not_none
from rope_ext.methods.geometry import Band, Distance
from rope_ext.methods.kinds import Rope, Self, register


@register
class RPE3D(Encoding):
    """RoPE that restarts in every chunk, with a second angle that distinguishes the chunks.

    Token ``m`` of chunk ``j`` becomes ``e^(i m theta) (cos(phi_j) i h + sin(phi_j) h)`` with
    ``phi_j = base ** -j``, which is a rotation by ``m theta - phi_j`` and by 90 degrees for all
    tokens. Within a chunk, logits are those of RoPE. With the published base, only the first chunk
    differs from the others; a ``base`` close to 1 distinguishes them.

    Args:
        chunk: tokens; three quarters of the trained length by default, as published.
        base: base of the second angle; the base of the rotation by default, as published.

    Ma et al. 2025, arXiv 2406.09897, definition 1.
    """

    name = "3d_rpe"
    causal_only = "restarts positions in chunks of earlier tokens"
    summary = "positions within chunks and one angle per chunk; needs training"

    chunk: Tokens | None = None
    base: Annotated[float, Number(minimum=1)] | None = None

    def resolved(self, rope: Rope) -> Self:
        (chunk,) = rope.tokens(0.75)
        base = rope.base if self.base is None else self.base
        return replace(self, chunk=self.chunk or chunk, base=float(base))

    def bands(self) -> tuple[Band, ...]:
        chunk = not_none(self.chunk)

        def within(t: torch.Tensor) -> torch.Tensor:
            return t % chunk

        return (Band(Distance(0, None), within, within),)

    def phase(self, t: torch.Tensor) -> torch.Tensor:
        return -(not_none(self.base) ** -(t // not_none(self.chunk)))
