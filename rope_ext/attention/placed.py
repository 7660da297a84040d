"""Attention on keys whose positions are known as tensors only, as in compiled graphs.

The kernels for consecutive tokens decide in Python which keys each tile has. A graph cannot, since
the number of filled slots and the padding are tensors there. Few queries (decoding) become plain
operations on all slots, without synchronising with the device. Many go into one operator, which
reads the positions when it runs and passes every run of consecutive tokens to a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rope_ext.attention import bands as plain
from rope_ext.attention import dispatch as attention
from rope_ext.attention import flash, products
from rope_ext.attention.call import Call, RotatedBand, Rotation, each_table
from rope_ext.attention.reference import Places
from rope_ext.errors import UnsupportedModelError

BACK = (
    "the position ids go back within one row, where a compiled position method would have to "
    "attend to the future; give it one sequence in each row, padded on the left"
)
APART = (
    "there is padding between the tokens of a row, or its position ids repeat, where a position "
    "method in tensors would look for near keys in the wrong places; pad on the left "
    "(padding_side='left' of the tokenizer) and give position ids that count"
)
COUNTED = (
    "the position ids do not count one by one, which the tokens of a row have to do in an exported "
    "program with a static cache"
)
BEYOND = (
    "the tokens of a row lie further apart by position than there are slots for them, and for as "
    "many distances a compiled bias is known; give them position ids that count one by one"
)
FEW = 16
"""The most queries whose logits on all slots are held at once."""


@dataclass(frozen=True, eq=False)
class Part:
    """A band on the slots where its keys can be.

    Args:
        hidden: the lowest number for keys that a query does not see in the band, else zero,
            ``[rows or 1, queries, slots]``; adding it in each layer is cheaper than a mask.
        query: rotation of the queries, ``[rows or 1, 1, queries, pairs]``.
        key: rotation of the keys, ``[rows or 1, 1, slots, pairs]``.
        slots: int64, ``[rows or 1, slots]``; None: all.
        among: the index in ``slots`` of every slot, or their number for slots that are not among
            them, int64, ``[rows or 1, all slots]``; None: all are.
    """

    hidden: torch.Tensor
    query: Rotation
    key: Rotation
    slots: torch.Tensor | None
    among: torch.Tensor | None


class Few(NamedTuple):
    """What few queries see; shared by all layers of one layout.

    Args:
        parts: the bands, disjoint.
        sees: which queries see any key, bool, ``[rows or 1, queries]``.
    """

    parts: Sequence[Part]
    sees: torch.Tensor


def attend_few(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    few: Few,
    distance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of few queries on all slots.

    Args:
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, kv_heads, slots, columns]``.
        value: ``[rows, kv_heads, slots, value columns]``.
        call: without bands and scores; the queries are already multiplied by the temperature.
        few: what the queries see.
        distance: from every query to every key, tokens, int64, ``[rows or 1, queries, slots]``;
            needed if there is a bias.
    """
    rows, queries = query.shape[0], query.shape[2]
    kv_heads = key.shape[1]
    query = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # no key is read twice
    each = query.shape[2] // queries

    def repeated(x: torch.Tensor) -> torch.Tensor:  # for all heads of a key
        return x.repeat(1, 1, each, 1) if queries > 1 else x

    def rotated(by: Rotation) -> torch.Tensor:
        return call.pairs.rotate(query, each_table(by, repeated))

    parts = [
        _Rows(rotated(part.query), repeated(part.hidden[:, None]), part.key, part.slots, part.among)
        for part in few.parts
    ]
    bias = sinks = None
    if call.bias is not None and distance is not None:
        bias = call.bias[:, distance.clamp(max=call.bias.shape[1] - 1)].movedim(0, 1)
        bias = bias.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    if call.sinks is not None:
        sinks = call.sinks.view(kv_heads, each, 1).expand(-1, -1, queries)
        sinks = sinks.flatten(1, 2)[:, :, None].expand(rows, -1, -1, -1)
    sees = few.sees.repeat(1, each)[:, None, :, None]
    out = by_products(parts, key, value, call, bias, sinks, sees)
    return out.unflatten(2, (-1, queries)).flatten(1, 2)


