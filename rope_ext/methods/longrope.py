"""Tables with a number for every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.kinds import (
    DynamicMethod,
    FrequencyMethod,
    Method,
)
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
        long_factor: ``lambda``, one per pair, for sequences longer than the trained context.
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


def check_table(method: Method, option: str) -> None:
    """Convert an option to a table, or raise an OptionError."""
    table = getattr(method, option)
    listed = isinstance(table, Sequence) and not isinstance(table, str)
    numbers = tuple(map(plain_number, table)) if listed else (None,)
    holds = all(x is not None and 1 / LARGEST <= x <= LARGEST for x in numbers)
    method.require(option, holds, "a list of positive numbers, one per pair")
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


_EARLIER = 30 / 35  # Llama-3-8B: the critical pair found, over the theoretical one


@register
@dataclass(frozen=True, kw_only=True)
class LongRoPE2(FrequencyMethod):
    """Divides pairs by ``factor`` or more from a critical pair on, and faster ones as NTK does.

    In theory, the critical pair is the first one without a full rotation within the trained
    context. The authors search for a faster one, because slow pairs saw few rotations in training:
    30 instead of 35 for Llama-3-8B. Tune ``critical`` and ``stretch`` on your model with
    :func:`rope_ext.calibrate`. Cosine and sine are multiplied by ``sqrt(1 + ln(s) / ln(length))``,
    as in LongRoPE's code.

    Args:
        critical: index, from 0, of the first pair that is divided by ``stretch * factor``; None is
            30/35 of the theoretical one.
        stretch: from 1 to 2, the range that the paper searches for slow pairs.
        long_factor: a searched or published table, used instead: the divisor of each pair.

    Shang et al. 2025, arXiv 2502.20082, section 3. The NTK part follows descriptions of the paper;
    its training on two kinds of windows is ``positions: mixed_windows`` of the recipes.
    """

    name = "longrope2"
    paper = "arXiv 2502.20082"
    summary = "NTK up to a critical pair that you search for, or a published table"

    critical: int | None = None
    stretch: float = 1.0
    long_factor: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("critical", minimum=0)
        self.require_number("stretch", minimum=1, maximum=2)
        if self.long_factor is not None:
            check_table(self, "long_factor")
            self.require("critical", self.critical is None, "None where long_factor is given")

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        if self.long_factor is not None:
            return super().grids(rope)
        theory = int((rope.rotations >= 1).sum())
        critical = tuple(round(share * theory) for share in (0.6, 0.75, 0.9, 1))
        return {**super().grids(rope), "critical": critical, "stretch": (1.0, 1.25, 1.5)}

    def critical_pair(self, rope: Rope) -> int:
        """``critical``, or its default for a trained embedding."""
        if self.critical is not None:
            return self.critical
        return round(_EARLIER * int((rope.rotations >= 1).sum()))

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        if self.long_factor is not None:
            return rope.inv_freq / table_of(self, "long_factor", rope)
        critical = self.critical_pair(rope)
        index = torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu")
        power = torch.where(index < critical, index / max(critical, 1), 1.0)
        return rope.inv_freq / float(self.stretch * self.factor) ** power

    def own_scaling(self, rope: Rope) -> float:
        return math.sqrt(1 + math.log(self.factor) / math.log(rope.length))
