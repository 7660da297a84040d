from dataclasses import replace
from typing import Annotated

from rope_ext.methods.checked import Number, Tokens, not_none
from rope_ext.methods.geometry import Band, after
from rope_ext.methods.kinds import LogScaled, Rope, Self, register


@register
class LeakyReRoPE(LogScaled):
    """Beyond ``window``, distances grow ``k`` times more slowly: ``w + (m - n - w) / k``.

    Choose ``factor`` for your longest text: there, the largest distance is the trained one.

    Args:
        window: tokens; an eighth of the trained length by default (512 of 4096, as published).
        k: by default chosen so that the largest distance of the extended context becomes that of
            the trained one, ``(factor L - w) / (L - w)``.

    Su 2023, kexue.fm/archives/9708.
    """

    name = "leaky_rerope"
    paper = "Su 2023, kexue.fm/archives/9708"
    summary = "like rerope, but distant tokens keep their order"
    candidate_shares = {"window": (1 / 8, 1 / 4, 1 / 2)}

    window: Tokens | None = None
    k: Annotated[float, Number(minimum=1)] | None = None

    def resolved(self, rope: Rope) -> Self:
        window = self.window or max(1, rope.length // 8)
        k = self.k
        if k is None:
            valid = "smaller than the trained length, or k given"
            self.require_resolved("window", window < rope.length, valid=valid, rope=rope)
            k = (self.target_length(rope) - window) / (rope.length - window)
        return replace(self, window=window, k=float(k))

    def bands(self) -> tuple[Band, ...]:
        w = not_none(self.window)
        k = not_none(self.k)
        return after(w, lambda m: m / k + w - w / k, lambda n: n / k)
