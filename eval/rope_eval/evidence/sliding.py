"""Computes sliding layers in blocks of queries, with time and memory linear in the length.

torch's attention takes a mask of all pairs for them: for 15 of Gemma 3's 18 layers, it would be
4 GiB and take seconds at 64k tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

BLOCK = 2048


def in_blocks() -> None:
    """Replace torch's attention in all models of this process, for whole texts without padding."""
    native, masked = FUNCTIONS["sdpa"], MASKS["sdpa"]

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        sliding_window: int | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        count = query.shape[2]
        if not sliding_window or count != key.shape[2]:
            return native(module, query, key, value, attention_mask, *args, **more)
        parts = []
        for start in range(0, count, BLOCK):
            stop, first = min(count, start + BLOCK), max(0, start - sliding_window + 1)
            rows = torch.arange(start, stop, device=query.device)[:, None]
            gap = rows - torch.arange(first, stop, device=query.device)
            seen = ((gap >= 0) & (gap < sliding_window))[None, None]
            tensors = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
            parts.append(native(module, *tensors, seen, *args, **{**more, "is_causal": False})[0])
        return torch.cat(parts, 1), None

    FUNCTIONS.register("sdpa", attend)
    MASKS.register("sdpa", lambda **more: None if more.get("local_size") else masked(**more))
