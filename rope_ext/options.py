"""What ``patch`` takes beside a method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from rope_ext.errors import OptionError
from rope_ext.methods import FrequencyMethod, Method
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

    def check(self, method: Method) -> None:
        """Raise OptionError where ``frequency`` cannot go under ``method``."""
        under = self.frequency
        if under is None:
            return
        if method.kind == "frequency":
            raise OptionError(
                f"frequency={under!r} goes under a position method such as 'rerope', and "
                f"{method.name} is a frequency method itself; leave one of them out"
            )
        if not isinstance(under, FrequencyMethod):
            raise OptionError(
                f"frequency={under!r} is not valid; it must be a frequency method object such as "
                f"rope_ext.NTK(factor=2)"
            )
        under.check()
        if under.adapts:
            raise OptionError(
                f"{under.name} changes with the sequence and cannot go under {method.name}; pass "
                f"length=TOKENS to fix it"
            )
        if under.temperature is not None:
            raise OptionError(
                f"{under.name} under {method.name} has temperature={under.temperature!r}; give it "
                f"to {method.name}, whose queries it multiplies"
            )
        if under.start_tokens:
            raise OptionError(
                f"{under.name} with start_tokens={under.start_tokens} rotates by position, which "
                f"{method.name} changes; leave start_tokens out"
            )

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
