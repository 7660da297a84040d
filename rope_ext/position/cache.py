"""What a cache knows of its keys: their positions, and the map under which they were turned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache

from rope_ext.caches import Carrying, Move, carry
from rope_ext.errors import CacheError
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

    def moved(self, move: Move) -> KeyPositions:
        """Those of other rows."""
        if len(self.positions) == 1:
            return self
        return replace(self, positions=move(self.positions))


def keep(cache: Cache, known: KeyPositions) -> None:
    """Put ``known`` on a cache, which then refuses to go on without its map."""
    carry(cache, _POSITIONS, known, _Logged)


def kept(cache: Cache | None) -> KeyPositions | None:
    """What :func:`keep` has put there."""
    return getattr(cache, _POSITIONS, None)


class _Logged(Carrying):
    """Of a cache whose keys carry the rotation of a position map."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        if not any(forward.cache is self for forward in here.positions):
            raise CacheError(
                f"the keys in this cache carry the rotation of {kept(self).key[0]}, and this "
                f"model is not patched with it; start with an empty cache"
            )
        return super().update(*args, **kwargs)
