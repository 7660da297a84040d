"""Chooses the attention kernel, and wraps it as a custom operator for compiled graphs.

Graphs would unroll the tiles and blocks of kernels, and cannot read positions. So in a graph
everything but FlexAttention is one operator with gradients, as is every fused call that trains.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rope_ext.attention import bands, cards, flash, flex
from rope_ext.attention.call import Call, Pairs, Places, RotatedBand, Rotation, each_table, wide
from rope_ext.attention.runs import BACK, Run, goes_back, runs
from rope_ext.errors import OptionError, UnsupportedModelError, nearest
from rope_ext.methods.geometry import Ahead, Around, ChunkGap, Distance, Queries, Sinks

_logger = logging.getLogger("rope_ext")
_PLAIN = "runs by plain operations of torch, which are slower"
KERNELS = ("auto", "flash", "flex", "reference")


def attend(query: Tensor, key: Tensor, value: Tensor, call: Call, kernel: str = "auto") -> Tensor:
    """Compute the attention of :class:`Call` with the chosen kernel.

    ``kernel`` is ``"flash"`` (CPU, or half precision on CUDA), ``"flex"`` (CUDA), ``"reference"``
    (any device, slow), or ``"auto"``: the best of these that supports the call on its device.
    Under autocast, query, key and value are cast as for torch's ``scaled_dot_product_attention``.

    Raises:
        OptionError: the kernel is unknown or does not support the call.
    """
    device, asked = query.device.type, kernel
    if kernel not in KERNELS:
        raise OptionError(
            f"no attention kernel {kernel!r}{nearest(kernel, KERNELS)}; use one of {KERNELS}"
        )
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    card = cards.card(query.device) if device == "cuda" and kernel != "reference" else None
    if kernel == "auto":
        kernel, why = chosen(query, value, call, card)
        if why is not None and not torch.compiler.is_compiling():
            log_once(f"attention on {query.device} {_PLAIN}: {why}")
    elif kernel != "reference":
        why = refusal(kernel, query, value, call, card)
        if why is not None:
            raise OptionError(f"kernel={kernel!r} cannot run this: {why}; use kernel='auto'")
    if kernel == "flex":
        try:
            return flex.attend(query, key, value, call)
        except flex.NotCompiledError as error:
            if asked != "auto":
                raise OptionError(
                    f"kernel='flex' was not compiled for this GPU ({error}); use kernel='auto'"
                ) from error
            log_once(f"attention on {query.device} {_PLAIN}: it was not compiled ({error})")
    fused, tensors = kernel == "flash", (query, key, value)
    columns, value_columns = query.shape[-1], value.shape[-1]
    if fused:  # it needs equally many columns of query, key and value
        most = max(columns, value_columns)
        query, key, value = (F.pad(x, (0, most - x.shape[-1])) for x in tensors)
    grads = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*tensors, call.sinks)
    )
    if (fused and grads) or (torch.compiler.is_compiling() and call.scores is None):
        out = attend_encoded(query, key, value, call, None, "flash" if fused else "reference")
    else:  # the operator would add overhead to each step of decoding
        out = _compute(query, key, value, call, fused)[0]
    return out[..., :value_columns]


def chosen(
    query: Tensor, value: Tensor, call: Call, card: cards.Card | None
) -> tuple[str, str | None]:
    """Return the kernel for ``kernel="auto"``, and, on a GPU, why it is not a fused one.

    ``card`` is the GPU of the tensors; None on other devices.
    """
    refused = {}
    order = ("flex", "flash") if card is not None else ("flash",)
    if flash.uses_cudnn(query, value, card):
        order = ("flash", "flex")
    for kernel in order:
        why = refusal(kernel, query, value, call, card)
        if why is None:
            return kernel, None
        refused[kernel] = why
    said = card is not None and call.scores is None
    return "reference", "; ".join(map(": ".join, refused.items())) if said else None


def refusal(
    kernel: str, query: Tensor, value: Tensor, call: Call, card: cards.Card | None
) -> str | None:
    """Return why ``"flash"`` or ``"flex"`` does not support a call; None if it does."""
    if call.scores is not None:
        return "the encoding makes the logits itself"
    if kernel == "flash":
        return flash.refusal(query, value, call, card)
    if card is not None:
        return flex.refusal(query, value, call, card)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, value)):
        return "it has no gradients on the CPU"
    return None


@functools.cache
def log_once(sentence: str) -> None:
    _logger.warning("rope_ext: %s", sentence)


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, found: list[tuple[Run, Call]], kernel: str
) -> Tensor:
    """Compute attention for every run with its call; zero for queries outside all runs."""
    out = query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])
    for run, call in found:
        rows = slice(None) if run.rows is None else run.rows
        k, v = (x[rows][:, :, run.keys] for x in (key, value))
        call = replace(call, start=run.start)
        part = attend(query[rows][:, :, run.queries], k, v, call, kernel)
        if run.rows is None and part.shape[2] == query.shape[2]:
            return part  # all of them
        out = out.to(part.dtype)
        # A new view each time: autograd refuses a second assignment by rows to the same one.
        out.transpose(1, 2)[rows, :, run.queries] = part
    return out.transpose(1, 2)


_GEOMETRIES = {  # listed here because dynamo in torch 2.11 cannot trace fields()
    Distance: ("first", "last"),
    ChunkGap: ("size", "first", "last"),
    Sinks: ("count", "first"),
    Queries: ("first", "begin", "end"),
    Ahead: ("first", "last"),
    Around: ("last",),
}
_OPEN = 2**62
"""Encodes ``last=None`` in geometries passed as integers: larger than any distance."""


def attend_encoded(
    query: Tensor, key: Tensor, value: Tensor, call: Call, at: list[Tensor] | None, kernel: str
) -> Tensor:
    """Compute attention as a custom operator, whose arguments are only integers and tensors.

    ``at``: places and sequences, as for :func:`runs`, and the slot of the first query. Rotations
    are then ``[rows or 1, tokens, pairs]``, and there are no gradients. None: consecutive tokens.
    """
    plan, tables = [call.ahead, len(call.bands)], []
    for band in call.bands:
        kind = type(band.geometry)
        values = [getattr(band.geometry, name) for name in _GEOMETRIES[kind]]
        plan += [list(_GEOMETRIES).index(kind), *(_OPEN if x is None else x for x in values)]
        for rotation in (band.query, band.key):
            plan.append(int(rotation is not None))
            tables += rotation or ()
    for side in (call.pairs.first, call.pairs.second):
        plan.append(int(isinstance(side, slice)))
        if isinstance(side, slice):
            plan += (side.start, side.stop, side.step or 1)
        else:
            tables.append(side)
    numbers = call.start, call.scale, call.softcap
    return operator(query, key, value, call.sinks, call.bias, tables, at, plan, *numbers, kernel)[0]


def _unpacked(
    sinks: Tensor | None,
    bias: Tensor | None,
    tables: list[Tensor],
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
) -> Call:
    numbers, tensors, found = iter(plan), iter(tables), []
    ahead = next(numbers)
    for _ in range(next(numbers)):
        kind, names = list(_GEOMETRIES.items())[next(numbers)]
        values = [None if x == _OPEN else x for _, x in zip(names, numbers, strict=False)]
        query, key = (
            (next(tensors), next(tensors)) if next(numbers) else None for _ in ("query", "key")
        )
        found.append(RotatedBand(kind(*values), query, key))
    first, second = (
        slice(next(numbers), next(numbers), next(numbers)) if next(numbers) else next(tensors)
        for _ in ("first", "second")
    )
    return Call(found, Pairs(first, second), scale, start, softcap, sinks, bias, ahead)


def _compute(
    query: Tensor, key: Tensor, value: Tensor, call: Call, fused: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the latter is empty without a fused kernel."""
    if not fused:
        return bands.attend(query, key, value, call), query.new_empty(0, dtype=wide(query))
    # Kernels assume contiguous columns without checking.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return flash.compute(query, key, value, call)


