"""The bands with FlexAttention: CUDA, any dtype, differentiable through the log-sum-exp.

On CUDA every band is one fused kernel. It must never fall back to the unfused operation, which
holds all logits at once. So each kind of call is compiled separately with ``fullgraph``, and
everything that changes from call to call is passed in tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    flex_attention,
)

from rope_ext.attention import cards, fused
from rope_ext.attention.call import Call, part_of
from rope_ext.attention.extent import blocks, extent
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry

_BLOCK = 128
"""Tokens of a block of the mask."""
_OPEN = 2**30
"""Stands for ``last=None`` in a mask: larger than any distance."""
LEAST_COLUMNS = 16
"""Columns of a head: the smallest matrix product on the device."""


def refusal(query: torch.Tensor, value: torch.Tensor, call: Call, card: cards.Card) -> str | None:
    """Why the fused kernel cannot have a call on this card; None: it can."""
    columns = min(query.shape[-1], value.shape[-1])
    if columns < LEAST_COLUMNS:
        return f"it needs heads of {LEAST_COLUMNS} columns or more, and these have {columns}"
    if query.dtype == torch.float64:
        return "it has no float64"
    if query.dtype == torch.bfloat16 and card.capability < cards.AMPERE:
        return f"it has no bfloat16 on a GPU of capability {card.version}; use float16"
    if not card.compiles:
        return "it is compiled by Triton, which needs the package triton and a C compiler"
    if _options(query, value, call, card) is None:
        return (
            f"heads of {query.shape[-1]} columns in {query.dtype} do not fit into "
            f"{card.shared // 1024} KiB of shared memory"
        )
    return None


def _options(
    query: torch.Tensor, value: torch.Tensor, call: Call, card: cards.Card
) -> dict[str, int | bool] | None:
    heads = cards.Heads(
        query.shape[-1], value.shape[-1], query.element_size(), call.bias is not None
    )
    learns = torch.is_grad_enabled() and (query.requires_grad or value.requires_grad)
    return cards.options(card, heads, learns)


def _read(options: str) -> Any:
    """Options of the kernel, written as ``"name=number name=number"``."""
    return {name: int(x) for name, x in (one.split("=") for one in options.split())}


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: str | float,
    options: str,
    mask: BlockMask | None,
    cap: torch.Tensor | None,
    bias: torch.Tensor | None,
    apart: torch.Tensor | None,
) -> tuple:
    """Output and log-sum-exp.

    Args:
        query: as :func:`flex_attention` takes it.
        key: keys of the band only.
        value: their values.
        scale: scale of the logits; a string, since a number would become a symbol in the graph.
        options: see :func:`_read`; a string for the same reason.
        mask: mask of the band; None: all keys are visible.
        cap: the soft cap, a 0-dimensional tensor.
        bias: see :class:`Call`.
        apart: distance from the first key to the first query, a 0-dimensional tensor; needed if
            there is a bias.
    """

    def changed(
        score: torch.Tensor,
        _batch: torch.Tensor,
        head: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
    ) -> torch.Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is not None and apart is not None:
            score = score + bias[head, (apart + row - column).clamp(0, bias.shape[1] - 1)]
        return score

    return flex_attention(
        query,
        key,
        value,
        score_mod=None if cap is None and bias is None else changed,
        block_mask=mask,
        scale=float(scale),
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=_read(options),
        return_aux=AuxRequest(lse=True),
    )


def _merged(*tensors: Any) -> torch.Tensor:
    """Outputs of disjoint keys merged by their log-sum-exps, in the dtype of the latter.

    The tensors are the outputs, as many log-sum-exps, and the sinks of :class:`Call` or None.
    """
    *both, sinks = tensors
    count = len(both) // 2
    logs = [x.clamp(min=-1e30) for x in both[count:]]  # -inf has no gradient
    if sinks is not None:
        logs.append(sinks.to(logs[0].dtype).unsqueeze(1).expand_as(logs[0]))
    weights = torch.stack(logs).softmax(dim=0).unsqueeze(-1)
    total = weights[0] * both[0]
    for i in range(1, count):
        total = total + weights[i] * both[i]
    return total


@lru_cache(maxsize=16)
def block_mask_of(
    geometry: Geometry,
    queries: int,
    keys: int,
    query: int,
    key: int,
    device: torch.device,
) -> BlockMask:
    """Block mask of queries from token ``query`` on and keys from token ``key`` on.

    Allocates nothing of size queries times keys, and does not synchronise with the device.
    """
    with torch.inference_mode(False), torch.no_grad():  # kept for calls that train as well
        row, column = (
            torch.arange(first, first + count, _BLOCK, device=device)
            for first, count in ((query, queries), (key, keys))
        )
        row = row.unsqueeze(1)
        some, every = blocks(geometry, row, column, _BLOCK)
        every = every & (row + _BLOCK <= query + queries) & (column + _BLOCK <= key + keys)
        listed = [y for x in (some & ~every, every) for y in _listed(x)]
        return BlockMask.from_kv_blocks(
            *listed,
            BLOCK_SIZE=_BLOCK,
            mask_mod=_seen(geometry, query, key, device),
            seq_lengths=(queries, keys),
        )


def _listed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of key blocks that each query block sees, and their indices before all others."""
    order = torch.argsort(seen.int(), dim=-1, descending=True, stable=True)
    count, order = (x.int().view(1, 1, *x.shape) for x in (seen.sum(-1), order))
    return count, order


