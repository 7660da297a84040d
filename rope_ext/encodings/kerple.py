"""KERPLE, its logarithmic and its power form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rope_ext.encodings.base import Encoding, Heads, Learned
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope

_LEAST = 0.01
"""Below which the authors' code lets no parameter fall."""


@dataclass(frozen=True, kw_only=True)
class _Kerple(Encoding):
    def initial(self, heads: Heads, rope: Rope) -> dict[str, torch.Tensor]:
        return {"r1": 2 * torch.rand(heads.count), "r2": torch.rand(heads.count)}

    def settles(self, rope: Rope) -> None:
        return None


def _clamped(learned: Learned, name: str, like: torch.Tensor, most: float | None) -> torch.Tensor:
    return learned[name].to(like).clamp(_LEAST, most)[:, None]


@register
@dataclass(frozen=True, kw_only=True)
class KerpleLog(_Kerple):
    """No rotation; every head learns ``-r1 ln(1 + r2 d)``.

    Both parameters stay at 0.01 or more; they begin uniform in [0, 2] and in [0, 1].

    Chi et al. 2022, arXiv 2205.09921.
    """

    name: ClassVar[str] = "kerple_log"
    aliases: ClassVar[tuple[str, ...]] = ("kerple",)
    paper: ClassVar[str] = "arXiv 2205.09921"
    use: ClassVar[str] = "a learned penalty that grows with the logarithm; to be trained with"

    def bias(
        self, distance: torch.Tensor, heads: int, rope: Rope, learned: Learned
    ) -> torch.Tensor:
        r1, r2 = (_clamped(learned, name, distance, None) for name in ("r1", "r2"))
        return -r1 * torch.log1p(r2 * distance)


@register
@dataclass(frozen=True, kw_only=True)
class KerplePower(_Kerple):
    """No rotation; every head learns ``-r1 d^r2``.

    Both parameters stay at 0.01 or more, ``r2`` at 2 or less; they begin uniform in [0, 2] and in
    [0, 1].

    Chi et al. 2022, arXiv 2205.09921.
    """

    name: ClassVar[str] = "kerple_power"
    paper: ClassVar[str] = "arXiv 2205.09921"
    use: ClassVar[str] = "a learned penalty that is a power of the distance; to be trained with"

    def bias(
        self, distance: torch.Tensor, heads: int, rope: Rope, learned: Learned
    ) -> torch.Tensor:
        r1 = _clamped(learned, "r1", distance, None)
        r2 = _clamped(learned, "r2", distance, 2.0)
        return -r1 * distance**r2
