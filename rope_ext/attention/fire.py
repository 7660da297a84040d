"""FIRE with the flash attention kernel of the CPU: linear memory, one call per block of queries.

The bias of query ``i`` is a piecewise linear network of ``x = near(d) / far(i)``: a sum of units
``w2 relu(w x + b)``. Where the same units are active for all queries of a block, which is almost
everywhere, it is ``A(d) + B(d) / far(i)``: two vectors by distance, which are strided views for a
tile with its rows in reverse order (see :mod:`rope_ext.attention.flash`). Units that are active
for only some of the queries matter in a narrow band of distances, where the bias is corrected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from rope_ext.attention import flash, sizes
from rope_ext.attention.blocked import refuse_second_derivatives
from rope_ext.attention.call import Call
from rope_ext.attention.faster import faster
from rope_ext.encodings.fire import FIREScores
from rope_ext.methods.geometry import Distance


@faster.register
def attend(
    scores: FIREScores,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
) -> torch.Tensor | None:
    """Attention as :class:`Call` describes it; None for calls that need another kernel."""
    plain = call.softcap is None and call.sinks is None and call.bias is None
    everything = [band.geometry for band in call.bands] == [Distance(0, None)]
    rotated = any(band.query or band.key for band in call.bands)
    if query.device.type != "cpu" or not plain or not everything or rotated:
        return None
    if query.shape[-1] != value.shape[-1]:
        return None
    query, key, value = map(flash.packed, (call.scale_query(query), key, value))
    call = replace(call, scores=None, temperature=None)
    queries, keys = query.shape[2], key.shape[2]
    like = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
    near = scores.near(torch.arange(keys, device="cpu").to(like))
    first = call.start + keys - queries  # place of the first query
    alike = math.ceil(scores.reach(like).detach()) - first  # queries with one denominator
    alike = queries if queries == 1 else min(max(alike, 0), queries)
    parts = []
    if alike:
        seen = keys - queries + alike
        bias = scores.network(near[:seen] / scores.far(like.new_tensor([first])))
        part = (query[:, :, :alike], key[:, :, :seen], value[:, :, :seen])
        parts.append(flash.attend(*part, replace(call, bias=bias)))
    if alike < queries:
        places = torch.arange(first + alike, call.start + keys, device="cpu")
        over = 1 / scores.far(places.to(like))
        network = scores.layers(like)
        parts.append(_Rows.apply(query[:, :, alike:], key, value, call.scale, near, over, *network))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@dataclass(frozen=True, eq=False)
class _Bias:
    """The bias of queries that each have a different denominator.

    Args:
        near: numerator of every distance, ``[keys]``.
        over: one over the denominator of every query, ``[queries]``, falling.
        weight, bias: first layer, ``[units]`` each.
        weights, biases: second layer, ``[heads, units]`` and ``[heads]``.
    """

    near: torch.Tensor
    over: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    weights: torch.Tensor
    biases: torch.Tensor

    def block(self, rows: slice) -> _Block:
        """The bias of these queries."""
        rest = len(self.over) - rows.stop
        return _Block(self, rows, len(self.near) - rest)


class _Block:
    """The bias of a block of queries, with its rows in reverse order.

    Args:
        of: the bias of all queries.
        rows: the queries of the block.
        keys: number of keys that the last of them sees.
    """

    def __init__(self, of: _Bias, rows: slice, keys: int) -> None:
        self.of, self.count, self.keys = of, rows.stop - rows.start, keys
        self.rows = rows
        with torch.no_grad():  # distances where units switch, for the first and the last query
            kinks = -of.bias / of.weight
            kinks[~((kinks > 0) | ((kinks == 0) & (of.weight > 0)))] = torch.inf  # or no number
            ends = kinks / of.over[[rows.start, rows.stop - 1]][:, None]
            first, last = torch.searchsorted(of.near[:keys], ends, right=True)
            order = first.argsort()
            self.order = order[first[order] < keys]  # units that switch, by distance
            self.first, self.last = first[self.order], last[self.order]

    @property
    def over(self) -> torch.Tensor:
        """One over the denominators, ``[rows, 1]``."""
        return self.of.over[self.rows].flip(0)[:, None]

    def vectors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` and ``B`` by distance, with the units of the first query; ``[heads, keys]``."""
        of, near = self.of, self.of.near[: self.keys]
        begun = of.bias > 0
        changes = of.weights[:, self.order] * of.weight[self.order].sign()
        counts = torch.diff(
            self.first, prepend=self.first.new_zeros(1), append=self.first.new_tensor([self.keys])
        )

        def by_distance(each: torch.Tensor) -> torch.Tensor:
            start = (of.weights * begun) @ each
            steps = (changes * each[self.order]).cumsum(1)
            pieces = torch.cat((start[:, None], start[:, None] + steps), 1)
            return pieces.repeat_interleave(counts, 1)

        return by_distance(of.bias) + of.biases[:, None], by_distance(of.weight) * near

    def bands(self) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Units that switch within the block, with the distances and the error of ``A + B`` there.

        The error is ``[rows, distances]`` by falling distance, to be multiplied by the weights of
        the unit.
        """
        of = self.of
        for unit, first, last in zip(
            self.order.tolist(), self.first.tolist(), self.last.tolist(), strict=True
        ):
            if first < last:
                near = of.near[first:last].flip(0)
                x = torch.addcmul(of.bias[unit], self.over, near * of.weight[unit])
                yield unit, slice(first, last), F.relu(-of.weight[unit].detach().sign() * x)

    def skewed(self, tile: torch.Tensor, distances: slice) -> torch.Tensor:
        """Those distances of a tile of :meth:`tiles`, ``[heads, rows, distances]``.

        Keys before the first one fall on the unused columns.
        """
        heads, rows, columns = tile.shape
        return tile.as_strided(
            (heads, rows, distances.stop - distances.start),
            (rows * columns, columns - 1, 1),
            tile.storage_offset() + self.keys - distances.stop,
        )

    @torch.no_grad()
    def tiles(
        self, store: torch.Tensor, parts: list[slice]
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """For each group of heads: the heads, their tile in ``store``, and ``B`` as a view.

        A tile is ``[heads, rows, keys + rows]``, with unused columns after the last key, so that a
        row stride shorter by one follows a distance. The view of ``B`` is without them.
        """
        rows, keys = self.count, self.keys
        a, b = (F.pad(x.flip(1), (0, rows - 1)) for x in self.vectors())
        a[:, keys:] = -torch.inf  # later keys
        a, b = (x.unfold(1, keys, 1) for x in (a, b))
        bands = list(self.bands())
        for heads in parts:
            shape = (len(a[heads]), rows, keys + rows)
            tile = store[: math.prod(shape)].view(shape)
            torch.addcmul(a[heads], b[heads], self.over, out=tile[..., :keys])
            for unit, distances, error in bands:
                weights = self.of.weights[heads, unit, None, None]
                self.skewed(tile, distances).addcmul_(weights, error)
            yield heads, tile, b[heads]


def _tiles(
    bias: _Bias, groups: int, most: int
) -> Iterator[tuple[_Block, slice, int, slice, torch.Tensor, torch.Tensor]]:
    """Blocks of ``most`` queries, one query head of some key heads at a time.

    Yields block, key heads, index of the query head within each, query heads, their tile and ``B``.
    """
    rows = min(most, len(bias.over))
    size = rows * (len(bias.near) + rows)
    count = len(bias.weights) // groups
    # Few to save memory, but enough for all threads: the kernel splits a block into thirds.
    each = min(max(sizes.FIRE_NUMBERS // size, -(-2 * torch.get_num_threads() // 3)), count)
    store = bias.near.new_empty(each * size)
    parts = {}
    for head in range(0, count, each):
        of_key = slice(head, min(head + each, count))
        for group in range(groups):
            heads = slice(of_key.start * groups + group, of_key.stop * groups, groups)
            parts[heads.start] = (of_key, group, heads)
    for row in range(0, len(bias.over), rows):
        block = bias.block(slice(row, min(row + rows, len(bias.over))))
        found = block.tiles(store, [heads for *_, heads in parts.values()])
        for heads, tile, slopes in found:
            yield block, *parts[heads.start], tile, slopes


def _grouped(key: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows as ``[batch, kv_heads, groups, queries, columns]``."""
    return [x.unflatten(1, (key.shape[1], -1)) for x in rows]


