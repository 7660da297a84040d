import math
from dataclasses import replace
from typing import Annotated

import torch

from rope_ext.methods.checked import Tokens, Whole, not_none
from rope_ext.methods.geometry import Band, Distance, identity
from rope_ext.methods.kinds import PositionMethod, Rope, Self, register
from rope_ext.methods.temperature import yarn_factor

# Fitted by the authors to Llama-3-8B (8192 tokens): M(l) = c / (1 + exp(-(a l + b))), here in
# trained lengths, and the constant that they use within the trained length.
_SLOPE = 0.8596
_SHIFT = -2.4666
_MOST = 0.7574
_WITHIN = 1536 / 8192


@register
class LaMPE(PositionMethod):
    """Keeps the nearest and farthest distances exact and maps those in between to fewer positions.

    The authors map each text by its length. Here ``length`` fixes the map, so that cached keys
    keep their positions; pass the length of your texts. With ``c = mapped / (length - 1)``,
    distances from ``head`` on are ``floor(c m) - floor(c n)``, shifted to continue at ``head - 1``,
    and about the last ``tail`` before ``length`` grow by one per token again. Cosine and sine are
    multiplied by ``0.1 ln(2) + 1``, as in the authors' code.

    Args:
        length: text length that the map is made for, tokens; the extended context by default.
        head: tokens that keep their exact distances; an eighth of the trained length by default.
            The paper recommends 1/8 to 1/16.
        mapped: M, the number of positions for the whole text; by default from the authors' sigmoid.
        tail: tokens; 200 of 8192 by default. Moved to the end of tokens that share a position.

    Zhang et al. 2025, arXiv 2508.02308; formulas and defaults from the authors' code.
    """

    name = "lampe"
    summary = "no fine-tuning, one text length; exact for nearest and farthest tokens"
    allows_factor_one = True
    candidate_shares = {"head": (1 / 16, 1 / 8, 1 / 4)}

    length: Annotated[int, Whole(2)] | None = None
    head: Tokens | None = None
    mapped: Tokens | None = None
    tail: Tokens | None = None

    def resolved(self, rope: Rope) -> Self:
        trained = rope.length
        length = self.length or max(2, self.target_length(rope))
        share = _WITHIN
        if length >= trained:
            share = _MOST / (1 + math.exp(-(_SLOPE * length / trained + _SHIFT)))
        mapped = self.mapped or max(1, int(share * trained))
        full = replace(
            self,
            length=length,
            head=self.head or max(1, trained // 8),
            mapped=mapped,
            tail=self.tail or max(1, round(trained * 200 / 8192)),
        )
        full.require_resolved("mapped", mapped < length, valid=f"below length={length}", rope=rope)
        return full

    def own_scaling(self, rope: Rope) -> float:
        return yarn_factor(2)

    def bands(self) -> tuple[Band, ...]:
        head = not_none(self.head)
        length = not_none(self.length)
        count = not_none(self.mapped)
        tail = not_none(self.tail)
        last = length - 1

        def mapped(t: torch.Tensor) -> torch.Tensor:
            return (t * count / last).floor()

        def place(t: int) -> int:
            return t * count // last

        near = head - 1 - place(head)
        far = min(((place(min(tail, last)) + 1) * last - 1) // count, last)
        shift = last - far - place(last - far) - near
        border = length - far
        if border <= head:
            return super().bands()
        return (
            Band(Distance(0, head), identity, identity),
            Band(Distance(border, None), lambda m: m - shift, identity),
            Band(Distance(head, border), lambda m: mapped(m) + near, mapped),
        )
