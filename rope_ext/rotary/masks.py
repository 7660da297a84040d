"""Reads padding and documents from the attention mask that a decoder received."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rope_ext.rotary.context import mask_of_decoder


def visible(mask: Tensor) -> Tensor:
    """Convert a bool or additive mask to the visible keys, bool."""
    return mask if mask.dtype == torch.bool else mask.float().exp() > 0


def tokens_among(seen: Tensor, filled: int) -> Tensor:
    """Return which of the visible keys are tokens, not padding; bool, ``[rows, keys]``.

    ``seen`` is ``[rows, heads, queries, keys]``, and ``filled`` the number of keys before the
    queries. A key is padding if no query sees it. Padding at the beginning of a row may see itself,
    or every key, since some masks show something to every query.
    """
    seen = seen.any(1)
    count = seen.shape[1]
    new = torch.arange(count, device=seen.device)
    by_last = seen[:, -1, filled:]  # padding before the last token is hidden from it
    padding_sees_all = seen.all(-1) & ~by_last
    seen = seen & ~padding_sees_all.unsqueeze(-1)
    others = seen.clone()
    others[:, new, filled + new] = False
    others[:, -1, filled + count - 1] = True  # nothing comes after the last token to see it
    first = others.any(1).to(torch.uint8).argmax(1, keepdim=True)
    slots = torch.arange(filled + count, device=seen.device)
    return seen.any(1) & (slots >= first)


def goes_on(positions: Tensor, real: Tensor) -> Tensor:
    """Whether a token's position is above that of the token before it in its row.

    All are ``[rows or 1, tokens]``; padding between two tokens does not count, and the first token
    goes on.
    """
    slots = torch.arange(positions.shape[1], device=positions.device)
    latest = torch.where(real, slots, -1).cummax(1).values
    before = F.pad(latest[:, :-1], (1, 0), value=-1)  # slot of the previous token
    return (before < 0) | (positions > positions.gather(1, before.clamp(min=0)))


def beginnings(real: Tensor, restarts: Tensor, edges: Tensor | None) -> Tensor:
    """Return which tokens are the first of a document, bool, ``[rows, tokens]``.

    These are the first ``real`` token of a row, and tokens whose position ``restarts`` or that
    follow one of the ``edges`` between packed documents. All are bool, as the result.
    """
    begins = restarts if edges is None else restarts | edges
    return real & (begins | (real.cumsum(1) == 1))


def read(mask: Any, filled: int, tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """Return masks of real tokens and of sequence starts; bool, ``[rows, tokens]``, or None."""
    mask = mask_of_decoder(mask)
    if not isinstance(mask, Tensor):
        return None, None
    reached = filled + tokens
    if mask.ndim == 2:
        mask = mask[:, filled:reached]
        return (mask != 0 if mask.shape[1] == tokens else None), None
    if mask.ndim != 4 or mask.shape[2] != tokens or mask.shape[3] < reached:
        return None, None
    seen = visible(mask)[..., :reached].any(1)
    real = seen[..., filled:].diagonal(dim1=1, dim2=2)
    place = torch.arange(filled, reached, device=mask.device)
    earliest = torch.where(real, seen.to(torch.uint8).argmax(2), place)
    # At an edge, no later token sees earlier ones; windows and branches are not edges.
    return real, earliest.flip(1).cummin(1).values.flip(1) >= place
