"""What ``patch`` takes beside a method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from rope_ext.errors import OptionError
from rope_ext.methods import FrequencyMethod
from rope_ext.methods.rope import MOST_TOKENS, whole_number

SlidingLayers = Literal["auto", "keep", "scale"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of :func:`rope_ext.patch`, which says what they mean.

    Raises:
        OptionError: one is not valid.
    """

    frequency: FrequencyMethod | None = None
    kernel: Literal["auto", "flash", "flex", "reference"] = "auto"
    compose: bool = False
    sliding_layers: SlidingLayers = "auto"
    precise: bool | Literal["auto"] = "auto"
    original_max_position_embeddings: int | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        self._require("kernel", "auto", "flash", "flex", "reference")
        self._require("sliding_layers", "auto", "keep", "scale")
        self._require("precise", "auto", True, False)
        given = self.original_max_position_embeddings
        if given is None:
            return
        length = whole_number(given, minimum=2)
        if length is None:
            raise OptionError(
                f"original_max_position_embeddings={given!r} is not valid; it must be a number of "
                f"tokens, from 2 to {MOST_TOKENS}"
            )
        object.__setattr__(self, "original_max_position_embeddings", length)

    def recorded(self) -> dict[str, Any]:
        """What a record keeps: all but the tokenizer."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name != "tokenizer"}

    def _require(self, option: str, *valid: Any) -> None:
        value = getattr(self, option)
        if not any(type(value) is type(x) and value == x for x in valid):  # an array is neither
            raise OptionError(
                f"{option}={value!r} is not valid; it must be one of {', '.join(map(repr, valid))}"
            )
