from typing import Annotated

import torch

from rope_ext.methods.checked import Number
from rope_ext.methods.kinds import FrequencyMethod, Rope, register


@register
class PRoPE(FrequencyMethod):
    """Rotates only the fastest fraction ``p`` of the pairs.

    Without extensive training it does not extend a model.

    Args:
        p: fraction of pairs that rotate, in (0, 1]; rounded down to whole pairs.

    Barbero et al. 2024, arXiv 2410.06205, section 6; transformers calls it ``proportional``.
    """

    name = "p_rope"
    aliases = ("proportional",)
    summary = "training studies: unrotated pairs carry meaning at any distance"

    p: Annotated[float, Number(above=0, maximum=1)] = 0.75

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        index = torch.arange(rope.dim // 2, device="cpu")
        return torch.where(index < int(self.p * (rope.dim // 2)), rope.inv_freq, 0.0)
