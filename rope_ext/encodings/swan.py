from dataclasses import replace
from typing import Annotated

from rope_ext.encodings.base import Encoding
from rope_ext.methods.checked import Whole
from rope_ext.methods.kinds import LogN, Rope, Self, Temperature, register


@register
class SWAN(Encoding):
    """Lets every n-th layer attend to the whole text without positions, and the others to a window.

    The others rotate as trained, so no distance is new to them, and a growing cache keeps only the
    window for them. Layers ``start``, ``start + every``, ... have no positions. Only their queries
    get the temperature: ``"log_n"`` by default; the paper fits a logarithm. Models that already
    have windowed layers raise an error.

    Args:
        every: layers in a group, one of which has no positions; 4 as published.
        start: the first layer without positions, counted from 0; 0 as published. Llama 4, Cohere
            and SmolLM3 put theirs last in a group: 3.
        window: tokens that the other layers attend to, including the query itself; a sixteenth of
            the trained length by default, as published (512 of 8192).

    Puvvada et al. 2025, arXiv 2504.08719, by its abstract and summaries.
    """

    name = "swan"
    causal_only = "has no order but that of a causal mask in the layers without positions"
    summary = "some layers without positions, a window in the others; needs training"
    by_layer = True

    every: Annotated[int, Whole(2)] = 4
    start: Annotated[int, Whole(0, below="every")] = 0
    window: Annotated[int, Whole(2)] | None = None

    def resolved(self, rope: Rope) -> Self:
        window = max(2, rope.tokens(1 / 16)[0]) if self.window is None else self.window
        trained = "at most the trained length, since longer distances are new to the rotation"
        self.require_resolved("window", window <= rope.length, valid=trained, rope=rope)
        return replace(self, window=window)

    def own_temperature(self) -> Temperature:
        return LogN()

    def default_layers(self, count: int) -> tuple[int, ...]:
        return tuple(range(self.start, count, self.every))

    def window_beside(self) -> int | None:
        return self.window
