"""Selects one of bitsandbytes' two code paths for 4-bit weights on CPUs, on any machine.

If a CPU supports bfloat16 products (avx512_bf16), bitsandbytes repacks a layer's weights in its
first forward without gradients, rounds their constants to bfloat16, and keeps that when saving.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch

Patch = Any  # (object, name, value) -> None, as pytest's monkeypatch.setattr


def use(packed: bool, patch: Patch = setattr) -> None:
    """Force one code path on every machine; torch computes products with packed weights."""
    patch(bitsandbytes.nn.modules, "has_avx512bf16", lambda: packed)
    if packed:
        patch(bitsandbytes.functional, "gemv_4bit", product)


def product(inputs: torch.Tensor, packed: torch.Tensor, out: None, state: Any) -> torch.Tensor:
    """``inputs`` of (..., in) times a packed weight of (out, in), in bfloat16 as the kernel does.

    The layout is bitsandbytes': a byte of 32 rows' block holds in its low half an element of the
    first 16 rows, in its high half the same element of the last 16.
    """
    rows, columns = state.shape
    halves = packed.view(rows // 32, columns // 2, 1, 32)
    blocks = torch.cat([halves & 15, halves >> 4], dim=2).view(rows // 32, columns // 2, 32, 2)
    codes = blocks.transpose(1, 2).reshape(rows, columns)
    scales = state.absmax.t().float().repeat_interleave(state.blocksize, dim=1)
    weight = (state.code[codes.long()] * scales).bfloat16()
    return (inputs.bfloat16() @ weight.t()).to(inputs.dtype)
