"""Attention of layers where a forward is known by tensors, and which graphs can have one.

A graph must serve every step of a sequence, so everything that the eager path decides with values
follows from tensors here: the positions recorded on the cache, the number of filled slots, and the
padding. The eager path uses this, too, for few queries in rows that are padded differently.
Forwards that tensors cannot express run eagerly, which breaks the graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from rope_ext.attention import decode, placed
from rope_ext.attention import dispatch as attention
from rope_ext.attention.call import Call, RotatedBand, Rotation, each_table
from rope_ext.attention.extent import positions_seen
from rope_ext.methods.geometry import Distance, Geometry, Sinks
from rope_ext.position.cache import kept, whole
from rope_ext.position.forward import PositionForward, once
from rope_ext.position.map import PositionMap
from rope_ext.position.segments import BatchMask
from rope_ext.position.tables import BandRotations, Decay, RotationTable
from rope_ext.rotary import calls
from rope_ext.rotary.caches import UNKNOWN
from rope_ext.rotary.context import cache_among, forward_context, is_paged

WHY = (
    "a position method compiles whole where the cache is empty or a StaticCache, without "
    "gradients through padding; see docs/limits.md"
)


class LayoutRotations(NamedTuple):
    """The rotations of all layers of one layout.

    Args:
        number: index of the layout, since a graph cannot use an object as a key.
        rotations: see :meth:`PositionMap.rotations`.
    """

    number: int
    rotations: BandRotations


def batch_mask(arguments: dict[str, Any]) -> BatchMask:
    """The mask of a forward that is traced."""
    given = arguments.get("attention_mask")
    return given if isinstance(given, BatchMask) else BatchMask(None, arguments)


def traced(
    position_map: PositionMap, decoder: nn.Module, given: dict[str, Any]
) -> PositionForward | None:
    """The forward with these arguments in tensors; None if tensors cannot express it."""
    encoding, reach = position_map.encoding, position_map.reach
    if position_map.computes_positions or (encoding is not None and encoding.entered):
        return None
    if position_map.include_sliding or forward_context.look is not None:
        return None
    if given.get("output_attentions") or is_paged(given):
        return None
    if calls.runs_layers_again(decoder):
        return None
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    cache = cache_among(given)
    rows, count = tokens.shape[:2]
    context = _in_cache(position_map, cache, rows, count)
    if context is None:
        return None
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, dict):  # one per kind of layer, made before the forward
        if "full_attention" not in mask:
            return None
        mask = mask["full_attention"]
    if isinstance(mask, BatchMask) and not mask.plain:
        return None
    padding = mask.valid if isinstance(mask, BatchMask) else mask
    if padding is not None and padding.ndim != 2:
        return None
    fresh = isinstance(context.filled, int)
    regular = fresh and mask is None and positions is None
    if not regular:
        # Positions without a mask may belong to several documents, or have several axes.
        if (cache is None and mask is None) or (positions is not None and positions.ndim > 2):
            return None
        if count > placed.FEW and torch.is_grad_enabled():
            return None
    if reach is not None or (encoding is not None and encoding.scored()):
        regular = False  # kernels for many queries cannot take these in tensors
        if count > min(placed.FEW, reach or placed.FEW):
            return None
    context.regular, context.exported = regular, calls.is_exporting()
    if padding is not None:
        context.pad(padding)
    return context


def _in_cache(
    position_map: PositionMap, cache: Any, rows: int, tokens: int
) -> PositionForward | None:
    """A forward of ``tokens`` new tokens after those in a cache, if tensors can express it."""

    def context(filled: Any, room: int, known: Any = None) -> PositionForward:
        return PositionForward(
            position_map, rows, tokens, filled, cache, True, room=room, known=known
        )

    if cache is None:
        return context(0, tokens)
    if not isinstance(cache, Cache) or cache.offloading:
        return None
    layer = whole(cache)
    if layer is None:
        length = cache.get_seq_length()
        return context(0, tokens) if isinstance(length, int) and length == 0 else None
    known, room = kept(cache), layer.max_cache_len
    if known is not None and known.key != position_map.key:
        return None
    if calls.is_exporting() and layer.is_initialized:
        return context(layer.cumulative_length.clone(), room)
    if known is None:
        if layer.is_initialized:
            torch._assert_async(layer.cumulative_length == 0, UNKNOWN)
        return context(0, room)
    if tuple(known.positions.shape) != (rows, room):
        return None
    # A copy, since the layers increment it in place.
    filled = layer.cumulative_length.clone() if layer.is_initialized else 0
    return context(filled, room, known)


def dense_mask(context: PositionForward, mask: BatchMask) -> torch.Tensor | None:
    """The mask of a layer that the map leaves alone; None: causal."""
    if mask.made is not None:
        return mask.made
    return sdpa_mask(**{**(mask.arguments or {}), "q_offset": context.filled})


class InTensors:
    """Attention of the layers of one layout with the tensors of a forward.

    Args:
        context: the forward, located.
        rotated: the rotations of the layout.
    """

    def __init__(self, context: PositionForward, rotated: LayoutRotations) -> None:
        self.context, self.rotated, self.map = context, rotated, context.map
        self.query, self.key, self.made = context.query, context.key, context.made

    def first_tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """For tokens 0, 1, 2, ... of their sequences."""
        query, dtype = self._scaled(query)
        tokens = self.context.tokens
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        bands = [
            RotatedBand(band.geometry, _row(band.query), _row(band.key))
            for band in self._bands(dtype)
        ]
        return attention.attend(query, key, value, _with(call, bands), self.map.kernel)

    def many(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """For many queries at any positions, which an operator reads when it runs."""
        query, dtype = self._scaled(query)
        context = self.context
        first = torch.as_tensor(context.filled)
        return placed.attend_many(
            query,
            key,
            value,
            _with(call, self._bands(dtype)),
            context.key,
            context.real(),
            first,
            self.map.kernel,
        )

    def scored(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """For few queries with the scores of an encoding."""
        query, dtype = self._scaled(query)
        call, context = _with(call, self._bands(dtype)), self.context
        where = context.query, context.key, context.visible()
        return placed.attend_scored(query, key, value, call, *where)

    def few(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """For few queries on all slots, with the same operations for every row."""
        if self._has_kernel(query, key, value, call):
            return decode.attend(query, key, value, call, self._ranges())
        query, dtype = self._scaled(query)
        apart = None if call.bias is None else self._distance(call.bias.shape[1])
        return placed.attend_few(query, key, value, call, self._few(dtype), apart)

    def _has_kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> bool:
        """Whether :mod:`rope_ext.attention.decode` can have a call."""
        tensors = (query, key, value, call.sinks, call.bias)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return False
        if decode.refusal(query, value, call.pairs) is not None:
            return False
        return not any(isinstance(x, Decay) for _, *pair in self.rotated.rotations for x in pair)

    def _ranges(self) -> decode.Ranges:
        """What the queries see by slots, and their rotations, for all layers of the layout."""
        key = ("ranges", self.rotated.number)
        if key not in self.made:
            context, t = self.context, self.query
            filled = torch.as_tensor(context.filled, device=t.device).view(1)
            origin = torch.zeros(context.rows, dtype=torch.long, device=t.device)
            if context.padding is not None:
                origin = context.padding.to(t.device).int().argmax(1)
            if context.traced:  # eager forwards are in segments, whose tokens count one by one
                apart = torch.arange(context.room, device=t.device) - origin[:, None] != self.key
                torch._assert_async(~(apart & context.real()).any(), placed.APART)
            # Those that rotate keys come first; the order of bands does not matter otherwise.
            bands = [band for band in self.rotated.rotations if not band[2].idle]
            bands += [band for band in self.rotated.rotations if band[2].idle]
            of_row = origin[:, None] if context.padding is not None else 0
            low, high = [], []
            for geometry, *_ in bands:
                first, end = positions_seen(geometry, t)
                first = first.clamp(min=0)
                seen = end > first
                low.append(torch.where(seen, first + of_row, decode.NOTHING))
                high.append(torch.where(seen, end + of_row, 0))
            rotated = 0
            for number, (_, by, _) in enumerate(bands):
                rotated += 0 if by.idle else 1 << number
            temperature = self.map.temperature(t, torch.float32)
            self.made[key] = decode.Ranges(
                torch.stack(low).int(),
                torch.stack(high).int(),
                origin.int(),
                filled.int(),
                decode.stacked([self._at(by, t) for _, by, _ in bands]),
                rotated,
                decode.stacked([self._everywhere(by) for _, _, by in bands if not by.idle]),
                temperature,
            )
        return self.made[key]

    def _at(self, by: RotationTable | Decay, t: torch.Tensor) -> Rotation:
        """Rotation of tokens at ``t``, float32, ``[rows or 1, tokens, pairs]``."""
        if by.idle or self.context.traced:
            return by.at(t, torch.float32)
        made = by.between(0, self.context.room, t.device, torch.float32)
        return each_table(made, lambda x: x.expand(*t.shape, -1) if len(x) == 1 else x[t.clamp(0)])

    def _everywhere(self, by: RotationTable | Decay) -> Rotation:
        """Rotation of tokens at all positions in the room, float32, ``[room, pairs]``."""
        room, device = self.context.room, self.query.device
        if self.context.traced:
            return by.at(torch.arange(room, device=device), torch.float32)
        made = by.between(0, room, device, torch.float32)
        return each_table(made, lambda x: x.expand(room, -1).contiguous())

    def _scaled(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The queries times their temperature, and the dtype of tables."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        query_scale = self._query_scale(dtype)
        if query_scale is not None:
            query = (query * query_scale).to(query.dtype)
        return query, dtype

    def _query_scale(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Factor of the queries, ``[rows or 1, 1, queries, 1]``; None: no factor."""
        if ("query_scale", dtype) not in self.made:
            made = self.map.temperature(self.query, dtype)
            self.made["query_scale", dtype] = None if made is None else made[:, None, :, None]
        return self.made["query_scale", dtype]

    def _distance(self, known: int) -> torch.Tensor:
        """Distance from every query to every slot, tokens, ``[rows or 1, queries, slots]``.

        ``known``: number of distances with a bias. A bias of fewer distances than slots is constant
        beyond the last one; only one for all slots has to cover every distance.
        """
        if "distance" not in self.made:
            apart = self.query[:, :, None] - self.key[:, None]
            if known >= self.context.room:
                beyond = self.context.visible() & (apart >= known)
                torch._assert_async(~beyond.any(), placed.BEYOND)
            (self.made["distance"],) = once([apart.clamp(min=0)])
        return self.made["distance"]

    def _bands(self, dtype: torch.dtype) -> list[RotatedBand]:
        """The bands, with rotations of ``[rows or 1, tokens, pairs]``."""
        if ("bands", self.rotated.number, dtype) not in self.made:
            self.made["bands", self.rotated.number, dtype] = [
                RotatedBand(seen, of_query.at(self.query, dtype), of_key.at(self.key, dtype))
                for seen, of_query, of_key in self.rotated.rotations
            ]
        return self.made["bands", self.rotated.number, dtype]

    def _few(self, dtype: torch.dtype) -> placed.Few:
        """The bands for few queries."""
        if ("few", self.rotated.number, dtype) in self.made:
            return self.made["few", self.rotated.number, dtype]
        found, shown, middle = [], None, 0
        if self.map.reach is not None:
            middle = (self.query.amin(1, keepdim=True) + self.query.amax(1, keepdim=True)) // 2
        for geometry, of_query, of_key in self.rotated.rotations:
            of_query, of_key = of_query.about(middle), of_key.about(middle)
            seen = geometry.sees(self.query[:, :, None], self.key[:, None]) & self.context.visible()
            shown = seen if shown is None else shown | seen
            slots, at = self._slots(geometry, of_key), self.key
            if slots is not None:
                self._refuse_gaps()
                at = at.expand(len(slots), -1) if len(at) == 1 else at
                slots = slots.expand(len(at), -1)
                at = at.gather(1, slots)
                seen = seen.expand(len(slots), -1, -1)
                seen = seen.gather(2, slots[:, None].expand(-1, self.context.tokens, -1))
            hidden = torch.zeros_like(seen, dtype=dtype)
            hidden = hidden.masked_fill(~seen, torch.finfo(dtype).min)
            found.append((hidden, of_query.at(self.query, dtype), of_key.at(at, dtype), slots))
        flat = [x for hidden, q, k, _ in found for x in (hidden, *(q or ()), *(k or ()))]
        sees = self.context.visible().any(-1) if shown is None else shown.any(-1)
        sees, *flat = once([sees, *flat])
        left = iter(flat)

        def rotation(made: Rotation) -> Rotation:  # with a dimension for heads
            return each_table(made, lambda _: next(left)[:, None])

        parts = [
            placed.Part(next(left), rotation(q), rotation(k), slots, self._among(slots))
            for _, q, k, slots in found
        ]
        self.made["few", self.rotated.number, dtype] = placed.Few(parts, sees)
        return self.made["few", self.rotated.number, dtype]

    def _among(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        """See :class:`placed.Part`; ``slots`` are consecutive."""
        if slots is None:
            return None
        count = slots.shape[1]
        index = torch.arange(self.context.room, device=slots.device) - slots[:, :1]
        return index.masked_fill((index < 0) | (index > count), count)

    def _refuse_gaps(self) -> None:
        """Fail at run time if tokens are further apart by slot than by position."""
        if "gaps" not in self.made:
            own = torch.arange(self.context.tokens, device=self.key.device)
            by_slot = (self.context.filled + own)[:, None] - torch.arange(
                self.context.room, device=own.device
            )
            apart = self.query[:, :, None] - self.key[:, None]
            self.made["gaps"] = (self.context.visible() & (apart < by_slot)).any()
            torch._assert_async(~self.made["gaps"], placed.APART)

    def _slots(self, geometry: Geometry, of_key: RotationTable | Decay) -> torch.Tensor | None:
        """The slots of the keys of a band, if they are few and have to be rotated.

        Relies on tokens being at least as far apart by position as by slot.
        """
        if of_key.idle:
            return None
        if isinstance(geometry, Distance) and geometry.last is not None:
            count = geometry.last + self.context.tokens - 1
            if count >= self.context.room:
                return None
            end = torch.as_tensor(
                self.context.filled + self.context.tokens, device=self.query.device
            )
            first = (end - count).clamp(min=0)
            return (first + torch.arange(count, device=self.query.device))[None]
        if isinstance(geometry, Sinks) and geometry.count < self.context.room:
            first = torch.zeros(1, 1, dtype=torch.long, device=self.query.device)
            if self.context.padding is not None:
                first = self.context.padding.to(self.query.device).int().argmax(1, keepdim=True)
            first = first.clamp(max=self.context.room - geometry.count)  # each slot once
            return first + torch.arange(geometry.count, device=self.query.device)
        return None


def _row(rotation: Rotation) -> Rotation:
    return each_table(rotation, lambda table: table[0])


def _with(call: Call, bands: list[RotatedBand]) -> Call:
    return replace(call, bands=bands)
