"""Attention of layers where a forward is known by tensors, and which graphs can have one.

A graph must serve every step of a sequence, so everything that depends on values follows from
tensors here: positions, the number of filled slots, and the padding. Eager steps with few queries
use this, too: on a GPU they read nothing. Forwards that tensors cannot express run eagerly, which
breaks the graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from rope_ext.attention import bands as plain
from rope_ext.attention import decode, dispatch
from rope_ext.attention.call import Call, Places, RotatedBand, Rotation, each_table
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.geometry import Distance
from rope_ext.position.forward import BACK, FEW, PositionForward, keys_of, once, whole
from rope_ext.position.layers import Layout
from rope_ext.position.map import PositionMap
from rope_ext.position.masks import BatchMask, clipped
from rope_ext.position.tables import BandRotations, Decay, RotationTable
from rope_ext.rotary import calls
from rope_ext.rotary.context import UNKNOWN, cache_among, forward_context, is_paged

WHY = (
    "a position method compiles whole where the cache is empty or a StaticCache, without "
    "gradients through padding; see docs/limits.md"
)


APART = (
    "there is padding between the tokens of a row, where a position method in tensors would look "
    "for near keys in the wrong places; pad on the left (padding_side='left' of the tokenizer)"
)
BEYOND = (
    "the tokens of a row lie further apart by position than there are slots for them, and for as "
    "many distances a compiled bias is known; give them position ids that count one by one"
)


class LayoutRotations(NamedTuple):
    """The rotations of all layers of one layout.

    Args:
        number: index of the layout, since a graph cannot use an object as a key.
        rotations: see :meth:`PositionMap.rotations`.
        tempered: whether queries get the temperature of the map.
    """

    number: int
    rotations: BandRotations
    tempered: bool = True

    def temperature(
        self, position_map: PositionMap, t: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """See :meth:`PositionMap.temperature`."""
        return position_map.temperature(t, dtype) if self.tempered else None


def rotations_of(
    position_map: PositionMap, number: int, layout: Layout, window: int | None = None
) -> LayoutRotations:
    """The rotations of a layout; with ``window``, of layers that stay as they are within one."""
    if window is None:
        return LayoutRotations(number, position_map.rotations(layout))
    nothing = RotationTable(0, 0, layout.pair[:0].double(), layout.pair[:0])
    return LayoutRotations(number, [(Distance(0, window), nothing, nothing)], tempered=False)


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
        if count > FEW and torch.is_grad_enabled():
            return None
    if reach is not None or (encoding is not None and encoding.scored()):
        regular = False  # kernels for many queries cannot take these in tensors
        if count > min(FEW, reach or FEW):
            return None
    context.regular, context.exported = regular, calls.is_exporting()
    if padding is not None:
        context.pad(padding)
    return context


def _in_cache(
    position_map: PositionMap, cache: Any, rows: int, tokens: int
) -> PositionForward | None:
    """A forward of ``tokens`` new tokens after those in a cache, if tensors can express it."""

    def context(filled: Any, room: int) -> PositionForward:
        return PositionForward(position_map, rows, tokens, filled, cache, True, room=room)

    if cache is None:
        return context(0, tokens)
    if not isinstance(cache, Cache) or cache.offloading:
        return None
    layer = whole(cache)
    if layer is None:
        length = cache.get_seq_length()
        return context(0, tokens) if isinstance(length, int) and length == 0 else None
    known, room = keys_of(cache), layer.max_cache_len
    if known is not None and (known.patch != position_map.key or known.counted is not None):
        return None
    if known is None and not calls.is_exporting():
        if layer.is_initialized:
            torch._assert_async(layer.cumulative_length == 0, UNKNOWN)
        return context(0, room)
    # A copy, since the layers increment it in place.
    return context(layer.cumulative_length.clone() if layer.is_initialized else 0, room)


def dense_mask(context: PositionForward, mask: BatchMask) -> torch.Tensor | None:
    """The mask of a layer that the map leaves alone; None: causal."""
    if mask.ready is not None:
        return mask.ready
    return sdpa_mask(**{**(mask.arguments or {}), "q_offset": context.filled})


def many(
    forward: PositionForward,
    rotated: LayoutRotations,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """Attention of many queries of a forward that is traced."""
    step = step_of(forward, rotated, 0, None)
    query = step.scaled(query)
    call = replace(call, bands=step.bands(dtype_of(query)))
    if forward.regular:  # tokens 0, 1, 2, ...
        return dispatch.attend(query, key, value, call, forward.map.kernel)
    if call.bias is not None and forward.begins and call.bias.shape[1] >= forward.room:
        apart = (forward.key.amax() - forward.key.amin()) < forward.room
        torch._assert_async(apart, BEYOND)
    sequences = forward.real().long() - 1
    first = torch.as_tensor(forward.filled)
    at = forward.key, sequences, first
    return dispatch.attend_placed(query, key, value, call, at, forward.map.kernel)


def step_of(
    forward: PositionForward, rotated: LayoutRotations, offset: int, window: int | None
) -> Step:
    """What all layers of one layout share in a forward with few queries."""
    name = "step", rotated.number, offset, window
    if name not in forward.made:
        forward.made[name] = Step(forward, rotated, offset, window)
    return forward.made[name]


class Step:
    """What a forward knows by tensors, for the layers of one layout.

    Everything here is computed once, by the first layer that needs it. Nothing waits for a GPU.

    Args:
        forward: the forward, located, on the device of the layers.
        rotated: the rotations of the layout.
        offset: slot of the first key, in caches that keep the last ones.
        window: number of tokens to which the mask limits every token; None: all.
    """

    def __init__(
        self,
        forward: PositionForward,
        rotated: LayoutRotations,
        offset: int,
        window: int | None,
    ) -> None:
        rotations = clipped(rotated.rotations, window)
        assert rotations is not None, "way_of() has asked"
        self.forward, self.rotated, self.rotations = forward, rotated, rotations
        self.offset = offset
        self.made: dict[Any, Any] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Attention of few queries, ``[rows, heads, queries, columns of value]``."""
        if self._has_kernel(query, key, value, call):
            return decode.attend(query, key, value, call, self._ranges())
        call = replace(call, bands=self.bands(dtype_of(query), apart=True))
        return plain.attend(self.scaled(query), key, value, call, self._places())

    def _has_kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> bool:
        """Whether :mod:`rope_ext.attention.decode` can have a call."""
        if call.scores is not None or self.forward.apart:
            return False
        tensors = (query, key, value, call.sinks, call.bias)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return False
        if decode.refusal(query, value, call.pairs) is not None:
            return False
        return not any(isinstance(x, Decay) for _, *pair in self.rotations for x in pair)

    def _ranges(self) -> decode.Ranges:
        """What the queries see by slots, and their rotations."""
        if "ranges" not in self.made:
            forward, t = self.forward, self.forward.query
            if forward.padding is not None and not forward.reads:  # else it is known already
                apart = (forward.slots() - forward.origin() != forward.key) & forward.real()
                torch._assert_async(~apart.any(), APART)
            filled = torch.as_tensor(forward.filled, device=forward.device).view(1) - self.offset
            bands = [
                RotatedBand(geometry, self._at(q, t), self._everywhere(k))
                for geometry, q, k in self.rotations
            ]
            self.made["ranges"] = decode.ranges_of(
                bands,
                t,
                forward.origin()[:, 0] - self.offset,
                filled,
                self.rotated.temperature(forward.map, t, torch.float32),
            )
        return self.made["ranges"]

    def _at(
        self, by: RotationTable | Decay, t: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> Rotation:
        """Rotation of tokens at ``t``, ``[rows or 1, tokens, pairs]``."""
        if by.idle or self.forward.traced or isinstance(by, Decay) or not self._counted():
            return by.at(t, dtype)
        made = by.between(0, self.forward.room, t.device, dtype)
        return each_table(made, lambda x: x.expand(*t.shape, -1) if len(x) == 1 else x[t.clamp(0)])

    def _counted(self) -> bool:
        """Whether positions are below the number of slots."""
        return not self.forward.begins and self.forward.shown is None

    def _everywhere(self, by: RotationTable | Decay) -> Rotation:
        """Rotation of tokens at all positions in the room, float32, ``[room, pairs]``."""
        room, device = self.forward.room, self.forward.device
        if self.forward.traced:
            return by.at(torch.arange(room, device=device), torch.float32)
        made = by.between(0, room, device, torch.float32)
        return each_table(made, lambda x: x.expand(room, -1).contiguous())

    def scaled(self, query: torch.Tensor) -> torch.Tensor:
        """The queries times their temperature."""
        name = "query_scale", dtype_of(query)
        if name not in self.made:
            made = self.rotated.temperature(self.forward.map, self.forward.query, name[1])
            self.made[name] = None if made is None else made[:, None, :, None]
        scale = self.made[name]
        return query if scale is None else (query * scale).to(query.dtype)

    def bands(self, dtype: torch.dtype, apart: bool = False) -> list[RotatedBand]:
        """The bands, with rotations of ``[rows or 1, tokens, pairs]``.

        ``apart``: with a dimension for heads, or none for rows where all rows are alike.
        """
        if (name := ("bands", dtype, apart)) not in self.made:
            query, key, middle = self.forward.query, self.forward.key[:, self.offset :], 0
            if self.forward.map.reach is not None and apart:
                middle = (query.amin(1, keepdim=True) + query.amax(1, keepdim=True)) // 2
            flat: list[torch.Tensor] = []
            for _, *both in self.rotations:
                for by, t in zip(both, (query, key), strict=True):
                    flat += self._at(by.about(middle), t, dtype) or ()
            if apart:
                flat = [x[0] if len(x) == 1 else x[:, None] for x in once(flat)]
            elif self.forward.regular:
                flat = [x[0] for x in flat]
            left = iter(flat)
            self.made[name] = [
                RotatedBand(
                    geometry,
                    *(None if by.idle else (next(left), next(left)) for by in both),
                )
                for geometry, *both in self.rotations
            ]
        return self.made[name]

    def _places(self) -> Places:
        """The positions of queries and keys, and which keys are visible."""
        if "places" not in self.made:
            forward = self.forward
            query, key = forward.query, forward.key[:, self.offset :]
            seen = forward.visible()[..., self.offset :]
            if (
                forward.reads
                and forward.begins
                and bool((seen & (key[:, None] > query[:, :, None])).any())
            ):
                raise UnsupportedModelError(BACK)
            query, key = (x[0] if len(x) == 1 else x for x in (query, key))
            mask = seen[0] if len(seen) == 1 else seen[:, None]
            self.made["places"] = Places(query, key, mask, made={})
        return self.made["places"]


def dtype_of(query: torch.Tensor) -> torch.dtype:
    """The dtype of tables."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32
