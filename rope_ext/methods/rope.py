"""A trained rotary embedding as methods see it, and helpers for numeric options."""

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from rope_ext.errors import OptionError, UnsupportedModelError

MOST_TOKENS = 2**31 - 1
"""Longest supported context; other readers of config.json store it in 32 bits."""
LARGEST = 1e30
"""Largest value of any option; its inverse is the smallest except 0. Float32 holds both."""


@dataclass(frozen=True)
class Rope:
    """One trained rotary embedding.

    Args:
        inv_freq: ``theta``, float64, shape ``[dim / 2]``, radians per token, fastest first.
        base: ``b`` of ``theta_i = b ** (-2 i / dim)`` (``rope_theta``).
        length: trained length in tokens (``original_max_position_embeddings``).
    """

    inv_freq: torch.Tensor
    base: float
    length: int

    @classmethod
    def geometric(cls, base: float, dim: int, length: int) -> Self:
        """The unscaled embedding with this ``base``, exact in float64."""
        return cls(geometric(base, dim), base, length)

    @property
    def dim(self) -> int:
        return 2 * self.inv_freq.numel()

    @property
    def rotations(self) -> torch.Tensor:
        """Full rotations of each pair within the trained length: ``length * theta / (2 pi)``."""
        return self.length * self.inv_freq / (2 * math.pi)

    def rotation_ramp(self, low: float, high: float) -> torch.Tensor:
        """Linear in rotations: 0 below ``low``, 1 above ``high``, float64, ``[dim / 2]``."""
        return ((self.rotations - low) / (high - low)).clamp(0, 1)

    def tokens(self, *shares: float) -> tuple[int, ...]:
        """Convert fractions of the trained length to tokens, at least one token each."""
        return tuple(max(1, round(share * self.length)) for share in shares)

    @property
    def ntk_exponent(self) -> float:
        """``d / (d - 2)``; a base times ``s`` to this power divides the slowest pair by ``s``."""
        self._require_pairs()
        return self.dim / (self.dim - 2)

    def _require_pairs(self) -> None:
        """Raise if the base has no effect: the frequency of the fastest pair is 1 for any base."""
        if self.dim == 2:
            raise UnsupportedModelError(
                "only one pair of columns rotates in each head of this model, and its frequency "
                "does not depend on the base; use a method that divides frequencies, such as 'pi'"
            )

    def interpolated(self, kept: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """Keep a fraction ``kept`` of each frequency and divide the rest by ``factor``."""
        return (1 - kept) * self.inv_freq / factor + kept * self.inv_freq

    def with_base_times(self, scale: float | torch.Tensor) -> torch.Tensor:
        """The frequencies for the base times ``scale`` (``[...]``): ``[..., dim / 2]``."""
        self._require_pairs()
        scale = torch.as_tensor(scale, dtype=torch.float64, device="cpu")
        return self.inv_freq * scale.unsqueeze(-1) ** -_exponents(self.dim)


def geometric(base: float, dim: int) -> torch.Tensor:
    """``base ** (-2 i / dim)`` in float64, shape ``[dim / 2]``."""
    return float(base) ** -_exponents(dim)


def extended_length(factor: float, length: int) -> int:
    """Context in tokens after extending ``length`` tokens."""
    if factor > MOST_TOKENS / length:
        raise OptionError(
            f"factor={factor!r} is not valid; {length} trained tokens can be extended to at most "
            f"{MOST_TOKENS}, by a factor of {MOST_TOKENS // length}"
        )
    return math.ceil(round(factor * length, 6))  # 1.1 * 1500 is 1650.0000000000002


def factor_to(target: int, length: int) -> int | float:
    """The factor that extends ``length`` tokens to ``target``, rounded up to hundredths."""
    hundredths = -(-100 * target // length)
    return hundredths // 100 if hundredths % 100 == 0 else hundredths / 100


def plain_number(value: Any) -> int | float | None:
    """Convert a real number of any type (numpy, Fraction) to Python's; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError:  # a large Fraction
        return math.inf


def whole_number(value: Any, minimum: int = 1) -> int | None:
    """Convert to a number of tokens from ``minimum`` to MOST_TOKENS; None for anything else."""
    number = plain_number(value)
    return number if isinstance(number, int) and minimum <= number <= MOST_TOKENS else None


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
