"""All errors that rope_ext raises. Each message ends with how to fix the problem."""

import difflib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rope_ext.quoting import printable

CURE = "rope_ext: unknown to plain transformers; load with rope_ext.from_pretrained"
"""Stored where transformers looks up a name, so that its error message tells users what to do."""
_MOST_QUOTED = 300
"""Characters of another library's error that are quoted: it may contain a whole file."""


class RopeExtError(ValueError):
    """Base class of all errors in this package."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may quote names and texts from elsewhere


class UnknownMethodError(RopeExtError):
    """No method with this name is registered."""


class OptionError(RopeExtError):
    """An option is unknown, has the wrong type, or is out of range."""


class NoRopeError(RopeExtError):
    """The model has no rotary position embedding."""


class AlreadyPatchedError(RopeExtError):
    """The model is already patched."""


class NotPatchedError(RopeExtError):
    """The model is not patched."""


class AlreadyScaledError(RopeExtError):
    """The configuration of the checkpoint already scales its rotary embedding."""


class UnsupportedModelError(RopeExtError):
    """The patch cannot be verified for this model family, so it is not applied."""


class CacheError(RopeExtError):
    """A key-value cache cannot be used with this patch."""


class RecordError(RopeExtError):
    """The saved record of a patch cannot be read or applied."""


class AdapterError(RopeExtError):
    """An adapter and its base model have different patches."""


class LoadError(RopeExtError, OSError):
    """A directory or Hub ID contains no model that can be loaded."""


class ExportError(RopeExtError):
    """An engine cannot run a patch."""


class MeasureError(RopeExtError):
    """A model or text cannot be loaded or evaluated as requested."""


class SeveralErrors(RopeExtError):
    """Several errors, reported together."""

    def __init__(self, errors: Sequence[RopeExtError]) -> None:
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        return "\n  - ".join([f"{len(self.errors)} mistakes:", *map(str, self.errors)])


class Mistakes:
    """Collects errors to report them together; truthy if there are any."""

    def __init__(self) -> None:
        self.errors: list[RopeExtError] = []

    def __bool__(self) -> bool:
        return bool(self.errors)

    def add(self, error: RopeExtError | str) -> None:
        if isinstance(error, str):
            error = OptionError(error)
        known = set(map(str, self.errors))
        self.errors += [one for one in getattr(error, "errors", [error]) if str(one) not in known]

    def add_all(self, messages: Iterable[str]) -> None:
        """Add each message, and the error that the iterator raises, if any."""
        with self.collected():
            for message in messages:
                self.add(message)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Add an error of this package that the block raises."""
        try:
            yield
        except RopeExtError as error:
            self.add(error)

    def check(self, check: Callable[..., Any], *given: Any, default: Any = None) -> Any:
        """Return ``check(*given)``; if it raises, add the error and return ``default``."""
        with self.collected():
            return check(*given)
        return default

    def report(self) -> None:
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else SeveralErrors(self.errors)


def optional(package: str, needs: str, extra: str, kind: type[RopeExtError] = MeasureError) -> Any:
    """Import an optional package; raise an error of this kind that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        missing = error.name in (package, package.partition(".")[0])
        broken = "" if missing else f" (which fails: {first_line(error)})"
        cure = f'install it with: pip install "{extra}"'
        raise kind(f"{needs} {package}{broken}; {cure}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` if known words are close to ``word``, else ``""``."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def brief(value: Any) -> str:
    """Format a value for an error message: models and long texts as the name of their class."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def nowhere(path: str) -> str:
    """Return the text to append to an error about something that was not found on the Hub."""
    given = os.path.exists(path) or is_path(path)  # not a Hub ID
    return "" if given else ", and there is no folder of that name"


def is_path(name: str) -> bool:
    """Whether a name can only be a path: Hub IDs are NAME or OWNER/NAME, or with /FILE.gguf."""
    most = 2 if name.endswith(".gguf") else 1
    return name[:1] in ("", ".", "/", "~") or name.endswith("/") or name.count("/") > most


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, cut, to quote within a sentence."""
    first, *more = str(error).strip().split("\n", 2)
    if first.endswith(":") and more:  # the first line only introduces the second
        first = f"{first} {more[0].strip()}"
    cut = first[:_MOST_QUOTED]
    return cut.rstrip(".") if cut == first else f"{cut}..."
