"""The rotation itself, as it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rope_ext.methods.geometry import Distance
from rope_ext.methods.kinds import Band, PositionMethod, own
from rope_ext.methods.registry import register
from rope_ext.methods.rope import Rope


@register
@dataclass(frozen=True, kw_only=True)
class RoPE(PositionMethod):
    """The rotation as it was trained, to which ``bias=`` adds or which ``temperature=`` sharpens.

    By itself it changes nothing, and is refused.

    Args:
        factor: the context grows to this many times the trained length; distances beyond it are
            new to the rotation.

    Su et al. 2021, arXiv 2104.09864.
    """

    name: ClassVar[str] = "rope"
    paper: ClassVar[str] = "arXiv 2104.09864"
    use: ClassVar[str] = "the rotation as it was trained, under a bias or a temperature"

    kind: ClassVar[str] = "rotation"
    works_within: ClassVar[bool] = True

    factor: float = 1.0

    def bands(self) -> tuple[Band, ...]:
        return (Band(Distance(0, None), own, own),)

    def reached(self, rope: Rope) -> int:
        return rope.length
