"""A cache carries a note on its rows, which moves as they do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from rope_ext.swapping import swap

Move = Callable[[torch.Tensor], torch.Tensor]
"""Takes and returns tensors of ``[rows, ...]``."""
_WATCHED = (
    "get_mask_sizes",
    "reorder_cache",
    "batch_select_indices",
    "batch_repeat_interleave",
)
"""What is called of every cache before keys are added in a forward, and when its rows move."""


class Note(Protocol):
    """What is known of the rows of a cache."""

    @property
    def kind(self) -> type[Carrying] | None:
        """What the cache is to be; None: as it came."""

    def moved(self, move: Move) -> Note:
        """The note on other rows."""


class Carrying:
    """Of a cache that carries notes."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> Any:
        _move(self, lambda rows: rows[beam_idx.to(rows.device)])
        return super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> Any:
        _move(self, lambda rows: rows[indices.to(rows.device)])
        return super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> Any:
        _move(self, lambda rows: rows.repeat_interleave(repeats, dim=0))
        return super().batch_repeat_interleave(repeats)


def carry(cache: Cache, name: str, note: Note) -> None:
    """Put ``note`` on a cache as its attribute ``name``, which begins with ``_rope_ext``.

    The cache becomes one of its kind.
    """
    setattr(cache, name, note)
    _become(cache, note.kind)


def _become(cache: Cache, kind: type[Carrying] | None) -> None:
    if kind is not None and not isinstance(cache, kind):
        swap(cache, kind)


def watch() -> None:
    """Let caches that a compiled graph begins become what :func:`carry` makes of them.

    A graph can put a note on a cache, and not give it another class: the first method of it that
    is called outside of graphs does that. The methods stay watched, as a graph of another thread
    may hold them.
    """
    for name in _WATCHED:
        function = getattr(Cache, name)
        if function not in _watching:
            made = _watched(name, function)
            _watching.add(made)
            setattr(Cache, name, made)


_watching: set[Callable] = set()
"""Methods of :class:`Cache` as :func:`watch` has made them."""


def _watched(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def method(self: Cache, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or isinstance(self, Carrying):
            return function(self, *args, **kwargs)
        for of, note in list(vars(self).items()):
            if of.startswith("_rope_ext") and note.kind is not None:
                _become(self, note.kind)
        if isinstance(self, Carrying):
            return getattr(self, name)(*args, **kwargs)
        return function(self, *args, **kwargs)

    return method


def _move(cache: Any, move: Move) -> None:
    """Let notes go with the keys and values."""
    for name, note in list(vars(cache).items()):
        if name.startswith("_rope_ext"):
            setattr(cache, name, note.moved(move))
