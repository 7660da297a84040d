import math
from typing import Annotated, Any

import torch

from rope_ext.methods.checked import Number
from rope_ext.methods.kinds import FrequencyMethod, Rope, register

Frequency = Annotated[float, Number(minimum=0)]


@register
class BaseTruncation(FrequencyMethod):
    """Keeps fast pairs and sets slow ones to a small constant, the slowest to zero.

    ``h = theta`` for ``theta >= upper``, ``constant`` between ``lower`` and ``upper``, 0 at or
    below ``lower``. Retrieval suffers, since only slow pairs distinguish large distances.

    Args:
        upper: radians per token; None is ``2 pi / length``.
        lower: radians per token; None is ``upper / 8``.
        constant: radians per token; None is ``upper / 16``.

    Pal et al. 2023 ("Giraffe"), arXiv 2308.10882, section 4.3; the defaults are the released ones.
    """

    name = "base_truncation"
    aliases = ("truncated_basis", "giraffe")
    summary = "fine-tuning studies: good perplexity at any length, but weaker retrieval"

    upper: Frequency | None = None
    lower: Frequency | None = None
    constant: Frequency | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.upper is not None and self.lower is not None:
            self.require("lower", self.lower <= self.upper, f"at most upper={self.upper}")

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        upper = 2 * math.pi / rope.length
        return {**super().grids(rope), "upper": (upper / 2, upper, 2 * upper)}

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        upper = 2 * math.pi / rope.length if self.upper is None else self.upper
        lower = upper / 8 if self.lower is None else self.lower
        constant = upper / 16 if self.constant is None else self.constant
        theta = rope.inv_freq
        slow = torch.full_like(theta, constant).where(theta > lower, 0.0)
        return torch.where(theta >= upper, theta, slow)
