"""One forward of a decoder: which tokens there are, and where."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods.kinds import at
from rope_ext.position.cache import KeyPositions, keep, kept
from rope_ext.position.map import PositionMap
from rope_ext.position.rotated_key_cache import RotatedKeyStep
from rope_ext.rotary import hooks
from rope_ext.rotary.sites import RotarySite
from rope_ext.under_way import here

FRACTIONS = (
    "position ids have to be whole numbers of tokens under this patch, and these have fractions; "
    "round them"
)


def current(position_map: PositionMap) -> Forward | None:
    """The innermost forward under way in this thread that ``position_map`` is in force for."""
    return next((f for f in reversed(here.positions) if f.map is position_map), None)


class Forward:
    """One forward of the decoder: which tokens there are, and where.

    Args:
        position_map: in force.
        rows: batch size.
        tokens: of this forward.
        filled: tokens in the cache before.
        cache: may be None.
        padding: bool, ``[rows, keys]``, False where there is no token; None: no padding.
        weights: every layer is to return its attention weights too (``output_attentions``).
    """

    def __init__(
        self,
        position_map: PositionMap,
        rows: int,
        tokens: int,
        filled: int,
        cache: Cache | None,
        padding: torch.Tensor | None,
        weights: bool = False,
    ) -> None:
        self.map, self.rows, self.tokens, self.filled = position_map, rows, tokens, filled
        self.cache, self.weights = cache, weights
        self.known: KeyPositions | None = None
        self.rotating = RotatedKeyStep(cache) if tokens == 1 and cache is not None else None
        if padding is not None:
            padding = padding[:, : filled + tokens].bool()
            padding = nn.functional.pad(padding, (0, filled + tokens - padding.shape[1]))
            known = padding.cpu()  # read once, since reading waits for a GPU
            padding = None if bool(known.all()) else padding
        self.padding = padding
        self.padding_known = None if padding is None else known
        self.t: torch.Tensor | None = None
        self.documents: torch.Tensor | None = None
        self.entering: torch.Tensor | None = None  # what the positions change the layers' input by
        self._embeddings: dict[int, Any] = {}

    def locate(self, positions: torch.Tensor) -> None:
        """Take note of the position ids that the model itself uses.

        Sets ``t``: int64, ``[rows or 1, keys]``, positions counted from the first real token of
        each sequence; negative for padding before it.
        """
        if self.t is not None:
            return
        if positions.ndim == 3:
            if not bool((positions == positions[:1]).all()):
                raise UnsupportedModelError(
                    f"this input has positions on several axes (an image or a video), and "
                    f"{self.map.named} attends by one axis only; {self.map.instead}"
                )
            positions = positions[0]
        if positions.is_floating_point() and bool((positions != positions.floor()).any()):
            raise UnsupportedModelError(f"{FRACTIONS}, or {self.map.instead}")
        positions = positions.reshape(-1, positions.shape[-1]).long()
        if len(positions) > 1:
            known = positions.cpu()
            positions = positions[:1] if bool((known == known[:1]).all()) else positions
        if self.filled:
            positions = self._continued(positions)
        self.known = KeyPositions(self.map.key, positions)
        if self.cache is not None:
            keep(self.cache, self.known, self.rows)
        self._count()

    def split(self, documents: torch.Tensor) -> None:
        """Take note of the documents that transformers keeps apart, int64, ``[rows, keys]``."""
        self.documents = documents
        if self.t is not None:
            self._count()

    def _count(self) -> None:
        positions = self.known.positions
        if self.padding is not None:
            positions = positions.expand(self.rows, -1)
            first = self.padding.to(positions.device).int().argmax(1, keepdim=True)
        elif self.documents is not None:
            documents = self.documents.to(positions.device)
            positions = positions.expand(len(documents), -1)
            first = torch.searchsorted(documents, documents)  # where each document begins
        else:
            first = torch.zeros_like(positions[:, :1])
        self.t = positions - positions.gather(1, first)

    def _continued(self, positions: torch.Tensor) -> torch.Tensor:
        known = kept(self.cache)
        if known is None or known.positions.shape[1] < self.filled:
            raise CacheError(
                f"this cache was begun before the model was patched with "
                f"{self.map.method.name} (or by prefix tuning), so its keys carry other "
                f"rotations; start with an empty cache, or use a frequency method such as 'yarn'"
            )
        if known.key != self.map.key:
            raise CacheError(
                f"this cache was begun under another patch ({known.key[0]}) than the one in force "
                f"({self.map.key[0]}); start with an empty cache"
            )
        before = known.positions[:, : self.filled].to(positions.device)
        if len(before) != len(positions):
            rows = max(len(before), len(positions))
            if min(len(before), len(positions)) != 1:
                raise CacheError(
                    f"this cache was begun with {len(before)} rows and is continued with "
                    f"{len(positions)}; start again with an empty cache"
                )
            before, positions = before.expand(rows, -1), positions.expand(rows, -1)
        return torch.cat((before, positions), 1)

    def embeddings(self, site: RotarySite, like: Any) -> Any:
        """Cosine and sine with which the model turns its queries and keys."""
        made = self._embeddings.get(id(site))
        if made is None:
            made = stored_rotation(self.map, site, self.t[:, self.filled :], like)
            self._embeddings[id(site)] = made
        return made


def stored_rotation(position_map: PositionMap, site: RotarySite, t: torch.Tensor, like: Any) -> Any:
    """What the rotary module of ``site`` returns for tokens at ``t`` (``[rows or 1, tokens]``)."""
    t = t.double().clamp(min=0)
    stored = at(position_map.stored, t)
    inv_freq, scaling = position_map.inv_freq(site, t.device), position_map.frequencies[site][1]
    phase = position_map.phase(t)
    if stored.shape[-1] == 1 and phase is None:
        stored = stored.squeeze(-1)
    else:  # pairs of a token at positions of their own: as frequencies of the token at 1
        stored, inv_freq = torch.ones_like(t), stored * inv_freq
        inv_freq = inv_freq if phase is None else inv_freq + phase.unsqueeze(-1)
    made = hooks.rotation(site, stored, inv_freq, scaling, position_map.precise, like)
    if not isinstance(like, torch.Tensor) and like[0].ndim == 4:
        made = tuple(part.expand(like[0].shape) for part in made)
    return made