class _Rows(torch.autograd.Function):
    """Output of queries that each have a different denominator; they are the last of the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        lse = query.new_empty((*query.shape[:3], 1), dtype=bias[0].dtype)
        q, o, m = _grouped(key, query, out, lse)
        for block, of_key, group, _, tile, _ in _tiles(_Bias(*bias), q.shape[2], sizes.FIRE_ROWS):
            at = (slice(None), of_key, group, block.rows)
            k, v = (x[:, of_key, : block.keys] for x in (key, value))
            mask = _mask(block, tile, q)
            new, log = flash.kernel(q[at].flip(-2), k, v, attn_mask=mask, scale=scale)
            o[at], m[at] = new.flip(-2), log[..., None].flip(-2)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, out, lse, *bias)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        refuse_second_derivatives(grad)
        query, key, value, out, lse, *bias = ctx.saved_tensors
        learns = any(ctx.needs_input_grad[4:])
        all_of = _Bias(*(x.detach().requires_grad_() for x in bias))
        grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        of_bias = [torch.zeros_like(x) for x in bias]
        q, o, m, g, of_query = _grouped(key, query, out, lse, grad, grads[0])
        for block, of_key, group, heads, tile, slopes in _tiles(
            all_of, q.shape[2], sizes.FIRE_ROWS_BACKWARD
        ):
            at = (slice(None), of_key, group, block.rows)
            part = (slice(None), of_key, slice(0, block.keys))
            query_rows, out_rows, lse_rows, grad_rows = (x[at].flip(-2) for x in (q, o, m, g))
            rows = (query_rows, out_rows, lse_rows, grad_rows)
            views = (*rows, key[part], value[part], _mask(block, tile, q))
            new_q, new_k, new_v = _backward(ctx.scale, *views)
            of_query[at] += new_q.flip(-2)
            grads[1][part] += new_k
            grads[2][part] += new_v
            if learns:
                of_tile = torch.empty_like(tile)
                of_tile[..., block.keys :] = 0
                of_tile[..., : block.keys] = _of_logits(ctx.scale, *views)
                found = _of_bias(block, heads, of_tile, slopes, all_of)
                for total, x in zip(of_bias, found, strict=True):
                    if x is not None:
                        total += x
        grads = [x.to(query.dtype) for x in grads]
        return *grads, None, *(of_bias if learns else [None] * len(bias))


def _mask(block: _Block, tile: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Mask added to the logits, ``[batch, heads, rows, keys]``, a view."""
    return tile[..., : block.keys].expand(len(q), -1, -1, -1)


