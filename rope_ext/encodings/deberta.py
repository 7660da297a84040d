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
    """No rotation; queries meet the position of keys, and keys that of queries.

    Content to content, content to position and position to content, the sum of the three divided
    by the square root of three beside the model's own scale. Every head of a layer learns its
    vectors by distance directly, those that stand for keys and those that stand for queries; the
    paper makes them of one embedding by two projections in each layer. Without the absolute
    positions that its "enhanced mask decoder" has in the last layers.

    Args:
        clip: tokens; the paper's k. The vectors are those of the distances below it, in the
            released code the half of its table that a causal model sees.

    He et al. 2021, arXiv 2006.03654.
    """

    name: ClassVar[str] = "deberta"
    paper: ClassVar[str] = "arXiv 2006.03654"
    use: ClassVar[str] = "queries and keys meet learned vectors by distance; to be trained with"

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
