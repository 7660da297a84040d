"""Dense attention in bands: slow and simple, the reference that every kernel is tested against.

It also computes attention weights where a forward returns them.
"""

from __future__ import annotations

import torch

from rope_ext.attention.call import Block, Call, Places, wide, without_autocast


def weights(
    query: torch.Tensor, key: torch.Tensor, call: Call, places: Places | None = None
) -> torch.Tensor:
    """Attention weight of every query on every key, with the rotations of each band.

    Returns:
        ``[batch, heads, queries, keys]``, float32 or better. A row sums to one, less what its
        sink takes; it is zero for a query that sees no key.
    """
    with without_autocast(query):
        return _weighed(query, key, call, places)[0]


def _weighed(
    query: torch.Tensor, key: torch.Tensor, call: Call, places: Places | None
) -> tuple[torch.Tensor, Block]:
    """:func:`weights`, and the block that they were computed from, in their dtype."""
    places = places or Places.following(call, query, key)
    query, key = call.scale_query(query.to(wide(query))), key.to(wide(key))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query.new_zeros((*query.shape[:3], key.shape[2]))
    visible = torch.zeros(logits.shape[2:], dtype=torch.bool, device=query.device)
    every = slice(None)
    for band in call.bands:
        seen = places.sees(band.geometry, every, every)
        rotated = call.pairs.rotate(query, band.query), call.pairs.rotate(key, band.key)
        logits = torch.where(seen, rotated[0] @ rotated[1].mT * call.scale, logits)
        visible = visible | seen
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    block = Block(query, key, logits, places.query, places.key, visible, call.scale)
    if call.scores is not None:
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
    with without_autocast(query):
        found, block = _weighed(query, key, call, places)
        out = found.to(value.dtype) @ value.repeat_interleave(
            query.shape[1] // value.shape[1], dim=1
        )
        more = None if call.scores is None else call.scores.more(found, block)
    return out if more is None else out + more.to(out.dtype)
