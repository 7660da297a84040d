import math
from dataclasses import replace

from rope_ext.methods.checked import Tokens, not_none
from rope_ext.methods.geometry import Band, after
from rope_ext.methods.kinds import Rope, Self, Tempered, register


@register
class SelfExtend(Tempered):
    """Beyond ``window``, groups of tokens share a position.

    From factor 26 on, the default group exceeds the 64 that the authors call reasonable.
    llama.cpp's ``--grp-attn-n`` is another method, which also changes distances to neighbors.

    In both directions, later keys have the negative distances of earlier ones, with the positions
    of query and key swapped. LongEmbed's code for embedders (arXiv 2404.12096) does the same, but
    scales logits by the length of the padded batch, where ``log_n`` counts the tokens of each text,
    and counts positions from the first column, which is padding if that is on the left.

    Args:
        window: tokens that keep their exact distances; a quarter of the trained length by default.
        group: tokens that share a position; by default the smallest number that keeps the largest
            distance within two thirds of the trained length, as the authors recommend
            (``w + (N - w) / G < 2/3 L``).

    Jin et al. 2024, arXiv 2401.01325; the rule for ``group`` is from the authors' repository.
    """

    name = "self_extend"
    aliases = ("group_attention",)
    summary = "no fine-tuning; exact distances to neighbors, grouped positions beyond"
    candidate_shares = {"window": (1 / 8, 1 / 4, 3 / 8)}

    window: Tokens | None = None
    group: Tokens | None = None

    def resolved(self, rope: Rope) -> Self:
        window = self.window or max(1, rope.length // 4)
        group = self.group
        if group is None:
            room = 2 * rope.length / 3 - window
            valid = "smaller than two thirds of the trained length, unless group is given"
            self.require_resolved("window", room > 0, valid=valid, rope=rope)
            group = math.floor((self.target_length(rope) - window) / room) + 1
        return replace(self, window=window, group=group)

    def bands(self) -> tuple[Band, ...]:
        w = not_none(self.window)
        g = not_none(self.group)
        return after(w, lambda m: m // g + w - w // g, lambda n: n // g)
