"""What a cache knows of its keys: their positions, and the map under which they were turned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache

from rope_ext.errors import CacheError
from rope_ext.swapping import swap
from rope_ext.under_way import here

_POSITIONS = "_rope_ext_positions"  # on a cache: the KeyPositions of its keys


@dataclass(frozen=True)
class KeyPositions:
    """Positions of the keys in a cache, and the map under which they were turned.

    Args:
        key: what must be the same for the cache to be continued.
        positions: int64, ``[rows, keys]``; one row if all are alike.
    """

    key: tuple[Any, ...]
    positions: torch.Tensor


def keep(cache: Cache, known: KeyPositions) -> None:
    """Put ``known`` on a cache, which then refuses to go on without its map."""
    setattr(cache, _POSITIONS, known)
    swap(cache, _Logged)


def kept(cache: Cache | None) -> KeyPositions | None:
    """What :func:`keep` has put there."""
    return getattr(cache, _POSITIONS, None)


class _Logged:
    """Of a cache whose keys carry the rotation of a position map."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        if not any(forward.cache is self for forward in here.positions):
            raise CacheError(
                f"the keys in this cache carry the rotation of {kept(self).key[0]}, and this "
                f"model is not patched with it; start with an empty cache"
            )
        return super().update(*args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> Any:
        _move(self, lambda positions: positions[beam_idx.to(positions.device)])
        return super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> Any:
        _move(self, lambda positions: positions[indices.to(positions.device)])
        return super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> Any:
        _move(self, lambda positions: positions.repeat_interleave(repeats, dim=0))
        return super().batch_repeat_interleave(repeats)


def _move(cache: Any, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let rows of positions go with those of the keys."""
    known = kept(cache)
    if len(known.positions) > 1:
        setattr(cache, _POSITIONS, replace(known, positions=moved(known.positions)))
