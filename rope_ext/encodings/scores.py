"""Logits that depend on more than the distance, computed in blocks of queries."""

from collections.abc import Mapping
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """How an encoding changes logits; depends only on a block and on ``learned``.

    Args:
        learned: by name, in the dtype of the parameters. Kernels replace them by their own copies
            (:func:`dataclasses.replace`) to get the gradients.
    """

    learned: Mapping[str, torch.Tensor]

    @property
    def width(self) -> int:
        """Numbers stored at a time for every pair of query and key, for all heads."""
        return 0

    def logits(self, block: Block) -> torch.Tensor:
        """The logits with positions, in the shape of ``block.content``."""
        return block.content

    def more(self, weights: torch.Tensor, block: Block) -> torch.Tensor | None:
        """A term added to the output, ``[batch, heads, rows, value columns]``, or None.

        ``weights``: ``[batch, heads, rows, keys]``, float32 or better, after the softmax.
        """
        return None


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


@dataclass(frozen=True, eq=False, kw_only=True)
class ByTables(Scores):
    """Scores from tables in ``learned`` with a vector per distance, the last one for all larger.

    With optional ``of_query`` and ``of_key``, ``[heads or 1, distances, columns]``, and
    ``of_value``, ``[distances, value_columns]``, for a distance ``d = i - j``:

        logit_ij = share * scale * (<q_i, k_j> + <q_i, of_query[d]> + <k_j, of_key[d]>)
        out_i = sum_j w_ij (v_j + of_value[d])

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
    return block.distance.long().clamp(max=table.shape[-2] - 1)
