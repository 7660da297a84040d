"""A cache carries a note on its rows, which moves as they do."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from rope_ext.swapping import swap, take_back

Move = Callable[[torch.Tensor], torch.Tensor]
"""Takes and returns tensors of ``[rows, ...]``."""
_WATCHED = (
    "get_mask_sizes",
    "reorder_cache",
    "batch_select_indices",
    "batch_repeat_interleave",
    "reset",
)
"""What is called of every cache before keys are added, when its rows move, and when it is reset."""
UNKNOWN = (
    "this cache was taken for an empty one, and it has tokens that were put there without this "
    "patch, so its keys carry other rotations; start with an empty cache"
)
"""Why a graph fails that has begun with a static cache of which nothing is known."""


class CacheMetadata(Protocol):
    """What is known of the rows of a cache."""

    @property
    def kind(self) -> type[CacheWithMetadata] | None:
        """What the cache is to be; None: as it came."""

    def moved(self, move: Move) -> CacheMetadata:
        """The note on other rows."""

    def emptied(self) -> CacheMetadata | None:
        """What is left of it when the cache is reset; None: nothing."""


class CacheWithMetadata:
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

    def reset(self) -> Any:
        result = super().reset()
        empty(self)
        return result


def attach(cache: Cache, name: str, note: CacheMetadata) -> None:
    """Put ``note`` on a cache as its attribute ``name``, which begins with ``_rope_ext``.

    The cache becomes one of its kind.
    """
    setattr(cache, name, note)
    _become(cache, note.kind)


def empty(cache: Cache) -> None:
    """Forget what was known of the keys of a cache that has none."""
    for name, note in _notes(cache):
        left = note.emptied()
        if left is None:
            delattr(cache, name)
        else:
            setattr(cache, name, left)
    take_back(cache)


def forget(cache: Cache, name: str) -> None:
    """Take one note off a cache."""
    delattr(cache, name)
    if not any(note.kind is not None for _, note in _notes(cache)):
        take_back(cache)


def is_filled(cache: Cache) -> bool:
    """Whether a cache has tokens; False where it does not count them."""
    try:
        return int(cache.get_seq_length()) > 0
    except (ValueError, RuntimeError):  # no layer attends, or its tensors have no values
        return False


def _notes(cache: Any) -> list[tuple[str, CacheMetadata]]:
    return [(name, note) for name, note in vars(cache).items() if name.startswith("_rope_ext")]


def _become(cache: Cache, kind: type[CacheWithMetadata] | None) -> None:
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
        if torch.compiler.is_compiling() or isinstance(self, CacheWithMetadata):
            return function(self, *args, **kwargs)
        settle(self)
        if isinstance(self, CacheWithMetadata):
            return getattr(self, name)(*args, **kwargs)
        result = function(self, *args, **kwargs)
        if name == "reset":
            empty(self)
        return result

    return method


def _move(cache: Any, move: Move) -> None:
    """Let notes go with the keys and values."""
    for name, note in _notes(cache):
        setattr(cache, name, note.moved(move))


def settle(cache: Cache) -> None:
    """Let a cache become what its notes ask for."""
    for _, note in _notes(cache):
        _become(cache, note.kind)


_living: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()
"""Every cache of this process, by its id, from the first call of :func:`living` on."""


def living() -> list[Cache]:
    """Every cache of this process, but those that only graphs have seen.

    The first call searches for them, and has the following ones register when they are made: a
    search takes a tenth of a second, and a call in every forward would slow all models down.
    """
    if Cache.__init__ not in _watching:
        Cache.__init__, Cache.__setstate__ = _registered(Cache.__init__), _restored()
        _watching.add(Cache.__init__)
        kinds = _kinds(Cache)
        for one in gc.get_objects():
            if type(one) in kinds:  # isinstance would run code of others
                _living[id(one)] = one
    return list(_living.values())


def _kinds(cls: type) -> set[type]:
    return {cls}.union(*map(_kinds, cls.__subclasses__()))


def _registered(function: Callable) -> Callable:
    @functools.wraps(function)
    def __init__(self: Cache, *args: Any, **kwargs: Any) -> None:
        function(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _living[id(self)] = self

    return __init__


def _restored() -> Callable:
    function = getattr(Cache, "__setstate__", None)

    def __setstate__(self: Cache, state: dict[str, Any]) -> None:
        """Of a copy, which is made without ``__init__``."""
        if function is None:
            vars(self).update(state)
        else:
            function(self, state)
        _living[id(self)] = self

    return __setstate__
