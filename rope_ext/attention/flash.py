"""The bands with the flash attention kernel of the CPU: linear memory, one call per tile.

A band is cut into tiles, rectangles of queries and keys which one kernel call computes. The
kernel returns the log-sum-exp of its rows, by which the tiles of a row are merged; the backward
pass gives every tile the GLOBAL output and log-sum-exp of its rows, as ring attention does (Liu
et al. 2023). Only query, key, value, output and log-sum-exp are saved; rotations are done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

from rope_ext.attention.call import Call, Pairs, Turn, TurnedBand
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry, Sinks

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_GEOMETRIES = (Distance, ChunkGap, Sinks)
# Names apart from fields(), which the dynamo of torch 2.11 cannot trace.
_NAMES = {kind: [part.name for part in fields(kind)] for kind in _GEOMETRIES}
_OPEN = 2**62
"""Stands for ``last=None`` where geometries travel as integers: no distance is as large."""
_STRIP = 128
"""Rows of a tile along a near band: fewer repeat too many keys, more waste at the corners."""
_BLOCK = 1024
"""Tokens that are turned at a time."""


@dataclass(frozen=True)
class Tile:
    """Rectangles of queries and keys: ``blocks`` equal ones, each ``step`` tokens after the last.

    Args:
        row, rows: first query (counted from the first one given) and number of queries.
        key, keys: first key and number of keys.
        kind: which keys row ``m`` sees: ``"full"``: all; ``"causal"``: ``0 .. m``;
            ``"band"``: ``m .. m + keys - rows``.
    """

    row: int
    rows: int
    key: int
    keys: int
    kind: str = "full"
    blocks: int = 1
    step: int = 1


def tiles(geometry: Geometry, queries: int, keys: int, start: int = 0) -> list[Tile]:
    """The tiles of a band; the queries are the last of the keys, key 0 is token ``start``."""
    if isinstance(geometry, ChunkGap):
        found = _chunks(geometry, queries, keys, start)
    elif isinstance(geometry, Sinks):
        found = _triangle(queries, keys, geometry.first, min(geometry.count - start, keys))
    elif geometry.last is None:
        found = _triangle(queries, keys, geometry.first, keys)
    else:
        found = _near(queries, keys, max(geometry.first, 0), geometry.last)
    # An empty region of keys kills the process: the kernel divides by zero.
    return _batched(tile for tile in found if tile.rows > 0 and tile.keys > 0)


def _corner(row: int, rows: int, key: int, before: int) -> Iterator[Tile]:
    """Row ``m`` sees keys ``key .. key + before + m``."""
    if rows == 1:
        yield Tile(row, 1, key, before + 1)
    else:
        yield Tile(row, rows, key, before)
        yield Tile(row, rows, key + before, rows, "causal")


def _triangle(queries: int, keys: int, first: int, count: int) -> Iterator[Tile]:
    """Of the first ``count`` keys those at least ``first`` tokens away."""
    seen = keys - queries + 1 - max(first, 0)  # by the first query, if it is positive
    row = max(1 - seen, 0)  # the first query that sees a key
    growing = min(queries, max(count - seen + 1, row))  # from here on all `count` are seen
    yield from _corner(row, growing - row, 0, seen + row - 1)
    yield Tile(growing, queries - growing, 0, count)


def _near(queries: int, keys: int, first: int, last: int) -> Iterator[Tile]:
    """Keys at a distance of ``first .. last - 1``."""
    window = last - first
    if window <= 0:
        return
    row = max(first - (keys - queries), 0)  # the first query that sees a key
    seen = keys - queries - first + row  # the last key it sees
    whole = min(max(row + window - seen, row), queries)  # from here on all `window` are seen
    yield from _corner(row, whole - row, 0, seen)
    blocks, rest = divmod(queries - whole, _STRIP)
    key = seen + whole - row - window + 1
    yield Tile(whole, _STRIP, key, window + _STRIP - 1, "band", blocks, _STRIP)
    shift = blocks * _STRIP
    kind = "full" if rest == 1 else "band"
    yield Tile(whole + shift, rest, key + shift, window + rest - 1, kind)


def _chunks(geometry: ChunkGap, queries: int, keys: int, start: int) -> Iterator[Tile]:
    size = geometry.size
    end = start + keys
    for chunk in range((end - queries) // size, (end - 1) // size + 1):
        row = max(chunk * size, end - queries)
        rows = min((chunk + 1) * size, end) - row
        low = start if geometry.last is None else max((chunk - geometry.last) * size, start)
        if geometry.first <= 0:
            yield from _corner(row - end + queries, rows, low - start, row - low)
        else:
            high = (chunk - geometry.first + 1) * size
            yield Tile(row - end + queries, rows, low - start, high - low)


def _batched(found: Iterable[Tile]) -> list[Tile]:
    """Equal tiles at equal steps joined to one."""
    runs: dict[tuple, list[Tile]] = {}
    for tile in found:
        if tile.blocks == 0:
            continue
        run = runs.setdefault((tile.rows, tile.keys, tile.kind, tile.key - tile.row), [])
        if run and run[-1].blocks == 1 == tile.blocks:
            run[-1] = replace(run[-1], blocks=2, step=tile.row - run[-1].row)
        elif run and tile.blocks == 1 and tile.row == run[-1].row + run[-1].blocks * run[-1].step:
            run[-1] = replace(run[-1], blocks=run[-1].blocks + 1)
        else:
            run.append(tile)
    return [tile for run in runs.values() for tile in run]


def _pack(call: Call) -> tuple[list[int], list]:
    """Bands and pairs as integers and tensors, the only things that an operator takes."""
    plan = [len(call.bands)]
    tables: list[torch.Tensor] = []
    for band in call.bands:
        kind = type(band.geometry)
        values = [getattr(band.geometry, name) for name in _NAMES[kind]]
        plan += [_GEOMETRIES.index(kind), *(_OPEN if value is None else value for value in values)]
        for turn in (band.query, band.key):
            plan.append(int(turn is not None))
            tables += turn or ()
    for side in (call.pairs.first, call.pairs.second):
        plan.append(int(isinstance(side, slice)))
        if isinstance(side, slice):
            plan += (side.start, side.stop, side.step or 1)
        else:
            tables.append(side)
    return plan, tables


def _unpack(
    sinks: torch.Tensor | None,
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
) -> Call:
    numbers, tensors = iter(plan), iter(tables)
    bands = []
    for _ in range(next(numbers)):
        kind = _GEOMETRIES[next(numbers)]
        values = [next(numbers) for _ in _NAMES[kind]]
        geometry = kind(*(None if value == _OPEN else value for value in values))
        query, key = (
            (next(tensors), next(tensors)) if next(numbers) else None for _ in ("query", "key")
        )
        bands.append(TurnedBand(geometry, query, key))
    first, second = (
        slice(next(numbers), next(numbers), next(numbers)) if next(numbers) else next(tensors)
        for _ in ("first", "second")
    )
    return Call(bands, Pairs(first, second), scale, start, sinks=sinks)


@dataclass(frozen=True)
class _Region:
    """A band's tiles, counted from the first of the rows and of the keys that it touches."""

    band: TurnedBand
    rows: slice
    keys: slice
    tiles: list[Tile]


