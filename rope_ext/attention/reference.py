"""Dense attention in bands: slow and simple, the reference that every kernel is tested against.

It also computes attention weights where a forward returns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_ext.attention import products
from rope_ext.attention.call import Block, Call
from rope_ext.methods.geometry import Geometry


@dataclass(frozen=True, eq=False)
class Places:
    """Positions of queries and keys that do not simply follow one another, and what is hidden.

    Args:
        query: positions of the queries, int64, ``[queries]`` or ``[batch, queries]``, in any order
            and with any gaps.
        key: positions of the keys, ``[keys]`` or ``[batch, keys]``.
        mask: bool, broadcast to ``[batch, heads, queries, keys]``; False hides. None hides nothing.
        newest: index of the last key that a query sees, ``[queries]``: later keys are hidden even
            if they have the same position. None: positions alone decide.
        made: where to keep what queries see, for several calls with the same places; None: nowhere.
    """

    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor | None = None
    newest: torch.Tensor | None = None
    made: dict[Any, Any] | None = None

    def sees(self, geometry: Geometry, queries: slice) -> torch.Tensor:
        """Whether these queries see the keys in a band, ``[queries, keys]``, or by row and head."""
        seen = geometry.sees(self.query[..., queries, None], self.key[..., None, :])
        return seen[:, None] if seen.dim() == 3 else seen

    def visible(self, queries: slice) -> torch.Tensor | None:
        """What these queries see as far as ``mask`` and ``newest`` know; None: everything."""
        mask = self.mask
        if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask[..., queries, :]
        if self.newest is None:
            return mask
        index = torch.arange(self.key.shape[-1], device=self.key.device)
        before = index <= self.newest[queries][:, None]
        return before if mask is None else mask & before

    def biased(self, bias: torch.Tensor, queries: slice, keys: slice) -> torch.Tensor:
        """``bias`` (see :class:`Call`) by distance, ``[heads, queries, keys]``, or by row."""
        apart = self.query[..., queries, None] - self.key[..., None, keys]
        found = bias[:, apart.clamp(0, bias.shape[1] - 1)]
        return found.movedim(1, 0) if found.dim() == 4 else found

    @classmethod
    def following(cls, call: Call, query: torch.Tensor, key: torch.Tensor) -> Places:
        """Consecutive keys from ``call.start`` on; the queries are the last of them."""
        positions = torch.arange(call.start, call.start + key.shape[2], device=key.device)
        return cls(positions[key.shape[2] - query.shape[2] :], positions)

    @classmethod
    def in_order(cls, query: torch.Tensor, key: torch.Tensor) -> Places:
        """The same at positions that may repeat: a token never sees those after it."""
        index = torch.arange(len(key), device=key.device)
        return cls(query, key, newest=index[len(key) - len(query) :])


def weights(
    query: torch.Tensor, key: torch.Tensor, call: Call, places: Places | None = None
) -> torch.Tensor:
    """Attention weight of every query on every key, with the rotations of each band.

    Returns:
        ``[batch, heads, queries, keys]``, float32 or better. A row sums to one, less what its
        sink takes; it is zero for a query that sees no key.
    """
    return _weighed(query, key, call, places)[0]


def _weighed(
    query: torch.Tensor, key: torch.Tensor, call: Call, places: Places | None
) -> tuple[torch.Tensor, Block]:
    """:func:`weights`, and the block that they were computed from, in their dtype."""
    places = places or Places.following(call, query, key)
    query, key = query.to(products.wide(query)), key.to(products.wide(key))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    query = call.scale_query(query)
    logits = query.new_zeros((*query.shape[:3], key.shape[2]))
    visible = torch.zeros(logits.shape[2:], dtype=torch.bool, device=query.device)
    every = slice(None)
    for band in call.bands:
        seen = places.sees(band.geometry, every)
        rotated = call.pairs.rotate(query, band.query), call.pairs.rotate(key, band.key)
        logits = torch.where(seen, products.logits(*rotated) * call.scale, logits)
        visible = visible | seen
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    shown = places.visible(every)
    visible = visible if shown is None else visible & shown
    block = Block(query, key, logits, places.query, places.key, visible, call.scale)
    if call.scores is not None:
        with products.without_autocast(query):
            logits = call.scores.logits(block)
    if call.bias is not None:
        logits = logits + places.biased(call.bias, every, every)
    # The lowest finite number, not -inf: a row without any key has no weights, but no NaN either.
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if call.sinks is not None:
        column = call.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, column), dim=-1)
    return logits.softmax(dim=-1)[..., : key.shape[2]] * visible, block


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    places: Places | None = None,
) -> torch.Tensor:
    """Attention as :class:`Call` describes it, with :func:`weights`."""
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    given, block = _weighed(query, key, call, places)
    out = given.to(value.dtype) @ value
    if call.scores is None:
        return out
    with products.without_autocast(query):
        more = call.scores.more(given, block)
    return out if more is None else out + more.to(out.dtype)