_CALL = "Tensor[] tables, {}SymInt[] plan, SymInt start, float scale, float? softcap"
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? bias"


# It reads positions at run time, which CUDA graphs cannot capture: inductor partitions around it.
@torch.library.custom_op(
    "rope_ext::bands",
    mutates_args=(),
    # AOTInductor passes None instead of an empty list.
    schema=f"({_TENSORS}, {_CALL.format('Tensor[]? at, ')}, str kernel) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def operator(query, key, value, sinks, bias, tables, at, plan, *rest):  # noqa: ANN001, ANN002, ANN201
    """Return output and log-sum-exp; ``at`` is None if tokens are consecutive."""
    *numbers, kernel = rest
    call = _unpacked(sinks, bias, tables, plan, *numbers)
    if not at:
        with torch.no_grad():
            out, lse = _compute(query, key, value, call, kernel == "flash")
        return _empty(query, value).copy_(out), lse
    places, sequences, first = at[0], at[1], int(at[2])
    found = runs(places, sequences, len(query), first)
    if found is not None:
        calls = [(run, replace(call, bands=_of_run(call, run))) for run in found]
        out = attend_runs(query, key, value, calls, kernel)
    elif bool(goes_back(places, sequences >= 0)):
        raise UnsupportedModelError(BACK)
    else:
        new = places[:, first : first + query.shape[2]]
        there = Places.in_slots(new, places, sequences >= 0, first)
        of_all = [
            RotatedBand(band.geometry, *(each_table(x, lambda table: table[:, None]) for x in both))
            for band in call.bands
            for both in [(band.query, band.key)]
        ]
        out = bands.attend(query, key, value, replace(call, bands=of_all), there)
    return _empty(query, value).copy_(out), query.new_empty(0, dtype=wide(query))


def _of_run(call: Call, run: Run) -> list[RotatedBand]:
    """Return the bands of a run, from tables by row."""
    row = 0 if run.rows is None else run.rows[0]

    def part(rotation: Rotation, there: slice) -> Rotation:
        return each_table(rotation, lambda x: x[row if len(x) > 1 else 0][there])

    return [
        RotatedBand(band.geometry, part(band.query, run.queries), part(band.key, run.keys))
        for band in call.bands
    ]


@operator.register_fake
def _(query, key, value, sinks, bias, tables, at, *rest):  # noqa: ANN001, ANN002, ANN202
    if torch.onnx.is_in_onnx_export():  # checked here, since it is False in traced functions
        raise UnsupportedModelError(
            "ONNX has no operator for the attention of position methods, encodings, bias= and "
            "layers=; patch with a frequency method such as 'yarn' alone (a dynamic one with "
            "length=TOKENS), or use torch.export instead (docs/saving.md)"
        )
    lse = query.shape[:3] if rest[-1] == "flash" and not at else (0,)
    return _empty(query, value), query.new_empty(lse, dtype=wide(query))


def _empty(query: Tensor, value: Tensor) -> Tensor:
    """Return an empty output with the memory layout that the model expects."""
    rows, heads, queries, _ = query.shape
    return query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)


