"""A cache carries a note on its rows, which moves as they do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

Move = Callable[[torch.Tensor], torch.Tensor]
_MOVES = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")


class Note(Protocol):
    """What is known of the rows of a cache."""

    def moved(self, move: Move) -> Note:
        """The note on other rows; ``move`` takes and returns tensors of ``[rows, ...]``."""


def carry(cache: Cache, name: str, note: Note, update: Callable | None = None) -> None:
    """Put ``note`` on a cache as its attribute ``name``.

    Args:
        cache: gets a class of its own.
        name: of the attribute.
        note: moves along wherever rows of the cache are moved.
        update: in place of the method of that name; gets that one right after the cache. A
            function of a module, since caches are pickled.
    """
    setattr(cache, name, note)
    cache.__class__ = _carrying(getattr(type(cache), "_rope_ext_plain", type(cache)), name, update)


@functools.cache
def _carrying(cls: type[Cache], name: str, update: Callable | None) -> type[Cache]:
    def follow(method: str) -> Callable:
        def moved(self: Cache, by: Any) -> Any:
            def move(rows: torch.Tensor) -> torch.Tensor:
                if method == "batch_repeat_interleave":
                    return rows.repeat_interleave(by, dim=0)
                return rows[by.to(rows.device)]

            setattr(self, name, getattr(self, name).moved(move))
            return getattr(cls, method)(self, by)

        return moved

    def reduce(self: Cache, protocol: int) -> tuple:
        return _rebuild, (cls, name, update), self.__dict__

    members = {method: follow(method) for method in _MOVES if hasattr(cls, method)}
    members |= {"__reduce_ex__": reduce, "_rope_ext_plain": cls}
    if update is not None:
        members["update"] = lambda self, *args, **kw: update(self, cls.update, *args, **kw)
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)


def _rebuild(cls: type[Cache], name: str, update: Callable | None) -> Cache:
    carrying = _carrying(cls, name, update)
    return carrying.__new__(carrying)
