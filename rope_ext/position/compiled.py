"""A forward under a position map that ``torch.compile`` traces.

The eager path reads positions and masks and decides, with numbers, which runs of tokens each layer
attends to. A graph must serve every step of a sequence, so here the same follows from tensors: the
log of positions on the cache, the number of its filled slots, and the padding. What cannot be said
in tensors is left to the eager path, at the price of breaks in the graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from rope_ext.attention import dispatch as attention
from rope_ext.attention import placed
from rope_ext.attention.call import Call, RotatedBand, Rotation
from rope_ext.caches import UNKNOWN
from rope_ext.methods.geometry import Distance, Geometry, Sinks
from rope_ext.position.cache import KeyPositions, kept, note, whole
from rope_ext.position.map import PositionMap
from rope_ext.position.segments import BatchMask
from rope_ext.position.tables import RotationTable
from rope_ext.position.tokens import FRACTIONS, stored_rotation
from rope_ext.rotary import calls
from rope_ext.rotary.sites import RotarySite
from rope_ext.under_way import here

WHY = (
    "a position method compiles whole where the cache is empty or a StaticCache, without "
    "gradients through padding; see docs/limits.md"
)


class LayoutRotations(NamedTuple):
    """What the layers of one layout have in common.

    Args:
        number: of the layout; a graph cannot look up an object.
        turns: of :meth:`PositionMap.turns`.
    """

    number: int
    rotations: list[tuple[Geometry, RotationTable, RotationTable]]


def begin(position_map: PositionMap, decoder: nn.Module, given: dict[str, Any]) -> bool:
    """Begin a forward with these arguments of the decoder, if a graph can have it."""
    traced = _understood(position_map, decoder, given)
    if traced is not None:
        traced.exported = calls.is_exporting()
        here.traced.append(traced)
    return traced is not None


def end(position_map: PositionMap, output: Any) -> None:
    """End it; a cache that the decoder made itself gets the positions too."""
    traced = current(position_map)
    here.traced.remove(traced)
    for part in output if isinstance(output, tuple) else (output,):
        cache = getattr(part, "past_key_values", part)
        if isinstance(cache, Cache) and traced.known is not None:
            note(cache, traced.known)


def forget_failed() -> None:
    """Drop forwards of exports that an error has ended: torch runs no hooks after one of these."""
    here.traced[:] = [traced for traced in here.traced if not traced.exported]


def mask(arguments: dict[str, Any]) -> BatchMask:
    """The mask of a forward that is traced."""
    given = arguments.get("attention_mask")
    return given if isinstance(given, BatchMask) else BatchMask(None, arguments)


def current(position_map: PositionMap) -> Traced | None:
    """The innermost forward that is traced under ``position_map``."""
    for traced in reversed(here.traced):
        if traced.map is position_map:
            return traced
    return None


def together(mask: BatchMask, device: torch.device) -> Traced | None:
    """A forward of the eager path in tensors: few queries in rows that are padded differently.

    Row by row each would be a call of its own in every layer. None: it has none of these, or a
    mask that cannot be said in tensors. All layers on a device get the same.
    """
    if device not in mask.together:
        mask.together[device] = _together(mask, device)
    return mask.together[device]


def _together(mask: BatchMask, device: torch.device) -> Traced | None:
    forward = mask.forward
    if forward.padding is None or forward.documents is not None or forward.tokens > placed.FEW:
        return None
    if mask.offset or mask.window is not None or mask.segments is None or len(mask.segments) == 1:
        return None
    if not all(
        isinstance(segment.keys, slice) for segment in mask.segments
    ):  # near keys may be anywhere
        return None
    slots = Slots(forward.rows, forward.tokens, forward.filled, mask.keys)
    traced = Traced(forward.map, slots, forward.padding.to(device), False)
    positions = mask.positions.to(device)
    traced.place(positions[:, forward.filled :], positions)
    return traced


class Slots(NamedTuple):
    """The tokens of a forward among all slots that its layers will see.

    Args:
        rows: batch size.
        tokens: of this forward.
        filled: slots that had a token before: a tensor without dimensions, or 0.
        room: all slots.
        cache: may be None.
        known: what a static cache knows of its keys.
    """

    rows: int
    tokens: int
    filled: torch.Tensor | int
    room: int
    cache: Cache | None = None
    known: KeyPositions | None = None


def _understood(
    position_map: PositionMap, decoder: nn.Module, given: dict[str, Any]
) -> Traced | None:
    """The forward in tensors; None: it cannot be said in them."""
    encoding, reach = position_map.encoding, position_map.reach
    if encoding is not None and encoding.entered:
        return None
    if position_map.local_too or here.look is not None:
        return None
    if given.get("output_attentions") or given.get("cache") is not None:
        return None
    if calls.runs_layers_again(decoder):
        return None
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    cache = given.get("past_key_values")
    slots = _slots(position_map, cache, *tokens.shape[:2])
    if slots is None:
        return None
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, dict):  # one for each kind of layer, made before the forward
        if "full_attention" not in mask:
            return None
        mask = mask["full_attention"]
    padding = mask.valid if isinstance(mask, BatchMask) else mask
    if padding is not None and padding.ndim != 2:
        return None
    fresh = isinstance(slots.filled, int)
    regular = fresh and mask is None and positions is None
    if not regular:
        # Positions without a mask may be those of several documents; others, of several axes.
        if (cache is None and mask is None) or (positions is not None and positions.ndim > 2):
            return None
        if slots.tokens > placed.FEW and torch.is_grad_enabled():
            return None
    if reach is not None or (encoding is not None and encoding.scored()):
        regular = False  # what a kernel for many queries cannot be told in tensors
        if slots.tokens > min(placed.FEW, reach or placed.FEW):
            return None
    return Traced(position_map, slots, padding, regular)


def _slots(position_map: PositionMap, cache: Any, rows: int, tokens: int) -> Slots | None:
    if cache is None:
        return Slots(rows, tokens, 0, tokens)
    if not isinstance(cache, Cache) or cache.offloading:
        return None
    layer = whole(cache)
    if layer is None:
        length = cache.get_seq_length()
        empty = isinstance(length, int) and length == 0
        return Slots(rows, tokens, 0, tokens, cache) if empty else None
    known, room = kept(cache), layer.max_cache_len
    if known is not None and known.key != position_map.key:
        return None
    if calls.is_exporting() and layer.is_initialized:
        return Slots(rows, tokens, layer.cumulative_length.clone(), room, cache)
    if known is None:
        if layer.is_initialized:
            torch._assert_async(layer.cumulative_length == 0, UNKNOWN)
        return Slots(rows, tokens, 0, room, cache)
    if tuple(known.positions.shape) != (rows, room):
        return None
    # A copy, since the layers count on.
    filled = layer.cumulative_length.clone() if layer.is_initialized else 0
    return Slots(rows, tokens, filled, room, cache, known)


class Traced:
    """One forward of the decoder, with everything that depends on the sequence in tensors.

    Args:
        position_map: in force.
        slots: where its tokens go.
        mask: ``[rows, slots]``, zero where there is no token; None: no padding.
        regular: the tokens are the first of their sequences, one after the other.
    """

    def __init__(
        self,
        position_map: PositionMap,
        slots: Slots,
        mask: torch.Tensor | None,
        regular: bool,
    ) -> None:
        self.map, self.regular, self.exported = position_map, regular, False
        self.rows, self.tokens, self.filled, self.room, self.cache, self.known = slots
        self.padding: torch.Tensor | None = None
        if mask is not None:
            self.padding = nn.functional.pad(mask != 0, (0, self.room - mask.shape[1]))
        self.query: torch.Tensor | None = None  # t of the queries, [rows or 1, tokens]
        self.key: torch.Tensor | None = None  # t of all slots
        self.real: torch.Tensor | None = None  # slots with a token, [rows or 1, room]
        self.visible: torch.Tensor | None = None  # of few queries, [rows or 1, tokens, room]
        self._made: dict[Any, Any] = {}

    def locate(self, positions: torch.Tensor) -> None:
        """Take note of the position ids that the model itself uses."""
        if self.query is not None:
            return
        if positions.ndim == 3:  # all axes alike, since none were given
            positions = positions[0]
        if positions.is_floating_point():
            torch._assert_async((positions == positions.floor()).all(), FRACTIONS)
        positions = positions.reshape(-1, positions.shape[-1]).long()
        device = positions.device
        own = torch.arange(self.tokens, device=device)
        places = self._log(positions, own)
        if self.regular:
            self.query = self.key = own[None]
            return
        origin = places[:, :1]
        if self.padding is not None:
            padding = self.padding.to(device)
            places = places.expand(len(padding), -1)  # one row where no positions were given
            origin = places.gather(1, padding.int().argmax(1, keepdim=True))
        self.place(positions - origin, places - origin)
        if self.visible is not None:
            future = self.visible & (self.key[:, None] > self.query[:, :, None])
            torch._assert_async(~future.any(), placed.BACK)

    def place(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Set ``t`` of the queries and of all slots, and what follows from it."""
        self.query, self.key = query, key
        slots = torch.arange(self.room, device=key.device)
        self.real = (slots < self.filled + self.tokens)[None]
        if self.padding is not None:
            self.real = self.real & self.padding.to(key.device)
        if self.tokens <= placed.FEW:
            own = torch.arange(self.tokens, device=key.device)
            self.visible = (slots <= (self.filled + own)[:, None]) & self.real[:, None]

    def _log(self, positions: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Positions of all slots, after the new ones were written on a static cache."""
        if self.cache is None or whole(self.cache) is None:
            self.known = KeyPositions(self.map.key, positions)
            return positions
        if calls.is_exporting():
            return self._counted(positions, self.filled + own)
        if self.known is None:
            empty = torch.zeros(self.rows, self.room, dtype=torch.long, device=positions.device)
            self.known = KeyPositions(self.map.key, empty)
        places = self.known.positions
        places.index_copy_(1, self.filled + own, positions.expand(self.rows, -1))
        return places

    def _counted(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Positions of all slots where nothing but their tokens can be asked, in a program.

        They are counted, and those of the new tokens, in ``slots``, tell from where on.
        """
        real = torch.ones(1, self.room, dtype=torch.bool, device=positions.device)
        if self.padding is not None:
            real = self.padding.to(positions.device)
        counted = real.long().cumsum(1) - 1
        new = real.index_select(1, slots)
        apart = positions - counted.index_select(1, slots)
        first = torch.where(new, apart, apart.new_full((), -(2**62))).amax(1, keepdim=True)
        torch._assert_async(((apart == first) | ~new).all(), placed.COUNTED)
        return counted + first

    def embeddings(self, site: RotarySite, like: Any) -> Any:
        """Cosine and sine with which the model turns its queries and keys."""
        made = stored_rotation(self.map, site, self.query, like)
        if isinstance(made, torch.Tensor):
            return _once([made])[0]
        return tuple(_once(list(made)))

    def dense(self, mask: BatchMask) -> torch.Tensor | None:
        """The mask of a layer that stays as it was; None: plainly causal."""
        if mask.made is not None:
            return mask.made
        return sdpa_mask(**{**mask.arguments, "q_offset": self.filled})

    def attend(
        self,
        rotated: LayoutRotations,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: Call,
    ) -> torch.Tensor:
        """``[rows, heads, queries, columns of value]``."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        query_scale = self._query_scale(dtype)
        if query_scale is not None:
            query = (query * query_scale).to(query.dtype)
        if self.regular:
            key, value = key[:, :, : self.tokens], value[:, :, : self.tokens]
            bands = self._bands(rotated, dtype)
            bands = [RotatedBand(band.geometry, _row(band.query), _row(band.key)) for band in bands]
            call = _with(call, bands)
            return attention.attend(query, key, value, call, self.map.kernel)
        if self.tokens > placed.FEW:
            return placed.attend_many(
                query,
                key,
                value,
                _with(call, self._bands(rotated, dtype)),
                self.key,
                self.real,
                torch.as_tensor(self.filled),
                self.map.kernel,
            )
        if call.scores is not None:
            call = _with(call, self._bands(rotated, dtype))
            return placed.attend_scored(query, key, value, call, self.query, self.key, self.visible)
        few = self._few(rotated, dtype)
        apart = None if call.bias is None else self._distance(call.bias.shape[1])
        return placed.attend_few(query, key, value, call, few, apart)

    def _query_scale(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What multiplies the queries, ``[rows or 1, 1, queries, 1]``."""
        if ("query_scale", dtype) not in self._made:
            made = self.map.temperature(self.query, dtype)
            self._made["query_scale", dtype] = None if made is None else made[:, None, :, None]
        return self._made["query_scale", dtype]

    def _distance(self, known: int) -> torch.Tensor:
        """From every query to every slot, tokens, ``[rows or 1, queries, slots]``.

        ``known``: to how many distances something is added; of fewer than all, the last stays.
        """
        if "distance" not in self._made:
            apart = self.query[:, :, None] - self.key[:, None]
            if known >= self.room:
                beyond = self.visible & (apart >= known)
                torch._assert_async(~beyond.any(), placed.BEYOND)
            (self._made["distance"],) = _once([apart.clamp(min=0)])
        return self._made["distance"]

    def _bands(self, rotated: LayoutRotations, dtype: torch.dtype) -> list[RotatedBand]:
        """The bands, with turns of ``[rows or 1, tokens, pairs]``."""
        if (rotated.number, dtype) not in self._made:
            self._made[rotated.number, dtype] = [
                RotatedBand(seen, of_query.at(self.query, dtype), of_key.at(self.key, dtype))
                for seen, of_query, of_key in rotated.rotations
            ]
        return self._made[rotated.number, dtype]

    def _few(self, rotated: LayoutRotations, dtype: torch.dtype) -> placed.Few:
        """What few queries see."""
        if (rotated.number, dtype) in self._made:
            return self._made[rotated.number, dtype]
        found, shown, middle = [], None, 0
        if self.map.reach is not None:
            middle = (self.query.amin(1, keepdim=True) + self.query.amax(1, keepdim=True)) // 2
        for geometry, of_query, of_key in rotated.rotations:
            of_query, of_key = of_query.about(middle), of_key.about(middle)
            seen = geometry.sees(self.query[:, :, None], self.key[:, None]) & self.visible
            shown = seen if shown is None else shown | seen
            slots, at = self._slots(geometry, of_key), self.key
            if slots is not None:
                self._refuse_gaps()
                at = at.expand(len(slots), -1) if len(at) == 1 else at
                slots = slots.expand(len(at), -1)
                at = at.gather(1, slots)
                seen = seen.expand(len(slots), -1, -1)
                seen = seen.gather(2, slots[:, None].expand(-1, self.tokens, -1))
            hidden = torch.zeros_like(seen, dtype=dtype)
            hidden = hidden.masked_fill(~seen, torch.finfo(dtype).min)
            found.append((hidden, of_query.at(self.query, dtype), of_key.at(at, dtype), slots))
        flat = [x for hidden, q, k, _ in found for x in (hidden, *(q or ()), *(k or ()))]
        sees, *flat = _once([shown.any(-1), *flat])
        left = iter(flat)

        def rotation(made: Rotation) -> Rotation:  # for every head
            return made and (next(left)[:, None], next(left)[:, None])

        parts = [
            placed.Part(next(left), rotation(q), rotation(k), slots) for _, q, k, slots in found
        ]
        self._made[rotated.number, dtype] = placed.Few(parts, sees)
        return self._made[rotated.number, dtype]

    def _refuse_gaps(self) -> None:
        """Fail when it runs if tokens lie further apart by slot than by position."""
        if "gaps" not in self._made:
            own = torch.arange(self.tokens, device=self.key.device)
            by_slot = (self.filled + own)[:, None] - torch.arange(self.room, device=own.device)
            apart = self.query[:, :, None] - self.key[:, None]
            self._made["gaps"] = (self.visible & (apart < by_slot)).any()
            torch._assert_async(~self._made["gaps"], placed.APART)

    def _slots(self, geometry: Geometry, of_key: RotationTable) -> torch.Tensor | None:
        """The slots in which the keys of a band lie, if they are few and must be turned.

        A token is at least as far from another by position as by slot.
        """
        if of_key.idle:
            return None
        if isinstance(geometry, Distance) and geometry.last is not None:
            count = geometry.last + self.tokens - 1
            if count >= self.room:
                return None
            end = torch.as_tensor(self.filled + self.tokens, device=self.query.device)
            first = (end - count).clamp(min=0)
            return (first + torch.arange(count, device=self.query.device))[None]
        if isinstance(geometry, Sinks) and geometry.count < self.room:
            first = torch.zeros(1, 1, dtype=torch.long, device=self.query.device)
            if self.padding is not None:
                first = self.padding.to(self.query.device).int().argmax(1, keepdim=True)
            first = first.clamp(max=self.room - geometry.count)  # each slot once
            return first + torch.arange(geometry.count, device=self.query.device)
        return None


def _row(rotation: Rotation) -> Rotation:
    return rotation and (rotation[0][0], rotation[1][0])


def _once(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """They, which a graph holds rather than to make them again in every layer, for every key."""
    alone = calls.is_exporting() or not torch.compiler.is_compiling()
    return tensors if alone else _held(tensors)


@torch.library.custom_op("rope_ext::held", mutates_args=())
def _held(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in tensors]


@_held.register_fake
def _(tensors):  # noqa: ANN001, ANN202
    return [torch.empty_like(x) for x in tensors]


def _with(call: Call, bands: list[RotatedBand]) -> Call:
    return Call(
        bands,
        call.pairs,
        call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        bias=call.bias,
        scores=call.scores,
    )
