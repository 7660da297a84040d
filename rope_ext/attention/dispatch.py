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
from rope_ext.attention.runs import BACK, Run, find_runs, goes_back
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
    device = query.device.type
    requested = kernel
    if kernel not in KERNELS:
        raise OptionError(
            f"no attention kernel {kernel!r}{nearest(kernel, KERNELS)}; use one of {KERNELS}"
        )
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    card = cards.card(query.device) if device == "cuda" and kernel != "reference" else None
    if kernel == "auto":
        kernel, why = chosen(query=query, value=value, call=call, card=card)
        if why is not None and not torch.compiler.is_compiling():
            log_once(f"attention on {query.device} {_PLAIN}: {why}")
    elif kernel != "reference":
        why = refusal(kernel, query=query, value=value, call=call, card=card)
        if why is not None:
            raise OptionError(f"kernel={kernel!r} cannot run this: {why}; use kernel='auto'")
    if kernel == "flex":
        try:
            return flex.attend(query, key, value, call=call)
        except flex.NotCompiledError as error:
            if requested != "auto":
                raise OptionError(
                    f"kernel='flex' was not compiled for this GPU ({error}); use kernel='auto'"
                ) from error
            log_once(f"attention on {query.device} {_PLAIN}: it was not compiled ({error})")
    fused = kernel == "flash"
    value_columns = value.shape[-1]
    grads = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, call.sinks)
    )
    if fused:  # it needs equally many columns of query, key and value
        most = max(query.shape[-1], value_columns)
        query = F.pad(query, (0, most - query.shape[-1]))
        key = F.pad(key, (0, most - key.shape[-1]))
        value = F.pad(value, (0, most - value.shape[-1]))
    # Plain operations differentiate themselves; encodings that make the logits are traced into.
    if (fused and grads) or (torch.compiler.is_compiling() and call.scores is None):
        out = attend_encoded(
            query, key, value, call=call, at=None, kernel="flash" if fused else "reference"
        )
    else:  # the operator would add overhead to each step of decoding
        out = _compute(query, key, value, call=call, fused=fused)[0]
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
        why = refusal(kernel, query=query, value=value, call=call, card=card)
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
        return flash.refusal(query=query, value=value, call=call, card=card)
    if card is not None:
        return flex.refusal(query=query, value=value, call=call, card=card)
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
        part = attend(
            query=query[rows][:, :, run.queries],
            key=key[rows][:, :, run.keys],
            value=value[rows][:, :, run.keys],
            call=replace(call, start=run.start),
            kernel=kernel,
        )
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

    ``at``: places and sequences, as for :func:`find_runs`, and the slot of the first query.
    Rotations are then ``[rows or 1, tokens, pairs]``, and there are no gradients. None: consecutive
    tokens.
    """
    plan, tables = _encoded(call)
    results = operator(
        query,
        key,
        value,
        call.sinks,
        call.bias,
        tables,
        at,
        plan,
        call.start,
        call.scale,
        call.softcap,
        kernel,
    )
    return results[0]  # the log-sum-exp is for the backward pass


def _encoded(call: Call) -> tuple[list[int], list[Tensor]]:
    """Return the integers and the tensors of bands and pairs, in the order :class:`_Decoder` reads.

    Each band is its kind and numbers, then for queries and keys whether they are rotated. Each side
    of the pairs is a 1 and its slice, or a 0 where a tensor has the columns.
    """
    plan: list[int] = [call.ahead, len(call.bands)]
    tables: list[Tensor] = []
    kinds = list(_GEOMETRIES)
    for band in call.bands:
        kind = type(band.geometry)
        plan.append(kinds.index(kind))
        for name in _GEOMETRIES[kind]:
            number = getattr(band.geometry, name)
            plan.append(_OPEN if number is None else number)
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


class _Decoder:
    """Reads what :func:`_encoded` wrote, in its order."""

    def __init__(self, plan: list[int], tables: list[Tensor]) -> None:
        self._numbers = iter(plan)
        self._tables = iter(tables)

    def number(self) -> int:
        return next(self._numbers)

    def band(self) -> RotatedBand:
        kind = list(_GEOMETRIES)[self.number()]
        numbers = [self.number() for _ in _GEOMETRIES[kind]]
        geometry = kind(*(None if x == _OPEN else x for x in numbers))
        query = self._rotation()
        key = self._rotation()
        return RotatedBand(geometry, query, key)

    def _rotation(self) -> Rotation:
        if not self.number():
            return None
        cos = next(self._tables)
        sin = next(self._tables)
        return cos, sin

    def pairs(self) -> Pairs:
        first = self._columns()
        second = self._columns()
        return Pairs(first, second)

    def _columns(self) -> slice | Tensor:
        if not self.number():
            return next(self._tables)
        start = self.number()
        stop = self.number()
        step = self.number()
        return slice(start, stop, step)


def _decoded(
    sinks: Tensor | None,
    bias: Tensor | None,
    tables: list[Tensor],
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
) -> Call:
    """Return the call from which :func:`_encoded` made ``plan`` and ``tables``."""
    decoder = _Decoder(plan, tables)
    ahead = decoder.number()
    count = decoder.number()
    found = [decoder.band() for _ in range(count)]
    return Call(
        bands=found,
        pairs=decoder.pairs(),
        scale=scale,
        start=start,
        softcap=softcap,
        sinks=sinks,
        bias=bias,
        ahead=ahead,
    )


def _compute(
    query: Tensor, key: Tensor, value: Tensor, call: Call, fused: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the latter is empty without a fused kernel."""
    if not fused:
        return bands.attend(query, key, value, call=call), query.new_empty(0, dtype=wide(query))
    return flash.compute(
        query=_by_columns(query), key=_by_columns(key), value=_by_columns(value), call=call
    )


