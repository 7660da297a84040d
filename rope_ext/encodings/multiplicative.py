from dataclasses import replace
from typing import Annotated, Literal

import torch

from rope_ext.encodings.base import InputEncoding, Learned, sinusoid
from rope_ext.methods.checked import Whole, not_none
from rope_ext.methods.kinds import Rope, Self, register


@register
class Multiplicative(InputEncoding):
    """Replaces RoPE with a vector for each position that multiplies the embeddings.

    A learned table starts at 1, which changes nothing. The sinusoid is that of ``sinusoidal``: a
    sine of 0 deletes a column, for the first token half of them.

    Args:
        table: ``"learned"`` or ``"sinusoidal"``.
        length: entries of the learned table, tokens; by default the context length.

    Su 2021, kexue.fm/archives/8130.
    """

    name = "multiplicative"
    summary = "multiplies embeddings by a vector for the position; needs training"

    table: Literal["learned", "sinusoidal"] = "learned"
    length: Annotated[int, Whole(2)] | None = None

    def resolved(self, rope: Rope) -> Self:
        resolved = replace(self, length=self.length or self.target_length(rope))
        resolved.covers(resolved.target_length(rope), rope)
        return resolved

    def limit(self, rope: Rope) -> int | None:
        return self.length if self.table == "learned" else None

    def initial_inputs(self, columns: int, size: float, rope: Rope) -> dict[str, torch.Tensor]:
        if self.table == "sinusoidal":
            return {}
        return {"table": torch.ones(not_none(self.length), columns, device="cpu")}

    def p(self, t: torch.Tensor, columns: int, rope: Rope, learned: Learned) -> torch.Tensor:
        if self.table == "sinusoidal":
            return sinusoid(t, columns, 10000.0)
        return super().p(t, columns, rope, learned)

    def join(self, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return x * p
