"""Every error that rope_ext raises on purpose. The text always ends with the cure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class RopeExtError(ValueError):
    """Base of all errors of this package."""


class UnknownMethodError(RopeExtError):
    """No method of that name is registered."""


class OptionError(RopeExtError):
    """An option is unknown, of the wrong kind, or out of range."""


class NoRopeError(RopeExtError):
    """The model has no rotary position embedding."""


class AlreadyPatchedError(RopeExtError):
    """The model carries a patch already."""


class NotPatchedError(RopeExtError):
    """The model carries no patch."""


class AlreadyScaledError(RopeExtError):
    """The checkpoint's rotary embedding is scaled by its own configuration."""


class UnsupportedModelError(RopeExtError):
    """The effect of a patch on this family cannot be proven, so none is made."""


class CacheError(RopeExtError):
    """A key-value cache cannot be continued under this patch."""


class RecordError(RopeExtError):
    """The record of a patch cannot be read, or not be followed."""


class AdapterError(RopeExtError):
    """An adapter and the model it is put on do not carry the same patch."""


class LoadError(RopeExtError, OSError):
    """A folder or Hub id holds no model that can be loaded."""


class ExportError(RopeExtError):
    """An engine cannot run a patch."""


class MeasureError(RopeExtError):
    """A model or a text cannot be loaded or measured as asked."""


class SeveralErrors(RopeExtError):
    """Several mistakes, reported together.

    Args:
        errors: the mistakes, two or more.
    """

    def __init__(self, errors: Iterable[RopeExtError]) -> None:
        self.errors = tuple(errors)
        listed = "".join(f"\n  - {error}" for error in self.errors)
        super().__init__(f"{len(self.errors)} mistakes:{listed}")


class Mistakes:
    """Collects errors, so that all of them are reported at once; true if there are any."""

    def __init__(self) -> None:
        self.errors: list[RopeExtError] = []

    def __bool__(self) -> bool:
        return bool(self.errors)

    def add(self, error: RopeExtError | str) -> None:
        """Remember an error, or the message of an ``OptionError``; none is kept twice."""
        if isinstance(error, str):
            error = OptionError(error)
        known = set(map(str, self.errors))
        self.errors += [one for one in getattr(error, "errors", [error]) if str(one) not in known]

    def add_all(self, messages: Iterable[str]) -> None:
        """Remember each message, and the error that ends them if one is raised."""
        with self.collected():
            for message in messages:
                self.add(message)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Remember an error of this package that the block raises."""
        try:
            yield
        except RopeExtError as error:
            self.add(error)

    def check(self, check: Callable[..., Any], *given: Any, default: Any = None) -> Any:
        """The result of ``check(*given)``; ``default`` if it raises, which is remembered."""
        with self.collected():
            return check(*given)
        return default

    def report(self) -> None:
        """Raise what was collected: one error as it is, several as ``SeveralErrors``."""
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else SeveralErrors(self.errors)


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"`` for the known words close to ``word``, else ``""``."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def first_line(error: Exception) -> str:
    """What the error of another library says first, to quote within a sentence."""
    first, *more = str(error).strip().split("\n", 2)
    if first.endswith(":") and more:  # it only announces the second
        first = f"{first} {more[0].strip()}"
    return first.rstrip(".")
