"""Logits from tables of learned vectors: one per distance, the last one for all larger distances.

With tables ``a``, ``b`` and ``c``, and a distance ``d = i - j``:

    logit_ij = share * scale * (<q_i, k_j> + <q_i, a[d]> + <k_j, b[d]>)
    out_i = sum_j w_ij (v_j + c[d])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_ext.encodings.scores import Block, Scores

STD = 0.02
"""Standard deviation of initial tables, as for embeddings in transformers."""


def lengthened(
    learned: torch.Tensor, initial: torch.Tensor, dim: int, *, repeat: bool
) -> torch.Tensor | None:
    """A longer table that begins with the rows of a shorter one; None if it is not longer.

    With ``repeat``, new rows copy the last one, which all larger distances shared; else they are
    those of ``initial``.
    """
    rows = learned.shape[dim]
    if initial.shape[dim] < rows or initial.narrow(dim, 0, rows).shape != learned.shape:
        return None
    more = initial.narrow(dim, rows, initial.shape[dim] - rows)
    if repeat:
        more = learned.narrow(dim, rows - 1, 1).expand_as(more)
    return torch.cat((learned, more), dim)


@dataclass(frozen=True, eq=False, kw_only=True)
class ByTables(Scores):
    """Scores from the tables in ``learned``, each of which is optional.

    ``of_query`` and ``of_key`` are multiplied with queries and with keys, ``[heads or 1,
    distances, columns]``; ``of_value`` is added to the values, ``[distances, value_columns]``.

    Args:
        share: factor of all logits.
    """

    share: float = 1.0

    def logits(self, block: Block) -> torch.Tensor:
        of_query, of_key = (self.learned.get(name) for name in ("of_query", "of_key"))
        more = torch.zeros_like(block.content)
        pairs = more.shape
        if of_query is not None:
            found = block.query @ of_query.to(block.query).mT
            more = more + found.gather(-1, _index(block, of_query).expand(pairs))
        if of_key is not None:
            found = of_key.to(block.key) @ block.key.mT
            more = more + found.gather(-2, _index(block, of_key).expand(pairs))
        return self.share * (block.content + block.scale * more)

    def more(self, weights: torch.Tensor, block: Block) -> torch.Tensor | None:
        table = self.learned.get("of_value")
        if table is None:
            return None
        total = weights.new_zeros(*weights.shape[:3], table.shape[0])
        total = total.scatter_add(-1, _index(block, table).expand(weights.shape), weights)
        return total @ table.to(weights)


def _index(block: Block, table: torch.Tensor) -> torch.Tensor:
    """The row of a table for each query and key."""
    return block.distance.long().clamp(max=table.shape[-2] - 1)