def _seen(geometry: Geometry, first_query: int, first_key: int, device: torch.device) -> Callable:
    """``geometry.sees`` with its numbers in tensors, so that one kernel serves them all."""

    def number(value: int | None) -> torch.Tensor:  # filled on the device, without synchronising
        value = _OPEN if value is None else value
        return torch.full((), value, dtype=torch.int32, device=device)

    query, key = number(first_query), number(first_key)
    if isinstance(geometry, Distance):
        first, last = number(max(geometry.first, 0)), number(geometry.last)

        def seen(_batch: Any, _head: Any, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            distance = (row + query) - (column + key)
            return (distance >= first) & (distance < last)

    elif isinstance(geometry, ChunkGap):
        size, first, last = (number(x) for x in (geometry.size, geometry.first, geometry.last))

        def seen(_batch: Any, _head: Any, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            row, column = row + query, column + key
            gap = row // size - column // size
            return (row >= column) & (gap >= first) & (gap <= last)

    else:
        count, first = number(geometry.count), number(geometry.first)

        def seen(_batch: Any, _head: Any, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            row, column = row + query, column + key
            return (row - column >= first) & (column < count)

    return seen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """Attention as :class:`Call` describes it."""
    (batch, heads, queries, _), (kv_heads, keys) = query.shape, key.shape[1:3]
    query = call.scale_query(query)
    scale = repr(float(call.scale)) if fused.fuses(query) else call.scale
    options = ""
    if query.is_cuda:
        chosen = _options(query, value, call, cards.card(query.device)) or {}
        options = " ".join(f"{name}={int(number)}" for name, number in chosen.items())
    cap = None if call.softcap is None else query.new_full((), call.softcap, dtype=torch.float32)
    outs, logs = [], []
    for band in call.bands:
        part = extent(band.geometry, queries, keys, call.start)
        count = part.stop - part.start
        if not count:
            continue
        rotated = (query, band.query), (key.narrow(2, part.start, count), part_of(band.key, part))
        tensors = *fused.rotate(call.pairs, *rotated), value.narrow(2, part.start, count)
        mask = apart = None
        sizes = [1, queries, count]
        if queries > 1:
            at = call.start + keys - queries, call.start + part.start
            mask = block_mask_of(band.geometry, queries, count, *at, query.device)
            sizes += [-(-queries // _BLOCK), -(-count // _BLOCK)]
        if call.bias is not None:
            apart = torch.full((), keys - queries - part.start, device=query.device)
        kind = (scale, options, type(band.geometry), heads, kv_heads, fused.alike(sizes))
        given = (scale, options, mask, cap, call.bias, apart)
        out, aux = fused.run(_masked, *tensors, *given, kind=kind, unfused=False)
        outs.append(out)
        logs.append(aux.lse)
    if not outs:
        return value.new_zeros(batch, heads, queries, value.shape[-1])
    if len(outs) == 1 and call.sinks is None:
        return outs[0].to(value.dtype)
    wide = torch.promote_types(logs[0].dtype, torch.float32)
    logs = [x.to(wide) for x in logs]
    return fused.run(_merged, *outs, *logs, call.sinks).to(value.dtype)
