"""Absolute encodings: positions change the input of the layers, which do not rotate.

    x_t <- x_t + scale * p(t)          or x_t * p(t)

Positions count from the first token of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rope_ext.encodings.base import Encoding, Learned
from rope_ext.errors import OptionError
from rope_ext.methods.rope import Rope


@dataclass(frozen=True, kw_only=True)
class InputEncoding(Encoding):
    """Base of encodings that add positions to the input of layers."""

    entered: ClassVar[Literal["first", "every"] | int | None] = "first"
    sized: ClassVar[bool] = False  # ``p`` is of magnitude 1 and has a scale
    tabled: ClassVar[bool] = False  # ``p`` of a position depends on all earlier ones

    def initial_inputs(self, columns: int, size: float, rope: Rope) -> dict[str, torch.Tensor]:
        """The initial learned parameters by name, as in :meth:`initial`.

        ``size`` is the root mean square of the input of the first layer.
        """
        return {}

    def limit(self, rope: Rope) -> int | None:
        """Longest sequence that has positions, in tokens; None: no limit."""
        return None

    def cure(self, tokens: int, rope: Rope) -> str:
        """How to fix a sequence longer than the limit; ends the error message."""
        return f"patch with length={tokens}, and train the rest of the table"

    def covers(self, tokens: int, rope: Rope) -> None:
        """Raise an OptionError if there are not enough positions for ``tokens``."""
        limit = self.limit(rope)
        if limit is not None and tokens > limit:
            raise OptionError(
                f"{self.name}: a sequence of {tokens} tokens goes beyond its {limit} positions; "
                f"{self.cure(tokens, rope)}"
            )

    def p(self, t: torch.Tensor, columns: int, rope: Rope, learned: Learned) -> torch.Tensor:
        """The encoding of positions ``t`` (float64, ``[...]``): ``[..., columns]``.

        If ``tabled``, ``t`` is ``0, 1, 2, ...``, in the dtype in which to compute.
        """
        raise NotImplementedError

    def join(self, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Combine hidden states with the encoding of their positions."""
        return x + p


@dataclass(frozen=True, kw_only=True)
class Sized(InputEncoding):
    """Base of encodings whose ``p`` has a scale.

    Args:
        scale: factor of ``p``. None: the root mean square of the first layer's input for a sample
            of the vocabulary, computed when the model is patched and saved with the weights.
    """

    sized: ClassVar[bool] = True

    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            self.require_number("scale", above=0)


def sinusoid(t: torch.Tensor, columns: int, base: float) -> torch.Tensor:
    """``sin(t / base^(2i / columns))`` in column ``2i`` and the cosine next to it: float32."""
    even = torch.arange(0, columns, 2, dtype=t.dtype, device=t.device)
    angles = t.unsqueeze(-1) * base ** -(even / columns)
    both = torch.stack((angles.sin().float(), angles.cos().float()), -1)
    return both.flatten(-2)[..., :columns]
