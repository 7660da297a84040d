"""Banded attention with PyTorch's fused kernels: flash for CPUs and CUDA, cuDNN for Hopper cards.

The kernels support full rectangles and causal squares. Every band is split into a few such tiles,
and equal tiles share a call. The left edge of a window is a causal square of reversed tokens.
Outputs are merged by their log-sum-exps, and the backward pass passes each call the GLOBAL output
and log-sum-exp, as in ring attention (Liu et al. 2023).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rope_ext.attention import cards
from rope_ext.attention.call import Call, Pairs, Rotation, each_table, wide
from rope_ext.methods.geometry import (
    Ahead,
    Around,
    Causal,
    ChunkGap,
    Distance,
    Geometry,
    Queries,
    Sinks,
)

_Tensors = Sequence[Tensor]
_Function = TypeVar("_Function", bound=Callable[..., Any])
WHOLE, CAUSAL, REVERSED = range(3)
# From these sizes on, cuDNN is faster than flash on Hopper cards. For each new shape, it spends
# about 50 ms on a plan.
LONG = 2**13  # queries of a call
LEAST = 2**11  # tokens of a tile
# Up to this many keys, torch's kernel for CPUs computes the hidden half of a causal square, too.
WHOLE_SQUARE = 512
STRIP = 128  # queries of a part of such a square, with only the keys that they see


class Tile(NamedTuple):
    """Ranges of queries and keys, in ``blocks`` of ``rows`` and ``keys`` that follow each other."""

    shape: int  # WHOLE: all pairs; CAUSAL: a square; REVERSED: one of tokens in reversed order
    row: int  # its first query
    rows: int  # queries of a block
    key: int  # its first key
    keys: int  # keys of a block
    blocks: int = 1

    def queries(self, x: Tensor) -> Tensor:
        """Select this tile's queries; each block becomes a row of the batch."""
        return self._part(x, self.row, self.rows)

    def among(self, x: Tensor) -> Tensor:
        """Select this tile's keys; each block becomes a row of the batch."""
        return self._part(x, self.key, self.keys)

    def _part(self, x: Tensor, first: int, count: int) -> Tensor:
        part = x.narrow(2, first, self.blocks * count)
        if self.blocks > 1:
            part = part.unflatten(2, (self.blocks, count)).transpose(1, 2).flatten(0, 1)
        return part.flip(2) if self.shape == REVERSED else part

    def back(self, x: Tensor) -> Tensor:
        """Undo :meth:`queries` or :meth:`among`."""
        x = x.flip(2) if self.shape == REVERSED else x
        if self.blocks > 1:
            x = x.unflatten(0, (-1, self.blocks)).transpose(1, 2).flatten(2, 3)
        return x


def tiles(geometry: Geometry, queries: int, keys: int, start: int = 0) -> list[Tile]:
    """Split a band into tiles that cover every visible key once; in each, every query sees a key.

    The queries are the last keys, and key 0 is token ``start``.
    """
    if isinstance(geometry, Ahead):
        return _mirrored(geometry, queries, keys)
    if isinstance(geometry, Around):
        return _around(geometry, queries, keys)
    return _causal(geometry, queries=queries, keys=keys, start=start)


def _mirrored(geometry: Ahead, queries: int, keys: int) -> list[Tile]:
    """Split a band of later keys, by reversing the tokens: then these keys are earlier ones."""
    assert queries == keys, "a cache has no later keys"
    found = []
    for tile in _causal(Distance(geometry.first, geometry.last), queries, keys):
        shape = {CAUSAL: REVERSED, REVERSED: CAUSAL}.get(tile.shape, tile.shape)
        row = queries - tile.row - tile.blocks * tile.rows
        key = keys - tile.key - tile.blocks * tile.keys
        found.append(tile._replace(shape=shape, row=row, key=key))
    return found[::-1]  # the first queries first


def _around(geometry: Around, queries: int, keys: int) -> list[Tile]:
    if geometry.last is None or geometry.last >= keys:
        if not queries or not keys or geometry.last == 0:
            return []
        return [Tile(shape=WHOLE, row=0, rows=queries, key=0, keys=keys)]
    near = _causal(Distance(0, geometry.last), queries, keys)
    return near + _mirrored(Ahead(1, geometry.last), queries, keys)


