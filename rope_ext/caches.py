"""A cache carries a note on its rows, which moves as they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from rope_ext.swapping import swap

Move = Callable[[torch.Tensor], torch.Tensor]
"""Takes and returns tensors of ``[rows, ...]``."""


class Note(Protocol):
    """What is known of the rows of a cache."""

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


def carry(cache: Cache, name: str, note: Note, kind: type[Carrying] = Carrying) -> None:
    """Put ``note`` on a cache as its attribute ``name``, which begins with ``_rope_ext``.

    The cache becomes one of that ``kind``.
    """
    setattr(cache, name, note)
    swap(cache, kind)


def _move(cache: Any, move: Move) -> None:
    """Let notes go with the keys and values."""
    for name, note in list(vars(cache).items()):
        if name.startswith("_rope_ext"):
            setattr(cache, name, note.moved(move))
