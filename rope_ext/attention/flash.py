"""Bands with a fused kernel that returns the log-sum-exp, as an operator with gradients.

The kernel is that of the device: :mod:`rope_ext.attention.flash_cpu` or
:mod:`rope_ext.attention.flash_cuda`. In a graph, calls that it does not support are one operator,
too: there the blocks of :mod:`rope_ext.attention.bands` would be unrolled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from rope_ext.attention import bands, cards, flash_cpu, flash_cuda, products
from rope_ext.attention.call import Call, Pairs, RotatedBand
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.geometry import ChunkGap, Distance, Sinks

_GEOMETRIES = (Distance, ChunkGap, Sinks)
# Field names are listed here because the dynamo of torch 2.11 cannot trace fields().
_NAMES = {kind: [part.name for part in fields(kind)] for kind in _GEOMETRIES}
_OPEN = 2**62
"""Stands for ``last=None`` where geometries are passed as integers: larger than any distance."""

BY_DEVICE = {"cpu": flash_cpu, "cuda": flash_cuda}


def refusal(
    query: torch.Tensor, value: torch.Tensor, call: Call, card: cards.Card | None
) -> str | None:
    """Why the kernel of the device cannot have a call; None: it can."""
    if call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled():
        return "it has no gradient of a bias"
    if query.device.type == "cpu":
        return flash_cpu.refusal(call)
    if card is None:
        return "it is for CPUs and for NVIDIA GPUs"
    return flash_cuda.refusal(query, value, call, card)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Attention as :class:`Call` describes it, by the fused kernel of the device."""
    columns, value_columns = query.shape[-1], value.shape[-1]
    query = call.scale_query(query)
    # The kernel needs query, key and value with the same number of columns.
    value = F.pad(value, (0, max(columns - value_columns, 0)))
    query, key = (F.pad(x, (0, max(value_columns - columns, 0))) for x in (query, key))
    tensors = (query, key, value, call.sinks)
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    ):
        out = _operator(query, key, value, call, fused=True)
    else:  # the operator would add overhead to each step of decoding
        out, _ = _compute(query, key, value, call)
    return out[..., :value_columns]


def attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> torch.Tensor:
    """Attention as :class:`Call` describes it, by plain operations of torch."""
    if torch.compiler.is_compiling() and call.scores is None:
        return _operator(call.scale_query(query), key, value, call, fused=False)
    return bands.attend(query, key, value, call)


