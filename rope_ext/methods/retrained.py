"""Frequency methods for models that are trained further, and studies of single pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.kinds import (
    FrequencyMethod,
)
from rope_ext.methods.registry import build_method, register
from rope_ext.methods.rope import Rope
from rope_ext.methods.temperature import Temperature, as_temperature


def smallest_base(length: float) -> float:
    """The smallest base that still distinguishes related tokens at ``length`` tokens.

    Fitted by Men et al. 2024, arXiv 2405.14591, figure 1.
    """
    return 0.0424 * length**1.628


@register
@dataclass(frozen=True, kw_only=True)
class ABF(FrequencyMethod):
    """Uses a larger base that you choose, for long continued training.

    Llama 2 Long went from base 10,000 to 500,000, and Qwen2.5-1M to 10,000,000. Only the base
    changes, so every engine runs the checkpoint. Without training it is ``ntk`` with another
    number.

    Args:
        base: the new base. None uses the smallest useful base for the target length,
            ``0.0424 * L_target ** 1.628`` (arXiv 2405.14591), if it is above the trained base.

    Xiong et al. 2023, arXiv 2309.16039, section 2.
    """

    name = "abf"
    aliases = ("adjusted_base_frequency", "base")
    paper = "arXiv 2309.16039"
    summary = "long continued training, as for Llama 2 Long and Code Llama"

    base: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is not None:
            self.require_number("base", above=1)

    def new_base(self, rope: Rope) -> float:
        """The base after the patch.

        Raises:
            OptionError: it would be smaller than the trained base.
        """
        target = self.target_length(rope)
        base = self.base or smallest_base(target)
        if base < rope.base:
            fault = (
                f"base {base:g} is smaller than the trained base {rope.base:g}"
                if self.base
                else f"the trained base {rope.base:g} is already large enough for {target} tokens "
                f"(the smallest useful one there is {base:g}, arXiv 2405.14591)"
            )
            raise OptionError(f"abf: {fault}; give base= a number above {rope.base:g}")
        return float(base)

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        return rope.with_base_times(self.new_base(rope) / rope.base)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.new_base(rope)}


@register
@dataclass(frozen=True, kw_only=True)
class BaseTruncation(FrequencyMethod):
    """Keeps fast pairs and freezes slow ones: at a small constant, and the slowest at zero.

    ``h = theta`` for ``theta >= upper``, ``constant`` between ``lower`` and ``upper``, 0 at or
    below ``lower``. For fine-tuning studies: hardly any angle is new at any length, so perplexity
    stays low, but retrieval loses the slow pairs, which distinguish large distances.

    Args:
        upper: radians per token; None is ``2 pi / length``.
        lower: radians per token; None is ``upper / 8``.
        constant: radians per token; None is ``upper / 16``.

    Pal et al. 2023 ("Giraffe"), arXiv 2308.10882, section 4.3; the defaults are the released ones.
    """

    name = "base_truncation"
    aliases = ("truncated_basis", "giraffe")
    paper = "arXiv 2308.10882"
    summary = "fine-tuning studies: good perplexity at any length, but weaker retrieval"

    upper: float | None = None
    lower: float | None = None
    constant: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("upper", "lower", "constant"):
            if getattr(self, option) is not None:
                self.require_number(option, minimum=0)
        if self.upper is not None and self.lower is not None:
            self.require("lower", self.lower <= self.upper, f"at most upper={self.upper}")

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        upper = 2 * math.pi / rope.length
        return {**super().grids(rope), "upper": (upper / 2, upper, 2 * upper)}

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        upper = 2 * math.pi / rope.length if self.upper is None else self.upper
        lower = upper / 8 if self.lower is None else self.lower
        constant = upper / 16 if self.constant is None else self.constant
        theta = rope.inv_freq
        slow = torch.full_like(theta, constant).where(theta > lower, 0.0)
        return torch.where(theta >= upper, theta, slow)


@register
@dataclass(frozen=True, kw_only=True)
class Resonance(FrequencyMethod):
    """Rounds wavelengths to whole tokens, on top of another frequency method, at no cost.

    A pair whose wavelength is a whole number of tokens meets no new angles beyond the trained
    context. The fastest pair changes most, by 4.7 % (6.28 tokens become 6), slow pairs by far less
    than 1 %.

    Args:
        on: the method whose wavelengths to round: the name of a fixed method (built with the same
            ``factor``), or an object.

    Wang et al. 2024, arXiv 2403.00071, section 4.
    """

    name = "resonance"
    aliases = ("resonance_rope",)
    paper = "arXiv 2403.00071"
    summary = "refines another method (on='yarn') at no cost"

    on: str | FrequencyMethod = "yarn"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.on, str):
            self.set("on", build_method(self.on, factor=self.factor))
        self.require("on", isinstance(self.on, FrequencyMethod), "a method or a method's name")
        rounded = self.rounded
        if rounded.is_dynamic:
            raise OptionError(
                f"resonance: on={rounded.name!r} changes with the sequence; give it length=..., "
                f"or choose a fixed method such as 'yarn'"
            )
        self.require("on", not rounded.start_tokens, "a map without start_tokens")
        self.require("factor", self.factor == rounded.factor, f"the factor of on, {rounded.factor}")

    @property
    def rounded(self) -> FrequencyMethod:
        """The method in ``on``, where a name is replaced when the object is made."""
        return cast(FrequencyMethod, self.on)

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        wavelength = 2 * math.pi / self.rounded.inv_freq(rope)
        return 2 * math.pi / wavelength.round()  # inf and back to 0 for a pair that does not rotate

    def extends(self, rope: Rope) -> bool:
        return self.rounded.extends(rope)  # rounding alone slows some pairs

    def own_scaling(self, rope: Rope) -> float:
        return self.rounded.attention_scaling(rope)

    def own_temperature(self) -> Temperature | None:
        return as_temperature(self.rounded.temperature) or self.rounded.own_temperature()


@register
@dataclass(frozen=True, kw_only=True)
class PRoPE(FrequencyMethod):
    """Rotates only the fastest fraction ``p`` of the pairs.

    For training from scratch or with extensive fine-tuning: pairs that do not rotate carry meaning
    at any distance. Without training it does not extend a model.

    Args:
        p: fraction of pairs that rotate, in (0, 1]; rounded down to whole pairs.

    Barbero et al. 2024, arXiv 2410.06205, section 6; transformers calls it ``proportional``.
    """

    name = "p_rope"
    aliases = ("proportional",)
    paper = "arXiv 2410.06205"
    summary = "training studies: unrotated pairs carry meaning at any distance"

    p: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("p", above=0)
        self.require("p", self.p <= 1, "a number in (0, 1]")

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        index = torch.arange(rope.dim // 2, device="cpu")
        return torch.where(index < int(self.p * (rope.dim // 2)), rope.inv_freq, 0.0)


_SHARE = 20 / 64  # of the pairs of Llama-3-8B, as released


@register
@dataclass(frozen=True, kw_only=True)
class Clipped(FrequencyMethod):
    """Slows down the slowest pairs along a half cosine, the slowest to zero (CoPE).

    The first of the ``pairs`` slowest keeps its frequency, and the last no longer rotates. For
    training studies: the authors raise the base of Llama 3 8B to 10,000,000, clip, and train on
    65,536 tokens. The factor only sets the target length.

    Args:
        pairs: number of pairs; None is 20 of 64, as released for Llama-3-8B, and at least 2.

    Li et al. 2026, arXiv 2602.05258; the formula and the number are those of its code.
    """

    name = "clipped"
    paper = "arXiv 2602.05258"
    summary = "training studies: slows the slowest pairs gradually, down to zero"

    pairs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_tokens("pairs")

    def grids(self, rope: Rope) -> dict[str, tuple[Any, ...]]:
        pairs = tuple(round(share * rope.dim / 2) for share in (0.2, 0.3, 0.4, 0.5))
        return {**super().grids(rope), "pairs": pairs}

    def inv_freq(self, rope: Rope) -> torch.Tensor:
        count = rope.dim // 2
        clipped = max(round(_SHARE * count), 2) if self.pairs is None else self.pairs
        clipped = min(clipped, count)
        angle = torch.linspace(0, math.pi, clipped, dtype=torch.float64, device="cpu")
        kept = torch.ones(count, dtype=torch.float64, device="cpu")
        kept[count - clipped :] = (1 + angle.cos()) / 2
        return rope.inv_freq * kept
