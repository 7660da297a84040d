"""What a cache knows of its keys: their positions, and the map under which they were rotated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache, StaticLayer

from rope_ext.caches import CacheWithMetadata, Move, attach, empty, is_filled
from rope_ext.errors import CacheError
from rope_ext.forward.context import forward_context

_POSITIONS = "_rope_ext_positions"  # on a cache: the KeyPositions of its keys


class _Logged(CacheWithMetadata):
    """Of a cache whose keys carry the rotation of a position map."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        if not any(one.cache is self and one.logs_positions for one in forward_context.stack):
            if not is_filled(self):  # cropped, or its layers were reset one by one
                empty(self)
                return self.update(*args, **kwargs)
            raise CacheError(
                f"the keys in this cache carry the rotation of {kept(self).key[0]}, and this "
                f"model is not patched with it; start with an empty cache"
            )
        return super().update(*args, **kwargs)


@dataclass(frozen=True)
class KeyPositions:
    """Positions of the keys in a cache, and the map under which they were rotated.

    Args:
        key: what must be the same for the cache to be continued.
        positions: int64, ``[rows, keys]``; one row if all are alike. Of a static cache always
            all rows, and all slots, also those that are not filled.
    """

    kind: ClassVar[type[CacheWithMetadata]] = _Logged
    key: tuple[Any, ...]
    positions: torch.Tensor

    def moved(self, move: Move) -> KeyPositions:
        """Those of other rows."""
        if len(self.positions) == 1:
            return self
        return replace(self, positions=move(self.positions))

    def emptied(self) -> _Emptied:
        """What a cache that was reset keeps of them: their memory."""
        return _Emptied(self)


@dataclass(frozen=True)
class _Emptied:
    """On a cache that was reset: nothing but memory, at the address that graphs hold on to."""

    kind: ClassVar[type[CacheWithMetadata] | None] = None
    before: KeyPositions

    def moved(self, move: Move) -> _Emptied:
        """The same: there are no rows."""
        return self

    def emptied(self) -> _Emptied:
        """The same."""
        return self


def keep(cache: Cache, known: KeyPositions, rows: int) -> None:
    """Put ``known`` on a cache of that many rows, which then refuses to go on without its map."""
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
    """As :func:`keep` where torch.compile traces, which cannot give a cache another class.

    What is called next of it outside of graphs does that: :func:`rope_ext.caches.watch`.
    """
    setattr(cache, _POSITIONS, known)


def kept(cache: Cache | None) -> KeyPositions | None:
    """What :func:`keep` has put there."""
    known = getattr(cache, _POSITIONS, None)
    return known if isinstance(known, KeyPositions) else None


def _memory(cache: Cache) -> KeyPositions | None:
    """The same, or what a cache that was reset had before, whose memory may be used again."""
    known = getattr(cache, _POSITIONS, None)
    return known.before if isinstance(known, _Emptied) else known


def whole(cache: Cache) -> StaticLayer | None:
    """The first layer of a static cache that keeps every token; None: the cache is another one."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, StaticLayer) and not layer.is_sliding:
            return layer
    return None


def _filled_in(
    before: KeyPositions | None, known: KeyPositions, shape: tuple[int, int]
) -> KeyPositions:
    """``known`` in a tensor of that shape, for all steps the same, as a compiled graph needs it."""
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
        before = replace(known, positions=empty)
    before.positions[:, : new.shape[1]] = new
    return before
