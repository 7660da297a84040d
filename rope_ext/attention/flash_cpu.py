"""Bands with the flash attention kernel of the CPU: linear memory, one call per tile.

A tile is a block of queries and the keys of one band that all of its queries see, or those that
some of them see, under a mask. Tiles are merged by their log-sum-exps. The backward pass gives
every tile the GLOBAL output and log-sum-exp of its queries, as ring attention does (Liu et al.
2023).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from rope_ext.attention import products
from rope_ext.attention.call import Call, RotatedBand
from rope_ext.attention.extent import extent, seen_by_all
from rope_ext.methods.geometry import Distance, Geometry

kernel = torch._scaled_dot_product_flash_attention_for_cpu  # less overhead than torch.ops
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ROWS = 256
"""Queries of a tile."""
_HIDES = -1e30
"""Not -inf, since a tile may hide all of its keys from some of its queries."""


def refusal(call: Call) -> str | None:
    """Why the kernel cannot have a call; None: it can."""
    if call.softcap is not None:
        return "it has no soft cap"
    if call.bias is not None and not all(isinstance(b.geometry, Distance) for b in call.bands):
        return "it has a bias for bands of distances only"
    return None


class _Bands:
    """The tiles of a call, with rotated queries and keys.

    The keys of several queries are in reverse order: column minus row is then the negative of the
    distance plus a constant, so the mask of a tile is a view of one vector by distance.
    """

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> None:
        self.call, self.queries, self.keys = call, query.shape[2], key.shape[2]
        self.reverse = self.queries > 1
        self.query, self.value = query, self.ordered(value)
        self.of_band: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.unrotated = query, self.ordered(key)
        self.key, self.dtype = key, products.wide(query)

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Keys in the order of the masks, or back."""
        return x.flip(2) if self.reverse else x

    def rotated(self, number: int, band: RotatedBand) -> tuple[torch.Tensor, torch.Tensor]:
        if number not in self.of_band:
            q, k = self.unrotated
            q = q if band.query is None else self.call.pairs.rotate(self.query, band.query)
            k = k if band.key is None else self.ordered(self.call.pairs.rotate(self.key, band.key))
            self.of_band[number] = q, k
        return self.of_band[number]

    def tiles(self) -> Iterator[tuple[int, slice, slice, torch.Tensor | None]]:
        """The band, the queries, the keys (as they are ordered) and the mask of every tile."""
        start, by_distance = self.call.start, {}
        for row in range(0, self.queries, ROWS):
            rows = slice(row, min(row + ROWS, self.queries))
            count, last = rows.stop - row, self.keys - self.queries + rows.stop
            for number, band in enumerate(self.call.bands):
                every = extent(band.geometry, count, last, start)
                if every.stop <= every.start:
                    continue
                first = start + last - count
                whole = seen_by_all(band.geometry, first, start + last - 1, every, start)
                if whole.stop - whole.start < min(ROWS, every.stop - every.start):
                    whole = slice(every.start, every.start)
                parts = (
                    (every.start, whole.start),
                    (whole.start, whole.stop),
                    (whole.stop, every.stop),
                )
                for index, (low, high) in enumerate(parts):
                    if high <= low:
                        continue
                    mask = None
                    if self.call.bias is not None or index != 1:
                        if isinstance(band.geometry, Distance) and number not in by_distance:
                            by_distance[number] = self._by_distance(band.geometry)
                        mask = self._mask(band.geometry, by_distance.get(number), rows, low, high)
                    at = (
                        slice(self.keys - high, self.keys - low)
                        if self.reverse
                        else slice(low, high)
                    )
                    yield number, rows, at, mask

    def _by_distance(self, geometry: Distance) -> torch.Tensor:
        """What the logits get at the distances from ``-ROWS`` on, ``[heads or 1, distances]``."""
        bias = self.call.bias
        distance = torch.arange(-ROWS, self.keys, device="cpu")
        made = torch.zeros(1, len(distance), dtype=self.dtype, device="cpu")
        if bias is not None:
            made = bias.to(self.dtype)[:, distance.clamp(0, bias.shape[1] - 1)]
        return made.masked_fill(~geometry.sees(distance, torch.zeros_like(distance)), _HIDES)

    def _mask(
        self, geometry: Geometry, values: torch.Tensor | None, rows: slice, low: int, high: int
    ) -> torch.Tensor:
        """Added to the logits of a tile, ``[1, heads or 1, rows, keys]``."""
        at = self.keys - self.queries + rows.start
        if values is None:
            size, start = rows.stop - rows.start, self.call.start
            return _hidden(geometry, start + at, size, start + low, high - low, self.dtype)
        if not self.reverse:
            return values[:, None, ROWS + at - high + 1 : ROWS + at - low + 1].flip(2)[None]
        first = ROWS + at - high + 1  # the distance from the first query to the last key
        part = values[:, first : first + rows.stop - rows.start + high - low - 1]
        return part.unfold(1, high - low, 1)[None]