def _compute(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, by the kernel of the device."""
    # Kernels assume contiguous columns without checking.
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return BY_DEVICE[query.device.type].compute(*rows, call)


def pack_call(call: Call) -> tuple[list[int], list]:
    """Bands and pairs as integers and tensors, since a custom operator takes nothing else."""
    plan = [len(call.bands)]
    tables: list[torch.Tensor] = []
    for band in call.bands:
        kind = type(band.geometry)
        values = [getattr(band.geometry, name) for name in _NAMES[kind]]
        plan += [_GEOMETRIES.index(kind), *(_OPEN if value is None else value for value in values)]
        for rotation in (band.query, band.key):
            plan.append(int(rotation is not None))
            tables += rotation or ()
    for side in (call.pairs.first, call.pairs.second):
        plan.append(int(isinstance(side, slice)))
        if isinstance(side, slice):
            plan += (side.start, side.stop, side.step or 1)
        else:
            tables.append(side)
    return plan, tables


def unpack_call(
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
) -> Call:
    numbers, tensors = iter(plan), iter(tables)
    bands = []
    for _ in range(next(numbers)):
        kind: Any = _GEOMETRIES[next(numbers)]
        values = [next(numbers) for _ in _NAMES[kind]]
        geometry = kind(*(None if value == _OPEN else value for value in values))
        query, key = (
            (next(tensors), next(tensors)) if next(numbers) else None for _ in ("query", "key")
        )
        bands.append(RotatedBand(geometry, query, key))
    first, second = (
        slice(next(numbers), next(numbers), next(numbers)) if next(numbers) else next(tensors)
        for _ in ("first", "second")
    )
    return Call(bands, Pairs(first, second), scale, start, None, softcap, sinks, bias)


def refuse_onnx() -> None:
    """Raise in an export to ONNX, whose converter supports none of our operators.

    Called where torch computes shapes, since ``is_in_onnx_export`` is False in traced functions.
    """
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedModelError(
            "ONNX has no operator for the attention of position methods, encodings, bias= and "
            "layers=; patch with a frequency method such as 'yarn' alone (a dynamic one with "
            "length=TOKENS), or use torch.export instead (docs/saving.md)"
        )


def _operator(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, fused: bool
) -> torch.Tensor:
    """``call`` without its temperature."""
    plan, tables = pack_call(call)
    return _bands(
        query, key, value, call.sinks, call.bias, tables, plan, call.start, call.scale,
        call.softcap, fused,
    )[0]  # fmt: skip


@torch.library.custom_op("rope_ext::bands", mutates_args=())
def _bands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
    fused: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = unpack_call(sinks, bias, tables, plan, start, scale, softcap)
    if fused:
        return _compute(query, key, value, call)
    with torch.no_grad():
        out = bands.attend(query, key, value, call)
    return out.transpose(1, 2).contiguous().transpose(1, 2), query.new_empty(0)


@_bands.register_fake
def _(query, key, value, *rest):  # noqa: ANN001, ANN002, ANN202
    refuse_onnx()
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    fused = rest[-1]
    lse = (batch, heads, queries) if fused else (0,)
    return out, query.new_empty(lse, dtype=products.wide(query) if fused else query.dtype)


@torch.library.custom_op("rope_ext::bands_backward", mutates_args=())
def _bands_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    learns: list[bool],
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
) -> list[torch.Tensor]:
    """Gradients of query, key and value, then of those of sinks and bias that learn."""
    call = unpack_call(sinks, bias, tables, plan, start, scale, softcap)
    if lse.dim() > 1:
        rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, query, key, value, out))
        found = [*BY_DEVICE[query.device.type].differentiate(*rows, lse, call)]
        if sinks is not None and learns[0]:
            by_row = (grad.to(lse.dtype) * out).sum(-1)
            of_sinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * by_row).sum((0, 2))
            found.append(of_sinks.to(sinks.dtype))
        return found
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    more = [
        x.detach().requires_grad_() if x is not None and learned else x
        for x, learned in zip((sinks, bias), learns, strict=True)
    ]
    with _recorded():
        call = replace(call, sinks=more[0], bias=more[1])
        made = bands.attend(leaves[0], leaves[1], leaves[2], call)
        leaves += [x for x, learned in zip(more, learns, strict=True) if x is not None and learned]
        grads = torch.autograd.grad(made, leaves, grad)  # computes blocks again, recorded too
    # With the strides of the inputs, as its fake promises.
    return [torch.empty_like(x).copy_(made) for x, made in zip(leaves, grads, strict=True)]


@contextmanager
def _recorded() -> Iterator[None]:
    """Record gradients in an operator, which compiled graphs run below autograd."""
    key = torch._C.DispatchKey.AutogradFunctionality
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


@_bands_backward.register_fake
def _(grad, query, key, value, sinks, bias, out, lse, learns, *_rest):  # noqa: ANN001, ANN002, ANN202
    more = [x for x, learned in zip((sinks, bias), learns, strict=True) if learned]
    return [torch.empty_like(x) for x in (query, key, value, *more)]


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, tables, ctx.plan, ctx.start, ctx.scale, ctx.softcap, _ = inputs
    ctx.save_for_backward(*tensors, *output, *tables)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _grad_lse: torch.Tensor) -> tuple:
    saved = ctx.saved_tensors  # read once: under checkpointing a second time is an error
    tables = list(saved[7:])
    learns = [ctx.needs_input_grad[3], ctx.needs_input_grad[4]]
    inputs: Any = (grad, *saved[:7], learns, tables, ctx.plan, ctx.start, ctx.scale, ctx.softcap)
    grads = _bands_backward(*inputs)
    more = iter(grads[3:])
    of_learned = [next(more) if learned else None for learned in learns]
    nothing = ([None] * len(tables), None, None, None, None, None)
    return *grads[:3], *of_learned, *nothing


_bands.register_autograd(_differentiate, setup_context=_setup)
