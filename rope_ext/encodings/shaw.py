from typing import Annotated, Literal

import torch

from rope_ext.encodings.base import STD, Block, Encoding, Heads, Learned, sinusoid
from rope_ext.methods.checked import Tokens, Whole
from rope_ext.methods.kinds import register


@register
class Shaw(Encoding):
    """Replaces RoPE with vectors for each distance, added to keys and values.

    The heads of a layer share its vectors; distances beyond ``clip`` share the last one.

    Args:
        clip: tokens; the paper's k (16 and 8, for translation). A larger ``clip`` with
            ``replace=True`` keeps trained vectors.
        table: ``"learned"``, or ``"sinusoidal"`` for NEZHA's fixed sinusoids of the distance,
            without learned parameters.
        p_min: smaller distances share the vector of this distance, in tokens; ``clip`` is
            ``p_max`` in this notation.
        values: whether to add vectors to values, too, or to keys only.

    Shaw et al. 2018, arXiv 1803.02155; sinusoids: Wei et al. 2019, arXiv 1909.00204, eq. 5 and 6.
    """

    name = "shaw"
    summary = "learned vectors per distance for keys and values; needs training"
    redefining = ("p_min",)
    grows = 0

    clip: Tokens = 64
    table: Literal["learned", "sinusoidal"] = "learned"
    p_min: Annotated[int, Whole(0, below="clip")] = 0
    values: bool = True

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        if self.table == "sinusoidal":
            return {}
        rows = self.clip + 1 - self.p_min
        return {name: STD * torch.randn(rows, size) for name, size in self._columns(heads).items()}

    def constants(self, heads: Heads, device: torch.device) -> dict[str, torch.Tensor]:
        if self.table == "learned":
            return {}
        distance = torch.arange(self.p_min, self.clip + 1, dtype=torch.float64, device=device)
        # In the paper's formula the position of the query is subtracted.
        columns = self._columns(heads).items()
        return {name: sinusoid(-distance, size, 10000.0) for name, size in columns}

    def _columns(self, heads: Heads) -> dict[str, int]:
        keys = {"key": heads.columns}
        return keys | {"value": heads.value_columns} if self.values else keys

    def logits(self, block: Block, learned: Learned) -> torch.Tensor:
        return block.by_tables(self._from_zero(learned["key"])[None])

    def more(self, weights: torch.Tensor, block: Block, learned: Learned) -> torch.Tensor | None:
        if not self.values:
            return None
        table = self._from_zero(learned["value"])
        total = weights.new_zeros(*weights.shape[:3], len(table))
        total = total.scatter_add(-1, block.row_of(table).expand(weights.shape), weights)
        return total @ table.to(weights)

    def _from_zero(self, table: torch.Tensor) -> torch.Tensor:
        """A table with a row for each distance from 0 to ``clip``."""
        return torch.cat((table[:1].expand(self.p_min, -1), table)) if self.p_min else table
