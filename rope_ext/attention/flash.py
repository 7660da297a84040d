"""The bands with the flash attention kernel of the CPU: linear memory, one call per tile.

A band is split into tiles: rectangles of queries and keys, each computed by one kernel call. The
kernel also returns the log-sum-exp of its rows, with which the tiles of a row are merged. The
backward pass gives every tile the GLOBAL output and log-sum-exp of its rows, as ring attention does
(Liu et al. 2023). Only query, key, value, output and log-sum-exp are saved; rotations are computed
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from rope_ext.attention import sizes
from rope_ext.attention.call import Call, Pairs, RotatedBand, Rotation, rows_of
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry, Sinks

Before = tuple[torch.Tensor, torch.Tensor] | None
"""Output and log-sum-exp of keys that rows have attended to already; the latter is finite."""

kernel = torch._scaled_dot_product_flash_attention_for_cpu  # less overhead than torch.ops
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_GEOMETRIES = (Distance, ChunkGap, Sinks)
# Field names are listed here because the dynamo of torch 2.11 cannot trace fields().
_NAMES = {kind: [part.name for part in fields(kind)] for kind in _GEOMETRIES}
ALL = slice(0, None)
_OPEN = 2**62
"""Stands for ``last=None`` where geometries are passed as integers: larger than any distance."""


_LOST = 40.0
"""A key whose logit is this far below another's has no weight in float32: 4e-18 of the other's."""


@dataclass(frozen=True)
class Tile:
    """Rectangles of queries and keys: ``blocks`` equal ones, each ``step`` tokens after the last.

    Args:
        row, rows: first query (counted from the first one given) and number of queries.
        key, keys: first key and number of keys.
        kind: which keys row ``m`` sees: ``"full"``: all; ``"causal"``: ``0 .. m``;
            ``"band"``: ``m + hidden .. m + keys - rows``; ``"strip"``: those that the bias of
            their distance does not hide.
        hidden: number of first keys of a band that no row sees.
    """

    row: int
    rows: int
    key: int
    keys: int
    kind: str = "full"
    blocks: int = 1
    step: int = 1
    hidden: int = 0


def tiles(
    geometry: Geometry,
    queries: int,
    keys: int,
    start: int = 0,
    height: sizes.TileRows = sizes.TILES["forward", False],
) -> list[Tile]:
    """The tiles of a band; the queries are the last of the keys, key 0 is token ``start``."""
    if isinstance(geometry, ChunkGap):
        found = chunk_tiles(geometry, queries, keys, start)
    elif isinstance(geometry, Sinks):
        found = triangle_tiles(queries, keys, geometry.first, min(geometry.count - start, keys))
    elif geometry.last is None:
        found = triangle_tiles(queries, keys, geometry.first, keys)
    else:
        first = max(geometry.first, 0)
        found = _near(queries, keys, first, geometry.last, height.rows_for(first, geometry.last))
    # An empty region of keys kills the process: the kernel divides by zero.
    return batched(tile for tile in found if tile.rows > 0 and tile.keys > 0)


def _corner(row: int, rows: int, key: int, before: int) -> Iterator[Tile]:
    """Row ``m`` sees keys ``key .. key + before + m``."""
    if rows == 1:
        yield Tile(row, 1, key, before + 1)
    else:
        yield Tile(row, rows, key, before)
        yield Tile(row, rows, key + before, rows, "causal")


def triangle_tiles(
    queries: int, keys: int, first: int, count: int, corner: Callable[..., Iterator[Tile]] = _corner
) -> Iterator[Tile]:
    """Of the first ``count`` keys, those at least ``first`` tokens away."""
    seen = keys - queries + 1 - max(first, 0)  # by the first query, if it is positive
    row = max(1 - seen, 0)  # the first query that sees a key
    growing = min(queries, max(count - seen + 1, row))  # from here on all `count` are seen
    yield from corner(row, growing - row, 0, seen + row - 1)
    yield Tile(growing, queries - growing, 0, count)


def _to_even(window: int, rows: int) -> int:
    """Keys that no row sees, 0 or 1: matrix products are faster for an even number of keys."""
    return (window + rows - 1) % 2


def _near(queries: int, keys: int, first: int, last: int, strip: int) -> Iterator[Tile]:
    """Keys at a distance of ``first .. last - 1``, in tiles of ``strip`` rows."""
    window = last - first
    if window <= 0:
        return
    row = max(first - (keys - queries), 0)  # the first query that sees a key
    seen = keys - queries - first + row  # the last key it sees
    whole = min(max(row + window - seen, row), queries)  # from here on all `window` are seen
    yield from _corner(row, whole - row, 0, seen)
    blocks, rest = divmod(queries - whole, strip)
    key = seen + whole - row - window + 1
    shift = blocks * strip
    for at, rows, count in ((0, strip, blocks), (shift, rest, 1)):
        if rows == 1:
            yield Tile(whole + at, 1, key + at, window)
            continue
        more = _to_even(window, rows)
        size = window + rows - 1 + more
        yield Tile(whole + at, rows, key + at - more, size, "band", count, strip, more)


def _strips(
    geometry: Distance, queries: int, keys: int, tall: bool, height: sizes.TileRows
) -> list[Tile]:
    """Tiles for a bias by distance, in each of which every row sees a key.

    Keys that all rows of a block see get separate tiles, which are tall (fewer calls with larger
    steps) or not (intermediate results stay in the processor's cache).
    """
    first, last = max(geometry.first, 0), geometry.last
    if last is not None and last <= first:
        return []
    before, found = keys - queries, []
    strip = height._replace(wide=sizes.BIASED).rows_for(first, last)
    most = sizes.TALL if tall else sizes.BIASED
    for block in range(max(first - before, 0), queries, most):
        end = min(block + most, queries)
        whole = before + block - first  # of the keys: the first row sees one more
        if (tall and end - block < sizes.STEPS) or (last is not None and before + end > last):
            whole = 0
        wide = max(whole, 1) if tall else sizes.TALL
        for key in range(0, whole, wide):
            found.append(Tile(block, end - block, key, min(wide, whole - key), "strip"))
        for row in range(block, end, strip):
            stop = min(row + strip, end)
            low = whole
            if last is not None:
                low = max(before + row - last + 1 - _to_even(last - first, strip), whole)
            found.append(Tile(row, stop - row, low, before + stop - first - low, "strip"))
    return batched(found) if tall or strip < sizes.BIASED else found


def chunk_tiles(
    geometry: ChunkGap,
    queries: int,
    keys: int,
    start: int,
    corner: Callable[..., Iterator[Tile]] = _corner,
) -> Iterator[Tile]:
    size = geometry.size
    end = start + keys
    for chunk in range((end - queries) // size, (end - 1) // size + 1):
        row = max(chunk * size, end - queries)
        rows = min((chunk + 1) * size, end) - row
        low = start if geometry.last is None else max((chunk - geometry.last) * size, start)
        if geometry.first <= 0:
            yield from corner(row - end + queries, rows, low - start, row - low)
        else:
            high = (chunk - geometry.first + 1) * size
            yield Tile(row - end + queries, rows, low - start, high - low)


def batched(found: Iterable[Tile]) -> list[Tile]:
    """Equal tiles at equal steps, merged into one."""
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
    return Call(bands, Pairs(first, second), scale, start, sinks=sinks, bias=bias)


@dataclass(frozen=True, eq=False)
class _Hankel:
    """A bias by distance: for a tile with its rows in reverse order, a view of one vector.

    Args:
        values: by falling distance, from that of the first key on, -inf where it is hidden;
            ``[heads, keys + sizes.BIASED]``.
        before: number of keys before the first row.
    """

    values: torch.Tensor
    before: int

    @classmethod
    def within(cls, band: Distance, bias: torch.Tensor, queries: int, keys: int) -> _Hankel:
        """The bias for ``keys`` keys; the queries are the last of them."""
        distance = torch.arange(keys - 1, -sizes.BIASED - 1, -1, device=bias.device)
        seen = band.sees(distance, torch.zeros_like(distance))
        values = bias[:, distance.clamp(0, bias.shape[1] - 1)]
        return cls(values.masked_fill(~seen, -torch.inf), keys - queries)

    def counted_from(self, row: int, key: int) -> _Hankel:
        """The same for tiles whose rows and keys are counted from these."""
        return replace(self, before=self.before + row - key)

    def at(self, tile: Tile, values: torch.Tensor | None = None) -> torch.Tensor:
        """``[heads, rows, keys]``, rows in reverse order; ``values`` replace those of the bias."""
        values = self.values if values is None else values
        farthest = self.before + tile.row + tile.rows - 1 - tile.key
        first = values.shape[1] - sizes.BIASED - 1 - farthest
        return values[:, first : first + tile.rows + tile.keys - 1].unfold(1, tile.keys, 1)

    def add(self, tile: Tile, x: torch.Tensor, total: torch.Tensor) -> None:
        """Add ``x`` (as :meth:`at` returns) to ``total`` (as ``values``), by distance."""
        rows, keys = x.shape[1:]
        # Reading padded rows at a length shorter by one shifts each row one column to the right.
        flat = F.pad(x, (0, rows)).flatten(1)[:, : rows * (rows + keys - 1)]
        farthest = self.before + tile.row + tile.rows - 1 - tile.key
        first = total.shape[1] - sizes.BIASED - 1 - farthest
        total[:, first : first + rows + keys - 1] += flat.unflatten(1, (rows, -1)).sum(1)

    def sum_into(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` (as :attr:`values`) to those of a bias, ``[heads, distances]``."""
        values = values[:, : values.shape[1] - sizes.BIASED].flip(1)
        count = min(values.shape[1], total.shape[1])
        total[:, :count] += values[:, :count]


@dataclass(frozen=True)
class _Region:
    """Tiles of a band, counted from its first row and its first key.

    ``bias`` is added to all logits, ``[heads]``; for strips it is a :class:`_Hankel`.
    """

    band: RotatedBand
    rows: slice
    keys: slice
    tiles: list[Tile]
    bias: torch.Tensor | _Hankel | None = None

    @property
    def more(self) -> torch.Tensor | None:
        """Added to every log-sum-exp: ``[1, heads, 1, 1, 1]``."""
        return self.bias.view(1, -1, 1, 1, 1) if isinstance(self.bias, torch.Tensor) else None

    def mask(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor | None:
        """Mask that the kernel adds to the logits of a tile: ``[1, heads or 1, 1, rows, keys]``."""
        if isinstance(self.bias, _Hankel):
            return self.bias.at(tile)[None, :, None]
        if tile.kind != "band":
            return None
        # By key minus row, repeated: rows shorter by one begin one column further left.
        by_distance = torch.full((tile.keys + tile.rows,), -torch.inf, dtype=dtype, device="cpu")
        by_distance[tile.hidden : tile.keys - tile.rows + 1] = 0
        size = (1, 1, 1, tile.rows, tile.keys)
        return by_distance.repeat(tile.rows).as_strided(size, (0, 0, 0, len(by_distance) - 1, 1))


def _parts(
    call: Call, queries: int, keys: int, height: sizes.TileRows, tall: bool
) -> Iterator[tuple[RotatedBand, list[Tile], torch.Tensor | _Hankel | None]]:
    """The tiles of every band, and the bias of their logits."""
    for band in call.bands:
        if call.bias is None:
            yield band, tiles(band.geometry, queries, keys, call.start, height), None
            continue
        geometry = cast("Distance", band.geometry)  # see takes()
        first, last = geometry.first, geometry.last
        same = call.bias.shape[1] - 1  # from this distance on
        if same < keys - 1:
            far = Distance(max(first, same), last)
            yield band, tiles(far, queries, keys, call.start, height), call.bias[:, -1]
            last = same if last is None else min(same, last)
        near = Distance(first, last)
        values = _Hankel.within(near, call.bias, queries, keys)
        yield band, _strips(near, queries, keys, tall, height), values


def regions(
    call: Call, query: torch.Tensor, keys: int, way: sizes.Way, tall: bool = True
) -> Iterator[_Region]:
    height = sizes.TILES[way, query.element_size() < 4]
    for band, found, bias in _parts(call, query.shape[2], keys, height, tall):
        if not found:
            continue
        row, key = min(tile.row for tile in found), min(tile.key for tile in found)
        shift = [(tile.blocks - 1) * tile.step for tile in found]
        rows = max(tile.row + by + tile.rows for tile, by in zip(found, shift, strict=True))
        keys_end = max(tile.key + by + tile.keys for tile, by in zip(found, shift, strict=True))
        found = [replace(tile, row=tile.row - row, key=tile.key - key) for tile in found]
        if isinstance(bias, _Hankel):
            bias = bias.counted_from(row, key)
        yield _Region(band, slice(row, rows), slice(key, keys_end), found, bias)


def without_lost(
    call: Call, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor | None = None
) -> Call:
    """``call`` with the bias clamped for keys that have no weight anyway.

    Their exponentials would be subnormal (below 1e-38), and some processors take many times as
    long to multiply by such a number.
    """
    if call.bias is None or not query.numel():
        return call
    here = torch.zeros((), dtype=torch.long, device="cpu")
    if not any(bool(band.geometry.sees(here, here)) for band in call.bands):
        return call  # the bound below takes the logit of a query with itself
    if _wide(query.dtype) != torch.float32:  # a wider one has no numbers as small
        return call
    longest, longest_key = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax((0, 2)) for x in (query, key)
    )
    groups = query.shape[1] // key.shape[1]
    most = abs(call.scale) * longest * longest_key.repeat_interleave(groups)  # of any product
    most *= max(_stretch(band.query) * _stretch(band.key) for band in call.bands)
    least = call.bias[:, 0] - most if lse is None else lse.amin((0, 2))  # of any row's sum
    limit = (least - most - _LOST)[:, None]
    return replace(call, bias=torch.where(call.bias < limit, limit - 200, call.bias))


def _stretch(rotation: Rotation) -> float:
    """The largest factor by which a rotation lengthens a token."""
    if rotation is None or not rotation[0].numel():
        return 1.0
    return max(1.0, torch.hypot(*rotation).max().item())


def rotate_part(x: torch.Tensor, rotation: Rotation, part: slice, pairs: Pairs) -> torch.Tensor:
    """A part of the tokens of ``x``, rotated."""
    x = x[..., part, :]
    if rotation is None:
        return x
    out = torch.empty_like(x)
    for block, table in _blocks(x, rotation, part):
        pairs.rotate_into(out[..., block, :], x[..., block, :], table)
    return out


def _add_rotated_back(
    total: torch.Tensor,
    x: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    part: slice,
    pairs: Pairs,
) -> None:
    """Add the gradient ``x`` of rotated tokens to a part of the gradient of unrotated ones."""
    total = total[..., part, :]
    for block, (cos, sin) in _blocks(x, rotation, part):
        total[..., block, :].add_(pairs.rotate(x[..., block, :], (cos, -sin)))


def _blocks(
    x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], part: slice
) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
    """Blocks of tokens so small that intermediate results stay in the processor's cache."""
    for first in range(0, x.shape[-2], sizes.ROTATED):
        block = slice(first, min(first + sizes.ROTATED, x.shape[-2]))
        rows = slice(part.start + block.start, part.start + block.stop)
        yield block, (rows_of(rotation[0], rows), rows_of(rotation[1], rows))


