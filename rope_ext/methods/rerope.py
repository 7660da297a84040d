from dataclasses import replace

from rope_ext.methods.checked import Tokens, not_none
from rope_ext.methods.geometry import Band, after
from rope_ext.methods.kinds import LogScaled, Rope, Self, register


@register
class ReRoPE(LogScaled):
    """Clips distances at ``window``: ``min(m - n, window)``.

    All tokens beyond the window have the same distance: the model finds and uses them, but does not
    know their order; ``leaky_rerope`` and ``self_extend`` keep the order. For keys beyond the
    window, the query is rotated to position ``window`` and the key is not rotated.

    Args:
        window: tokens; half of the trained length by default.
        published: use a quarter of the trained length as the default window, like the author for
            Llama 2 (1024 of 4096); docs/evidence.md compares both.

    Su 2023, kexue.fm/archives/9708.
    """

    name = "rerope"
    paper = "Su 2023, kexue.fm/archives/9708"
    summary = "no fine-tuning, any length; distances are clipped at the window"
    candidate_shares = {"window": (1 / 8, 1 / 4, 1 / 2, 3 / 4)}

    window: Tokens | None = None
    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:  # so that equal settings compare equal
            self.set("published", False)

    def resolved(self, rope: Rope) -> Self:
        share = 4 if self.published else 2
        return replace(self, window=self.window or max(1, rope.length // share))

    def bands(self) -> tuple[Band, ...]:
        window = not_none(self.window)
        return after(window, float(window), 0.0)
