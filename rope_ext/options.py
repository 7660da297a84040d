"""The keyword arguments of ``patch`` other than the method and its options."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rope_ext.encodings import Encoding
from rope_ext.errors import OptionError
from rope_ext.methods import FrequencyMethod, Method, Rope, all_encodings, method_class
from rope_ext.methods.checked import Checked, Whole
from rope_ext.methods.rope import whole_number

PRECISE_BEYOND = 131072
"""Target length, in tokens, beyond which angles are computed in float64 by default."""
SlidingLayers = Literal["auto", "keep", "scale"]


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """The keyword arguments of :func:`rope_ext.patch`, documented there."""

    name = "patch"

    frequency: FrequencyMethod | None = None
    bias: Encoding | None = None
    layers: tuple[int, ...] | str | None = None
    kernel: Literal["auto", "flash", "flex", "reference"] = "auto"
    compose: Literal[False, True, "raise"] = False
    sliding_layers: SlidingLayers = "auto"
    precise: Literal["auto", True, False] = "auto"
    original_max_position_embeddings: Annotated[int, Whole(2)] | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias is not None:
            self.set("bias", _bias(self.bias))
        if self.layers is not None:
            self.set("layers", _layers(self.layers))
        if self.tokenizer is not None and not hasattr(self.tokenizer, "model_max_length"):
            raise OptionError(
                f"tokenizer={self.tokenizer!r} is not valid; it must be a tokenizer of transformers"
            )

    def check(self, method: Method) -> None:
        for wrong, why in self._faults(method):
            if wrong:
                raise OptionError(why)
        if method.is_dynamic and isinstance(method, FrequencyMethod):
            given = {
                "bias=": self.bias,
                "layers=": self.layers,
                "start_tokens=": method.start_tokens,
            }
            temperature = method.chosen_temperature
            if temperature is not None and temperature.filled(2, 2).constant is None:
                given["a temperature by position"] = temperature
            for option in filter(given.get, given):
                refuse_moving(method, option)

    def _faults(self, method: Method) -> Iterator[tuple[bool, str]]:
        """Yield conflicts with ``method``: whether each exists, and why."""
        name = method.name
        bias = self.bias
        layers = self.layers
        under = self.frequency
        yield (
            bias is not None and method.kind == "encoding",
            f"{name} takes the place of the rotation, beside which bias= is added; leave bias out, "
            f"or patch with 'rope' or 'yarn'",
        )
        numbers = (method.temperature, method.attention_factor, bias, under)
        yield (
            method.kind == "rotation" and numbers == (None, None, None, None),
            f"{name} leaves the rotation as trained; pass bias='alibi' or temperature='log_n' "
            f"for another change, or use a method such as 'yarn'",
        )
        if layers is not None and isinstance(method, Encoding):
            told = f"so layers={layers!r} has no effect; leave layers out"
            yield (
                method.by_layer,
                f"{name} chooses its layers itself, {told}, and set the options every and start of "
                f"{name}",
            )
            yield bool(method.entered), f"{name} acts in front of the layers, {told}"
        if under is None:
            return
        yield (
            method.kind == "frequency",
            f"frequency={under!r} goes under a position method such as 'rerope', and {name} is a "
            f"frequency method itself; leave one of them out",
        )
        still = isinstance(method, Encoding) and (
            method.computes_positions()
            or all(band.query == band.key == 0 for band in method.bands())
        )
        yield (
            still,
            f"{name} does not rotate by positions in the layers it changes, or learns them for the "
            f"model's frequencies, so frequency={under!r} has no effect; leave it out",
        )
        yield (
            not isinstance(under, FrequencyMethod),
            f"frequency={under!r} is not valid; it must be a frequency method object such as "
            f"rope_ext.NTK(factor=2)",
        )
        under.check()
        told = f"{under.name} cannot go under {name}, since it"
        yield (under.is_dynamic, f"{told} changes with the sequence; pass length=TOKENS to fix it")
        yield (
            under.temperature is not None,
            f"{told} has temperature={under.temperature!r}; give that to {name}",
        )
        yield (
            bool(under.start_tokens),
            f"{told} rotates by position with start_tokens={under.start_tokens}; leave them out",
        )

    def rope(self, rope: Rope) -> Rope:
        """The embedding that a position method extends: ``rope``, after any frequency method."""
        under = self.frequency
        if under is None:
            return rope
        return Rope(under.inv_freq(rope), rope.base, under.target_length(rope))

    def is_precise(self, length: int) -> bool:
        """Whether angles are computed in float64, for a target length in tokens."""
        return length > PRECISE_BEYOND if self.precise == "auto" else self.precise

    def recorded(self) -> dict[str, Any]:
        """Return the options that a record stores: all except the tokenizer."""
        return {name: value for name, value in self.options().items() if name != "tokenizer"}


def refuse_moving(method: FrequencyMethod, option: str) -> None:
    """Raise OptionError for an option that needs frequencies that do not depend on the sequence."""
    raise OptionError(
        f"{method.name} changes with the sequence, which {option} cannot follow; pass "
        f"length=TOKENS to fix it"
    )


def _bias(given: Any) -> Encoding:
    """Resolve ``bias`` to an encoding that adds to the logits by distance."""
    adding = [cls for cls in all_encodings() if issubclass(cls, Encoding) and cls.adds()]
    names = ", ".join(repr(cls.name) for cls in adding)
    cls: Any = method_class(given) if isinstance(given, str) else type(given)
    if cls not in adding:
        raise OptionError(
            f"bias={given!r} is not valid; it must add to the logits by distance: one of {names}, "
            f"or an object such as rope_ext.T5(num_buckets=16)"
        )
    encoding = cls() if isinstance(given, str) else given
    for name, none in (("factor", 1), ("attention_factor", None), ("temperature", None)):
        value = getattr(encoding, name)
        if value != none:
            raise OptionError(
                f"{name}={value!r} has no effect on bias={encoding.name!r}; pass it to the method"
            )
    return encoding


def _layers(given: Any) -> tuple[int, ...] | str:
    """Resolve ``layers`` to ascending indices, or to a string such as "every 4th"."""
    if isinstance(given, str):
        every = re.fullmatch(r"every (\d{1,4})(st|nd|rd|th)", given.strip().lower())
        if every and int(every[1]) > 1:
            return f"every {int(every[1])}{every[2]}"
    elif isinstance(given, Sequence) and len(given):
        read = [whole_number(number, minimum=0) for number in given]
        numbers = {number for number in read if number is not None}
        if len(numbers) == len(read):
            return tuple(sorted(numbers))
    raise OptionError(
        f"layers={given!r} is not valid; it must be different indices counted from 0, such as [3], "
        f"[3, 7, 11] or range(3, 32, 4), or 'every 4th'"
    )
