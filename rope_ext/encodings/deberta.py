import math
from dataclasses import replace
from typing import Annotated

import torch

from rope_ext.encodings.base import STD, Block, Heads, InputEncoding, Learned, in_both_directions
from rope_ext.methods.checked import Tokens, Whole, not_none
from rope_ext.methods.kinds import Rope, Self, register


@register
class DeBERTa(InputEncoding):
    """Replaces RoPE with disentangled attention to content and relative positions.

    The sum of the content-to-content, content-to-position and position-to-content terms is divided
    by the square root of three, in addition to the model's scale. Each head of a layer learns one
    vector per distance for keys and one for queries; the paper projects them from one embedding. In
    both directions, later keys have vectors of their own: together those of the paper, but the
    vectors of queries are shared from distance ``clip - 1`` back and ``clip`` ahead, as for keys.

    ``absolute_layers`` adds a learned vector for each position to the hidden state that enters the
    first of the last ``n`` layers, as in the paper's "enhanced mask decoder", where only queries
    get it, and one layer runs ``n`` times.

    Args:
        clip: tokens; the paper's k. Each distance below it has one vector. A larger ``clip`` with
            ``replace=True`` keeps trained vectors.
        absolute_layers: ``n``; 2 in the paper. 0: no absolute positions.
        length: entries of the table of absolute positions, tokens; by default the context length.

    He et al. 2021, arXiv 2006.03654; absolute positions: section 3.2 and the released code.
    """

    name = "deberta"
    summary = "learned vectors per distance for queries and keys; needs training"
    grows = 1
    sided = True
    later_keys = True

    clip: Tokens = 512
    absolute_layers: Annotated[int, Whole(0)] = 0
    length: Annotated[int, Whole(2)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = self.length is None or self.absolute_layers > 0
        self.require("length", needed, "left out without absolute_layers")

    @property
    def entered(self) -> int:
        return self.absolute_layers

    def resolved(self, rope: Rope) -> Self:
        if not self.absolute_layers:
            return self
        resolved = replace(self, length=self.length or self.target_length(rope))
        resolved.covers(resolved.target_length(rope), rope)
        return resolved

    def limit(self, rope: Rope) -> int | None:
        return self.length

    def initial(self, heads: Heads) -> dict[str, torch.Tensor]:
        shape = heads.count, self.clip, heads.columns
        ahead = ("key_ahead", "query_ahead") if heads.both else ()
        return {name: STD * torch.randn(shape) for name in ("key", "query", *ahead)}

    def initial_inputs(self, columns: int, size: float, rope: Rope) -> dict[str, torch.Tensor]:
        return {"table": STD * torch.randn(not_none(self.length), columns, device="cpu")}

    def logits(self, block: Block, learned: Learned) -> torch.Tensor:
        key, ahead = in_both_directions(learned["key"], learned.get("key_ahead"))
        query, _ = in_both_directions(learned["query"], learned.get("query_ahead"))
        return 1 / math.sqrt(3) * block.by_tables(key, query, ahead)
