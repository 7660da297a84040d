"""Many queries at any positions: every run of consecutive tokens by a kernel.

Rows may be padded and may hold several documents, so what a kernel for consecutive tokens can have
is found by reading positions. A graph cannot read, so there all of it is one operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from rope_ext.attention import bands as plain
from rope_ext.attention import dispatch, flash
from rope_ext.attention.call import Call, RotatedBand, Rotation, each_table
from rope_ext.attention.reference import Places
from rope_ext.errors import UnsupportedModelError

_BACK = {  # what to do where positions decrease
    False: "give packed documents no attention mask and use_cache=False, so that transformers "
    "keeps them apart, or rows of their own if the model never does (gpt_oss)",
    True: "it is padded on the right, behind which generation goes on; pad on the left "
    "(padding_side='left' of the tokenizer)",
}


class Run(NamedTuple):
    """Tokens of one sequence, in all rows that have them in the same slots.

    Args:
        rows: None: all.
        queries: index of its queries among the new tokens.
        keys: index of its keys among the slots.
        places: positions of its keys, int64, ``[keys]``, on the CPU.
        steady: whether they count one by one.
    """

    rows: list[int] | None
    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    places: torch.Tensor
    steady: bool

    @property
    def queries_count(self) -> int:
        """Number of its queries."""
        return _count(self.queries)


def runs(places: torch.Tensor, sequences: torch.Tensor, rows: int, first: int) -> list[Run]:
    """The batch as runs.

    Args:
        places: position of the token in each slot, int64, ``[rows or 1, slots]``.
        sequences: the sequence in each slot, likewise; negative without a token.
        rows: batch size.
        first: slot of the first query.

    Raises:
        UnsupportedModelError: positions go back within a sequence.
    """
    places, sequences = places.cpu(), sequences.cpu()
    alike = len(places) == len(sequences) == 1
    found: dict[tuple, tuple[list[int], torch.Tensor, torch.Tensor]] = {}
    for row in range(1 if alike else rows):
        of_row, at = (x[row if len(x) > 1 else 0] for x in (sequences, places))
        numbers = of_row.unique()
        for number in numbers[numbers >= 0]:
            slots = torch.nonzero(of_row == number).flatten()
            if slots[-1] >= first:
                key = tuple(slots.tolist()), tuple(at[slots].tolist())
                found.setdefault(key, ([], slots, at[slots]))[0].append(row)
    made = []
    for of_run, slots, at in found.values():
        step = at.diff()
        back = step < 0
        if bool(back.any()):
            raise UnsupportedModelError(
                f"the position ids of row {of_run[0]} go back within one sequence, where a "
                f"position method would have to attend to the future; "
                f"{_BACK[bool((back & (slots.diff() > 1)).any())]}"
            )
        own = _range(slots[slots >= first] - first), _range(slots)
        made.append(Run(None if alike else of_run, *own, at, bool((step == 1).all())))
    return made


def _range(index: torch.Tensor) -> torch.Tensor | slice:
    """A slice if the index has no gaps, which avoids a copy."""
    start, end = int(index[0]), int(index[-1]) + 1
    return slice(start, end) if end - start == len(index) else index


def within(found: list[Run], reach: int | None) -> Iterator[Run]:
    """The runs, split so that the queries of each are at most ``reach`` tokens apart."""
    for run in found:
        count, keys = _count(run.queries), len(run.places)
        if reach is None or not count:
            yield run
            continue
        at, first = run.places[keys - count :].tolist(), 0
        for index in range(1, count + 1):
            if index == count or at[index] - at[first] > reach:
                last = keys - count + index
                yield run._replace(
                    queries=_part(run.queries, slice(first, index)),
                    keys=_part(run.keys, slice(0, last)),
                    places=run.places[:last],
                )
                first = index


def _part(index: slice | torch.Tensor, part: slice) -> slice | torch.Tensor:
    if isinstance(index, slice):
        return slice(index.start + part.start, index.start + part.stop)
    return index[part]


def _count(index: slice | torch.Tensor) -> int:
    return index.stop - index.start if isinstance(index, slice) else len(index)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    found: list[tuple[Run, Call]],
    kernel: str,
) -> torch.Tensor:
    """Attention of every run, with its call; zero for queries in none of them."""
    out = None
    for run, call in found:
        whole = len(found) == 1 and run.rows is None and _count(run.queries) == query.shape[2]
        rows = slice(None) if run.rows is None else run.rows
        q, k, v = (
            x if _count(at) == x.shape[2] and run.rows is None else x[rows][:, :, at]
            for x, at in ((query, run.queries), (key, run.keys), (value, run.keys))
        )
        if run.steady:
            part = dispatch.attend(q, k, v, replace(call, start=int(run.places[0])), kernel)
        else:
            at = run.places.to(query.device)
            part = plain.attend(q, k, v, call, Places.in_order(at[len(at) - q.shape[2] :], at))
        if whole:
            return part
        if out is None:
            out = part.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])
        if run.rows is None:
            out[:, run.queries] = part.transpose(1, 2)
        else:
            at = torch.arange(query.shape[2], device=query.device)[run.queries]
            out[torch.tensor(run.rows, device=query.device)[:, None], at] = part.transpose(1, 2)
    if out is None:  # nothing but padding
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    return out.transpose(1, 2)


def in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    places: torch.Tensor,
    sequences: torch.Tensor,
    first: torch.Tensor,
    kernel: str,
) -> torch.Tensor:
    """The same in a graph, without gradients.

    Args:
        query: ``[rows, heads, queries, columns]``.
        key: ``[rows, kv_heads, slots, columns]``.
        value: likewise.
        call: with rotations of ``[rows or 1, tokens, pairs]``.
        places: see :func:`runs`.
        sequences: see :func:`runs`.
        first: slot of the first query, int64, no dimensions.
        kernel: of :data:`rope_ext.attention.dispatch.KERNELS`.
    """
    plan, tables = flash.pack_call(call)
    return operator(
        query, key, value, call.sinks, call.bias, tables, plan, places, sequences, first,
        call.scale, call.softcap, kernel,
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
    sequences: torch.Tensor,
    first: torch.Tensor,
    scale: float,
    softcap: float | None,
    kernel: str,
) -> torch.Tensor:
    call, found = flash.unpack_call(sinks, bias, tables, plan, 0, scale, softcap), []
    for run in runs(places, sequences, len(query), int(first)):
        row = 0 if run.rows is None else run.rows[0]

        def of(rotation: Rotation, at: torch.Tensor | slice, row: int = row) -> Rotation:
            return each_table(rotation, lambda table: table[row if len(table) > 1 else 0][at])

        bands = [
            RotatedBand(band.geometry, of(band.query, run.queries), of(band.key, run.keys))
            for band in call.bands
        ]
        found.append((run, replace(call, bands=bands)))
    out = attend(query, key, value, found, kernel)
    return _empty(query, value).copy_(out)


@operator.register_fake
def _(query, key, value, *_rest):  # noqa: ANN001, ANN002, ANN202
    flash.refuse_onnx()
    return _empty(query, value)


def _empty(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An empty output with the memory layout that the model expects."""
    rows, heads, queries, _ = query.shape
    return query.new_empty(rows, queries, heads, value.shape[-1]).transpose(1, 2)
