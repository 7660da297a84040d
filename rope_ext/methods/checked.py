"""Validates objects whose fields are options."""

import dataclasses
import functools
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

import torch

from rope_ext.errors import OptionError
from rope_ext.methods.rope import LARGEST, MOST_TOKENS, plain_number, whole_number

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Return ``value``; for options that are always set, such as those of a resolved method."""
    if value is None:
        raise TypeError("unexpected None; resolved() and filled() set what options leave open")
    return value


@dataclass(frozen=True)
class Number:
    """Valid values of a number; ``above`` may name another option."""

    minimum: float | None = None
    above: float | str | None = None
    maximum: float = LARGEST


@dataclass(frozen=True)
class Whole:
    """Valid values of a number of tokens, or other things that are counted."""

    minimum: int = 1
    below: str | None = None  # name of another option
    parity: Literal["even", "odd"] | None = None


@dataclass(frozen=True)
class Numbers:
    """Valid values of a list, which is stored as a tuple: hashable, and safe from later edits."""

    valid: str  # ends an error: "must be ..."
    least: float = 1 / LARGEST
    most: float = LARGEST
    whole: bool = False


Tokens = Annotated[int, Whole()]
Positive = Annotated[float, Number(above=0)]
Base = Annotated[float, Number(above=1)]  # of frequencies


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return annotations by option, also those that ``from __future__ import annotations`` made."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError:  # of a name that only type checkers import
        return {field.name: field.type for field in dataclasses.fields(cls)}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of frozen dataclasses of options; errors name the class and the option.

    Options are checked by their annotations: ``bool``, ``Literal[...]``, ``Tokens``, ``Positive``
    and ``Annotated`` with one of the classes above, each also with ``| None``.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():  # dynamo cannot read Annotated
            return
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            self._check(field.name, hints.get(field.name))

    def _check(self, option: str, hint: Any) -> None:
        value = getattr(self, option)
        optional = False
        if typing.get_origin(hint) in (Union, UnionType) and NoneType in typing.get_args(hint):
            optional = True
            kinds = [kind for kind in typing.get_args(hint) if kind is not NoneType]
            if value is None or len(kinds) > 1:
                return
            hint = kinds[0]
        if hint is bool:
            self.require(option, isinstance(value, bool), "True or False")
        elif typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
            holds = any(type(value) is type(one) and value == one for one in choices)  # no arrays
            self.require(option, holds, " or ".join(map(repr, choices)))
        for valid in getattr(hint, "__metadata__", ()):
            if isinstance(valid, Number):
                self._require_number(option, valid)
            elif isinstance(valid, Whole):
                self._require_whole(option, valid, ", or None" if optional else "")
            elif isinstance(valid, Numbers):
                self.require_list(option, valid)

    def options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        fields = dataclasses.fields(self)
        return {f.name: x for f in fields if (x := getattr(self, f.name)) != f.default}

    def require(self, option: str, holds: bool, valid: str) -> None:
        """Raise an OptionError with the value and the valid values unless ``holds``."""
        if not holds:
            value = getattr(self, option)
            raise OptionError(f"{self.name}: {option}={value!r} is not valid; it must be {valid}")

    def valid_text(self, option: str, text: str) -> str:
        """Return how an error names the valid numbers of an option; ``text`` is its type's."""
        return text

    def _require_number(self, option: str, valid: Number) -> None:
        value = plain_number(getattr(self, option))
        above = valid.above
        if isinstance(above, str):  # where it is not valid itself, its own error says so
            other = plain_number(getattr(self, above))
            above = other if other is not None and abs(other) <= LARGEST else None
        number = math.nan if value is None else value
        holds = isinstance(number, int) or math.isfinite(number)  # isfinite overflows on big ints
        text = "a finite number"
        if valid.minimum is not None:
            text = f"{text} of at least {valid.minimum}"
            holds = holds and number >= valid.minimum
        if above is not None:
            text = f"{text} greater than {above}"
            holds = holds and number > above
        self.require(option, holds, self.valid_text(option, text))
        self.require(option, number <= valid.maximum, f"at most {valid.maximum}")
        self.require(option, not 0 < number < 1 / LARGEST, f"at least {1 / LARGEST}")
        self.set(option, number)

    def _require_whole(self, option: str, valid: Whole, more: str) -> None:
        value = getattr(self, option)
        number = whole_number(value, valid.minimum)
        text = f"a whole number of at least {valid.minimum}{more}"
        if isinstance(plain_number(value), int) and value > MOST_TOKENS:
            text = f"at most {MOST_TOKENS} tokens"
        self.require(option, number is not None, text)
        self.set(option, number)
        if valid.parity is not None:
            self.require(option, value % 2 == (valid.parity == "odd"), f"an {valid.parity} number")
        if valid.below is not None:
            most = getattr(self, valid.below)
            self.require(option, value < most, f"less than {valid.below}={most}")

    def require_list(self, option: str, valid: Numbers) -> None:
        value = getattr(self, option)
        convert = whole_number if valid.whole else plain_number
        listed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        numbers = tuple(map(convert, value)) if listed else (None,)
        holds = all(x is not None and valid.least <= x <= valid.most for x in numbers)
        self.require(option, holds, valid.valid)
        self.set(option, numbers)

    def set(self, option: str, value: Any) -> None:
        """Set an option of the frozen object; for ``__post_init__`` only."""
        object.__setattr__(self, option, value)
