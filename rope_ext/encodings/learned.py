from dataclasses import replace
from typing import Annotated, Literal

import torch

from rope_ext.encodings.base import InputEncoding, Learned
from rope_ext.methods.checked import Whole, not_none
from rope_ext.methods.kinds import Rope, Self, register

_SHARE = 0.4
"""Weight of the coarse part of a hierarchical position, as published."""


@register
class LearnedPositions(InputEncoding):
    """Replaces RoPE with a learned vector for each position, added to the embeddings.

    The table is initialized from a normal distribution with the scale of the embeddings. To extend
    a trained table, patch again with ``replace=True`` and a larger ``length``, which adds untrained
    rows, or with ``extend``.

    Args:
        length: entries of the table, tokens; by default the trained length, or ``factor`` times
            that without ``extend``.
        extend: how to go beyond the table. ``"hierarchical"``: position ``i n + j`` of a table of
            ``n`` is ``a u_i + (1 - a) u_j``, with ``a = 0.4`` and ``u = (p - a p_0) / (1 - a)``, up
            to ``n^2`` tokens; ``"interpolate"``: ``factor`` times the trained length is mapped onto
            the table. None: longer sequences raise an error.

    Vaswani et al. 2017, arXiv 1706.03762, section 3.5, after Gehring et al. 2017; hierarchical: Su
    2020, kexue.fm/archives/7947.
    """

    name = "learned"
    summary = "a learned vector for each position; needs training"
    extension = "extend= and a larger factor, or "

    length: Annotated[int, Whole(2)] | None = None
    extend: Literal["hierarchical", "interpolate"] | None = None

    def resolved(self, rope: Rope) -> Self:
        resolved = self
        if self.length is None:
            own = self.target_length(rope) if self.extend is None else rope.length
            resolved = replace(self, length=own)
        resolved.covers(resolved.target_length(rope), rope)
        return resolved

    def limit(self, rope: Rope) -> int:
        length = not_none(self.length)
        if self.extend == "hierarchical":
            return length**2
        return max(length, self.target_length(rope)) if self.extend else length

    def initial_inputs(self, columns: int, size: float, rope: Rope) -> dict[str, torch.Tensor]:
        return {"table": size * torch.randn(not_none(self.length), columns, device="cpu")}

    def p(self, t: torch.Tensor, columns: int, rope: Rope, learned: Learned) -> torch.Tensor:
        length = not_none(self.length)

        def rows(index: torch.Tensor) -> torch.Tensor:
            found = learned["table"][index.long()]
            return found.to(torch.promote_types(found.dtype, torch.float32))

        if self.extend == "interpolate":
            t = t * min(1.0, length / self.target_length(rope))
            low = rows(t)
            high = rows((t + 1).clamp(max=length - 1))
            return torch.lerp(low, high, t.frac().unsqueeze(-1).to(low))
        if self.extend == "hierarchical":
            coarse = rows(t // length)
            fine = rows(t % length)
            # a u_i + (1 - a) u_j, which is p_j if i is 0
            return fine + _SHARE / (1 - _SHARE) * (coarse - rows(torch.zeros_like(t)))
        return super().p(t, columns, rope, learned)