def _calls(
    tile: Tile,
    rows: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    *others: torch.Tensor | None,
) -> Iterator[list[Any]]:
    """The views of every kernel call, ``[any, heads, tokens, columns]``.

    ``rows`` and ``keys`` are ``[batch, heads, tokens, columns]``, and ``keys`` may have fewer
    heads. All others have blocks after the heads and are broadcast; those that are None stay None.
    """

    def views(x: torch.Tensor, first: int, count: int) -> torch.Tensor:
        x = x.narrow(2, first, (tile.blocks - 1) * tile.step + count)
        return x.unfold(2, count, tile.step).mT

    found = [views(x, tile.row, tile.rows) for x in rows]
    found += [views(x, tile.key, tile.keys) for x in keys]
    sizes = found[0].shape[:3]
    found += [x if x is None else x.expand(*sizes, *x.shape[3:]) for x in others]
    # The kernel takes the heads and one dimension beside them: loop over the shorter other.
    batch, _, blocks = sizes
    for i in range(min(batch, blocks)):
        dim = 0 if batch < blocks else 2
        each = [x if x is None else x.select(dim, i) for x in found]
        yield [x if x is None or dim else x.transpose(0, 1) for x in each]


def _in_order(tile: Tile, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows (``[..., rows, columns]``) in the order of the mask of a tile, or back."""
    return tuple(part.flip(-2) for part in x) if tile.kind == "strip" else x


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def initial_output(
    query: torch.Tensor, call: Call, before: Before
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (transposed in memory) and log-sum-exp before any key of the bands."""
    batch, heads, queries, columns = query.shape
    wide = _wide(query.dtype)
    total = query.new_zeros(batch, queries, heads, columns, dtype=wide).transpose(1, 2)
    lse = query.new_full((batch, heads, queries), -torch.inf, dtype=wide)
    if before is not None:
        total.copy_(before[0])
        lse.copy_(before[1])
    if call.sinks is not None:  # a sink acts as a key without a value
        sinks = call.sinks[:, None].to(wide)
        if before is not None:
            total.mul_(torch.sigmoid(lse - sinks)[..., None])
        lse = torch.logaddexp(lse, sinks)
    return total, lse


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    before: Before = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, ``[batch, heads, queries, columns]`` and without columns."""
    if query.shape[2] == 1:
        return _decode(query, key, value, call, before)
    call = without_lost(call, query, key)
    total, lse = initial_output(query, call, before)
    for region in regions(call, query, key.shape[2], "forward"):
        rows = [rotate_part(query, region.band.query, region.rows, call.pairs)]
        rows += [x[..., region.rows, :] for x in (total, lse[..., None])]
        keys = [rotate_part(key, region.band.key, region.keys, call.pairs)]
        keys.append(value[..., region.keys, :])
        for tile in region.tiles:
            mask = region.mask(tile, query.dtype)
            for tile_q, tile_o, tile_m, tile_k, tile_v, tile_mask, more in _calls(
                tile, rows, keys, mask, region.more
            ):
                (tile_q,) = _in_order(tile, tile_q)
                out, new = kernel(
                    tile_q,
                    tile_k,
                    tile_v,
                    is_causal=tile.kind == "causal",
                    attn_mask=tile_mask,
                    scale=call.scale,
                )
                out, new = _in_order(tile, out, new[..., None])
                _merge(tile_o, tile_m, out, new if more is None else new + more)
    return total.to(query.dtype), lse


def _merge(total: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, new: torch.Tensor) -> None:
    """Add output and log-sum-exp of further keys to those of all before."""
    dim = 0 if len(out) > 1 else 2
    step = out.shape[dim] * sizes.MERGED // out.numel() if out.dtype != total.dtype else 0
    parts = [x.split(step or out.shape[dim], dim) for x in (total, out, torch.sigmoid(new - lse))]
    for part, of_out, weight in zip(*parts, strict=True):
        part.lerp_(of_out.to(part.dtype), weight)
    lse.copy_(torch.logaddexp(new, lse))


def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, before: Before
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`_attend` for a single query, to which every tile is full.

    The heads of a key are rows of one call, so no key is read twice.
    """
    batch, heads, _, columns = query.shape
    kv_heads, keys = key.shape[1:3]
    wide = _wide(query.dtype)
    total, lse = (x.unflatten(1, (kv_heads, -1)) for x in initial_output(query, call, before))
    total, lse = total[:, :, :, 0], lse[..., 0]
    query = query.reshape(batch, kv_heads, heads // kv_heads, columns)
    bias = None
    if call.bias is not None:
        bias = by_key(call.bias, keys).view(1, kv_heads, -1, keys)
    for band in call.bands:
        for tile in tiles(band.geometry, 1, keys, call.start):
            part = slice(tile.key, tile.key + tile.keys)
            out, new = kernel(
                call.pairs.rotate(query, band.query),
                rotate_part(key, band.key, part, call.pairs),
                value[..., part, :],
                attn_mask=None if bias is None else bias[..., part],
                scale=call.scale,
            )
            total = total.lerp(out.to(wide), torch.sigmoid(new - lse)[..., None])
            lse = torch.logaddexp(lse, new)
    total = total.to(query.dtype).reshape(batch, 1, heads, columns).transpose(1, 2)
    return total, lse.reshape(batch, heads, 1)


def by_key(bias: torch.Tensor, keys: int) -> torch.Tensor:
    """A bias by distance for the last of ``keys`` tokens, ``[heads, keys]``."""
    distance = torch.arange(keys - 1, -1, -1, device=bias.device).clamp(max=bias.shape[1] - 1)
    return bias[:, distance]


def packed(x: torch.Tensor) -> torch.Tensor:
    """``x`` with contiguous columns, which the kernel assumes without checking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _here(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, before: Before
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, by the kernel of the device."""
    attend, _ = BY_DEVICE[query.device.type]
    return attend(packed(query), packed(key), packed(value), call, before)


@torch.library.custom_op("rope_ext::bands", mutates_args=())
def _bands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    before: torch.Tensor | None,
    before_lse: torch.Tensor | None,
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = unpack_call(sinks, bias, tables, plan, start, scale)
    known = None if before is None or before_lse is None else (before, before_lse)
    return _here(query, key, value, call, known)


def refuse_onnx() -> None:
    """Raise in an export to ONNX, whose converter supports none of our operators.

    Called where torch computes shapes, since ``is_in_onnx_export`` is False in traced functions.
    """
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedModelError(
            "ONNX has no operator for the attention of position methods, encodings, bias= and "
            "layers=; patch with a frequency method such as 'yarn' alone (a dynamic one with "
            "length=TOKENS), or use torch.export instead (docs/exported.md)"
        )


@_bands.register_fake
def _(query, key, value, *_rest):  # noqa: ANN001, ANN002, ANN202
    refuse_onnx()
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
    bias: torch.Tensor | None,
    learns: bool,
    tables: list[torch.Tensor],
    plan: list[int],
    start: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = unpack_call(None, bias, tables, plan, start, scale)
    _, differentiate = BY_DEVICE[query.device.type]
    rows = map(packed, (grad, query, key, value, out))
    return differentiate(*rows, lse, call, learns)


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, and of the bias if it learns."""
    call = without_lost(call, query, key, lse)
    pairs, keys, scale, bias = call.pairs, key.shape[2], call.scale, call.bias
    wide = _wide(query.dtype)
    grads = [torch.zeros_like(x, dtype=wide) for x in (query, key, value)]
    grad_q, grad_k, grad_v = grads
    grad_bias = query.new_zeros(0)
    if learns and bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=wide)
    # The gradient of a bias takes whole tiles; smaller ones need less memory at a time.
    for region in regions(call, query, keys, "backward", tall=not learns):
        band = region.band
        rotated_q = rotate_part(query, band.query, region.rows, pairs)
        rotated_k = rotate_part(key, band.key, region.keys, pairs)
        band_gq, band_gk = grad_q[..., region.rows, :], grad_k[..., region.keys, :]
        if band.query is not None:
            band_gq = torch.zeros_like(band_gq)
        if band.key is not None:
            band_gk = torch.zeros_like(band_gk)
        rows = [x[..., region.rows, :] for x in (out, lse[..., None], grad)]
        rows = [rotated_q, *rows, band_gq]
        columns = [rotated_k, value[..., region.keys, :], band_gk, grad_v[..., region.keys, :]]
        learned = None  # a bias, and its gradient by distance
        if learns and isinstance(region.bias, _Hankel):
            learned = region.bias, torch.zeros_like(region.bias.values)
        for tile in region.tiles:
            mask = region.mask(tile, query.dtype)
            of_bias = None
            if learned is not None and mask is not None:
                of_bias = mask.new_zeros(mask.shape)
            for part in _split(tile, keys):
                for views in _calls(part, rows, columns, mask, region.more, of_bias):
                    _tile_backward(part, scale, *views)
            if learned is not None and of_bias is not None:
                learned[0].add(tile, of_bias[0, :, 0], learned[1])
        if learned is not None:
            learned[0].sum_into(grad_bias, learned[1])
        if band.query is not None:
            _add_rotated_back(grad_q, band_gq, band.query, region.rows, pairs)
        if band.key is not None:
            _add_rotated_back(grad_k, band_gk, band.key, region.keys, pairs)
    grad_q, grad_k, grad_v = (x.to(query.dtype) for x in grads)
    return grad_q, grad_k, grad_v, grad_bias


def _split(tile: Tile, keys: int) -> Iterator[Tile]:
    """Fewer blocks at a time, so that copies of overlapping keys take no more than the keys."""
    most = max(keys // tile.keys, 1)
    if tile.step < tile.keys:
        most = min(most, max(sizes.TILES_BACKWARD, torch.get_num_threads()))
    for block in range(0, tile.blocks, most):
        shift = block * tile.step
        blocks = min(most, tile.blocks - block)
        yield replace(tile, row=tile.row + shift, key=tile.key + shift, blocks=blocks)


def _tile_backward(
    tile: Tile,
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
    mask: torch.Tensor | None,
    more: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
) -> None:
    """Add the gradients of a kernel call to their sums; both are views of :func:`_calls`."""
    if more is not None:  # a constant on all logits of the tile, so take it off the log-sum-exp
        lse = lse - more
    query, out, lse, grad = _in_order(tile, query, out, lse, grad)
    if grad_bias is not None:
        groups = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        with_bias = cast("torch.Tensor", mask)  # only tiles with a bias have its gradient
        _add_broadcast(grad_bias, of_logits(scale, query, out, lse, grad, k, v, with_bias))
    new_query, *new_keys = kernel_backward(
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
    grad_query += _in_order(tile, new_query)[0]
    # The keys of neighbouring blocks overlap, so add them in strips that do not.
    strip = tile.step if tile.blocks > 1 else tile.keys
    for total, new in zip((grad_key, grad_value), new_keys, strict=True):
        for first in range(0, tile.keys, strip):
            part = slice(first, first + strip)
            total[..., part, :].add_(new[..., part, :])


def of_logits(
    scale: float,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits of a tile, ``[..., rows, keys]``."""
    query, key, value, grad = (x.to(lse.dtype) for x in (query, key, value, grad))
    logits = ((query * scale) @ key.mT).add_(mask)
    # Clamped so that exp stays a normal number: subnormal ones are five times slower.
    weights = logits.sub_(lse).clamp_(min=-80).exp_()
    return (grad @ value.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)


def _add_broadcast(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add ``x`` to an expanded view, summed over the dimensions that were broadcast."""
    for dim in (dim for dim, step in enumerate(total.stride()) if step == 0):
        total, x = total.narrow(dim, 0, 1), x.sum(dim, keepdim=True)
    total.add_(x)


BY_DEVICE: dict[str, tuple[Callable, Callable]] = {"cpu": (_attend, _backward)}
"""Functions for the bands and for their gradients, by type of device."""


@_bands_backward.register_fake
def _(grad, query, key, value, out, lse, bias, learns, *_rest):  # noqa: ANN001, ANN002, ANN202
    grad_bias = torch.empty_like(bias, dtype=lse.dtype) if learns else query.new_empty(0)
    return *(torch.empty_like(x) for x in (query, key, value)), grad_bias


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, tables, ctx.plan, ctx.start, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, *tables)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _grad_lse: torch.Tensor) -> tuple:
    query, key, value, sinks, bias, before, before_lse, out, lse, *tables = ctx.saved_tensors
    learns = ctx.needs_input_grad[4]
    *grads, grad_bias = _bands_backward(
        grad, query, key, value, out, lse, bias, learns, tables, ctx.plan, ctx.start, ctx.scale
    )
    of_sinks = grad_sinks = grad_before = of_before = None
    wide, delta = lse.dtype, lse.new_zeros(())
    if sinks is not None or before is not None:
        delta = (grad.to(wide) * out).sum(-1)
    if sinks is not None:
        of_sinks = -(torch.exp(sinks.to(wide)[:, None] - lse) * delta).sum((0, 2))
        grad_sinks = of_sinks.to(sinks.dtype)
    if before is not None:
        weight = torch.exp(before_lse - lse)
        grad_before = (weight[..., None] * grad).to(before.dtype)
        of_before = weight * ((grad.to(wide) * before).sum(-1) - delta)
    if learns and bias.shape[1] < key.shape[2]:
        # The gradients of the logits in a row sum to zero, so the last entry gets the remainder.
        grad_bias[:, -1] -= grad_bias.sum(1)
        for other in (of_sinks, None if of_before is None else of_before.sum((0, 2))):
            grad_bias[:, -1] -= 0 if other is None else other
    grad_bias = grad_bias.to(bias.dtype) if learns else None
    nothing = ([None] * len(tables), None, None, None)
    return *grads, grad_sinks, grad_bias, grad_before, of_before, *nothing


_bands.register_autograd(_differentiate, setup_context=_setup)


def takes(call: Call) -> bool:
    """Whether the tiles support the bias of a call: only bands of distances do."""
    return call.bias is None or all(isinstance(band.geometry, Distance) for band in call.bands)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    before: Before = None,
) -> torch.Tensor:
    """Attention as :class:`Call` describes it, without soft caps.

    ``before``: output (``[batch, heads, queries, value_columns]``) and log-sum-exp (without
    columns) of keys that are in no band; merged with those of the bands.
    """
    columns, value_columns = query.shape[-1], value.shape[-1]
    query = call.scale_query(query)
    # The kernel needs query, key and value with the same number of columns.
    if value_columns < columns:
        value = F.pad(value, (0, columns - value_columns))
    elif value_columns > columns:
        query, key = (F.pad(x, (0, value_columns - columns)) for x in (query, key))
    bias = call.bias
    if bias is not None:  # the kernel would reinterpret a mask of another dtype
        bias = bias.to(_wide(query.dtype))
        call = replace(call, bias=bias)
    if before is not None:
        out, lse = before
        before = F.pad(out, (0, query.shape[-1] - value_columns)), lse.to(_wide(query.dtype))
    inputs = (query, key, value, call.sinks, bias, *(before or (None, None)))
    grads = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if grads or torch.compiler.is_compiling():
        plan, tables = pack_call(call)
        out, _ = _bands(*inputs, tables, plan, call.start, call.scale)
    else:  # the operator would add overhead to each step of decoding
        out, _ = _here(query, key, value, call, before)
    return out[..., :value_columns]