def _causal(geometry: Causal, queries: int, keys: int, start: int = 0) -> list[Tile]:
    """Split a part of the causal triangle."""
    split = _Split(keys - queries)
    if isinstance(geometry, ChunkGap):
        _split_chunks(split, geometry=geometry, keys=keys, start=start)
        return split.found
    # Rows are indexed by the last key that they see: row `far` sees key 0.
    far = max(geometry.first, 0)
    row = split.before
    end = keys
    if isinstance(geometry, Queries):
        row = max(row, geometry.begin - start)
        end = end if geometry.end is None else min(end, geometry.end - start)
    low = max(row - far, 0)
    high = end - far
    if isinstance(geometry, Distance) and geometry.last is not None:
        _split_window(split, far=far, low=low, high=high, width=geometry.last - far - 1)
        return split.found
    count = min(geometry.count - start, keys) if isinstance(geometry, Sinks) else keys
    growing = min(high, count)
    split.add(WHOLE, rows=(low + far, growing + far), keys=(0, low))
    split.add(CAUSAL, rows=(low + far, growing + far), keys=(low, growing))
    split.add(WHOLE, rows=(max(low, count) + far, high + far), keys=(0, count))
    return split.found


class _Split:
    """The tiles found so far; ``before`` is the number of keys before the first query."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.found: list[Tile] = []

    def add(self, shape: int, rows: tuple[int, int], keys: tuple[int, int]) -> None:
        """Add a tile of the queries in ``rows`` and of ``keys``: the first, and one past the last.

        All are key indices. Squares that follow each other diagonally become one tile of several
        blocks, which is a single call of the kernel.
        """
        row, end = rows
        key, stop = keys
        height = end - row
        count = stop - key
        if height <= 0 or count <= 0:
            return
        for index, old in enumerate(self.found):
            next_row = old.row + self.before + old.blocks * old.rows
            next_key = old.key + old.blocks * old.keys
            follows = row == next_row and key == next_key
            alike = shape == old.shape and height == old.rows and count == old.keys
            if follows and alike and height == count:
                self.found[index] = old._replace(blocks=old.blocks + 1)
                return
        tile = Tile(shape=shape, row=row - self.before, rows=height, key=key, keys=count)
        self.found.append(tile)


def _split_chunks(split: _Split, geometry: ChunkGap, keys: int, start: int) -> None:
    """Split keys that are a number of chunks of ``size`` tokens before the query's chunk."""
    size = geometry.size
    for chunk in range((start + split.before) // size, (start + keys - 1) // size + 1):
        begin = chunk * size - start
        row = max(begin, split.before)
        end = min(begin + size, keys)
        if geometry.first <= 0:  # the query's own chunk
            split.add(WHOLE, rows=(row, end), keys=(max(begin, 0), row))
            split.add(CAUSAL, rows=(row, end), keys=(row, end))
        first = max(geometry.first, 1)
        if geometry.last is None:
            split.add(WHOLE, rows=(row, end), keys=(0, begin - (first - 1) * size))
        for gap in range(first, (geometry.last or 0) + 1):
            split.add(
                WHOLE, rows=(row, end), keys=(max(begin - gap * size, 0), begin - (gap - 1) * size)
            )


def _split_window(split: _Split, far: int, low: int, high: int, width: int) -> None:
    """Split a window of the keys from ``far`` to ``far + width`` tokens before a query.

    ``low`` and ``high`` bound the nearest key of the queries. Within ``width`` rows, a window is a
    causal square at its right edge and a reversed one at its left edge.
    """
    if width < 0:
        return
    size = max(width, 1)
    for begin in range(low // size * size, high, size):
        row = max(low, begin)
        end = min(high, begin + size)
        split.add(WHOLE, rows=(row + far, end + far), keys=(begin, row if width else begin))
        split.add(CAUSAL, rows=(row + far, end + far), keys=(row, end))
        if begin and width:
            split.add(REVERSED, rows=(row + far, end + far), keys=(row - size, end - size))
            split.add(WHOLE, rows=(row + far, end + far), keys=(end - size, begin))


def refusal(query: Tensor, value: Tensor, call: Call, card: cards.Card | None) -> str | None:
    """Return why the device's kernel does not support a call; None if it does."""
    columns = max(query.shape[-1], value.shape[-1])
    device = query.device.type
    if call.softcap is not None:
        return "it has no soft cap"
    if call.bias is not None:
        return "it has no bias"
    if card is None:
        return None if device == "cpu" else "it is for CPUs and for NVIDIA GPUs"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it has float16 and bfloat16 on a GPU, and this is {query.dtype}"
    if columns % 8 or columns > 256:
        return f"it has heads of a multiple of 8 up to 256 columns, and these have {columns}"
    if query.shape[2] == 1 and nn.attention.current_flash_attention_impl() == "FA4":
        return "FA4 reads all keys in one thread block for a single query"
    if card.capability < cards.AMPERE:
        return f"it needs a GPU of capability 8.0 or later, and this one has {card.version}"
    return None


def uses_cudnn(query: Tensor, value: Tensor, card: cards.Card | None) -> bool:
    """Whether cuDNN's attention computes the long tiles of a call.

    torch's own switches apply: ``sdpa_kernel``, deterministic algorithms, and another flash
    attention (FA3, FA4), which is preferred if it was activated.
    """
    if card is None or card.capability != cards.HOPPER or query.shape[2] < LONG:
        return False
    return max(query.shape[-1], value.shape[-1]) <= 128 and _cudnn_is_allowed()


@torch.compiler.assume_constant_result  # graphs cannot read torch's switches
def _cudnn_is_allowed() -> bool:
    if torch.version.hip is not None or nn.attention.current_flash_attention_impl():
        return False
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    return enabled and not torch.are_deterministic_algorithms_enabled()


def kernel_of(tile: Tile, query: Tensor, value: Tensor) -> str:
    """Return the kernel for a tile of a call: ``"cpu"``, ``"flash"`` or ``"cudnn"``."""
    if query.device.type == "cpu":
        return "cpu"
    long = min(tile.rows, tile.keys) >= LEAST
    return "cudnn" if long and uses_cudnn(query, value, cards.card(query.device)) else "flash"


def forward(kernel: str, given: _Tensors, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output, ``[batch, heads, queries, columns]``, and its log-sum-exp.

    ``given``: query, key and value. ``causal`` requires as many queries as keys.
    """
    ops: Any = torch.ops.aten
    if kernel == "cpu":  # the function has less overhead than torch.ops
        if causal and STRIP < given[0].shape[2] <= WHOLE_SQUARE:
            return _in_strips(*given, scale=scale)
        run: Any = torch._scaled_dot_product_flash_attention_for_cpu
        return run(*given, 0.0, causal, scale=scale)
    if kernel == "cudnn":
        run = ops._scaled_dot_product_cudnn_attention
        out, lse = run(*given, None, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.reshape(lse.shape[:3])  # older versions have a fourth dimension
    q, k, v = (x.transpose(1, 2) for x in given)
    sizes = q.shape[1], k.shape[1]
    out, lse = ops._flash_attention_forward(
        q, k, v, None, None, *sizes, 0.0, causal, False, scale=scale
    )[:2]
    return out.transpose(1, 2), lse


def _in_strips(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute a small causal square on a CPU, without most of its hidden half."""
    run: Any = torch._scaled_dot_product_flash_attention_for_cpu
    count = query.shape[2]
    later = query.new_full((STRIP, STRIP), -torch.inf).triu(1)
    strips = []
    for first in range(0, count, STRIP):
        last = min(first + STRIP, count)
        size = last - first
        mask = F.pad(later[:size, :size], (first, 0))  # every strip sees all keys before it
        given = query[:, :, first:last], key[:, :, :last], value[:, :, :last]
        strips.append(run(*given, 0.0, False, attn_mask=mask[None, None], scale=scale))
    outputs = [out.transpose(1, 2) for out, _ in strips]  # as they lie in memory
    return torch.cat(outputs, dim=1).transpose(1, 2), torch.cat([lse for _, lse in strips], dim=2)


def backward(kernel: str, given: _Tensors, causal: bool, scale: float) -> _Tensors:
    """Return gradients of query, key and value.

    ``given``: gradient, query, key, value, and the output and log-sum-exp over all calls.
    """
    ops: Any = torch.ops.aten
    if kernel == "cpu":
        return ops._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *given, 0.0, causal, scale=scale
        )
    *tensors, lse = given
    sizes = tensors[1].shape[2], tensors[2].shape[2]
    if kernel == "cudnn":
        unused = torch.zeros((), dtype=torch.long, device=lse.device)  # dropout state
        return ops._scaled_dot_product_cudnn_attention_backward(
            *tensors, lse[..., None], unused, unused, None, None, None, *sizes,
            0.0, causal, scale=scale,
        )  # fmt: skip
    g, q, k, v, o = (x.transpose(1, 2) for x in tensors)
    unused = torch.empty(2, dtype=torch.uint64, device=lse.device)
    gradients = ops._flash_attention_backward(
        g, q, k, v, o, lse, None, None, *sizes, 0.0, causal, unused, unused, scale=scale
    )
    return [x.transpose(1, 2) for x in gradients]


def _rotate(pairs: Pairs, x: Tensor, rotation: Rotation) -> Tensor:
    # Heads are next to each other in memory; the result of a compiled rotation keeps that.
    of_tokens = each_table(rotation, lambda table: table.unsqueeze(-2))
    return pairs.rotate(x.transpose(1, 2), of_tokens).transpose(1, 2)


def _merge(total: Tensor, lse: Tensor, out: Tensor, new: Tensor) -> None:
    """Merge the output of a tile and its log-sum-exp ``new`` into those of the tiles before."""
    # The share of the tile: exp(new) / (exp(lse) + exp(new)).
    weight = torch.sigmoid(new - lse).transpose(1, 2)[..., None]
    total.transpose(1, 2).lerp_(out.transpose(1, 2).to(total.dtype), weight)
    lse.copy_(torch.logaddexp(lse, new))


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _fused(function: _Function, query: Tensor, value: Tensor) -> _Function:
    """Compile elementwise operations where they would take as long as cuDNN's attention."""
    card = cards.card(query.device) if query.is_cuda else None
    fuses = uses_cudnn(query, value, card) and cards.compiles()
    return cast("_Function", _compiled(function)) if fuses else function


def compute(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output of :class:`Call`, and its log-sum-exp, ``[batch, heads, queries]``.

    Tensors are ``[batch, heads, tokens, columns]`` with contiguous columns, as many of value as of
    query and key. The log-sum-exp is float32 or better, and -inf for a query that sees no key.
    """
    batch, heads, queries, columns = query.shape
    rotate = _fused(_rotate, query, value)
    split = [
        (band, found)
        for band in call.bands
        if (found := tiles(band.geometry, queries=queries, keys=key.shape[2], start=call.start))
    ]
    if call.sinks is None and len(split) == 1 and len(split[0][1]) == 1:
        band, [tile] = split[0]
        if tile.blocks * tile.rows == queries:  # as for a text within the window: nothing to merge
            q = rotate(call.pairs, query, band.query)
            k = rotate(call.pairs, key, band.key)
            out, lse = _attend(tile, query=q, key=k, value=value, scale=call.scale)
            return out, lse.contiguous()  # as the operator's fake promises
    total = query.new_zeros(batch, queries, heads, columns, dtype=wide(query)).transpose(1, 2)
    lse = query.new_full((batch, heads, queries), -torch.inf, dtype=wide(query))
    if call.sinks is not None:  # a sink acts as a key without a value
        lse = lse.maximum(call.sinks[:, None].to(lse))
    merge = _fused(_merge, query, value)
    merged = 0  # queries from here on have no output yet
    for band, found in split:
        q = rotate(call.pairs, query, band.query)
        k = rotate(call.pairs, key, band.key)
        for tile in found:
            part, part_lse = _attend(tile, query=q, key=k, value=value, scale=call.scale)
            count = part_lse.shape[2]
            there = total.narrow(2, tile.row, count)
            old = lse.narrow(2, tile.row, count)
            if tile.row < merged or call.sinks is not None:
                merge(total=there, lse=old, out=part, new=part_lse)
            else:  # the first tile of its queries
                there.copy_(part)
                old.copy_(part_lse)
            merged = max(merged, tile.row + count)
    return total.to(query.dtype), lse


def _attend(
    tile: Tile, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output of a tile's queries, and its log-sum-exp."""
    given = tile.queries(query), tile.among(key), tile.among(value)
    kernel = kernel_of(tile, query, value)
    out, lse = forward(kernel, given, causal=tile.shape != WHOLE, scale=scale)
    return tile.back(out), tile.back(lse)


def differentiate(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
) -> list[Tensor]:
    """Return gradients of query, key and value, from what :func:`compute` returned.

    Every tile gets the output and the log-sum-exp of the whole row: with those of its own, it would
    leave out the gradient that flows through the weights of other tiles.
    """
    of_query = torch.zeros_like(query, dtype=lse.dtype)
    of_key = torch.zeros_like(key, dtype=lse.dtype)
    of_value = torch.zeros_like(value, dtype=lse.dtype)
    queries = query.shape[2]
    grad = grad.to(query.dtype)
    rotate = _fused(_rotate, query, value)
    for band in call.bands:
        q = rotate(call.pairs, query, band.query)
        k = rotate(call.pairs, key, band.key)
        of_q = torch.zeros_like(query, dtype=lse.dtype)
        of_k = torch.zeros_like(key, dtype=lse.dtype)
        for tile in tiles(band.geometry, queries=queries, keys=key.shape[2], start=call.start):
            given = (
                tile.queries(grad),
                tile.queries(q),
                tile.among(k),
                tile.among(value),
                tile.queries(out),
                tile.queries(lse).contiguous(),
            )
            kernel = kernel_of(tile, query, value)
            gradients = backward(kernel, given, causal=tile.shape != WHOLE, scale=call.scale)
            _add(of_q, tile.row, tile.back(gradients[0]))
            _add(of_k, tile.key, tile.back(gradients[1]))
            _add(of_value, tile.key, tile.back(gradients[2]))
        # The gradient of a rotation is the rotation back.
        of_query += rotate(call.pairs, of_q, _inverse(band.query))
        of_key += rotate(call.pairs, of_k, _inverse(band.key))
    return [of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)]


def _add(total: Tensor, first: int, part: Tensor) -> None:
    """Add a tile's gradient to those of the tokens from ``first`` on."""
    total.narrow(2, first, part.shape[2]).add_(part)


def _inverse(rotation: Rotation) -> Rotation:
    """Return the rotation by the opposite angles."""
    return None if rotation is None else (rotation[0], -rotation[1])
