"""Temperatures: numbers that multiply queries, by position or by a constant.

Multiplying a query by ``tau`` multiplies all its logits by ``tau``, including those of columns that
do not rotate. Positions count from the first token of a sequence. Those that grow start at 1. In
attention in both directions, the position is that of the last token of the text, for all queries.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from typing_extensions import Self

from rope_ext.methods.checked import Checked, Number, Tokens, Whole, not_none
from rope_ext.methods.rope import plain_number


def yarn_factor(factor: float) -> float:
    """YaRN's factor for cosine and sine (arXiv 2309.00071, eq. 22)."""
    return 0.1 * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Temperature(Checked):
    """Base of all temperatures: frozen dataclasses whose fields are their options."""

    def filled(self, length: int, factor: float) -> Self:
        """The same temperature with every option set, for a trained length and a factor."""
        given = {"length": length, "factor": float(factor)}
        return replace(self, **{k: v for k, v in given.items() if getattr(self, k, 0) is None})

    def at(self, t: torch.Tensor) -> torch.Tensor:
        """``tau`` of a :meth:`filled` temperature at positions ``t``, float64, counted from 0."""
        return torch.full_like(t, not_none(self.constant))

    @property
    def constant(self) -> float | None:
        """``tau`` if it is the same at every position, else None."""
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain values from which :func:`as_temperature` builds the same temperature."""
        return {"temperature": self.name, **self.options()}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.changed().items())
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, kw_only=True, repr=False)
class LogN(Temperature):
    """``max(1, ln(i + 1) / ln(length))``: grows with the number of tokens to attend to.

    Args:
        length: tokens; the trained length by default.
        scale: fraction of the growth, ``1 + scale (tau - 1)``; 1 as published.

    Su 2023, kexue.fm/archives/8823.
    """

    name: ClassVar[str] = "log_n"

    length: Annotated[int, Whole(2)] | None = None
    scale: Annotated[float, Number(above=0, maximum=100)] = 1.0

    def at(self, t: torch.Tensor) -> torch.Tensor:
        assert self.length is not None, "`filled` sets it"
        grown = (t + 1).log() / math.log(self.length) - 1
        return 1 + self.scale * grown.clamp(min=0)


@dataclass(frozen=True, kw_only=True, repr=False)
class SSMax(LogN):
    """``1 + s max(0, ln(i + 1) / ln(length) - 1)`` with a learned ``s`` for every layer and head.

    Scalable-Softmax multiplies the logits of every head by ``s ln(n)``, with ``n`` the number of
    tokens that a query sees. A pretrained model expects a factor of 1 up to its trained length.
    Beyond it, the factor is ``(s / ln(length)) ln(n) + 1 - s``: that of :class:`LogN` for
    ``s = 1``, otherwise the published variant with a bias, derived from ``s``.

    Args:
        length: tokens; the trained length by default.
        scale: initial ``s`` of every head. 1 starts from ``log_n``, 0 without a temperature.

    Nakanishi 2025, arXiv 2501.19399.
    """

    name: ClassVar[str] = "ssmax"
    redefining: ClassVar[tuple[str, ...]] = ("length",)  # see Encoding

    scale: Annotated[float, Number(minimum=0, maximum=100)] = 1.0

    def growth(self, t: torch.Tensor) -> torch.Tensor:
        """What ``s`` multiplies at positions ``t``, float64."""
        return LogN(length=self.length).at(t) - 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Llama4(Temperature):
    """``1 + beta ln(1 + floor(i / length))``: a step at every multiple of the trained length.

    Ministral 3 and Mistral 4 count positions from 0, as here; Llama 4 counts them from 1, so its
    steps come one token earlier.

    Args:
        beta: 0.1 as published.
        length: tokens; the trained length by default (Llama 4: 8192).
    """

    name: ClassVar[str] = "llama4"

    beta: Annotated[float, Number(above=0, maximum=100)] = 0.1
    length: Tokens | None = None

    def at(self, t: torch.Tensor) -> torch.Tensor:
        return 1 + self.beta * (t / not_none(self.length)).floor().log1p()


@dataclass(frozen=True, kw_only=True, repr=False)
class YaRNTemperature(Temperature):
    """``(0.1 ln(s) + 1) ** 2``, the same at every position.

    YaRN multiplies cosine and sine by ``0.1 ln(s) + 1``, and so queries and keys. Here the square
    multiplies the query, and so also columns that do not rotate.

    Args:
        factor: ``s``; the factor of the method by default.

    Peng et al. 2023, arXiv 2309.00071, eq. 22.
    """

    name: ClassVar[str] = "yarn"

    factor: Annotated[float, Number(minimum=1)] | None = None

    @property
    def constant(self) -> float | None:
        return None if self.factor is None else yarn_factor(self.factor) ** 2


@dataclass(frozen=True, kw_only=True, repr=False)
class Constant(Temperature):
    """The same number at every position.

    Args:
        value: above 0.
    """

    name: ClassVar[str] = "constant"

    value: Annotated[float, Number(above=0, maximum=100)]

    @property
    def constant(self) -> float | None:
        return float(self.value)


TEMPERATURES: dict[str | None, type[Temperature]] = {
    cls.name: cls for cls in (LogN, SSMax, Llama4, YaRNTemperature, Constant)
}
"""By name. A constant needs a value, so its name alone is not enough."""


def as_temperature(given: Any) -> Temperature | None:
    """Convert a name, a number, JSON or a temperature; None if that is not possible."""
    if isinstance(given, Temperature):
        return given
    if isinstance(given, Mapping):
        options = dict(given)
        cls = TEMPERATURES.get(options.pop("temperature", None))
        try:
            return cls and cls(**options)
        except TypeError:  # an unknown or missing option
            return None
    if isinstance(given, str):
        return TEMPERATURES[given]() if given in TEMPERATURES and given != Constant.name else None
    number = plain_number(given)
    return Constant(value=number) if number is not None and 1e-30 <= number <= 100 else None
