from typing import Annotated, Literal

import torch

from rope_ext.encodings.base import (
    STD,
    Block,
    Encoding,
    Heads,
    Learned,
    in_both_directions,
    sinusoid,
)
from rope_ext.methods.checked import Tokens, Whole
from rope_ext.methods.kinds import register


@register
class Shaw(Encoding):
    """Replaces RoPE with vectors for each distance, added to keys and values.

    The heads of a layer share its vectors; distances beyond ``clip`` share the last one. In both
    directions, later keys have vectors of their own, as in the paper.

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
    sided = True
    later_keys = True
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
        tables = {
            name: STD * torch.randn(rows, size) for name, size in self._columns(heads).items()
        }
        if heads.both:
            rows = self.clip + 1 - self._first_ahead
            for name, size in self._columns(heads).items():
                tables[f"{name}_ahead"] = STD * torch.randn(rows, size)
        return tables

    def constants(self, heads: Heads, device: torch.device) -> dict[str, torch.Tensor]:
        if self.table == "learned":
            return {}
        distance = torch.arange(self.p_min, self.clip + 1, dtype=torch.float64, device=device)
        # In the paper's formula the position of the query is subtracted.
        columns = self._columns(heads).items()
        tables = {name: sinusoid(-distance, size, 10000.0) for name, size in columns}
        if heads.both:
            later = distance[self._first_ahead - self.p_min :]
            for name, size in columns:
                tables[f"{name}_ahead"] = sinusoid(later, size, 10000.0)
        return tables

    @property
    def _first_ahead(self) -> int:
        """Distance of the first vector for later keys; distance 0 has none."""
        return max(self.p_min, 1)

    def _columns(self, heads: Heads) -> dict[str, int]:
        keys = {"key": heads.columns}
        return keys | {"value": heads.value_columns} if self.values else keys

    def logits(self, block: Block, learned: Learned) -> torch.Tensor:
        table, ahead = self._table("key", learned)
        return block.by_tables(table[None], ahead=ahead)

    def more(self, weights: torch.Tensor, block: Block, learned: Learned) -> torch.Tensor | None:
        if not self.values:
            return None
        table, ahead = self._table("value", learned)
        total = weights.new_zeros(*weights.shape[:3], len(table))
        total = total.scatter_add(-1, block.row_of(table, ahead).expand(weights.shape), weights)
        return total @ table.to(weights)

    def _table(self, name: str, learned: Learned) -> tuple[torch.Tensor, int]:
        """A table with a row for each distance, and the number of rows for later keys."""
        earlier = learned[name]
        later = learned.get(f"{name}_ahead")
        if self.p_min:
            earlier = torch.cat((earlier[:1].expand(self.p_min, -1), earlier))
        if later is not None and self.p_min > 1:
            later = torch.cat((later[:1].expand(self.p_min - 1, -1), later))
        return in_both_directions(earlier, later)
