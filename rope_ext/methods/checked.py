"""Validates objects whose fields are options."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from rope_ext.errors import OptionError
from rope_ext.methods.rope import LARGEST, MOST_TOKENS, plain_number, whole_number

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Return ``value``; for options that are always set, such as those of a resolved method.

    Raises:
        TypeError: it is None.
    """
    if value is None:
        raise TypeError("unexpected None; resolved() and filled() set what options leave open")
    return value


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of frozen dataclasses of options; errors name the class and the option."""

    name: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def require(self, option: str, holds: bool, valid: str) -> None:
        """Raise an OptionError with the value and the valid values unless ``holds``."""
        if not holds:
            value = getattr(self, option)
            raise OptionError(f"{self.name}: {option}={value!r} is not valid; it must be {valid}")

    def require_choice(self, option: str, *choices: str) -> None:
        """Raise an OptionError unless the option is one of ``choices``."""
        value = getattr(self, option)
        valid = " or ".join(map(repr, choices))
        self.require(option, isinstance(value, str) and value in choices, valid)

    def require_number(
        self,
        option: str,
        minimum: float | None = None,
        above: float | None = None,
        maximum: float = LARGEST,
    ) -> None:
        """Raise an OptionError unless the option is a finite number in the given range."""
        value = plain_number(getattr(self, option))
        number = math.nan if value is None else value
        finite = isinstance(number, int) or math.isfinite(number)  # isfinite overflows on big ints
        valid, holds = "a finite number", finite
        if minimum is not None:
            valid, holds = f"{valid} of at least {minimum}", holds and number >= minimum
        if above is not None:
            valid, holds = f"{valid} greater than {above}", holds and number > above
        self.require(option, holds, valid)
        self.require(option, number <= maximum, f"at most {maximum}")
        self.require(option, not 0 < number < 1 / LARGEST, f"at least {1 / LARGEST}")
        self.set(option, number)

    def require_tokens(self, option: str, minimum: int = 1, optional: bool = True) -> None:
        """Raise an OptionError unless the option is a valid number of tokens, or None."""
        value = getattr(self, option)
        if optional and value is None:
            return
        number = whole_number(value, minimum)
        valid = f"a whole number of at least {minimum}{', or None' if optional else ''}"
        if isinstance(plain_number(value), int) and value > MOST_TOKENS:
            valid = f"at most {MOST_TOKENS} tokens"
        self.require(option, number is not None, valid)
        self.set(option, number)

    def set(self, option: str, value: Any) -> None:
        """Set an option of the frozen object; for ``__post_init__`` only."""
        object.__setattr__(self, option, value)