def _backward(
    scale: float,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return flash.kernel_backward(
        grad, query, key, value, out, lse[..., 0], 0.0, False, attn_mask=mask, scale=scale
    )


def _of_logits(
    scale: float,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits, ``[kv_heads, rows, keys]``, the sum of the batch."""
    batch = zip(query, out, lse, grad, key, value, mask, strict=True)
    total = flash.of_logits(scale, *next(batch))
    for rows in batch:
        total.add_(flash.of_logits(scale, *rows))
    return total


def _of_bias(
    block: _Block, heads: slice, of_tile: torch.Tensor, slopes: torch.Tensor, bias: _Bias
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the network from the gradient of a tile, which is overwritten."""
    with torch.enable_grad():
        a, b = (x[heads] for x in block.vectors())
        total = (a * _by_distance(of_tile, block.keys)).sum()
        for unit, distances, error in block.bands():
            weights = bias.weights[heads, unit, None, None]
            of_band = block.skewed(of_tile, distances).clone()  # the tile changes below
            total = total + (weights * error * of_band).sum()
        of_over = torch.einsum("hrk,hrk->r", of_tile[..., : block.keys], slopes)
        total = total + (block.over * of_over[:, None]).sum()
        of_tile.mul_(block.over.detach())
        total = total + (b * _by_distance(of_tile, block.keys)).sum()
    leaves = (bias.near, bias.over, bias.weight, bias.bias, bias.weights, bias.biases)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def _by_distance(tile: torch.Tensor, keys: int) -> torch.Tensor:
    """A tile of gradients, summed over its rows by distance, ``[heads, keys]``."""
    _, rows, columns = tile.shape
    # Reading rows at a length shorter by one shifts each row one column to the right.
    flat = tile.flatten(1)[:, : rows * (columns - 1)]
    return flat.unflatten(1, (rows, -1)).sum(1)[:, :keys].flip(1)
