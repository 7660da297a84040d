from typing import Any

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.checked import Base
from rope_ext.methods.kinds import FrequencyMethod, Rope, register


def smallest_base(length: float) -> float:
    """The smallest base that still distinguishes related tokens at ``length`` tokens.

    Fitted by Men et al. 2024, arXiv 2405.14591, figure 1.
    """
    return 0.0424 * length**1.628


@register
class ABF(FrequencyMethod):
    """Uses a larger base that you choose, for long continued training.

    Llama 2 Long went from base 10,000 to 500,000, and Qwen2.5-1M to 10,000,000. Only the base
    changes, so every engine runs the checkpoint. Without training, it is ``ntk`` with another base.

    Args:
        base: the new base. None uses the smallest useful base for the target length,
            ``0.0424 * L_target ** 1.628`` (arXiv 2405.14591), if it is above the trained base.

    Xiong et al. 2023, arXiv 2309.16039, section 2.
    """

    name = "abf"
    aliases = ("adjusted_base_frequency", "base")
    summary = "long continued training, as for Llama 2 Long and Code Llama"

    base: Base | None = None

    def new_base(self, rope: Rope) -> float:
        target = self.target_length(rope)
        base = self.base or smallest_base(target)
        if base < rope.base:
            fault = (
                f"base {base:g} is smaller than the trained base {rope.base:g}"
                if self.base
                else f"the trained base {rope.base:g} is already large enough for {target} tokens "
                f"(the smallest useful one there is {base:g}, arXiv 2405.14591)"
            )
            raise OptionError(f"abf: {fault}; give base= a number above {rope.base:g}")
        return float(base)

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.with_base_times(self.new_base(rope) / rope.base)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.new_base(rope)}
