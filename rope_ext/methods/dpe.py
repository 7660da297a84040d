import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch

from rope_ext.methods.checked import Numbers, Tokens, not_none
from rope_ext.methods.geometry import Band, after
from rope_ext.methods.kinds import Rope, Self, Tempered, register

# For each of the eight groups of Llama-3-8B (8192 tokens): rotations of its fastest pair within the
# trained length, and the effective length that the authors found, in trained lengths. For 16
# trained lengths, they divide the groups by 4, 4, 2, 16, 32, 32, 16 and 128.
_FOUND = (
    (1303.8, 4.0),
    (252.8, 4.0),
    (49.02, 8.0),
    (9.506, 1.0),
    (1.843, 0.5),
    (0.3574, 0.5),
    (0.0693, 1.0),
    (0.01344, 0.125),
)
_LIST = Numbers("a list of whole numbers of at least 1, one per group", least=1, whole=True)


@register
class DPE(Tempered):
    """Self-Extend with a group size ``S`` for each group of pairs.

    Beyond ``window``, distances are ``floor(m/S) + w - floor(w/S) - floor(n/S)``. The authors find
    the sizes with needles, one group of pairs at a time; the defaults transfer those of Llama-3-8B,
    and are a guess for any other model. All pairs are scaled, as in the released example, not a
    selection in each head.

    Args:
        window: tokens that keep their exact distances; an eighth of the trained length by default,
            the published 1024 of 8192.
        groups: number of pairs in each group, fastest first; by default eight groups, or as many as
            there are scales, as even as possible.
        scales: group sizes, whole numbers. By default, each group uses the effective length found
            for the group of Llama-3-8B whose fastest pair makes the nearest number of rotations (by
            ratio) within the trained length; ``S`` is the target length divided by this length.

    Lu et al. 2025, arXiv 2504.18857; formulas and lists from the authors' code.
    """

    name = "dpe"
    summary = "no fine-tuning; like self_extend, with one group size per group of pairs"
    allows_factor_one = True
    candidate_shares = {"window": (1 / 16, 1 / 8, 1 / 4)}
    by_pair = True

    window: Tokens | None = None
    groups: Annotated[Sequence[int], _LIST] | None = None
    scales: Annotated[Sequence[int], _LIST] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None and self.scales is not None:
            alike = len(self.groups) == len(self.scales)
            self.require("scales", alike, f"a list of {len(self.groups)}, one for each of groups")

    def resolved(self, rope: Rope) -> Self:
        pairs = rope.dim // 2
        groups = self.groups
        if groups is None:
            count = 8 if self.scales is None else len(self.scales)
            if self.scales is not None:
                valid = f"a list of at most {pairs} numbers, the pairs of this model"
                self.require("scales", count <= pairs, valid)
            count = min(count, pairs)
            groups = tuple(pairs // count + (i < pairs % count) for i in range(count))
        valid = f"numbers of pairs that make up all {pairs} of this model"
        self.require("groups", sum(groups) == pairs, valid)
        full = replace(self, window=self.window or max(1, rope.length // 8), groups=groups)
        if self.scales is None:
            first = [sum(groups[:i]) for i in range(len(groups))]
            turns = rope.rotations[first].clamp(min=1e-9).tolist()  # some pairs do not rotate
            lengths = [min(_FOUND, key=lambda f, r=r: abs(math.log(f[0] / r)))[1] for r in turns]
            scales = tuple(max(1, math.ceil(self.factor / found)) for found in lengths)
            full = replace(full, scales=scales)
        return full

    def bands(self) -> tuple[Band, ...]:
        w = not_none(self.window)
        scales = not_none(self.scales)
        groups = not_none(self.groups)
        of_pair = [s for s, n in zip(scales, groups, strict=True) for _ in range(n)]

        def grouped(t: torch.Tensor) -> torch.Tensor:
            return t.unsqueeze(-1) // torch.tensor(of_pair, dtype=t.dtype, device=t.device)

        def shifted(t: torch.Tensor) -> torch.Tensor:
            return grouped(t) + w - grouped(torch.full_like(t, w))

        return after(w, shifted, grouped)
