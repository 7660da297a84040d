"""Logits of tokens at once, and in pieces through a cache."""

from __future__ import annotations

import torch
from transformers import DynamicCache

EXACT = {"atol": 1e-4, "rtol": 0}  # float32 sums in another order; logits are of size 10


@torch.no_grad()
def decoded(model, ids: torch.Tensor, steps: list[int], cache=None, **kwargs) -> torch.Tensor:
    """Return logits of ``ids``, fed through one cache in pieces of these sizes."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces = [
        model(piece, past_key_values=cache, use_cache=True, **kwargs).logits
        for piece in ids.split(steps, dim=1)
    ]
    return torch.cat(pieces, 1)


@torch.no_grad()
def recomputed(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits
