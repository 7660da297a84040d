"""Frequency methods that divide slow pairs, or all of them: YaRN and its relatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from rope_ext.methods.kinds import (
    DynamicMethod,
    FrequencyMethod,
)
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope
from rope_ext.methods.temperature import yarn_factor

_BETAS = MappingProxyType({"beta_slow": (1.0, 2.0, 4.0), "beta_fast": (16.0, 32.0, 64.0)})


@register
@dataclass(frozen=True, kw_only=True)
class YaRN(FrequencyMethod):
    """NTK-by-parts plus a temperature: cos and sin are multiplied by ``0.1 ln(s) + 1``.

    Use it to fine-tune, or to serve with any engine. Untrained it works up to factor 4, but changes
    short prompts, too; ``dynamic_yarn`` does not.

    Two ramps are called YaRN. The paper's is linear in the rotations of a pair. The authors' code,
    transformers and vLLM use one that is linear in the index of the pair; on Llama 2 with factor 4,
    single frequencies differ by up to 73 %. The default follows the code, so that checkpoints are
    interchangeable.

    Args:
        beta_fast: pairs with more rotations within the trained context keep their frequency.
        beta_slow: pairs with fewer rotations are divided by ``factor``.
        truncate: round the ends of the index ramp outwards (False: gpt-oss). Index ramp only.
        ramp: ``"index"`` as in the released code, ``"rotations"`` as in the paper.
        blend: ``"arithmetic"`` mixes frequencies; ``"harmonic"`` mixes wavelengths,
            ``theta / ((1 - g) s + g)``, as in PoSE (arXiv 2309.10400).

    Peng et al. 2023, arXiv 2309.00071, sections 3.2 and 3.4.
    """

    name = "yarn"
    paper = "arXiv 2309.00071"
    summary = "fine-tuning, and serving with any engine; works untrained up to factor 4"
    candidates = _BETAS

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: Literal["index", "rotations"] = "index"
    blend: Literal["arithmetic", "harmonic"] = "arithmetic"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("beta_slow", above=0)
        self.require_number("beta_fast", above=self.beta_slow)
        self.require("truncate", isinstance(self.truncate, bool), "True or False")
        self.require_choice("ramp", "index", "rotations")
        self.require_choice("blend", "arithmetic", "harmonic")

    def kept(self, rope: Rope) -> torch.Tensor:
        """Fraction of each pair's trained frequency that is kept, in [0, 1]."""
        if self.ramp == "rotations":
            return rope.rotation_ramp(self.beta_slow, self.beta_fast)
        low = self._index(rope, self.beta_fast)
        high = self._index(rope, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # As in transformers, with its bounds and its 0.001: a ramp without width becomes a step.
        low, high = max(low, 0), min(high, rope.dim - 1)
        if low == high:
            high += 0.001
        index = torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu")
        return 1 - ((index - low) / (high - low)).clamp(0, 1)

    @staticmethod
    def _index(rope: Rope, rotations: float) -> float:
        """The (fractional) index of the pair with this many rotations in the trained context."""
        turns = rope.length / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.base))

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        kept = self.kept(rope)
        if self.blend == "harmonic":
            return rope.inv_freq / ((1 - kept) * self.factor + kept)
        return rope.interpolated(kept, self.factor)

    def own_scaling(self, rope: Rope) -> float:
        return yarn_factor(self.factor)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        if self.ramp != "index" or self.blend != "arithmetic":
            return super().rope_parameters(rope)
        parameters = {
            "rope_type": "yarn",
            "factor": float(self.factor),
            "original_max_position_embeddings": rope.length,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "attention_factor": float(self.attention_scaling(rope)),
        }
        return parameters if self.truncate else {**parameters, "truncate": False}


@register
@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(DynamicMethod):
    """YaRN whose factor follows the sequence length: ``s = max(1, l / L)`` for ``l`` tokens.

    Use it without fine-tuning if prompts differ in length: short ones give the outputs of the
    unpatched model. Every sequence keeps the frequencies it starts with, under ``generate`` those
    of the prompt plus ``max_new_tokens``. Other engines use one set for all sequences: pass
    ``length=``.

    Args:
        beta_fast: pairs with more rotations within the trained context keep their frequency.
        beta_slow: pairs with fewer rotations are divided by ``s``.
        truncate: round the ends of the ramp outwards.

    YaRN, arXiv 2309.00071, section 3.3 ("Dynamic Scaling").
    """

    name = "dynamic_yarn"
    paper = "arXiv 2309.00071"
    summary = "YaRN for mixed lengths; outputs for short prompts do not change"
    candidates = _BETAS

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._yarn()  # checks the shared options

    def _yarn(self) -> YaRN:
        return YaRN(
            factor=self.factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
        )

    def inv_freq_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        kept = self._yarn().kept(rope)  # the ramp does not depend on the factor
        factor = (lengths / rope.length).clamp(min=1).unsqueeze(-1)
        return rope.interpolated(kept, factor)

    def own_scaling_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        return 0.1 * (lengths / rope.length).clamp(min=1).log() + 1.0


@register
@dataclass(frozen=True, kw_only=True)
class NTK(FrequencyMethod):
    """Uses a larger base: the slowest pair is divided by ``factor``, the fastest is unchanged.

    ``b' = b * s ** (d / (d - 2))`` with the rotary dimension ``d``. Use it untrained up to factor
    4, or with an engine that only lets you set the base. Pairs in between are divided by less than
    ``factor``, so the usable context is shorter than you asked for: choose a larger factor.

    bloc97 2023; YaRN, arXiv 2309.00071, section 3.1.
    """

    name = "ntk"
    aliases = ("ntk_aware", "ntk_static")
    paper = "bloc97 2023"
    summary = "moderate factors without fine-tuning; changes only the base"

    def base_scale(self, rope: Rope) -> float:
        """``b' / b``."""
        return float(self.factor) ** rope.ntk_exponent

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.with_base_times(self.base_scale(rope))

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": rope.base * self.base_scale(rope)}


@register
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(DynamicMethod):
    """NTK-aware scaling that follows the sequence length; none within the trained context.

    ``b' = b * a ** (d / (d - 2))`` for a sequence of ``l`` tokens. Short prompts give the outputs
    of the unpatched model, and plain transformers loads the saved checkpoint. ``dynamic_yarn`` does
    the same with YaRN's frequencies.

    Args:
        alpha: ``"transformers"``: ``a = s l / L - (s - 1)``, which grows faster than the sequence
            (13 for ``s = 4`` at ``l = 4 L``); ``"ratio"``: ``a = l / L``. At least 1.
        mode: ``"fixed"`` uses one base per sequence, so that cached decoding equals recomputation;
            ``"growing"`` reproduces transformers, where cached keys keep the rotation of earlier
            bases.

    emozilla 2023; YaRN, arXiv 2309.00071, section 3.3.
    """

    name = "dynamic_ntk"
    aliases = ("dynamic",)
    paper = "emozilla 2023"
    summary = "no fine-tuning; outputs for short prompts do not change"

    alpha: Literal["transformers", "ratio"] = "transformers"
    mode: Literal["fixed", "growing"] = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("alpha", "transformers", "ratio")
        self.require_choice("mode", "fixed", "growing")
        if self.mode == "growing":
            like_transformers = self.alpha == "transformers"
            self.require("alpha", like_transformers, "'transformers' with mode='growing'")
            for option in ("length", "attention_factor", "temperature"):
                self.require(option, getattr(self, option) is None, "None with mode='growing'")

    def base_scale(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        """``b' / b`` for each of ``lengths`` (tokens)."""
        alpha = lengths / rope.length
        if self.alpha == "transformers":
            alpha = self.factor * alpha - (self.factor - 1)
        return alpha.clamp(min=1) ** rope.ntk_exponent

    def inv_freq_at(self, rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
        return rope.with_base_times(self.base_scale(rope, lengths))

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        if self.is_dynamic:  # transformers' alpha with s = 1 is the plain ratio l / L
            factor = self.factor if self.alpha == "transformers" else 1
            return {"rope_type": "dynamic", "factor": float(factor)}
        scale = float(self.base_scale(rope, self._fixed(rope)))
        return {"rope_type": "default", "rope_theta": rope.base * scale}


@register
@dataclass(frozen=True, kw_only=True)
class PI(FrequencyMethod):
    """Divides every frequency by ``factor``: ``h = theta / s``.

    Use it as a baseline, or where a recipe or an engine requires ``rope_type: linear``. Neighboring
    tokens blur until a few hundred steps of fine-tuning repair it: LLaMA 7B at 8192 tokens has a
    perplexity on PG19 of 16.10 untuned and 6.95 after 1000 steps (Table 3).

    Chen et al. 2023, arXiv 2306.15595, eq. 4; kaiokendev's SuperHOT.
    """

    name = "pi"
    aliases = ("linear", "position_interpolation")
    paper = "arXiv 2306.15595"
    summary = "the simplest baseline; needs fine-tuning; blurs neighboring tokens"

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.inv_freq / self.factor

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": float(self.factor)}


@register
@dataclass(frozen=True, kw_only=True)
class MrRoPE(FrequencyMethod):
    """YaRN with another ramp: slow pairs are divided by more, fast ones by less.

    The last pair with more than ``beta_fast`` rotations is unchanged, and the first with fewer than
    ``beta_slow`` is divided by ``factor``. If no pair rotates that often, the fastest one is
    unchanged, as in YaRN; if none rotates that rarely, the first one to be divided in full would
    follow the slowest. Cosine and sine are multiplied by ``0.1 ln(s) + 1``.

    Args:
        beta_fast: rotations within the trained context; the paper's alpha.
        beta_slow: rotations within the trained context; the paper's beta.
        mode: ``"pro"`` divides pair ``t`` of the ``n`` in between by ``factor`` to the power
            ``t (t + 1) / (n (n + 1))``, ``"uni"`` to the power ``t / n``.

    Tian et al. 2026, arXiv 2601.22181, section 3: its formulas, and the authors' code.
    """

    name = "mrrope"
    paper = "arXiv 2601.22181"
    summary = "no fine-tuning; like YaRN, but slows slow pairs more and fast pairs less"
    candidates = _BETAS

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mode: Literal["pro", "uni"] = "pro"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("beta_slow", above=0)
        self.require_number("beta_fast", above=self.beta_slow)
        self.require_choice("mode", "pro", "uni")

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        turns = rope.rotations
        last_kept = max(int((turns > self.beta_fast).sum()) - 1, 0)
        first_divided = max(int((turns >= self.beta_slow).sum()), last_kept + 1)
        between = first_divided - last_kept
        index = torch.arange(len(turns), dtype=torch.float64, device="cpu")
        t = (index - last_kept).clamp(0, between)
        power = t / between if self.mode == "uni" else t * (t + 1) / (between * (between + 1))
        return rope.inv_freq / float(self.factor) ** power

    def own_scaling(self, rope: Rope) -> float:
        return 0.1 * math.log(self.factor) + 1.0


@register
@dataclass(frozen=True, kw_only=True)
class NTKByParts(FrequencyMethod):
    """Divides slow pairs by ``factor`` and keeps fast ones, with a linear ramp in rotations.

    With ``r_i`` rotations of a pair within the trained context,
    ``g = clip((r_i - alpha) / (beta - alpha), 0, 1)`` and ``h = (1 - g) theta / s + g theta``. This
    is YaRN with the ramp of its paper and without the temperature: use it to measure what that
    adds.

    Args:
        alpha: pairs with fewer rotations are divided by ``factor``.
        beta: pairs with more rotations keep their frequency.

    YaRN, arXiv 2309.00071, section 3.2, definition 2.
    """

    name = "ntk_by_parts"
    aliases = ("by_parts",)
    paper = "arXiv 2309.00071"
    summary = "ablations of YaRN: the same ramp without the temperature"
    candidates = MappingProxyType({"alpha": (1.0, 2.0, 4.0), "beta": (16.0, 32.0, 64.0)})

    alpha: float = 1.0
    beta: float = 32.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("alpha", minimum=0)
        self.require_number("beta", above=self.alpha)

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        kept = rope.rotation_ramp(self.alpha, self.beta)
        return rope.interpolated(kept, self.factor)


@register
@dataclass(frozen=True, kw_only=True)
class Llama3(FrequencyMethod):
    """Divides long wavelengths by ``factor`` and keeps short ones, without a temperature.

    A pair keeps its frequency if its wavelength is below ``length / high_freq_factor``, and is
    divided by ``factor`` if it is above ``length / low_freq_factor``, with a smooth transition in
    between. Use it to train like Llama 3.1. Checkpoints that already have it take
    ``compose="raise"`` to raise their factor.

    Args:
        low_freq_factor: pairs with fewer rotations within the trained context are divided by
            ``factor``.
        high_freq_factor: pairs with more rotations keep their frequency.

    Llama 3.1 release (July 2024), ``apply_scaling``; factor 8, length 8192 there.
    """

    name = "llama3"
    aliases = ("llama31", "llama3.1")
    paper = "Llama 3.1 release"
    summary = "the scaling of Llama 3.1: a narrow ramp and no temperature"
    candidates = MappingProxyType(
        {"low_freq_factor": (1.0, 2.0), "high_freq_factor": (4.0, 8.0, 16.0)}
    )

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("low_freq_factor", above=0)
        self.require_number("high_freq_factor", above=self.low_freq_factor)

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        kept = rope.rotation_ramp(self.low_freq_factor, self.high_freq_factor)
        return rope.interpolated(kept, self.factor)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": float(self.factor),
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
            "original_max_position_embeddings": rope.length,
        }
