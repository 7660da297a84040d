"""Every frequency method, with every option that changes its formula; defaults of all methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rope_ext.methods import (
    ABF,
    NTK,
    PI,
    BaseTruncation,
    Clipped,
    DynamicNTK,
    DynamicYaRN,
    FrequencyMethod,
    Llama3,
    LongRoPE,
    LongRoPE2,
    MrRoPE,
    NTKByParts,
    PRoPE,
    Resonance,
    Rope,
    YaRN,
)


def full(factor: float, rope: Rope) -> dict[str, Any]:
    """Return options of a dynamic method fixed at its full extended length."""
    return {"factor": factor, "length": PI(factor=factor).target_length(rope)}


def table(factor: float, rope: Rope) -> list[float]:
    """A monotone longrope table from 1 to ``factor``."""
    return torch.linspace(1, factor, rope.dim // 2, dtype=torch.float64).tolist()


# Every method, and every option that changes its formula, none dynamic.
VARIANTS: dict[str, Callable[[float, Rope], FrequencyMethod]] = {
    "yarn": lambda s, rope: YaRN(factor=s),
    "yarn-untruncated": lambda s, rope: YaRN(factor=s, truncate=False),
    "yarn-rotations": lambda s, rope: YaRN(factor=s, ramp="rotations"),
    "yarn-harmonic": lambda s, rope: YaRN(factor=s, blend="harmonic"),
    "dynamic_yarn": lambda s, rope: DynamicYaRN(**full(s, rope)),
    "ntk": lambda s, rope: NTK(factor=s),
    "dynamic_ntk": lambda s, rope: DynamicNTK(**full(s, rope)),
    "dynamic_ntk-ratio": lambda s, rope: DynamicNTK(**full(s, rope), alpha="ratio"),
    "pi": lambda s, rope: PI(factor=s),
    "mrrope": lambda s, rope: MrRoPE(factor=s),
    "mrrope-uni": lambda s, rope: MrRoPE(factor=s, mode="uni"),
    "ntk_by_parts": lambda s, rope: NTKByParts(factor=s),
    "llama3": lambda s, rope: Llama3(factor=s),
    "longrope": lambda s, rope: LongRoPE(factor=s, long_factor=table(s, rope)),
    "longrope-fixed": lambda s, rope: LongRoPE(
        **full(s, rope), long_factor=table(s, rope), short_factor=table(1, rope)
    ),
    "longrope2": lambda s, rope: LongRoPE2(factor=s),
    "longrope2-stretched": lambda s, rope: LongRoPE2(factor=s, stretch=1.5),
    "longrope2-table": lambda s, rope: LongRoPE2(factor=s, long_factor=table(s, rope)),
    "abf": lambda s, rope: ABF(factor=s, base=s * rope.base),
    "base_truncation": lambda s, rope: BaseTruncation(factor=s),
    "resonance": lambda s, rope: Resonance(factor=s),
    "p_rope": lambda s, rope: PRoPE(factor=s, p=0.7),
    "clipped": lambda s, rope: Clipped(factor=s),
}


@dataclass(frozen=True)
class Defaults:
    """The published ``attention_factor`` and temperature of a method.

    Args:
        scaling: of cosine and sine, for a factor and a trained length.
        temperature: of the queries at float64 positions, for a trained length; None: 1 everywhere.
    """

    scaling: Callable[[float, int], float] = lambda factor, length: 1.0
    temperature: Callable[[torch.Tensor, int], torch.Tensor] | None = None


def log_n(t: torch.Tensor, length: int) -> torch.Tensor:
    return ((t + 1).double().log() / math.log(length)).clamp(min=1)


YARN = Defaults(lambda factor, length: 1 + 0.1 * math.log(factor))
LONGROPE = Defaults(lambda factor, length: math.sqrt(1 + math.log(factor) / math.log(length)))
FIXED = Defaults(lambda factor, length: 1 + 0.1 * math.log(2))
LOG_N = Defaults(temperature=log_n)
DEFAULTS: dict[str, Defaults] = {
    "yarn": YARN,
    "dynamic_yarn": YARN,
    "resonance": YARN,  # of the YaRN that it rounds
    "mrrope": YARN,
    "longrope": LONGROPE,
    "longrope2": LONGROPE,
    "lampe": FIXED,  # by the released code, at any factor
    "string": FIXED,  # likewise
    "dual_chunk": Defaults(lambda factor, length: 1 + 0.05 * math.log(factor)),  # likewise
    "rerope": LOG_N,
    "leaky_rerope": LOG_N,
    "self_extend": LOG_N,  # not published, but better; ``published=True`` leaves it out
    "dpe": LOG_N,  # likewise
}
"""By name, of the methods whose defaults are not 1."""


def defaults(name: str) -> Defaults:
    return DEFAULTS.get(name, Defaults())
