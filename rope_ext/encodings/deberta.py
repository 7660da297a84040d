"""DeBERTa's disentangled attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.encodings.base import Encoding, Heads, Learned
from rope_ext.encodings.tables import STD, ByTables, lengthened
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope


@register
@dataclass(frozen=True, kw_only=True)
class DeBERTa(Encoding):
    """Replaces RoPE with disentangled attention between contents and relative positions.

    The sum of content to content, content to position and position to content is divided by the
    square root of three, in addition to the model's scale. Each head of a layer learns its vectors
    by distance directly, one set for keys and one for queries; the paper projects them from one
    embedding in each layer. The absolute positions of its "enhanced mask decoder" in the last
    layers are not implemented.

    Args:
        clip: tokens; the paper's k. There is one vector for each distance below it: the half of the
            released code's table that a causal model uses.

    He et al. 2021, arXiv 2006.03654.
    """

    name: ClassVar[str] = "deberta"
    paper: ClassVar[str] = "arXiv 2006.03654"
    summary: ClassVar[str] = "learned vectors per distance for queries and keys; needs training"

    clip: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("clip", optional=False)

    def initial(self, heads: Heads, rope: Rope) -> dict[str, torch.Tensor]:
        return {
            "key": STD * torch.randn(heads.count, self.clip, heads.columns),
            "query": STD * torch.randn(heads.count, self.clip, heads.columns),
        }

    def grown(self, name: str, learned: torch.Tensor, initial: torch.Tensor) -> torch.Tensor | None:
        return lengthened(learned, initial, 1, repeat=True)

    def scores(self, heads: int, rope: Rope, learned: Learned) -> ByTables:
        tables = {"of_query": learned["key"], "of_key": learned["query"]}
        return ByTables(learned=tables, share=1 / math.sqrt(3))
