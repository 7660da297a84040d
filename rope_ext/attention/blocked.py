"""Attention with the scores of an encoding: blocks of queries against all keys that they see.

Memory is linear in the number of keys, since the backward pass computes the logits of each block
again. Plain torch operations that run on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from rope_ext.attention import reference, sizes
from rope_ext.attention.call import Call, Scores, part_of
from rope_ext.attention.reference import Places
from rope_ext.methods.geometry import Distance


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Attention as :class:`Call` has it, with ``call.scores``."""
    learned = _scores(call).learned.values()
    return _Blocks.apply(call, query, key, value, call.temperature, call.sinks, call.bias, *learned)


def refuse_second_derivatives(grad: torch.Tensor) -> None:
    """Raise if ``grad``, which a backward pass got, will be differentiated again.

    ``once_differentiable`` raises only where the gradient of all leaves is asked for. Of chosen
    ones, as with ``torch.autograd.grad``, it leaves out its part of the second derivative.
    """
    if grad.requires_grad and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the attention of this encoding has no second derivatives; patch the model with "
            "kernel='reference', which has"
        )


def _scores(call: Call) -> Scores:
    assert call.scores is not None, "dispatch sends calls with scores only"
    return call.scores


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        temperature: torch.Tensor | None,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None,
        *learned: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(query, key, value, temperature, sinks, bias, *learned)
        out = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=value.dtype)
        for rows, keys in _blocks(call, query, key):
            of_block = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            others = (temperature, sinks, bias, *learned)
            out[:, :, rows] = _attend(call, rows, keys, *of_block, *others)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        refuse_second_derivatives(grad)
        call, tensors = ctx.call, ctx.saved_tensors
        wanted = [i for i in range(len(tensors)) if ctx.needs_input_grad[i + 1]]
        total = {i: _zeros(tensors[i]) for i in wanted}
        for rows, keys in _blocks(call, *tensors[:2]):
            part = {0: rows, 1: keys, 2: keys}
            leaves = [x[:, :, part[i]] if i in part else x for i, x in enumerate(tensors)]
            for i in wanted:
                leaves[i] = leaves[i].detach().requires_grad_()
            with torch.enable_grad():
                out = _attend(call, rows, keys, *leaves)
            of_block = torch.autograd.grad(
                out, [leaves[i] for i in wanted], grad[:, :, rows], allow_unused=True
            )
            for i, x in zip(wanted, of_block, strict=True):
                if x is not None:
                    (total[i][:, :, part[i]] if i in part else total[i]).add_(x)
        return None, *(total[i].to(x.dtype) if i in total else None for i, x in enumerate(tensors))


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _blocks(call: Call, query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys that its queries see."""
    (batch, heads, queries), keys = query.shape[:3], key.shape[2]
    count = sizes.SCORED_LOGITS // (batch * max(keys, 1) * (heads + _scores(call).width))
    count = max(1, min(count, sizes.SCORED_ROWS))
    bands = [band.geometry for band in call.bands]
    ends = [x.last for x in bands if isinstance(x, Distance) and x.last is not None]
    farthest = max(ends, default=0) if len(ends) == len(bands) else keys + 1
    for row in range(0, queries, count):
        end = min(row + count, queries)
        last = keys - queries + end
        first = max(keys - queries + row - farthest + 1, 0)
        if first < last:
            yield slice(row, end), slice(first, last)


def _attend(
    call: Call,
    rows: slice,
    keys: slice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    temperature: torch.Tensor | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    *learned: torch.Tensor,
) -> torch.Tensor:
    """Output of a block of queries; query, key and value are its parts, the rest is the call's."""
    scores = _scores(call)
    scores = replace(scores, learned=dict(zip(scores.learned, learned, strict=True)))
    bands = [
        replace(band, query=part_of(band.query, rows), key=part_of(band.key, keys))
        for band in call.bands
    ]
    of_block = replace(
        call,
        bands=bands,
        temperature=None if temperature is None else temperature[rows],
        sinks=sinks,
        bias=bias,
        scores=scores,
    )
    last = call.start + keys.stop  # the last row sees the last key
    places = Places(
        torch.arange(last - query.shape[2], last, device=query.device),
        torch.arange(call.start + keys.start, last, device=query.device),
    )
    return reference.attend(query, key, value, of_block, places)
