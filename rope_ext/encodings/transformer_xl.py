from typing import Annotated, Literal

import torch

from rope_ext.encodings.base import STD, Block, Encoding, Heads, Learned
from rope_ext.methods.checked import Base, Whole
from rope_ext.methods.kinds import register


@register
class TransformerXL(Encoding):
    """Replaces RoPE with a learned projection of the sinusoid of the distance.

    ``<q + u, k> + <q + v, W_R R_d>`` with ``u``, ``v`` and ``W_R`` learned for every head of a
    layer. The KV cache takes the role of the paper's segment memory.

    Args:
        projection: ``"learned"``, or ``"key"`` to use the layer's own key projection as ``W_R``,
            with a sinusoid of the hidden size. Training then changes both uses of it. Families with
            more than one linear layer for keys (Qwen3, Gemma 3, DeepSeek-V3) raise an error.
        width: size of a sinusoid, an even number; None: the head dimension. The paper uses the
            hidden size of the model, which is slower. Only for a learned projection.
        base: base of the sinusoid's frequencies.

    Dai et al. 2019, arXiv 1901.02860, section 3.3; Yang et al. 2019 (XLNet), arXiv 1906.08237.
    """

    name = "transformer_xl"
    aliases = ("xlnet",)
    later_keys = True
    summary = "learned projections of sinusoids of the distance; needs training"

    projection: Literal["learned", "key"] = "learned"
    width: Annotated[int, Whole(2, parity="even")] | None = None
    base: Base = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projected:
            self.require("width", self.width is None, "left out with projection='key'")

    @property
    def projected(self) -> bool:
        return self.projection == "key"

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        width = self.width or heads.columns + heads.columns % 2
        shapes = {"u": (), "v": ()} | ({} if self.projected else {"r": (width,)})
        return {
            name: STD * torch.randn(heads.count, heads.columns, *more)
            for name, more in shapes.items()
        }

    def logits(self, block: Block, learned: Learned) -> torch.Tensor:
        # As a rotation: the product of a query with ``r`` (``[heads, columns, width]``), rotated by
        # the query's position, is multiplied with the sinusoid of the key's position.
        query = block.query
        key = block.key
        r = learned["key_projection" if self.projected else "r"].to(query)
        (sine, cosine), of_key = (self._sinusoid(at, r) for at in (block.query_at, block.key_at))
        of_sine, of_cosine = ((query + learned["v"].to(query)[:, None]) @ r).chunk(2, -1)
        # sin(i - j) and cos(i - j), split into terms in i and in j.
        to_sine = of_cosine * sine - of_sine * cosine
        to_cosine = of_sine * sine + of_cosine * cosine
        more = torch.cat((to_sine, to_cosine), -1) @ torch.cat(of_key, -1).mT
        more = more + learned["u"].to(key)[:, None] @ key.mT
        return block.content + block.scale * more

    def _sinusoid(self, at: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sines and cosines of every frequency at positions, ``[tokens, width / 2]`` each."""
        pairs = r.shape[-1] // 2
        exponent = torch.arange(pairs, dtype=torch.float64, device=at.device) / pairs
        angle = at.double()[:, None] * self.base**-exponent
        return angle.sin().to(r.dtype), angle.cos().to(r.dtype)
