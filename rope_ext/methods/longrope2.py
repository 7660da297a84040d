import math
from typing import Annotated, Any

import torch

from rope_ext.methods.checked import Number, Whole
from rope_ext.methods.kinds import FrequencyMethod, Rope, register
from rope_ext.methods.longrope import Table, table_of


@register
class LongRoPE2(FrequencyMethod):
    """Divides pairs by ``factor`` or more from a critical pair on, and faster ones as NTK does.

    In theory, the critical pair is the first one without a full rotation within the trained
    length. The authors search for a faster one: 30 instead of 35 for Llama-3-8B. Tune ``critical``
    and ``stretch`` on your model with :func:`rope_ext.calibrate`. Cosine and sine are multiplied by
    ``sqrt(1 + ln(s) / ln(length))``, as in LongRoPE's code.

    Args:
        critical: index, from 0, of the first pair that is divided by ``stretch * factor``; None is
            30/35 of the theoretical one.
        stretch: from 1 to 2, the range that the paper searches for slow pairs.
        long_factor: a searched or published table, used instead: the divisor of each pair.

    Shang et al. 2025, arXiv 2502.20082, section 3. The NTK part follows descriptions of the paper;
    recipes offer its training on two kinds of windows as ``positions: mixed_windows``.
    """

    name = "longrope2"
    summary = "NTK up to a critical pair that you search for, or a published table"

    critical: Annotated[int, Whole(0)] | None = None
    stretch: Annotated[float, Number(minimum=1, maximum=2)] = 1.0
    long_factor: Table | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.long_factor is not None:
            self.require("critical", self.critical is None, "None where long_factor is given")

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        if self.long_factor is not None:
            return super().grids(rope)
        theory = int((rope.rotations >= 1).sum())
        critical = tuple(round(share * theory) for share in (0.6, 0.75, 0.9, 1))
        return {**super().grids(rope), "critical": critical, "stretch": (1.0, 1.25, 1.5)}

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        if self.long_factor is not None:
            return rope.inv_freq / table_of(self, "long_factor", rope)
        critical = self.critical
        if critical is None:
            critical = round(30 / 35 * int((rope.rotations >= 1).sum()))
        index = torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu")
        power = torch.where(index < critical, index / max(critical, 1), 1.0)
        return rope.inv_freq / float(self.stretch * self.factor) ** power

    def own_scaling(self, rope: Rope) -> float:
        return math.sqrt(1 + math.log(self.factor) / math.log(rope.length))
