"""LongRoPE tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.kinds import DynamicMethod, Method
from rope_ext.methods.registry import register
from rope_ext.methods.rope import LARGEST, Rope, plain_number


@register
@dataclass(frozen=True, kw_only=True)
class LongRoPE(DynamicMethod):
    """Divides each pair by its own number from a table: ``h_i = theta_i / lambda_i``.

    Use it with a published table, or with one that :func:`rope_ext.search` found on your model and
    text. Any frequency method can be written as a table, and methods that transformers does not
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
    paper = "arXiv 2402.13753"
    summary = "published tables (Phi-3, MiniCPM), or tables that you searched for"

    long_factor: Sequence[float]
    short_factor: Sequence[float] | None = None
    start_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("long_factor", "short_factor"):
            if option == "long_factor" or self.short_factor is not None:
                check_table(self, option)
        self.require_tokens("start_tokens", minimum=0, optional=False)

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
        if self.length is not None:
            return super().rope_parameters(rope)
        long = table_of(self, "long_factor", rope)
        short = long if self.short_factor is None else table_of(self, "short_factor", rope)
        return {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "factor": float(self.factor),
            "attention_factor": self.attention_scaling(rope),
            "original_max_position_embeddings": rope.length,
        }


def check_table(
    method: Method,
    option: str,
    least: float = 1 / LARGEST,
    most: float = LARGEST,
    valid: str = "a list of positive numbers, one per pair",
) -> None:
    """Convert an option to a table, or raise an OptionError."""
    table = getattr(method, option)
    listed = isinstance(table, Sequence) and not isinstance(table, str)
    numbers = tuple(map(plain_number, table)) if listed else (None,)
    holds = all(x is not None and least <= x <= most for x in numbers)
    method.require(option, holds, valid)
    method.set(option, numbers)  # hashable, safe from later edits


def table_of(method: Method, option: str, rope: Rope) -> torch.Tensor:
    """The table in an option: float64, ``[dim / 2]``; raises an OptionError for other lengths."""
    table = getattr(method, option)
    if len(table) != rope.dim // 2:
        raise OptionError(
            f"{method.name}: {option} has {len(table)} numbers, but this model has "
            f"{rope.dim // 2} rotary pairs; give one number per pair"
        )
    return torch.tensor(table, dtype=torch.float64, device="cpu")