@functools.lru_cache(maxsize=64)
def _hidden(
    geometry: Geometry, query: int, queries: int, key: int, keys: int, dtype: torch.dtype
) -> torch.Tensor:
    """The mask of a tile of reversed keys, which depends on more than the distance."""
    with torch.inference_mode(False):  # kept for calls that train as well
        t = torch.arange(query, query + queries, device="cpu")[:, None]
        s = torch.arange(key + keys - 1, key - 1, -1, device="cpu")
        mask = torch.zeros(queries, keys, dtype=dtype, device="cpu")
        return mask.masked_fill_(~geometry.sees(t, s), _HIDES)[None, None]


def compute(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, ``[batch, heads, queries, columns]`` and without columns."""
    (batch, heads, queries, columns), bands = query.shape, _Bands(query, key, value, call)
    total = query.new_zeros(batch, queries, heads, columns, dtype=bands.dtype).transpose(1, 2)
    lse = query.new_full((batch, heads, queries), -torch.inf, dtype=bands.dtype)
    if call.sinks is not None:  # a sink acts as a key without a value
        lse = lse.maximum(call.sinks[:, None].to(lse))
    for number, rows, keys, mask in bands.tiles():
        q, k = bands.rotated(number, call.bands[number])
        out, new = kernel(
            q[:, :, rows], k[:, :, keys], bands.value[:, :, keys], attn_mask=mask, scale=call.scale
        )
        if mask is not None:
            new = new.masked_fill(new < _HIDES / 2, torch.finfo(new.dtype).min)
        old = lse[:, :, rows]
        total[:, :, rows].lerp_(out.to(total.dtype), torch.sigmoid(new - old)[..., None])
        lse[:, :, rows] = torch.logaddexp(old, new)
    blind = lse <= _HIDES / 2  # queries that see no key
    if bool(blind.any()):
        total.masked_fill_(blind[..., None], 0)
    return total.to(query.dtype), lse


def differentiate(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    bands = _Bands(query, key, value, call)
    # A query that sees nothing gets no gradient: against +inf every weight is zero.
    lse = lse.masked_fill(lse <= _HIDES / 2, torch.inf)
    wide = bands.dtype
    grad_value = torch.zeros_like(value, dtype=wide)
    grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, rows, keys, mask in bands.tiles():
        q, k = bands.rotated(number, call.bands[number])
        if number not in grads:
            grads[number] = torch.zeros_like(query, dtype=wide), torch.zeros_like(key, dtype=wide)
        of_query, of_key = grads[number]
        made = kernel_backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], bands.value[:, :, keys],
            out[:, :, rows], lse[:, :, rows], 0.0, False, attn_mask=mask, scale=call.scale,
        )  # fmt: skip
        of_query[:, :, rows].add_(made[0])
        of_key[:, :, keys].add_(made[1])
        grad_value[:, :, keys].add_(made[2])
    total = [torch.zeros_like(x, dtype=wide) for x in (query, key)]
    for number, (of_query, of_key) in grads.items():
        band = call.bands[number]
        for into, x, by in ((0, of_query, band.query), (1, bands.ordered(of_key), band.key)):
            total[into] += x if by is None else call.pairs.rotate(x, (by[0], -by[1]))
    return (
        total[0].to(query.dtype), total[1].to(key.dtype),
        bands.ordered(grad_value).to(value.dtype),
    )  # fmt: skip