def _regions(call: Call, queries: int, keys: int) -> Iterator[_Region]:
    for band in call.bands:
        found = tiles(band.geometry, queries, keys, call.start)
        if not found:
            continue
        row, key = min(tile.row for tile in found), min(tile.key for tile in found)
        shift = [(tile.blocks - 1) * tile.step for tile in found]
        rows = max(tile.row + by + tile.rows for tile, by in zip(found, shift, strict=True))
        keys_end = max(tile.key + by + tile.keys for tile, by in zip(found, shift, strict=True))
        found = [replace(tile, row=tile.row - row, key=tile.key - key) for tile in found]
        yield _Region(band, slice(row, rows), slice(key, keys_end), found)


def _turned(x: torch.Tensor, turn: Turn, part: slice, pairs: Pairs) -> torch.Tensor:
    """A part of the tokens of ``x``, turned."""
    x = x[..., part, :]
    if turn is None:
        return x
    blocks = list(_blocks(x, turn, part))
    if len(blocks) == 1:
        return pairs.rotate(x, blocks[0][1])
    out = torch.empty_like(x)
    for block, table in blocks:
        out[..., block, :] = pairs.rotate(x[..., block, :], table)
    return out


def _add_turned_back(
    total: torch.Tensor, x: torch.Tensor, turn: Turn, part: slice, pairs: Pairs
) -> None:
    """Add ``x``, which belongs to turned tokens, to a part of what belongs to unturned ones."""
    total = total[..., part, :]
    for block, (cos, sin) in _blocks(x, turn, part):
        total[..., block, :].add_(pairs.rotate(x[..., block, :], (cos, -sin)))


def _blocks(x: torch.Tensor, turn: Turn, part: slice) -> Iterator[tuple[slice, Turn]]:
    """Blocks of tokens, so small that what lies between two steps stays in the cache."""
    for first in range(0, x.shape[-2], _BLOCK):
        block = slice(first, min(first + _BLOCK, x.shape[-2]))
        rows = slice(part.start + block.start, part.start + block.stop)
        yield block, tuple(t if t.shape[0] == 1 else t[rows] for t in turn)


