"""The bands with FlexAttention: CUDA, any dtype, differentiable through the log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from rope_ext.attention.call import Call
from rope_ext.methods.geometry import Geometry

_FLOOR = -1e30
"""In place of a log-sum-exp of -inf, whose gradient is not a number."""


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


@lru_cache(maxsize=64)
def _block_mask(
    geometry: Geometry, queries: int, keys: int, start: int, device: torch.device
) -> BlockMask:
    def seen(
        _batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return geometry.sees(row + (start + keys - queries), column + start)

    build = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    with torch.inference_mode(False):  # kept for calls that train as well
        return build(seen, None, None, queries, keys, device=device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    merged: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention as :class:`Call` has it.

    ``merged``: output and log-sum-exp of keys that are in no band.
    """
    before = key.shape[2] - query.shape[2]

    def changed(
        score: torch.Tensor,
        _batch: torch.Tensor,
        head: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
    ) -> torch.Tensor:
        if call.softcap is not None:
            score = call.softcap * torch.tanh(score / call.softcap)
        if call.bias is not None:
            score = score + call.bias[head, (before + row - column).clamp(0, last)]
        return score

    last = 0 if call.bias is None else call.bias.shape[1] - 1
    plain = call.softcap is None and call.bias is None

    run = _compiled(flex_attention) if query.is_cuda else flex_attention
    query = call.warmed(query)
    outs, logs = [], []
    for band in call.bands:
        out, aux = run(
            call.pairs.rotate(query, band.query),
            call.pairs.rotate(key, band.key),
            value,
            score_mod=None if plain else changed,
            block_mask=_block_mask(
                band.geometry, query.shape[2], key.shape[2], call.start, query.device
            ),
            scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        outs.append(out)
        logs.append(aux.lse.clamp(min=_FLOOR))
    if merged is not None:
        outs.append(merged[0].to(outs[0].dtype))
        logs.append(merged[1].to(logs[0].dtype))
    if call.sinks is not None:
        logs.append(call.sinks.to(logs[0].dtype)[:, None].expand_as(logs[0]))
    weights = torch.stack(logs).softmax(dim=0)[: len(outs), ..., None]
    return (weights * torch.stack(outs)).sum(dim=0).to(value.dtype)
