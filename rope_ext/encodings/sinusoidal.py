import torch

from rope_ext.encodings.base import Learned, Sized, sinusoid
from rope_ext.methods.checked import Base
from rope_ext.methods.kinds import Rope, register


@register
class Sinusoidal(Sized):
    """Replaces RoPE with sines and cosines of the position, added to the embeddings.

    ``sin(t / base^(2i / d))`` in column ``2i`` and the cosine in column ``2i + 1``, times a scale,
    where the paper multiplies embeddings by ``sqrt(d)``.

    Args:
        base: wavelengths range from ``2 pi`` to ``2 pi base`` tokens.

    Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """

    name = "sinusoidal"
    summary = "adds sines and cosines of the position to embeddings; needs training"

    base: Base = 10000.0

    def p(self, t: torch.Tensor, columns: int, rope: Rope, learned: Learned) -> torch.Tensor:
        return sinusoid(t, columns, self.base)
