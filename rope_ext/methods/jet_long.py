import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from rope_ext.methods.checked import Numbers, Tokens, not_none
from rope_ext.methods.geometry import Band, Distance, Queries, identity
from rope_ext.methods.kinds import PositionMethod, Rope, Self, register
from rope_ext.methods.longrope import table_of
from rope_ext.methods.yarn import YaRN


@register
class JetLong(PositionMethod):
    """Beyond ``window``, groups of tokens share a position, and groups grow with the text.

    For the query at ``m`` and a key at ``n``, more than ``window`` tokens earlier, the distance is
    ``floor(m/G) - floor(n/G)`` with ``G = floor(m/step) + 1``. The authors' code uses the ``G`` of
    the last token for all queries of a forward, so its cached decoding differs from recomputation.
    Here every query has its own ``G``, as if the text ended there.

    Args:
        window: the largest exact distance, tokens; 2048 by default, as published, and at most a
            quarter of the trained length.
        step: tokens after which groups grow by one; by default, as published, the trained length.
        kept: None uses groups. ``"yarn"`` instead scales distances beyond ``window`` for each pair
            as YaRN scales its frequency with ``factor=G``; this is the authors' second variant
            (with a window of 4096 and a temperature). A list gives the share of the frequency that
            each pair keeps: distances are ``(m - n) (kept + (1 - kept) / G)``.

    NVIDIA 2026, arXiv 2607.07740; the formula is that of the authors' code.
    """

    name = "jet_long"
    causal_only = "groups earlier tokens by the position of the query in a growing text"
    summary = "no fine-tuning; short texts as unpatched, growing groups beyond"
    candidate_shares = {"window": (1 / 16, 1 / 8, 1 / 4, 1 / 2)}

    window: Tokens | None = None
    step: Tokens | None = None
    kept: Literal["yarn"] | Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept is not None and str(self.kept) != "yarn":
            valid = '"yarn", or a list of numbers from 0 to 1, one per pair'
            self.require_list("kept", Numbers(valid, 0, 1))

    @property
    def by_pair(self) -> bool:
        return self.kept is not None

    def resolved(self, rope: Rope) -> Self:
        window = self.window or max(1, min(2048, rope.length // 4))
        kept = self.kept
        if kept == "yarn":
            kept = tuple(YaRN(factor=self.factor).kept(rope).tolist())
        elif kept is not None:
            table_of(self, "kept", rope)  # refuses another number of pairs
        return replace(self, window=window, step=self.step or rope.length, kept=kept)

    def bands(self) -> tuple[Band, ...]:
        far = not_none(self.window) + 1
        step = not_none(self.step)
        groups = math.ceil(self.factor)

        def band(group: int) -> Band:
            def shared(t: torch.Tensor) -> torch.Tensor:
                if self.kept is None:
                    return t // group
                kept = torch.tensor(self.kept, dtype=t.dtype, device=t.device)
                return t.unsqueeze(-1) * (kept + (1 - kept) / group)

            to = identity if group == 1 else shared
            end = None if group == groups else group * step
            return Band(Queries(far, (group - 1) * step, end), to, to)

        # The last band is the one whose rotation cached keys have: that of the unpatched model.
        return (*map(band, range(1, groups + 1)), Band(Distance(0, far), identity, identity))
