"""Logits that an encoding makes of more than the distance: asked for by blocks of queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries and the keys that they may see.

    Args:
        query: ``[batch, heads, rows, columns]``, times the temperature.
        key: ``[batch, heads, keys, columns]``, repeated for the heads that share it.
        content: their logits without positions, ``[batch, heads, rows, keys]``, float32 or better:
            turned where a band turns, scaled, capped. Anything where it is not visible.
        query_at: where the queries are, int64, ``[rows]``, tokens from the first of a sequence.
        key_at: the same of the keys, ``[keys]``.
        visible: bool, broadcast to ``content``. What is hidden must change nothing; it is masked
            afterwards.
        scale: factor of the products of queries and keys that is in ``content``.
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
        """From every query to every key, tokens, in the dtype of ``content``; 0 to later ones."""
        apart = self.query_at[:, None] - self.key_at
        return apart.clamp(min=0).to(self.content.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """What an encoding makes of logits; a function of a block and of ``learned``, nothing else.

    Args:
        learned: by name, in the dtype of the parameters. Kernels put their own copies here
            (:func:`dataclasses.replace`) to get the gradients.
    """

    learned: Mapping[str, torch.Tensor]

    @property
    def width(self) -> int:
        """Numbers that are kept at a time for every pair of query and key, of all heads."""
        return 0

    def logits(self, block: Block) -> torch.Tensor:
        """The logits with positions, as ``block.content``."""
        return block.content

    def more(self, weights: torch.Tensor, block: Block) -> torch.Tensor | None:
        """What is added to the output, ``[batch, heads, rows, value columns]``; None: nothing.

        ``weights``: ``[batch, heads, rows, keys]``, float32 or better, as of softmax.
        """
        return None