def _mask(tile: Tile, like: torch.Tensor) -> torch.Tensor | None:
    """What the kernel adds to the logits of a tile, ``[rows, keys]``."""
    if tile.kind != "band":
        return None
    ahead = torch.arange(tile.keys, device="cpu") - torch.arange(tile.rows, device="cpu")[:, None]
    hidden = (ahead < 0) | (ahead > tile.keys - tile.rows)
    return like.new_zeros(tile.rows, tile.keys).masked_fill_(hidden, -torch.inf)


def _calls(
    tile: Tile, rows: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """The four-dimensional views of every kernel call.

    ``rows`` and ``keys`` are ``[batch, kv_heads, groups or 1, tokens, columns]``.
    """

    def views(x: torch.Tensor, first: int, count: int) -> torch.Tensor:
        x = x.narrow(3, first, (tile.blocks - 1) * tile.step + count)
        return x.unfold(3, count, tile.step).mT

    found = [views(x, tile.row, tile.rows) for x in rows]
    found += [views(x, tile.key, tile.keys) for x in keys]
    # The kernel has two dimensions for batch, kv_heads, groups and blocks: loop over the others.
    sizes = found[0].shape
    order = sorted(range(4), key=lambda dim: (sizes[dim] > 1, dim))
    found = [x.permute(*order, 4, 5) for x in found]
    for i in range(sizes[order[0]]):
        for j in range(sizes[order[1]]):
            yield [x[i, j] for x in found]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, ``[batch, heads, queries, columns]`` and without columns."""
    if query.shape[2] == 1:
        return _decode(query, key, value, call)
    batch, heads, queries, columns = query.shape
    wide = _wide(query.dtype)
    total = query.new_zeros(batch, queries, heads, columns, dtype=wide).transpose(1, 2)
    lse = query.new_full((batch, heads, queries), -torch.inf, dtype=wide)
    if call.sinks is not None:  # a key without a value, which is there before all others
        lse.copy_(call.sinks[:, None])
    q, o, m = _grouped(key, query, total, lse[..., None])
    for region in _regions(call, queries, key.shape[2]):
        rows = [_turned(q, region.band.query, region.rows, call.pairs)]
        rows += [x[..., region.rows, :] for x in (o, m)]
        keys = [_turned(key, region.band.key, region.keys, call.pairs)]
        keys.append(value[..., region.keys, :])
        keys = [x[:, :, None].expand(-1, -1, q.shape[2], -1, -1) for x in keys]
        for tile in region.tiles:
            mask = _mask(tile, query)
            for tile_q, tile_o, tile_m, tile_k, tile_v in _calls(tile, rows, keys):
                out, new = _kernel(
                    tile_q,
                    tile_k,
                    tile_v,
                    is_causal=tile.kind == "causal",
                    attn_mask=mask,
                    scale=call.scale,
                )
                new = new[..., None]
                tile_o.lerp_(out.to(wide), torch.sigmoid(new - tile_m))
                tile_m.copy_(torch.logaddexp(new, tile_m))
    return total.to(query.dtype), lse


def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`_attend` for a single query, to which every tile is full.

    The heads of a key are rows of one call, so no key is read twice.
    """
    batch, heads, _, columns = query.shape
    kv_heads, keys = key.shape[1:3]
    wide = _wide(query.dtype)
    query = query.reshape(batch, kv_heads, heads // kv_heads, columns)
    total = torch.zeros_like(query, dtype=wide)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
    if call.sinks is not None:
        lse.copy_(call.sinks.view(kv_heads, -1))
    for band in call.bands:
        for tile in tiles(band.geometry, 1, keys, call.start):
            part = slice(tile.key, tile.key + tile.keys)
            out, new = _kernel(
                call.pairs.rotate(query, band.query),
                _turned(key, band.key, part, call.pairs),
                value[..., part, :],
                scale=call.scale,
            )
            total = total.lerp(out.to(wide), torch.sigmoid(new - lse)[..., None])
            lse = torch.logaddexp(lse, new)
    total = total.to(query.dtype).reshape(batch, 1, heads, columns).transpose(1, 2)
    return total, lse.reshape(batch, heads, 1)


def _grouped(key: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows as ``[batch, kv_heads, groups, queries, columns]``."""
    return [x.unflatten(1, (key.shape[1], -1)) for x in rows]


@torch.library.custom_op("rope_ext::bands", mutates_args=())
def _bands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend(query, key, value, _unpack(sinks, tables, plan, start, scale))


@_bands.register_fake
def _(query, key, value, sinks, tables, plan, start, scale):  # noqa: ANN001, ANN202
    batch, heads, queries, columns = query.shape
    out = query.new_empty(batch, queries, heads, columns).transpose(1, 2)
    return out, query.new_empty(batch, heads, queries, dtype=_wide(query.dtype))


@torch.library.custom_op("rope_ext::bands_backward", mutates_args=())
def _bands_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _unpack(None, tables, plan, start, scale)
    pairs, keys = call.pairs, key.shape[2]
    wide = _wide(query.dtype)
    grads = [torch.zeros_like(x, dtype=wide) for x in (query, key, value)]
    q, o, m, g, grad_q = _grouped(key, query, out, lse[..., None], grad, grads[0])
    grad_k, grad_v = grads[1:]
    for region in _regions(call, query.shape[2], keys):
        band = region.band
        turned_q = _turned(q, band.query, region.rows, pairs)
        turned_k = _turned(key, band.key, region.keys, pairs)
        band_gq = _turned(grad_q, None, region.rows, pairs)
        band_gk = _turned(grad_k, None, region.keys, pairs)
        if band.query is not None:
            band_gq = torch.zeros_like(band_gq)
        if band.key is not None:
            band_gk = torch.zeros_like(band_gk)
        rows = (turned_q, *(x[..., region.rows, :] for x in (o, m, g)), band_gq)
        columns = [x[:, :, None] for x in (turned_k, value[..., region.keys, :])]
        columns = [x.expand(-1, -1, q.shape[2], -1, -1) for x in columns]
        columns += [x[:, :, None] for x in (band_gk, grad_v[..., region.keys, :])]
        for tile in region.tiles:
            mask = _mask(tile, query)
            for part in _split(tile, keys):
                for views in _calls(part, rows, columns):
                    _tile_backward(part, mask, scale, *views)
        if band.query is not None:
            _add_turned_back(grad_q, band_gq, band.query, region.rows, pairs)
        if band.key is not None:
            _add_turned_back(grad_k, band_gk, band.key, region.keys, pairs)
    return tuple(x.to(query.dtype) for x in grads)


def _split(tile: Tile, keys: int) -> Iterator[Tile]:
    """Fewer blocks at a time: the copies of overlapping keys stay below the keys themselves."""
    most = max(keys // tile.keys, 1)
    for block in range(0, tile.blocks, most):
        shift = block * tile.step
        blocks = min(most, tile.blocks - block)
        yield replace(tile, row=tile.row + shift, key=tile.key + shift, blocks=blocks)


def _tile_backward(
    tile: Tile,
    mask: torch.Tensor | None,
    scale: float,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
) -> None:
    """Add a kernel call's gradients to their sums, both as the views of :func:`_calls`."""
    new_query, *new_keys = _kernel_backward(
        grad,
        query,
        key,
        value,
        out,
        lse[..., 0],
        0.0,
        tile.kind == "causal",
        attn_mask=mask,
        scale=scale,
    )
    grad_query += new_query
    # The keys of neighbouring blocks overlap: add strips of them that do not.
    strip = tile.step if tile.blocks > 1 else tile.keys
    for total, new in zip((grad_key, grad_value), new_keys, strict=True):
        new = new.sum_to_size(total.shape)
        for first in range(0, tile.keys, strip):
            part = slice(first, first + strip)
            total[..., part, :].add_(new[..., part, :])


@_bands_backward.register_fake
def _(grad, query, key, value, *_rest):  # noqa: ANN001, ANN002, ANN202
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    query, key, value, sinks, tables, ctx.plan, ctx.start, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, *tables)
    ctx.mark_non_differentiable(output[1])


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, _grad_lse: torch.Tensor
) -> tuple:
    query, key, value, sinks, out, lse, *tables = ctx.saved_tensors
    grads = _bands_backward(
        grad, query, key, value, out, lse, tables, ctx.plan, ctx.start, ctx.scale
    )
    grad_sinks = None
    if sinks is not None:
        wide = lse.dtype
        weight = torch.exp(sinks.to(wide)[:, None] - lse)
        grad_sinks = -(weight * (grad.to(wide) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
    return *grads, grad_sinks, [None] * len(tables), None, None, None


_bands.register_autograd(_differentiate, setup_context=_setup)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Attention as :class:`Call` has it; soft caps are left to the other kernels."""
    columns, value_columns = query.shape[-1], value.shape[-1]
    query = call.warmed(query)
    # The kernel wants heads of one size.
    if value_columns < columns:
        value = F.pad(value, (0, columns - value_columns))
    elif value_columns > columns:
        query, key = (F.pad(x, (0, value_columns - columns)) for x in (query, key))
    inputs = (query, key, value, call.sinks)
    grads = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if grads or torch.compiler.is_compiling():
        plan, tables = _pack(call)
        out, _ = _bands(*inputs, tables, plan, call.start, call.scale)
    else:  # without what the operator costs in each step of decoding
        out, _ = _attend(query, key, value, call)
    return out[..., :value_columns]
