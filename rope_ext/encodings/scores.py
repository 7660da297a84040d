"""Logits that depend on more than the distance, computed in blocks of queries."""

from __future__ import annotations

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
