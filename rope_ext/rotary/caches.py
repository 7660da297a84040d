"""Metadata on a cache, which follows its rows when they are reordered, selected or repeated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from transformers.cache_utils import Cache, StaticCache

from rope_ext.errors import CacheError
from rope_ext.rotary.swapping import plain, swap, take_back

# A mixin: swapping.swap puts it in front of whatever class of cache an object has.
_CacheMixin = Cache if TYPE_CHECKING else object
Move = Callable[[torch.Tensor], torch.Tensor]
"""Takes and returns tensors of ``[rows, ...]``."""
_WATCHED = (
    "get_mask_sizes",
    "reorder_cache",
    "batch_select_indices",
    "batch_repeat_interleave",
    "reset",
)
"""Methods that run before keys are added, when rows move, and on reset."""
_RECORDED = "activate_past_recording"
RECORDS = "_rope_ext_records"
"""Set on every layer by this call, since a patch may give layers a window afterwards."""
UNKNOWN = (
    "this cache was taken for an empty one, and it has tokens that were put there without this "
    "patch, so its keys carry other rotations; start with an empty cache"
)
"""Error of a graph that starts with a static cache without metadata."""


class CacheMetadata(Protocol):
    """What is known about the rows of a cache."""

    @property
    def kind(self) -> type[CacheWithMetadata] | None:
        """Class that the cache needs; None: its original one."""
        ...

    def moved(self, move: Move) -> CacheMetadata:
        """The metadata after rows were reordered, selected or repeated."""
        ...

    def emptied(self) -> CacheMetadata | None:
        """What remains when the cache is reset; None: nothing."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """A layer of a cache that may lack the tokens before those that are taken back."""

    def require_past(self, tokens_to_remove: int) -> None:
        """Raise CacheError where it does."""


class CacheWithMetadata(_CacheMixin):
    """Mixin for caches with metadata, which follows the rows wherever they are moved."""

    def reorder_cache(self, beam_idx: Any) -> Any:  # int64, [rows]; annotated LongTensor there
        _move(self, lambda rows: rows[beam_idx.to(rows.device)])
        return super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> Any:
        _move(self, lambda rows: rows[indices.to(rows.device)])
        return super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> Any:
        _move(self, lambda rows: rows.repeat_interleave(repeats, dim=0))
        return super().batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> Any:
        for layer in getattr(self, "layers", ()):  # before the first of them is cut
            if isinstance(layer, Keeping):
                layer.require_past(tokens_to_remove)
        return super().crop(tokens_to_remove)

    def activate_past_recording(self) -> Any:
        # Assisted decoding refuses a StaticCache by its very class, which this object has not.
        if plain(self) is StaticCache:
            raise CacheError(
                "assisted decoding and prompt lookup take tokens back, which a StaticCache cannot "
                "do; start with an empty DynamicCache, or generate without them"
            )
        return super().activate_past_recording()

    def reset(self) -> Any:
        result = super().reset()
        empty(self)
        return result


def attach(cache: Cache, name: str, metadata: CacheMetadata) -> None:
    """Set ``metadata`` on a cache as attribute ``name``, which must start with ``_rope_ext``.

    Also gives the cache the class that the metadata needs.
    """
    setattr(cache, name, metadata)
    _become(cache, metadata.kind)


def empty(cache: Cache) -> None:
    """Drop the metadata of a cache that no longer has keys."""
    for name, metadata in _all_metadata(cache):
        left = metadata.emptied()
        if left is None:
            delattr(cache, name)
        else:
            setattr(cache, name, left)
    take_back(cache)


def is_filled(cache: Cache) -> bool:
    """Whether a cache has tokens; False where it does not count them."""
    try:
        return int(cache.get_seq_length()) > 0
    except (ValueError, RuntimeError):  # no layer attends, or its tensors have no values
        return False


def _all_metadata(cache: Any) -> list[tuple[str, CacheMetadata]]:
    return [(name, value) for name, value in vars(cache).items() if name.startswith("_rope_ext")]


def _become(cache: Cache, kind: type[CacheWithMetadata] | None) -> None:
    if kind is not None and not isinstance(cache, kind):
        swap(cache, kind)


def watch() -> None:
    """Give caches that were first filled by a compiled graph the class their metadata needs.

    A graph can attach metadata to a cache but cannot change its class, so the first method called
    outside a graph does. The methods stay wrapped, since a graph of another thread may hold them.
    """
    for name, make in (*((name, _watched) for name in _WATCHED), (_RECORDED, _recorded)):
        function = getattr(Cache, name, None)
        if function is not None and function not in _watching:
            made = make(name, function)
            _watching.add(made)
            setattr(Cache, name, made)


_watching: set[Callable] = set()
"""The wrapped methods of :class:`Cache` that :func:`watch` installed."""


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


def _recorded(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def method(self: Cache, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            setattr(layer, RECORDS, True)
        return function(self, *args, **kwargs)

    return method


def _move(cache: Any, move: Move) -> None:
    """Apply to the metadata what happens to the rows of keys and values."""
    for name, metadata in _all_metadata(cache):
        setattr(cache, name, metadata.moved(move))


def settle(cache: Cache) -> None:
    """Give a cache the class that its metadata needs."""
    for _, metadata in _all_metadata(cache):
        _become(cache, metadata.kind)
