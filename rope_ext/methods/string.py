import math
from dataclasses import replace

from rope_ext.methods.checked import Tokens, not_none
from rope_ext.methods.geometry import Band, after, identity
from rope_ext.methods.kinds import Factor, PositionMethod, Self, register
from rope_ext.methods.rope import Rope
from rope_ext.methods.temperature import yarn_factor


@register
class STRING(PositionMethod):
    """Distances from ``shift`` on restart at ``window``: ``m - n - shift + window``.

    Large distances are rare in training; STRING replaces them with frequent ones. Distances below
    ``shift`` do not change, so the context can at most be doubled. Cosine and sine are multiplied
    by ``0.1 ln(2) + 1`` for any factor, as in the authors' code, unless ``attention_factor=1``.

    Args:
        factor: 1 makes better use of the trained context without extending it.
        shift: S, tokens; a third of the trained length by default, or more if ``factor`` needs it.
        window: W, tokens; 128 by default, at most a sixteenth of the trained length.

    An et al. 2024, arXiv 2410.18745.
    """

    name = "string"
    summary = "better use of the trained context (factor=1), or up to twice its length"
    allows_factor_one = True
    candidate_shares = {"window": (1 / 32, 1 / 16, 1 / 8)}

    factor: Factor = 1.0
    shift: Tokens | None = None
    window: Tokens | None = None

    def resolved(self, rope: Rope) -> Self:
        length = rope.length
        target = self.target_length(rope)
        window = self.window or max(1, min(128, length // 16))
        shift = self.shift or max(math.ceil(length / 3), target - length + window)
        full = replace(self, shift=shift, window=window)
        full.require_resolved("window", window <= shift, valid=f"at most shift={shift}", rope=rope)
        if self.shift is None:
            most = math.floor(100 * (2 * length - window) / length) / 100
            valid = f"at most {most:g}, unless shift is given; patch with 'rerope' to go further"
            self.require_resolved("factor", shift <= length, valid=valid, rope=rope)
        return full

    def own_scaling(self, rope: Rope) -> float:
        return yarn_factor(2)

    def bands(self) -> tuple[Band, ...]:
        s = not_none(self.shift)
        w = not_none(self.window)
        return after(s, lambda m: m - s + w, identity)