class _Rows(NamedTuple):
    """A band of :class:`Few` for the rows of every key head.

    Args:
        query: rotated, ``[rows, kv_heads, rows of a key head, columns]``.
        hidden: added to their logits, ``[rows or 1, 1, rows of a key head or 1, slots]``.
        key: rotation of the keys.
        slots, among: see :class:`Part`.
    """

    query: torch.Tensor
    hidden: torch.Tensor
    key: Rotation
    slots: torch.Tensor | None
    among: torch.Tensor | None

    @property
    def plain(self) -> bool:
        """Whether it uses all keys as they are cached."""
        return self.slots is None and self.key is None


def by_products(
    parts: Sequence[_Rows],
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    sees: torch.Tensor,
) -> torch.Tensor:
    """With the logits of all slots at once."""

    def shown(logits: torch.Tensor, part: _Rows) -> torch.Tensor:
        logits = logits * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        return logits + part.hidden

    plain = [part for part in parts if part.plain]
    made = []
    if plain:  # read once for all these bands
        found = products.logits(torch.cat([part.query for part in plain], dim=2), key)
        made += map(shown, found.chunk(len(plain), dim=2), plain)
    for part in parts:
        if part.plain:
            continue
        near = call.pairs.rotate(_in(part.slots, key, 2), part.key)
        found = shown(products.logits(part.query, near), part)
        if part.among is not None:  # reading, unlike writing, fuses with what follows in a graph
            found = F.pad(found, (0, 1), value=torch.finfo(found.dtype).min)
        made.append(_in(part.among, found, 3))
    # Bands are disjoint and hide with the lowest number, so the largest logit of a key is the one
    # of the band that shows it.
    logits = functools.reduce(torch.maximum, made)
    if bias is not None:
        logits = logits + bias
    if sinks is not None:
        logits = torch.cat((logits, sinks.to(logits.dtype)), dim=-1)
    weights = (logits.softmax(dim=-1)[..., : key.shape[2]] * sees).to(value.dtype)
    if weights.is_cuda and not torch.compiler.is_compiling():
        weights = products.aligned(weights)
    return products.product(weights, value)


