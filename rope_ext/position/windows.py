"""Attention of layers that rotate as trained, within a window.

transformers makes one mask for all layers of most models, without a window. Here the queries attend
in blocks, each with a small mask, so that time and memory grow with the window and not with the
square of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rope_ext.position.forward import PositionForward

_BLOCK = 128  # queries at least, for few calls

Attend = Callable[[slice, slice, torch.Tensor | None], torch.Tensor]
"""Attention of some queries on some keys with a mask, ``[rows, queries, heads, columns]``."""


def attend(
    forward: PositionForward, window: int, keys: int, given: torch.Tensor | None, by: Attend
) -> torch.Tensor:
    """Attention of all queries of a forward, ``[rows, queries, heads, columns]``.

    Args:
        forward: the forward, located.
        window: tokens that a query sees, with itself.
        keys: number of keys that the cache returned: all slots, or the last of those filled.
        given: a mask that is not causal, bool, ``[rows, 1, queries, slots]``; None: causal.
        by: computes the attention of a block.
    """
    if forward.traced:  # for any number of tokens, which blocks would fix
        return by(*everything(forward, window, keys, given))
    tokens, filled = forward.tokens, forward.filled_count
    skipped = _skipped(forward, keys)
    size, parts = max(window, _BLOCK), []
    for first in range(0, tokens, size):
        last = min(first + size, tokens)
        begin = skipped if given is not None else max(skipped, filled + first - window + 1)
        of_keys = slice(begin - skipped, filled + last - skipped)
        of_queries = slice(first, last)
        mask = None
        if tokens > 1 or given is not None or forward.padding is not None:
            mask = _visible(forward, window, given, skipped, of_queries, of_keys)
        parts.append(by(of_queries, of_keys, mask))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def everything(
    forward: PositionForward, window: int, keys: int, given: torch.Tensor | None
) -> tuple[slice, slice, torch.Tensor]:
    """All queries, all keys that hold tokens, and which of these each query sees, as one block."""
    skipped = 0
    if not isinstance(forward.filled, torch.Tensor):
        skipped, keys = _skipped(forward, keys), min(keys, forward.filled + forward.tokens)
    every = slice(0, forward.tokens), slice(0, keys)
    return *every, _visible(forward, window, given, skipped, *every)


def _skipped(forward: PositionForward, keys: int) -> int:
    """Number of tokens before those that the cache kept, of which it returned ``keys``."""
    return max(0, forward.filled_count + forward.tokens - keys)


def _visible(
    forward: PositionForward,
    window: int,
    given: torch.Tensor | None,
    skipped: int,
    queries: slice,
    keys: slice,
) -> torch.Tensor:
    """Which keys some queries see, bool, ``[rows or 1, 1, queries, keys]``."""
    ends = queries.start, queries.stop, keys.start, keys.stop
    name = ("window", *(() if forward.traced else (given is None, skipped, *ends)))
    if name in forward.made:
        return forward.made[name]
    device = forward.key.device
    query = forward.filled + torch.arange(queries.start, queries.stop, device=device)
    key = torch.arange(skipped + keys.start, skipped + keys.stop, device=device)
    apart = query[:, None] - key
    seen = (apart < window)[None, None]
    slots = slice(skipped + keys.start, skipped + keys.stop)
    if given is not None:
        seen = seen & given[..., queries, slots].to(device)
    else:
        seen = seen & (apart >= 0)
        if forward.padding is not None:
            seen = seen & forward.padding[:, None, None, slots].to(device)
        if forward.documents is not None:
            of_tokens = forward.documents.to(device)[:, None]
            seen = seen & (of_tokens[..., queries, None] == of_tokens[..., None, slots])
    # Padding sees itself: a row of a softmax without keys is NaN in some kernels.
    forward.made[name] = seen | (apart == 0)
    return forward.made[name]
