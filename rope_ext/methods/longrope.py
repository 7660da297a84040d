import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.checked import Numbers, Whole
from rope_ext.methods.kinds import DynamicMethod, Method, Rope, register

Table = Annotated[Sequence[float], Numbers("a list of positive numbers, one per pair")]


@register
class LongRoPE(DynamicMethod):
    """Divides each pair by its own number from a table: ``h_i = theta_i / lambda_i``.

    :func:`rope_ext.search` finds a table on your model and text. Methods that transformers does not
    know are saved as one. Cosine and sine are multiplied by ``sqrt(1 + ln(s) / ln(length))``.

    Args:
        long_factor: ``lambda``, one per pair, for sequences longer than the trained length.
        short_factor: ``lambda`` for sequences within it; None uses ``long_factor`` everywhere.
        start_tokens: number of first tokens of a sequence that keep the trained frequencies. If it
            is not 0, only rope_ext can reload and run the model.

    Ding et al. 2024, arXiv 2402.13753, section 3; two lists as in Phi-3.
    """

    name = "longrope"
    aliases = ("su",)
    summary = "published tables (Phi-3, MiniCPM), or tables that you searched for"

    long_factor: Table
    short_factor: Table | None = None
    start_tokens: Annotated[int, Whole(0)] = 0

    @property
    def is_dynamic(self) -> bool:
        return self.short_factor is not None and self.length is None

    def inv_freq_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        long = rope.inv_freq / table_of(self, "long_factor", rope)
        if self.short_factor is None:
            return long.expand(len(lengths), -1)
        short = rope.inv_freq / table_of(self, "short_factor", rope)
        return torch.where((lengths > rope.length).unsqueeze(-1), long, short)

    def own_scaling_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        scaling = math.sqrt(1 + math.log(self.factor) / math.log(rope.length))
        return torch.full_like(lengths, scaling)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        parameters = super().rope_parameters(rope)
        if self.length is None:
            long = table_of(self, "long_factor", rope)
            short = long if self.short_factor is None else table_of(self, "short_factor", rope)
            parameters |= {"short_factor": short.tolist(), "long_factor": long.tolist()}
        return parameters


def table_of(method: Method, option: str, rope: Rope) -> torch.Tensor:
    """The table in an option: float64, ``[dim / 2]``; raises an OptionError for other lengths."""
    table = getattr(method, option)
    if len(table) != rope.dim // 2:
        raise OptionError(
            f"{method.name}: {option} has {len(table)} numbers, but this model has "
            f"{rope.dim // 2} rotary pairs; give one number per pair"
        )
    return torch.tensor(table, dtype=torch.float64, device="cpu")
