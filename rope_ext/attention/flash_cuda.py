"""The tiles of :mod:`rope_ext.attention.flash` with the flash kernel of CUDA: half precision.

Unlike the kernel of the CPU, this one aligns the last row with the last key for any number of
rows, has a window, and takes fewer key heads than query heads. So a band of distances is one call,
and a band of chunks is one call for all whole chunks. Each call returns the log-sum-exp of its
rows, with which the outputs are merged; the backward pass gives each call the GLOBAL output and
log-sum-exp.

It was tested on a CPU, with a stand-in for the two operators of torch and by their shapes, and has
never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rope_ext.attention import cards, flash, fused
from rope_ext.attention.call import Call, RotatedBand, Rotation, part_of
from rope_ext.attention.extent import extent
from rope_ext.attention.flash import Before, Tile
from rope_ext.methods.geometry import ChunkGap, Distance, Geometry, Sinks

_COLUMNS = 256
"""The most columns of a head; they must be a multiple of 8."""


def refusal(query: torch.Tensor, value: torch.Tensor, call: Call, card: cards.Card) -> str | None:
    """Why the kernel cannot have a call on this card; None: it can."""
    columns = max(query.shape[-1], value.shape[-1])
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it has float16 and bfloat16 on a GPU, and this is {query.dtype}"
    if columns % 8 or columns > _COLUMNS:
        return f"it has heads of a multiple of 8 up to {_COLUMNS} columns, and these have {columns}"
    if call.bias is not None:
        return "it has no bias on a GPU"
    if card.capability < cards.AMPERE:
        return f"it needs a GPU of capability 8.0 or later, and this one has {card.version}"
    return None


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    left: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, ``[batch, queries, heads, columns]`` like the inputs, and log-sum-exp.

    The latter is ``[batch, heads, queries]``.

    If ``causal``, the last query sees the last key and the ``left`` ones before it (None: all),
    and the window of every other query is shifted by its distance from the last.
    """
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0 if causal else None,
    )[:2]


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    left: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; ``out`` and ``lse`` are over the keys of all calls."""
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # dropout state
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        causal,
        unused,
        unused,
        scale=scale,
        window_size_left=left,
        window_size_right=0 if causal else None,
    )


def tiles(geometry: Geometry, queries: int, keys: int, start: int = 0) -> list[Tile]:
    """As :func:`flash.tiles`, except that ``"causal"`` is as in :func:`forward`."""
    if isinstance(geometry, ChunkGap):
        found = flash.chunk_tiles(geometry, queries, keys, start, _joined)
    elif isinstance(geometry, Sinks):
        count = min(geometry.count - start, keys)
        found = flash.triangle_tiles(queries, keys, geometry.first, count, _joined)
    else:
        part = extent(geometry, queries, keys, start)
        row = max(geometry.first - (keys - queries), 0)  # the first query that sees a key
        found = _joined(row, queries - row, part.start, part.stop - part.start - queries + row)
    return flash.batched(tile for tile in found if tile.rows > 0 and tile.keys > 0)


def _joined(row: int, rows: int, key: int, before: int) -> Iterator[Tile]:
    yield Tile(row, rows, key, before + rows, "full" if rows == 1 else "causal")


def farthest_key(geometry: Geometry) -> int | None:
    if isinstance(geometry, Distance) and geometry.last is not None:
        return geometry.last - max(geometry.first, 0) - 1
    return None


class _Part:
    """A tile of a band: its rotated queries and keys, as views that the kernel takes.

    ``rows`` and ``keys`` are the tokens of all its blocks, whose rows are adjacent.
    """

    def __init__(
        self, tile: Tile, band: RotatedBand, query: torch.Tensor, key: torch.Tensor, call: Call
    ) -> None:
        self.tile, self.band, self.pairs = tile, band, call.pairs
        self.rows = (tile.row, tile.blocks * tile.rows)
        self.keys = (tile.key, (tile.blocks - 1) * tile.step + tile.keys)
        self.rotations = tuple(
            part_of(rotation, slice(first, first + count))
            for rotation, (first, count) in ((band.query, self.rows), (band.key, self.keys))
        )
        self.query = self._of_rows(fused.rotate(call.pairs, self.row(query), self.rotations[0]))
        rotated = fused.rotate(call.pairs, key.narrow(2, *self.keys), self.rotations[1])
        self.key = self._of_keys(rotated)
        causal = tile.kind == "causal"
        self.asked = causal, farthest_key(band.geometry) if causal else None, call.scale

    def row(self, x: torch.Tensor) -> torch.Tensor:
        return x.narrow(2, *self.rows)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self._of_keys(x.narrow(2, *self.keys))

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch * blocks, rows, heads, columns]``."""
        return x.transpose(1, 2).unflatten(1, (self.tile.blocks, -1)).flatten(0, 1)

    def _of_keys(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.transpose(1, 2).unfold(1, self.tile.keys, max(self.tile.step, 1))
        return blocks.movedim(-1, 2).flatten(0, 1)

    def merge(self, total: torch.Tensor, lse: torch.Tensor, value: torch.Tensor) -> None:
        """Add the keys of the tile to output and log-sum-exp of the rows."""
        out, new = forward(self.query, self.key, self.value(value), *self.asked)
        batch, heads = lse.shape[:2]
        out = out.reshape(batch, -1, heads, out.shape[-1]).transpose(1, 2)
        new = new.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2)
        fused.run(merge, self.row(total), self.row(lse), out, new)

    def differentiate(
        self,
        grad: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grads: list[torch.Tensor],
    ) -> None:
        """Add the gradients of the tile to those of query, key and value."""
        tile, batch = self.tile, len(grad)
        of_rows = self.row(lse).unflatten(2, (tile.blocks, -1)).transpose(1, 2)
        of_query, *of_keys = backward(
            self._of_rows(self.row(grad)).contiguous(),
            self.query,
            self.key,
            self.value(value),
            self._of_rows(self.row(out)).contiguous(),
            of_rows.flatten(0, 1).contiguous(),
            *self.asked,
        )
        of_query = of_query.reshape(batch, -1, *of_query.shape[2:]).transpose(1, 2)
        self.row(grads[0]).add_(fused.rotate(self.pairs, of_query, _back(self.rotations[0])))
        for total, new, rotation in zip(grads[1:], of_keys, (self.rotations[1], None), strict=True):
            new = self._together(new.unflatten(0, (batch, -1)))
            total.narrow(2, *self.keys).add_(fused.rotate(self.pairs, new, _back(rotation)))

    def _together(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, blocks, keys, heads, columns]``, summed where keys overlap."""
        if x.shape[1] == 1:
            return x[:, 0].transpose(1, 2)
        batch, blocks, keys, heads, columns = x.shape
        total = x.new_zeros(batch, self.keys[1], heads, columns)
        for first in range(0, keys, self.tile.step):
            part = x[:, :, first : first + self.tile.step]
            count = part.shape[2]
            into = total[:, first:].unfold(1, count, self.tile.step)[:, :blocks].movedim(-1, 2)
            into.add_(part)
        return total.transpose(1, 2)


def _back(rotation: Rotation) -> Rotation:
    return rotation and (rotation[0], -rotation[1])


def merge(total: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, new: torch.Tensor) -> None:
    total.lerp_(out.to(total.dtype), torch.sigmoid(new - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(new, lse))


def _parts(query: torch.Tensor, key: torch.Tensor, call: Call) -> Iterator[_Part]:
    for band in call.bands:
        for tile in tiles(band.geometry, query.shape[2], key.shape[2], call.start):
            yield _Part(tile, band, query, key, call)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, before: Before = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, ``[batch, heads, queries, columns]`` and without columns."""
    total, lse = flash.initial_output(query, call, before)
    for part in _parts(query, key, call):
        part.merge(total, lse, value)
    return total.to(query.dtype), lse


def differentiate(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
    learns: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value, and an empty one of the bias, which is not supported."""
    grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
    grad = grad.to(query.dtype)
    for part in _parts(query, key, call):
        part.differentiate(grad, value, out, lse, grads)
    return *(x.to(query.dtype) for x in grads), query.new_empty(0)


flash.BY_DEVICE["cuda"] = (attend, differentiate)
