"""Jet-Long."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from rope_ext.methods.checked import not_none
from rope_ext.methods.geometry import Distance, Queries
from rope_ext.methods.kinds import Band, PositionMethod, identity
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope


@register
@dataclass(frozen=True, kw_only=True)
class JetLong(PositionMethod):
    """Beyond ``window``, groups of tokens share a position, and groups grow with the text.

    Use it without fine-tuning where most texts are short: up to the trained length, the model is
    the unpatched one. The query at ``m`` sees a key at ``n``, more than ``window`` tokens before
    it, at the distance ``floor(m/G) - floor(n/G)`` with ``G = floor(m/step) + 1``. The authors'
    code uses the ``G`` of the last token for all queries of a forward, so that cached decoding
    differs from recomputation after every ``step`` tokens. Here every query has its own, so that
    the last token is as published and every earlier one as if the text ended with it.

    Args:
        window: the largest exact distance, tokens; 2048 by default, as published, and at most a
            quarter of the trained length.
        step: the number of tokens after which groups have one token more; the trained length by
            default, as published.

    NVIDIA 2026, arXiv 2607.07740; the formula is that of the authors' code.
    """

    name = "jet_long"
    paper = "arXiv 2607.07740"
    summary = "no fine-tuning; short texts as unpatched, growing groups beyond"
    candidate_shares = MappingProxyType({"window": (1 / 16, 1 / 8, 1 / 4, 1 / 2)})

    valid_options = "a step of at most the trained length"

    window: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("window")
        self.require_tokens("step")

    def resolved(self, rope: Rope) -> JetLong:
        window = self.window or max(1, min(2048, rope.length // 4))
        return replace(self, window=window, step=self.step or rope.length)

    def bands(self) -> tuple[Band, ...]:
        far, step = not_none(self.window) + 1, not_none(self.step)
        groups = math.ceil(self.factor)

        def band(group: int) -> Band:
            def shared(t: torch.Tensor) -> torch.Tensor:
                return t // group

            to = identity if group == 1 else shared
            end = None if group == groups else group * step
            return Band(Queries(far, (group - 1) * step, end), to, to)

        # The last band is the one whose rotation cached keys have: that of the unpatched model.
        return (*map(band, range(1, groups + 1)), Band(Distance(0, far), identity, identity))
