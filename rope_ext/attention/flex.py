"""Banded attention with FlexAttention: CUDA, any dtype, differentiable through the log-sum-exp.

On CUDA a call is compiled: rotations, one fused kernel per band, and their merge. It must never
fall back to the unfused operation, which materializes all logits. So it is compiled with
``fullgraph`` for any number of kinds of calls, and everything that varies between calls is passed
in tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rope_ext.attention import cards
from rope_ext.attention.call import Call, Pairs, part_of, wide
from rope_ext.methods.geometry import Geometry, extent

_BLOCK = 128
"""Number of tokens in a block of the mask."""
_OPEN = 2**30
"""Encodes ``last=None`` in a mask: larger than any distance."""
LEAST_COLUMNS = 16
"""Minimum number of columns of a head: the smallest matrix product on the device."""


def refusal(query: Tensor, value: Tensor, call: Call, card: cards.Card) -> str | None:
    """Return why the fused kernel does not support a call on this card; None if it does."""
    columns = min(query.shape[-1], value.shape[-1])
    if columns < LEAST_COLUMNS:
        return f"it needs heads of {LEAST_COLUMNS} columns or more, and these have {columns}"
    if query.dtype == torch.float64:
        return "it has no float64"
    if query.dtype == torch.bfloat16 and card.capability < cards.AMPERE:
        return f"it has no bfloat16 on a GPU of capability {card.version}; use float16"
    if not card.compiles:
        return "it is compiled by Triton, which needs the package triton and a C compiler"
    if _options(query=query, value=value, call=call, card=card) is None:
        return (
            f"heads of {query.shape[-1]} columns in {query.dtype} do not fit into "
            f"{card.shared // 1024} KiB of shared memory"
        )
    return None


def _options(
    query: Tensor, value: Tensor, call: Call, card: cards.Card
) -> dict[str, int | bool] | None:
    size = query.element_size()
    heads = cards.Heads(
        columns=query.shape[-1],
        value_columns=value.shape[-1],
        size=size,
        bias=call.bias is not None,
    )
    learns = torch.is_grad_enabled() and (query.requires_grad or value.requires_grad)
    return cards.options(card, heads, learns)


def attend(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    parts = []
    for band in call.bands:
        at = extent(band.geometry, queries=queries, keys=keys, start=call.start)
        if (count := at.stop - at.start) == 0:
            continue
        mask = shift = None  # all keys are visible; entry in ``bias`` of the first key and query
        if queries > 1:
            ends = queries, count, call.start + keys - queries, call.start + at.start
            mask = block_mask_of(band.geometry, *ends, query.device)
        if call.bias is not None:
            first = keys - queries - at.start + call.ahead
            shift = torch.full((), first, device=query.device)
        k = key.narrow(2, at.start, count)
        v = value.narrow(2, at.start, count)
        parts.append((k, v, band.query, part_of(band.key, at), mask, shift))
    if not parts:
        return value.new_zeros(batch, heads, queries, value.shape[-1])
    cap = None if call.softcap is None else query.new_full((), call.softcap, dtype=torch.float32)
    options = ""
    if query.is_cuda:
        chosen = _options(query=query, value=value, call=call, card=cards.card(query.device)) or {}
        options = " ".join(f"{name}={int(number)}" for name, number in chosen.items())
    given = query, parts, call.sinks, cap, call.bias
    # As strings, since numbers would become symbols in the graph.
    fixed = repr(float(call.scale)), options, call.pairs.first, call.pairs.second
    if not fuses(query):
        return _attend(*given, *fixed)
    try:
        try:
            return compiled()(*given, *fixed)
        except FailOnRecompileLimitHit:  # one graph per kind of call
            with config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
                return compiled()(*given, *fixed)
    except Exception as error:
        if not type(error).__module__.startswith(_COMPILERS):
            raise
        raise NotCompiledError(f"{type(error).__name__}: {error}"[:300]) from error


def _attend(
    query: Tensor,
    parts: Sequence[Any],
    sinks: Tensor | None,
    cap: Tensor | None,
    bias: Tensor | None,
    scale: str,
    options: str,
    first: Any,
    second: Any,
) -> Tensor:
    """Merge the outputs of bands, whose keys are disjoint, by their log-sum-exps."""
    pairs = Pairs(first, second)
    outs = []
    logs = []
    kernel_options: Any = {x: int(y) for x, y in (one.split("=") for one in options.split())}
    for key, value, of_query, of_key, mask, shift in parts:

        def changed(
            score: Tensor,
            _batch: Tensor,
            head: Tensor,
            row: Tensor,
            column: Tensor,
            shift: Tensor | None = shift,
        ) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if bias is not None and shift is not None:
                entry = (shift + row - column).clamp(0, bias.shape[1] - 1)
                score = score + bias[head, entry]
            return score

        out, aux = flex_attention(
            pairs.rotate(query, of_query),
            pairs.rotate(key, of_key),
            value,
            score_mod=None if cap is None and bias is None else changed,
            block_mask=mask,
            scale=float(scale),
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options=kernel_options,
            return_aux=AuxRequest(lse=True),
        )
        outs.append(out)
        assert aux.lse is not None
        logs.append(aux.lse.to(wide(aux.lse)).clamp(min=-1e30))  # -inf has no gradient
    if len(outs) == 1 and sinks is None:
        return outs[0]
    if sinks is not None:
        logs.append(sinks.to(logs[0].dtype).unsqueeze(1).expand_as(logs[0]))
    weights = torch.stack(logs).softmax(dim=0).unsqueeze(-1)
    total = weights[0] * outs[0]
    for index in range(1, len(outs)):
        total = total + weights[index] * outs[index]
    return total.to(query.dtype)


@lru_cache(maxsize=16)
def block_mask_of(
    geometry: Geometry, queries: int, keys: int, query: int, key: int, device: torch.device
) -> BlockMask:
    """Build the block mask for queries from token ``query`` on and keys from token ``key`` on.

    Allocates no tensor of size queries times keys, and does not synchronize with the device.
    """

    def number(value: int | None) -> Tensor:  # filled on the device, without synchronizing
        return torch.full((), _OPEN if value is None else value, dtype=torch.int32, device=device)

    with torch.inference_mode(False), torch.no_grad():  # cached, also for training
        row, column = (
            torch.arange(first, first + count, _BLOCK, device=device)
            for first, count in ((query, queries), (key, keys))
        )
        row = row.unsqueeze(1)
        low, high = geometry.ends(row)
        later_low, later_high = geometry.ends(row + _BLOCK - 1)
        some = (low < column + _BLOCK) & (later_high > column)
        every = (later_low <= column) & (high >= column + _BLOCK)
        every = every & (row + _BLOCK <= query + queries) & (column + _BLOCK <= key + keys)
        # Its numbers are in tensors, so that one kernel serves them all.
        numbers = [number(getattr(geometry, field.name)) for field in fields(geometry)]
        of_tensors: Any = type(geometry)(*numbers)  # type: ignore[arg-type]
        first_query = number(query)
        first_key = number(key)

        def seen(_batch: Any, _head: Any, row: Tensor, column: Tensor) -> Tensor:
            return of_tensors.sees(row + first_query, column + first_key)

        listed: list[Any] = [y for x in (some & ~every, every) for y in _listed(x)]
        sizes: Any = {"BLOCK_SIZE": _BLOCK, "seq_lengths": (queries, keys)}
        return BlockMask.from_kv_blocks(*listed, mask_mod=seen, **sizes)


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return each query block's number of visible key blocks, and their indices, listed first."""
    order = torch.argsort(seen.int(), dim=-1, descending=True, stable=True)
    count, order = (x.int().view(1, 1, *x.shape) for x in (seen.sum(-1), order))
    return count, order


class NotCompiledError(Exception):
    """FlexAttention could not be compiled for a GPU; see the cause."""


_COMPILERS = ("triton", "torch._inductor", "torch._dynamo")
"""Modules whose errors mean that a kernel did not compile, or does not fit on the GPU."""


def fuses(x: Tensor) -> bool:
    """Whether to compile a call: on GPUs only, unless the call is already part of a graph."""
    return x.is_cuda and not torch.compiler.is_compiling()


@cache
def compiled() -> Callable[..., Tensor]:
    """Compile :func:`_attend`, with one graph for each kind of call."""
    return torch.compile(_attend, dynamic=True, fullgraph=True)
