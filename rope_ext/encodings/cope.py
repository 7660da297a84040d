from typing import Annotated

import torch

from rope_ext.encodings.base import Block, Encoding, Heads, Learned
from rope_ext.methods.checked import Whole
from rope_ext.methods.kinds import register


@register
class CoPE(Encoding):
    """Replaces RoPE with positions that a query counts: the number of keys relevant to it.

    Every key ``k`` opens a gate, the sigmoid of its logit; ``p_ij`` is the sum of the gates from
    ``j`` to the query, at most ``positions - 1``. ``<q_i, e[p_ij]>`` is added to the logit, without
    the model's scale, as in the paper's listing, and interpolated linearly between integers. Each
    layer has one table, shared by its heads and initialized to zero.

    Args:
        positions: rows of the table (``npos_max``). ``replace=True`` with more keeps trained ones.

    Golovneva et al. 2024, arXiv 2405.18719.
    """

    name = "cope"
    causal_only = "counts the relevant tokens between a key and a later query"
    summary = "positions counted by the content; slower; needs training"
    grows = 0

    positions: Annotated[int, Whole(2)] = 64

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        return {"table": torch.zeros(self.positions, heads.columns)}

    def pair_width(self, heads: int) -> int:
        return 8 * heads  # gates, positions, two indices of int64, two logits

    def logits(self, block: Block, learned: Learned) -> torch.Tensor:
        content = block.content
        table = learned["table"]
        gates = torch.sigmoid(content) * block.visible  # hidden keys do not count
        counted = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(table) - 1)
        of_whole = block.query @ table.to(block.query).mT
        below = counted.detach().floor().long()
        above = (below + 1).clamp(max=len(table) - 1)
        part = counted - below
        low = of_whole.gather(-1, below)
        high = of_whole.gather(-1, above)
        return content + low + part * (high - low)
