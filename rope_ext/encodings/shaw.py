"""Shaw et al.'s relative positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.encodings.base import Encoding, Heads, Learned
from rope_ext.encodings.tables import STD, ByTables, lengthened
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope


@register
@dataclass(frozen=True, kw_only=True)
class Shaw(Encoding):
    """Replaces RoPE with learned vectors for each distance, added to keys and values.

    The heads of a layer share its vectors. All distances beyond ``clip`` share the last vector.

    Args:
        clip: tokens; the paper's k, which is 16 and 8 there, for translation.

    Shaw et al. 2018, arXiv 1803.02155.
    """

    name: ClassVar[str] = "shaw"
    paper: ClassVar[str] = "arXiv 1803.02155"
    summary: ClassVar[str] = "learned vectors per distance for keys and values; needs training"

    clip: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("clip", optional=False)

    def initial(self, heads: Heads, rope: Rope) -> dict[str, torch.Tensor]:
        distances = self.clip + 1
        return {
            "key": STD * torch.randn(distances, heads.columns),
            "value": STD * torch.randn(distances, heads.value_columns),
        }

    def grown(self, name: str, learned: torch.Tensor, initial: torch.Tensor) -> torch.Tensor | None:
        return lengthened(learned, initial, 0, repeat=True)

    def scores(self, heads: int, rope: Rope, learned: Learned) -> ByTables:
        return ByTables(learned={"of_query": learned["key"][None], "of_value": learned["value"]})
