"""Position methods that restart positions, or leave keys out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from rope_ext.methods.checked import not_none
from rope_ext.methods.geometry import ChunkGap, Distance, Sinks
from rope_ext.methods.kinds import (
    Band,
    PositionMethod,
    identity,
)
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope
from rope_ext.methods.temperature import yarn_factor


@register
@dataclass(frozen=True, kw_only=True)
class DualChunk(PositionMethod):
    """Restarts positions in every chunk of ``chunk - local`` tokens (DCA, ChunkLlama).

    Use it without fine-tuning for large models and many times the trained length; Qwen2.5-1M is
    served with it, on top of YaRN (``frequency=``). Within a chunk, keys and queries use their
    positions in it. For keys of the previous chunk, queries use a position one chunk further, but
    at most ``chunk``; for all earlier keys, they use ``chunk``. Tokens less than ``local`` apart
    keep their distance across chunk boundaries. Cosine and sine are multiplied by
    ``0.05 ln(s) + 1``, as in the authors' code, but with ``s = factor`` for every token, so that
    cached decoding equals recomputation. The paper's numbers were measured without it:
    ``attention_factor=1``.

    Args:
        chunk: largest position used, tokens; three quarters of the trained length by default.
        local: tokens; an eighth of the trained length by default.

    An et al. 2024, arXiv 2402.17463; the defaults are those of the authors' code.
    """

    name = "dual_chunk"
    aliases = ("dca", "chunkllama")
    paper = "arXiv 2402.17463"
    summary = "no fine-tuning, any length; Qwen2.5-1M is served with it"
    candidate_shares = MappingProxyType(
        {"chunk": (1 / 2, 3 / 4, 1), "local": (1 / 16, 1 / 8, 1 / 4)}
    )

    valid_options = "a chunk of at most the trained length"

    chunk: int | None = None
    local: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("chunk", minimum=2)
        self.require_tokens("local")

    def resolved(self, rope: Rope) -> DualChunk:
        chunk = self.chunk or max(2, 3 * rope.length // 4)
        local = self.local or max(1, rope.length // 8)
        full = replace(self, chunk=chunk, local=local)
        full.require_resolved("local", local < chunk, f"smaller than chunk={chunk}", rope)
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


@register
@dataclass(frozen=True, kw_only=True)
class STRING(PositionMethod):
    """Distances from ``shift`` on restart at ``window``: ``m - n - shift + window``.

    Large distances are rare in training, so their positions are trained least; this uses frequent
    ones instead. With ``factor=1`` it makes better use of the trained context: Llama 3.1 8B scores
    80.0 instead of 77.0 on RULER at 128k (Table 2). Distances below ``shift`` do not change, so the
    context can at most be doubled. Cosine and sine are multiplied by ``0.1 ln(2) + 1`` for any
    factor, as in the authors' code; ``attention_factor=1`` disables this.

    Args:
        factor: 1 makes better use of the trained context without extending it.
        shift: S, tokens; a third of the trained length by default, or more if ``factor`` needs it.
        window: W, tokens; 128 by default, at most a sixteenth of the trained length.

    An et al. 2024, arXiv 2410.18745.
    """

    name = "string"
    paper = "arXiv 2410.18745"
    summary = "better use of the trained context (factor=1), or up to twice its length"
    allows_factor_one = True
    candidate_shares = MappingProxyType({"window": (1 / 32, 1 / 16, 1 / 8)})

    valid_options = "a shift of at most the trained length, and a smaller window"

    factor: float = 1.0
    shift: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("shift")
        self.require_tokens("window")

    def resolved(self, rope: Rope) -> STRING:
        length, target = rope.length, self.target_length(rope)
        window = self.window or max(1, min(128, length // 16))
        shift = self.shift or max(math.ceil(length / 3), target - length + window)
        full = replace(self, shift=shift, window=window)
        full.require_resolved("window", window <= shift, f"at most shift={shift}", rope)
        if self.shift is None:
            most = math.floor(100 * (2 * length - window) / length) / 100
            valid = f"at most {most:g}, unless shift is given; patch with 'rerope' to go further"
            self.require_resolved("factor", shift <= length, valid, rope)
        return full

    def own_scaling(self, rope: Rope) -> float:
        return yarn_factor(2)

    def bands(self) -> tuple[Band, ...]:
        s, w = not_none(self.shift), not_none(self.window)
        return (
            Band(Distance(0, s), identity, identity),
            Band(Distance(s, None), lambda m: m - s + w, identity),
        )


@register
@dataclass(frozen=True, kw_only=True)
class LMInfinite(PositionMethod):
    """Attends only to the last ``window`` tokens and the first ``sinks`` tokens.

    For endless text that does not need old tokens, such as a stream. Any length stays fluent, but
    the usable context is not extended: tokens outside the window cannot be recalled. They stay in
    the cache. Sinks outside the window get a distance of ``window``.

    Args:
        window: tokens; the trained length by default.
        sinks: first tokens of the sequence that stay visible; 10, the fewest that the paper
            recommends (StreamingLLM, arXiv 2309.17453, uses 4).

    Han et al. 2023, arXiv 2308.16137.
    """

    name = "lm_infinite"
    aliases = ("streaming",)
    paper = "arXiv 2308.16137"
    summary = "fluent text of any length; forgets tokens outside the window"

    valid_options = "a window of at most the trained length"

    window: int | None = None
    sinks: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("window")
        self.require_tokens("sinks", minimum=0, optional=False)

    def resolved(self, rope: Rope) -> LMInfinite:
        return replace(self, window=self.window or rope.length)

    def bands(self) -> tuple[Band, ...]:
        window = not_none(self.window)
        near = Band(Distance(0, window), identity, identity)
        if not self.sinks:
            return (near,)
        sinks = Band(Sinks(self.sinks, window), float(window), 0.0)
        return (sinks, near)