def _in(slots: torch.Tensor | None, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The entries of ``x`` at ``slots`` (``[rows or 1, slots]``; None: all) in a dimension."""
    if slots is None:
        return x
    if len(slots) == 1:  # gathering each column of each key takes ten times as long
        return x.index_select(dim, slots[0])
    size = (len(slots), *x.shape[1:])
    index = slots.view(len(slots), *(-1 if at == dim else 1 for at in range(1, x.dim())))
    return x.expand(size).gather(dim, index.expand(*size[:dim], -1, *size[dim + 1 :]))


def attend_scored(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    query_at: torch.Tensor,
    key_at: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Attention of few queries on all slots, with the scores of an encoding.

    Args:
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, kv_heads, slots, columns]``.
        value: likewise.
        call: with rotations of ``[rows or 1, tokens, pairs]``; the queries are multiplied by
            temperature.
        query_at: positions of the queries, int64, ``[rows or 1, queries]``.
        key_at: position of the token in each slot, ``[rows or 1, slots]``.
        visible: bool, ``[rows or 1, queries, slots]``.
    """
    alike = len(query_at) == len(visible) == 1
    found, every = [], slice(None)
    for row in range(1 if alike else len(query)):
        of_rows = every if alike else slice(row, row + 1)
        bands = [
            RotatedBand(band.geometry, _of(band.query, row, every), _of(band.key, row, every))
            for band in call.bands
        ]
        at, key_there, seen = (x[row if len(x) > 1 else 0] for x in (query_at, key_at, visible))
        places = Places(at, key_there, seen)
        of_row = query[of_rows], key[of_rows], value[of_rows]
        found.append(plain.attend(*of_row, replace(call, bands=bands), places))
    return torch.cat(found)


def attend_many(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    places: torch.Tensor,
    real: torch.Tensor,
    first: torch.Tensor,
    kernel: str,
) -> torch.Tensor:
    """Attention of many queries, without gradients.

    Args:
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, kv_heads, slots, columns]``.
        value: likewise.
        call: with rotations of ``[rows or 1, tokens, pairs]``.
        places: position of the token in each slot, int64, ``[rows or 1, slots]``.
        real: which slots have a token, bool, likewise.
        first: slot of the first query, int64, no dimensions.
        kernel: of :data:`rope_ext.attention.KERNELS`.

    Raises:
        UnsupportedModelError: when it runs, if positions go back within a row.
    """
    plan, tables = flash.pack_call(call)
    return operator(
        query, key, value, call.sinks, call.bias, tables, plan, places, real, first, call.scale,
        call.softcap, kernel,
    )  # fmt: skip


# It reads positions when it runs, which no CUDA graph can hold: inductor partitions around it.
@torch.library.custom_op("rope_ext::placed", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    tables: list[torch.Tensor],
    plan: list[int],
    places: torch.Tensor,
    real: torch.Tensor,
    first: torch.Tensor,
    scale: float,
    softcap: float | None,
    kernel: str,
) -> torch.Tensor:
    call = flash.unpack_call(sinks, bias, tables, plan, 0, scale, softcap)
    out = _empty(query, value).zero_()
    before = int(first)
    for rows, slots in _alike(places, real, len(query)):
        queries = slots[slots >= before] - before
        if not len(queries):
            continue
        row, at = rows[0], places[rows[0] if len(places) > 1 else 0][slots]
        own, there = _range(queries), _range(slots)
        bands = [
            RotatedBand(band.geometry, _of(band.query, row, own), _of(band.key, row, there))
            for band in call.bands
        ]
        found = query[rows][:, :, own], key[rows][:, :, there], value[rows][:, :, there]
        step = at.diff()
        if bool((step < 0).any()):
            raise UnsupportedModelError(BACK)
        if bool((step == 1).all()):
            of_run = replace(call, bands=bands, start=int(at[0]))
            part = attention.attend(*found, of_run, kernel)
        else:
            if bias is not None and at[-1] - at[0] >= bias.shape[1] >= places.shape[1]:
                raise UnsupportedModelError(BEYOND)
            of_queries = Places.in_order(at[len(at) - len(queries) :], at)
            part = plain.attend(*found, replace(call, bands=bands), of_queries)
        if len(queries) == query.shape[2]:
            out[rows] = part
        else:
            out[torch.tensor(rows)[:, None], :, queries] = part.transpose(1, 2)
    return out


@operator.register_fake
def _(query, key, value, *_rest):  # noqa: ANN001, ANN002, ANN202
    flash.refuse_onnx()
    return _empty(query, value)


def _empty(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An empty output with the memory layout that the model expects."""
    rows, heads, queries, _ = query.shape
    return query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)


def _alike(
    places: torch.Tensor, real: torch.Tensor, rows: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Rows that have the same tokens in the same slots, and those slots."""
    same = bool((real == real[:1]).all() and (places == places[:1])[:, real[0]].all())
    for row in range(1 if same else rows):
        slots = torch.nonzero(real[row if len(real) > 1 else 0]).flatten()
        yield list(range(rows)) if same else [row], slots


def _range(index: torch.Tensor) -> torch.Tensor | slice:
    """A slice if the index has no gaps, which avoids a copy."""
    first, last = int(index[0]), int(index[-1]) + 1
    return slice(first, last) if last - first == len(index) else index


def _of(rotation: Rotation, row: int, tokens: torch.Tensor | slice) -> Rotation:
    return each_table(rotation, lambda table: table[row if len(table) > 1 else 0][tokens])