def _by_columns(x: Tensor) -> Tensor:
    """Make columns contiguous, which kernels assume without checking."""
    return x if x.stride(-1) == 1 else x.contiguous()


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
def operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    tables: list[Tensor],
    at: list[Tensor] | None,
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; ``at`` is None if tokens are consecutive."""
    call = _decoded(
        sinks=sinks,
        bias=bias,
        tables=tables,
        plan=plan,
        start=start,
        scale=scale,
        softcap=softcap,
    )
    if at:
        places, sequences, first = at
        out = _at_places(
            query=query,
            key=key,
            value=value,
            call=call,
            places=places,
            sequences=sequences,
            first=int(first),
            kernel=kernel,
        )
        lse = query.new_empty(0, dtype=wide(query))
    else:
        with torch.no_grad():
            out, lse = _compute(query, key, value, call=call, fused=kernel == "flash")
    return _empty(query, value).copy_(out), lse


def _at_places(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    places: Tensor,
    sequences: Tensor,
    first: int,
    kernel: str,
) -> Tensor:
    """Compute attention in runs of consecutive tokens, else by the positions of single tokens.

    ``places``, ``sequences`` and ``first`` as for :func:`find_runs`; rotations are
    ``[rows or 1, tokens, pairs]``.
    """
    found = find_runs(places=places, sequences=sequences, rows=len(query), first=first)
    if found is not None:
        calls = [(run, replace(call, bands=_of_run(call, run))) for run in found]
        return attend_runs(query, key, value, found=calls, kernel=kernel)
    real = sequences >= 0
    if bool(goes_back(places, real)):  # a later token would pass for a near one
        raise UnsupportedModelError(BACK)
    new = places[:, first : first + query.shape[2]]
    by_head = [
        RotatedBand(
            geometry=band.geometry,
            query=each_table(band.query, lambda table: table[:, None]),
            key=each_table(band.key, lambda table: table[:, None]),
        )
        for band in call.bands
    ]
    there = Places.in_slots(query=new, key=places, real=real, filled=first)
    return bands.attend(query, key, value, call=replace(call, bands=by_head), places=there)


def _of_run(call: Call, run: Run) -> list[RotatedBand]:
    """Return the bands of a run, from tables by row."""
    row = 0 if run.rows is None else run.rows[0]  # a run's rows have the same positions

    def part(rotation: Rotation, there: slice) -> Rotation:
        return each_table(rotation, lambda x: x[row if len(x) > 1 else 0][there])

    return [
        RotatedBand(
            geometry=band.geometry,
            query=part(band.query, run.queries),
            key=part(band.key, run.keys),
        )
        for band in call.bands
    ]


@operator.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    tables: list[Tensor],
    at: list[Tensor] | None,
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    if torch.onnx.is_in_onnx_export():  # checked here, since it is False in traced functions
        raise UnsupportedModelError(
            "ONNX has no operator for the attention of position methods, encodings, bias= and "
            "layers=; patch with a frequency method such as 'yarn' alone (a dynamic one with "
            "length=TOKENS), or use torch.export instead (docs/saving.md)"
        )
    lse = query.shape[:3] if kernel == "flash" and not at else (0,)
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
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    learns: list[bool],
    tables: list[Tensor],
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
) -> list[Tensor]:
    """Return gradients of query, key and value, then of sinks and bias if they are trained.

    ``learns``: whether sinks, and whether the bias is.
    """
    call = _decoded(
        sinks=sinks,
        bias=bias,
        tables=tables,
        plan=plan,
        start=start,
        scale=scale,
        softcap=softcap,
    )
    if lse.dim() > 1:  # of a fused kernel
        return _fused_gradients(
            grad=grad,
            query=query,
            key=key,
            value=value,
            out=out,
            lse=lse,
            call=call,
            learns_sinks=learns[0],
        )
    leaves: Any = [x.detach().requires_grad_() for x in (query, key, value)]
    for x, learned in zip((sinks, bias), learns, strict=True):
        leaves.append(x if x is None else x.detach().requires_grad_(learned))
    with _recorded():
        again = replace(call, sinks=leaves[3], bias=leaves[4])
        recomputed = bands.attend(*leaves[:3], call=again)
        trained = [x for x in leaves if x is not None and x.requires_grad]
        grads = torch.autograd.grad(recomputed, trained, grad)  # recomputes blocks, also recorded
    # Match the strides of the inputs, as in the fake implementation.
    return [torch.empty_like(x).copy_(of_x) for x, of_x in zip(trained, grads, strict=True)]


def _fused_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    learns_sinks: bool,
) -> list[Tensor]:
    """Return gradients of query, key and value, and of sinks if they are trained."""
    found = flash.differentiate(
        grad=_by_columns(grad),
        query=_by_columns(query),
        key=_by_columns(key),
        value=_by_columns(value),
        out=_by_columns(out),
        lse=lse,
        call=call,
    )
    sinks = call.sinks
    if sinks is not None and learns_sinks:
        # A sink has a weight and no value, so only the softmax passes a gradient to it.
        by_row = (grad.to(lse.dtype) * out).sum(-1)
        weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
        found.append(-(weights * by_row).sum((0, 2)).to(sinks.dtype))
    return found


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
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    learns: list[bool],
    tables: list[Tensor],
    plan: list[int],
    start: int,
    scale: float,
    softcap: float | None,
) -> list[Tensor]:
    trained = [x for x, learned in zip((sinks, bias), learns, strict=True) if learned]
    return [torch.empty_like(x) for x in (query, key, value, *trained) if x is not None]


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, bias, tables, at, plan, start, scale, softcap, _ = inputs
    out, lse = output
    ctx.plan = plan
    ctx.start = start
    ctx.scale = scale
    ctx.softcap = softcap
    ctx.of_at = None if at is None else [None] * len(at)
    ctx.save_for_backward(query, key, value, sinks, bias, out, lse, *tables)
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple:
    # Saved tensors are read once: checkpointing forbids a second read.
    query, key, value, sinks, bias, out, lse, *tables = ctx.saved_tensors
    learns = list(ctx.needs_input_grad[3:5])
    grads = _backward(
        grad,
        query,
        key,
        value,
        sinks,
        bias,
        out,
        lse,
        learns,
        tables,
        ctx.plan,
        ctx.start,
        ctx.scale,
        ctx.softcap,
    )
    more = iter(grads[3:])
    of_sinks, of_bias = (next(more) if learned else None for learned in learns)
    of_numbers = [None] * 5  # plan, start, scale, softcap and kernel
    return *grads[:3], of_sinks, of_bias, [None] * len(tables), ctx.of_at, *of_numbers


operator.register_autograd(_differentiate, setup_context=_setup)
