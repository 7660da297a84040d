from dataclasses import replace
from typing import Annotated

from rope_ext.methods.checked import Tokens, Whole, not_none
from rope_ext.methods.geometry import Band, Distance, Sinks, identity
from rope_ext.methods.kinds import PositionMethod, Rope, Self, register


@register
class LMInfinite(PositionMethod):
    """Attends only to the last ``window`` tokens and the first ``sinks`` tokens.

    The usable context is not extended: tokens outside the window stay in the cache, but cannot be
    recalled. Sinks outside the window get a distance of ``window``.

    Args:
        window: tokens; the trained length by default.
        sinks: first tokens of the sequence that stay visible; 10, the fewest that the paper
            recommends (StreamingLLM, arXiv 2309.17453, uses 4).

    Han et al. 2023, arXiv 2308.16137.
    """

    name = "lm_infinite"
    aliases = ("streaming",)
    summary = "fluent text of any length; forgets tokens outside the window"

    window: Tokens | None = None
    sinks: Annotated[int, Whole(0)] = 10

    def resolved(self, rope: Rope) -> Self:
        return replace(self, window=self.window or rope.length)

    def bands(self) -> tuple[Band, ...]:
        window = not_none(self.window)
        near = Band(Distance(0, window), identity, identity)
        if not self.sinks:
            return (near,)
        return (Band(Sinks(self.sinks, window), float(window), 0.0), near)
