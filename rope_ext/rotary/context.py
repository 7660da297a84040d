"""A thread-local stack of forwards in progress, for all patches, eager and compiled.

It is thread-local because several threads may serve the same model. State that outlives a single
call belongs to a request and is stored on its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from transformers.cache_utils import Cache

UNKNOWN = (
    "this cache was taken for an empty one, and it has tokens that were put there without this "
    "patch, so its keys carry other rotations; start with an empty cache"
)
"""Error of a graph that starts with a static cache without metadata."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


NOTE = "_rope_ext"
"""Cache attribute with metadata of its keys for the next forward; ``patch`` computed them."""


class ForwardContext:
    """One forward of a decoder, with ``tokens`` in each row.

    ``patch`` is its position map or ``Sequences``. ``filled`` is the number of tokens already in
    the cache, a 0-dimensional tensor if one graph runs every step of a static cache. If ``traced``
    by torch.compile or torch.export, it computes with tensors, and values must not be read.
    """

    exported = False  # whether torch.export is tracing it

    def __init__(
        self, patch: Any, rows: int, tokens: int, filled: Any, cache: Cache | None, traced: bool
    ) -> None:
        self.patch, self.rows, self.tokens = patch, rows, tokens
        self.filled, self.cache, self.traced = filled, cache, traced

    @property
    def filled_count(self) -> int:
        """``filled`` as an int, for forwards that are not traced."""
        return cast("int", self.filled)

    def require(self, holds: torch.Tensor, error: type[Exception], message: str) -> None:
        """Raise ``error`` unless ``holds``; graphs raise RuntimeError when they run."""
        if self.traced:
            torch._assert_async(holds, message)
        elif not bool(holds):
            raise error(message)


class _ThreadState(threading.local):
    """State of the current thread."""

    def __init__(self) -> None:
        self.stack: list[Any] = []  # ForwardContexts and calls of generate, innermost last
        self.look: Callable[..., None] | None = None  # callback that observes attention layers


forward_context = _ThreadState()


def current(patch: Any) -> Any:
    """Return this thread's innermost forward in progress under ``patch``, or None."""
    for context in reversed(forward_context.stack):
        if context.patch is patch:
            return context
    return None


def forget_failed_exports() -> None:
    """Drop forwards of failed exports, since torch runs no hooks after such an error."""
    stack = forward_context.stack
    if stack and not torch.compiler.is_compiling():
        stack[:] = [context for context in stack if not context.exported]


def run(patch: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``, as part of the graph only if the forward in progress is traced."""
    context = current(patch)
    return function(*args) if context is not None and context.traced else _run(function, *args)


def run_eagerly(reason: str | None = None) -> Callable[[_Function], _Function]:
    """:func:`torch.compiler.disable` as a decorator that keeps the type of the function."""
    return cast("Callable[[_Function], _Function]", torch.compiler.disable(reason=reason))


@run_eagerly()
def _run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def cache_among(given: Mapping[str, Any]) -> Any:
    """Return the cache from a decoder's arguments; transformers 5.24 renamed it to ``cache``."""
    cache = given.get("past_key_values")
    return given.get("cache") if cache is None else cache


def shape_of(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and tokens of a forward from a decoder's arguments."""
    tokens = given.get("input_ids")
    rows, length = (given["inputs_embeds"] if tokens is None else tokens).shape[:2]
    return rows, length


def is_paged(given: Mapping[str, Any]) -> bool:
    """Whether the cache is for continuous batching, which is not a ``Cache``."""
    cache = given.get("cache")
    return cache is not None and not isinstance(cache, Cache)


def caches_in(output: Any) -> list[Any]:
    """Return the caches in a decoder's output, including one that the decoder created."""
    found = []
    for part in output if isinstance(output, tuple) else (output,):
        cache = getattr(part, "past_key_values", getattr(part, "cache", part))
        if hasattr(cache, "get_seq_length"):
            found.append(cache)
    return found
