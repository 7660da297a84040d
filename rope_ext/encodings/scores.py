"""Logits that depend on more than the distance, computed in blocks of queries."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries and the keys that they may attend to.

    Args:
        query: ``[batch, heads, rows, columns]``, times the temperature, in the dtype of
            ``content``.
        key: ``[batch, heads, keys, columns]``, likewise, repeated for the heads that share it.
        content: their logits without positions, ``[batch, heads, rows, keys]``, float32 or better:
            rotated if the band rotates, scaled, and capped. Undefined where it is not visible.
        query_at: positions of the queries, int64, ``[rows]``, tokens from the start of a sequence.
        key_at: positions of the keys, ``[keys]``.
        visible: bool, broadcast to ``content``. Hidden entries must not change anything; they are
            masked afterwards.
        scale: factor of the query-key products in ``content``.
    """

    query: torch.Tensor
    key: torch.Tensor
    content: torch.Tensor
    query_at: torch.Tensor
    key_at: torch.Tensor
    visible: torch.Tensor
    scale: float

    @property
    def distance(self) -> torch.Tensor:
        """Tokens from each query to each key, in the dtype of ``content``; 0 for later keys."""
        apart = self.query_at[:, None] - self.key_at
        return apart.clamp(min=0).to(self.content.dtype)


def linear(name: str, outputs: int, inputs: int, *kernel: int) -> dict[str, torch.Tensor]:
    """Weight and bias of a linear layer or convolution, with torch's default initialization."""
    fan = inputs
    for size in kernel:
        fan *= size
    shapes = {f"{name}_weight": (outputs, inputs, *kernel), f"{name}_bias": (outputs,)}
    return {key: (2 * torch.rand(shape) - 1) / fan**0.5 for key, shape in shapes.items()}


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


def by_tables(
    block: Block, of_query: torch.Tensor, of_key: torch.Tensor | None = None
) -> torch.Tensor:
    """``<q_i, k_j> + <q_i, of_query[d]> + <k_j, of_key[d]>`` for a distance ``d = i - j``.

    Tables are ``[heads or 1, distances, columns]``; larger distances share the last row.
    """
    found = block.query @ of_query.to(block.query).mT
    more = found.gather(-1, row_of(block, of_query).expand(block.content.shape))
    if of_key is not None:
        found = of_key.to(block.key) @ block.key.mT
        more = more + found.gather(-2, row_of(block, of_key).expand(more.shape))
    return block.content + block.scale * more


def row_of(block: Block, table: torch.Tensor) -> torch.Tensor:
    """The row of each distance in a table, whose last row is for all larger distances."""
    return block.distance.long().clamp(max=table.shape[-2] - 1)
