"""Attention on keys at positions that are known as tensors only: what a compiled graph holds.

The kernels for consecutive tokens decide in Python which keys each tile has. A graph cannot, since
in it the number of filled slots and the padding are tensors. Few queries (decoding) become plain
operations on all slots, with nothing that waits for a device. Many go into one operator, which
looks at the positions when it runs and hands every run of consecutive tokens to a kernel.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rope_ext import attention
from rope_ext.attention import flash, reference
from rope_ext.attention.call import Call, Turn, TurnedBand
from rope_ext.attention.reference import Places
from rope_ext.errors import UnsupportedModelError

BACK = (
    "the position ids go back within one row, where a compiled position method would have to "
    "attend to the future; give it one sequence in each row, padded on the left"
)
APART = (
    "there is padding between the tokens of a row, where a position method in tensors would look "
    "for near keys in the wrong places; pad on the left (padding_side='left' of the tokenizer)"
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
"""Queries at most whose logits on all slots are held at once."""


@dataclass(frozen=True, eq=False)
class Part:
    """A band on the slots where its keys can lie.

    Args:
        hidden: the lowest number for keys that a query does not have in it, else zero, ``[rows or
            1, queries, slots]``; to add a number is less work in each layer than to ask a mask.
        query: turn of the queries, ``[rows or 1, 1, queries, pairs]``.
        key: turn of the keys, likewise with slots.
        slots: int64, ``[rows or 1, slots]``; None: all.
    """

    hidden: torch.Tensor
    query: Turn
    key: Turn
    slots: torch.Tensor | None


class Few(NamedTuple):
    """What few queries see: the same for all layers alike.

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
        value: likewise.
        call: without bands and scores; the queries are multiplied by temperature.
        few: what the queries see.
        distance: to every key if there is a bias, tokens, int64, ``[rows or 1, queries, slots]``.
    """
    rows, queries = query.shape[0], query.shape[2]
    kv_heads, keys = key.shape[1:3]
    query = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # no key is read twice
    each = query.shape[2] // queries

    def shown(logits: torch.Tensor, part: Part) -> torch.Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        hidden = part.hidden[:, None]
        return logits + (hidden.repeat(1, 1, each, 1) if queries > 1 else hidden)

    def turned(by: Turn) -> torch.Tensor:
        if by is not None and queries > 1:
            by = tuple(x.repeat(1, 1, each, 1) for x in by)
        return call.pairs.rotate(query, by)

    # Of a key the largest of what the bands say is that of the band which shows it.
    parts = few.parts
    plain = [part.slots is None and part.key is None for part in parts]
    if any(plain):  # keys as they are cached, read once for all these bands
        at_once = list(itertools.compress(parts, plain))
        found = _product(torch.cat([turned(part.query) for part in at_once], dim=2), key.mT)
        found = map(shown, found.chunk(len(at_once), dim=2), at_once)
        logits = functools.reduce(torch.maximum, found)
    else:
        wide = torch.promote_types(query.dtype, torch.float32)
        logits = query.new_full((*query.shape[:3], keys), torch.finfo(wide).min, dtype=wide)
    for part in itertools.compress(parts, map(operator.not_, plain)):
        at = turned(part.query)
        if part.slots is None:
            found = shown(_product(at, call.pairs.rotate(key, part.key).mT), part)
            logits = torch.maximum(found, logits)
        elif len(part.slots) == 1:  # to look up each column of each key takes ten times as long
            (slots,) = part.slots
            near = call.pairs.rotate(key.index_select(2, slots), part.key)
            found = shown(_product(at, near.mT), part)
            found = torch.maximum(found, logits.index_select(3, slots))
            logits = logits.index_copy(3, slots, found)
        else:
            slots = part.slots[:, None, :, None].expand(rows, kv_heads, -1, key.shape[-1])
            near = call.pairs.rotate(key.gather(2, slots), part.key)
            slots = part.slots[:, None, None].expand(*query.shape[:3], -1)
            found = torch.maximum(shown(_product(at, near.mT), part), logits.gather(3, slots))
            logits = logits.scatter(3, slots, found)
    if call.bias is not None:
        bias = call.bias[:, distance.clamp(max=call.bias.shape[1] - 1)].movedim(0, 1)
        logits = logits + bias.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    if call.sinks is not None:
        column = call.sinks.to(logits.dtype).view(kv_heads, each, 1).expand(-1, -1, queries)
        column = column.flatten(1, 2)[:, :, None].expand(rows, -1, -1, -1)
        logits = torch.cat((logits, column), dim=-1)
    sees = few.sees.repeat(1, each)[:, None, :, None]
    weights = (logits.softmax(dim=-1)[..., :keys] * sees).to(value.dtype)
    return _product(weights, value).unflatten(2, (-1, queries)).flatten(1, 2)


def attend_scored(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    query_at: torch.Tensor,
    key_at: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Attention of few queries on all slots with logits that an encoding makes.

    Args:
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, kv_heads, slots, columns]``.
        value: likewise.
        call: with turns of ``[rows or 1, tokens, pairs]``; the queries are multiplied by
            temperature.
        query_at: where the queries are, tokens, int64, ``[rows or 1, queries]``.
        key_at: where the token in each slot is, likewise.
        visible: bool, ``[rows or 1, queries, slots]``.
    """
    alike = len(query_at) == len(visible) == 1
    found, every = [], slice(None)
    for row in range(1 if alike else len(query)):
        of_rows = every if alike else slice(row, row + 1)
        bands = [
            TurnedBand(band.geometry, _of(band.query, row, every), _of(band.key, row, every))
            for band in call.bands
        ]
        at, key_there, seen = (x[row if len(x) > 1 else 0] for x in (query_at, key_at, visible))
        places = Places(at, key_there, seen)
        of_row = query[of_rows], key[of_rows], value[of_rows]
        found.append(reference.attend(*of_row, replace(call, bands=bands), places))
    return torch.cat(found)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` as one operation in a graph too.

    Of a single row inductor would make a sum of products, and make ``a`` again for each of them.
    What is added is not read, but a number in its place would be written to all of it.
    """
    nothing = a.new_empty(*a.shape[:-1], b.shape[-1])
    parts = (x.flatten(0, 1) for x in (nothing, a, b))
    return torch.baddbmm(*parts, beta=0).view(nothing.shape)


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
        call: with turns of ``[rows or 1, tokens, pairs]``.
        places: position of the token in each slot, int64, ``[rows or 1, slots]``.
        real: which slots have a token, bool, likewise.
        first: slot of the first query, int64, no dimensions.
        kernel: of :data:`rope_ext.attention.KERNELS`.

    Raises:
        UnsupportedModelError: when it runs, if positions go back within a row.
    """
    plan, tables = flash._pack(call)
    return _placed(
        query, key, value, call.sinks, call.bias, tables, plan, places, real, first, call.scale,
        call.softcap, kernel,
    )  # fmt: skip


@torch.library.custom_op("rope_ext::placed", mutates_args=())
def _placed(
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
    call = replace(flash._unpack(sinks, bias, tables, plan, 0, scale), softcap=softcap)
    out = _empty(query, value).zero_()
    before = int(first)
    for rows, slots in _alike(places, real, len(query)):
        queries = slots[slots >= before] - before
        if not len(queries):
            continue
        row, at = rows[0], places[rows[0] if len(places) > 1 else 0][slots]
        own, there = _range(queries), _range(slots)
        bands = [
            TurnedBand(band.geometry, _of(band.query, row, own), _of(band.key, row, there))
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
            of_queries = Places(at[len(at) - len(queries) :], at)
            part = reference.attend_blocked(*found, replace(call, bands=bands), of_queries)
        if len(queries) == query.shape[2]:
            out[rows] = part
        else:
            out[torch.tensor(rows)[:, None], :, queries] = part.transpose(1, 2)
    return out


@_placed.register_fake
def _(query, key, value, *_rest):  # noqa: ANN001, ANN002, ANN202
    return _empty(query, value)


def _empty(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As the output lies in memory."""
    rows, heads, queries, _ = query.shape
    return query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)


def _alike(
    places: torch.Tensor, real: torch.Tensor, rows: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Rows with the same tokens in the same slots, and those slots."""
    same = bool((real == real[:1]).all() and (places == places[:1])[:, real[0]].all())
    for row in range(1 if same else rows):
        slots = torch.nonzero(real[row if len(real) > 1 else 0]).flatten()
        yield list(range(rows)) if same else [row], slots


def _range(index: torch.Tensor) -> torch.Tensor | slice:
    """A slice where an index has no gaps, which copies nothing."""
    first, last = int(index[0]), int(index[-1]) + 1
    return slice(first, last) if last - first == len(index) else index


def _of(turn: Turn, row: int, tokens: torch.Tensor | slice) -> Turn:
    return turn and tuple(table[row if len(table) > 1 else 0][tokens] for table in turn)
