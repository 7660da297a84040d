import math
from dataclasses import replace
from typing import Annotated

import torch

from rope_ext.methods.checked import Tokens, Whole, not_none
from rope_ext.methods.geometry import Band, ChunkGap
from rope_ext.methods.kinds import PositionMethod, Rope, Self, register


@register
class DualChunk(PositionMethod):
    """Restarts positions in every chunk of ``chunk - local`` tokens (DCA, ChunkLlama).

    Within a chunk, keys and queries use their positions in the chunk. For keys of the previous
    chunk, queries use a position one chunk further, but at most ``chunk``; for all earlier keys,
    they use ``chunk``. Tokens less than ``local`` apart keep their distance across chunk
    boundaries. Cosine and sine are multiplied by ``0.05 ln(s) + 1``, as in the authors' code, but
    with ``s = factor`` for every token, so that cached decoding equals recomputation. The paper's
    numbers were measured without it: ``attention_factor=1``.

    Args:
        chunk: largest position used, tokens; three quarters of the trained length by default.
        local: tokens; an eighth of the trained length by default.

    An et al. 2024, arXiv 2402.17463; the defaults are those of the authors' code.
    """

    name = "dual_chunk"
    causal_only = "restarts positions in chunks, whose queries are moved away from earlier chunks"
    aliases = ("dca", "chunkllama")
    summary = "no fine-tuning, any length; Qwen2.5-1M is served with it"
    candidate_shares = {"chunk": (1 / 2, 3 / 4, 1), "local": (1 / 16, 1 / 8, 1 / 4)}

    chunk: Annotated[int, Whole(2)] | None = None
    local: Tokens | None = None

    def resolved(self, rope: Rope) -> Self:
        chunk = self.chunk or max(2, 3 * rope.length // 4)
        local = self.local or max(1, rope.length // 8)
        full = replace(self, chunk=chunk, local=local)
        full.require_resolved(
            "local", local < chunk, valid=f"smaller than chunk={chunk}", rope=rope
        )
        return full

    def own_scaling(self, rope: Rope) -> float:
        return 0.05 * math.log(self.factor) + 1.0

    def bands(self) -> tuple[Band, ...]:
        largest = not_none(self.chunk)
        c = largest - not_none(self.local)

        def within(t: torch.Tensor) -> torch.Tensor:
            return t % c

        return (
            Band(ChunkGap(c, 0, 0), within, within),
            Band(ChunkGap(c, 1, 1), lambda m: (m % c + c).clamp(max=largest), within),
            Band(ChunkGap(c, 2, None), float(largest), within),
        )