@torch.library.custom_op(
    "rope_ext::bands_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_TENSORS}, Tensor out, Tensor lse, bool[] learns, {_CALL.format('')})"
    " -> Tensor[]",
)
def _backward(grad, query, key, value, sinks, bias, out, lse, learns, *packed):  # noqa: ANN001, ANN002, ANN202
    """Return gradients of query, key and value, then of sinks and bias if they are trained."""
    call = _unpacked(sinks, bias, *packed)
    if lse.dim() > 1:
        rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, query, key, value, out))
        found = flash.differentiate(*rows, lse=lse, call=call)
        if sinks is not None and learns[0]:
            by_row = (grad.to(lse.dtype) * out).sum(-1)
            of_sinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * by_row).sum((0, 2))
            found.append(of_sinks.to(sinks.dtype))
        return found
    given = zip((query, key, value, sinks, bias), (True, True, True, *learns), strict=True)
    leaves: Any = [x if x is None else x.detach().requires_grad_(learned) for x, learned in given]
    with _recorded():
        made = bands.attend(*leaves[:3], call=replace(call, sinks=leaves[3], bias=leaves[4]))
        leaves = [x for x in leaves if x is not None and x.requires_grad]
        grads = torch.autograd.grad(made, leaves, grad)  # recomputes blocks, also recorded
    # Match the strides of the inputs, as in the fake implementation.
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


@_backward.register_fake
def _(grad, query, key, value, sinks, bias, out, lse, learns, *_rest):  # noqa: ANN001, ANN002, ANN202
    more = [x for x, learned in zip((sinks, bias), learns, strict=True) if learned]
    return [torch.empty_like(x) for x in (query, key, value, *more)]


def _setup(ctx, inputs, output):  # noqa: ANN001, ANN202
    *tensors, tables, at, ctx.plan, ctx.start, ctx.scale, ctx.softcap, _ = inputs
    ctx.of_at = None if at is None else [None] * len(at)
    ctx.save_for_backward(*tensors, *output, *tables)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _grad_lse):  # noqa: ANN001, ANN202
    saved = ctx.saved_tensors  # read once: checkpointing forbids a second read
    tables, learns = list(saved[7:]), [*ctx.needs_input_grad[3:5]]
    numbers = ctx.plan, ctx.start, ctx.scale, ctx.softcap
    grads = _backward(grad, *saved[:7], learns, tables, *numbers)
    more = iter(grads[3:])
    of_learned = [next(more) if learned else None for learned in learns]
    return *grads[:3], *of_learned, [None] * len(tables), ctx.of_at, *[None] * 5


operator.register_autograd(_differentiate, setup_context=_setup)
