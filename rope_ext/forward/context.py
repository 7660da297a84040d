"""The forwards that a thread is running: one stack for all patches, eager and compiled.

A thread-local is the one place for it, since several threads may serve the same model. What
belongs to a request beyond one call is stored on its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache


class ForwardContext:
    """One forward of a decoder. Subclasses say what a kind of patch knows of its tokens.

    Args:
        patch: the object in force on the decoder: a position map, or what follows its sequences.
        rows: batch size.
        tokens: number of tokens of this forward.
        filled: tokens in the cache before; a tensor without dimensions where a graph runs for
            every step of a static cache.
        cache: may be None.
        traced: whether torch.compile or torch.export traces it, so that everything follows from
            tensors and no number may be read. Otherwise numbers are read where they decide.
    """

    logs_positions = False  # whether caches are told the positions of their keys
    exported = False  # whether torch.export traces it

    def __init__(
        self,
        patch: Any,
        rows: int,
        tokens: int,
        filled: int | torch.Tensor,
        cache: Cache | None,
        traced: bool,
    ) -> None:
        self.patch, self.rows, self.tokens = patch, rows, tokens
        self.filled, self.cache, self.traced = filled, cache, traced

    def locate(self, positions: torch.Tensor) -> None:
        """Complete the context with the position ids that the model uses; the first call counts."""
        raise NotImplementedError

    def require(self, holds: torch.Tensor, error: type[Exception], message: str) -> None:
        """Raise ``error`` unless ``holds``; in a graph, RuntimeError when it runs."""
        if self.traced:
            torch._assert_async(holds, message)
        elif not bool(holds):
            raise error(message)


class _ThreadState(threading.local):
    """State of the thread that asks."""

    def __init__(self) -> None:
        self.stack: list[Any] = []  # ForwardContexts in progress; the innermost is last
        self.requests: list[Any] = []  # calls of generate under a method that follows sequences
        self.recomputed: Any = None  # the forward of which gradient checkpointing repeats layers
        self.probed: list[tuple] | None = None  # what layers have shown to the probe of layouts
        self.look: Callable[..., None] | None = None  # who watches layers attend


forward_context = _ThreadState()


def current(patch: Any) -> Any:
    """The innermost forward in progress under ``patch`` in this thread, or None."""
    for context in reversed(forward_context.stack):
        if context.patch is patch:
            return context
    return None


def is_traced(patch: Any) -> bool:
    """Whether that forward is traced. The one question that tells eager from compiled."""
    context = current(patch)
    return context is not None and context.traced


def enter(context: Any) -> None:
    """Begin a forward."""
    forward_context.stack.append(context)


def leave(context: Any) -> None:
    """End it."""
    forward_context.stack.remove(context)


def forget_failed_exports() -> None:
    """Drop exports that an error has ended: torch runs no hooks after one of these."""
    stack = forward_context.stack
    if stack and not torch.compiler.is_compiling():
        stack[:] = [context for context in stack if not context.exported]


def caches_in(output: Any) -> list[Any]:
    """The caches in what a decoder returns, also one that it made itself."""
    found = []
    for part in output if isinstance(output, tuple) else (output,):
        cache = getattr(part, "past_key_values", part)
        if hasattr(cache, "get_seq_length"):
            found.append(cache)
    return found
