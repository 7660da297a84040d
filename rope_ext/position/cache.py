"""Metadata of a cache: the positions of its keys, and the map under which they were rotated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, StaticLayer

from rope_ext.errors import CacheError
from rope_ext.rotary.caches import CacheWithMetadata, Move, attach, empty, is_filled
from rope_ext.rotary.context import forward_context

_POSITIONS = "_rope_ext_positions"  # attribute of a cache: the KeyPositions of its keys


class _Logged(CacheWithMetadata):
    """Mixin for caches whose keys carry the rotation of a position map."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        if not any(one.cache is self and one.logs_positions for one in forward_context.stack):
            known = kept(self)
            if known is None or not is_filled(self):  # cropped, or its layers were reset one by one
                empty(self)
                return self.update(*args, **kwargs)
            raise CacheError(
                f"the keys in this cache carry the rotation of {known.key[0]}, and this "
                f"model is not patched with it; start with an empty cache"
            )
        return super().update(*args, **kwargs)


@dataclass(frozen=True)
class KeyPositions:
    """Positions of the keys in a cache, and the map under which they were rotated.

    Args:
        key: what must match for the cache to be continued, see :attr:`PositionMap.key`.
        positions: int64, ``[rows, keys]``; one row if all are equal. For a static cache always
            all rows and all slots, including empty ones.
        host: the same on the CPU, so that a step copies those of its new tokens only; None for a
            static cache, which graphs write to.
    """

    key: tuple[Any, ...]
    positions: torch.Tensor
    host: torch.Tensor | None = None

    @property
    def kind(self) -> type[CacheWithMetadata]:
        """A class that refuses keys from a model without the map."""
        return _Logged

    def moved(self, move: Move) -> KeyPositions:
        """The positions after rows were moved."""
        if len(self.positions) == 1:
            return self
        host = None if self.host is None else move(self.host)
        return replace(self, positions=move(self.positions), host=host)

    def on_host(self, keys: int) -> torch.Tensor:
        """The positions of the first ``keys`` keys, on the CPU."""
        positions = self.positions.cpu() if self.host is None else self.host
        return positions[:, :keys]

    def emptied(self) -> _Emptied:
        """What a cache that was reset keeps: the memory."""
        return _Emptied(self)


@dataclass(frozen=True)
class _Emptied:
    """On a cache that was reset: only memory, at the address that compiled graphs use."""

    before: KeyPositions

    @property
    def kind(self) -> None:
        """The original class: an empty cache may be used with any model."""

    def moved(self, move: Move) -> _Emptied:
        """The same: there are no rows."""
        return self

    def emptied(self) -> _Emptied:
        """The same."""
        return self


def keep(cache: Cache, known: KeyPositions, rows: int) -> None:
    """Put ``known`` on a cache with ``rows`` rows, which then refuses other models and maps."""
    layer = whole(cache)
    if layer is not None:
        needed = known.positions.shape[1]
        if needed > layer.max_cache_len:
            raise CacheError(
                f"this static cache has room for {layer.max_cache_len} tokens, and with those of "
                f"this forward there would be {needed}; make one with a larger max_cache_len"
            )
        known = _filled_in(_memory(cache), known, (rows, layer.max_cache_len))
    attach(cache, _POSITIONS, known)


def note(cache: Cache, known: KeyPositions) -> None:
    """As :func:`keep`, for torch.compile, which cannot change the class of a cache.

    The next method that is called outside a graph does that; see ``rotary.caches.watch``.
    """
    setattr(cache, _POSITIONS, known)


def kept(cache: Cache | None) -> KeyPositions | None:
    """The positions that :func:`keep` recorded; None if there are none."""
    known = getattr(cache, _POSITIONS, None)
    return known if isinstance(known, KeyPositions) else None


def _memory(cache: Cache) -> KeyPositions | None:
    """The same, or those from before a reset, whose memory can be used again."""
    known = getattr(cache, _POSITIONS, None)
    return known.before if isinstance(known, _Emptied) else known


def whole(cache: Cache) -> StaticLayer | None:
    """The first layer of a static cache that keeps every token; None for other caches."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, StaticLayer) and not layer.is_sliding:
            return layer
    return None


def _filled_in(
    before: KeyPositions | None, known: KeyPositions, shape: tuple[int, int]
) -> KeyPositions:
    """``known`` in a tensor of ``shape`` that stays the same in all steps, as graphs need it."""
    new = known.positions
    if (
        before is None
        or before.positions.shape != shape
        or before.positions.device != new.device
        or before.key != known.key
    ):
        with torch.inference_mode(False):  # it outlives the mode
            empty = torch.zeros(shape, dtype=torch.long, device=new.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(empty)
        before = replace(known, positions=empty, host=None)
    before.positions[:, : new.shape[1]] = new
    return before
