"""A patch's state of an attention module, and steps: what its layers share in a forward.

A compiled graph must work for every step of a sequence, so all that depends on values is computed
from tensors there: positions, the number of filled slots, and padding. Eager steps with few queries
do this, too, to read no values on a GPU. Other forwards run eagerly, which breaks the graph.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_ext.attention import bands as plain
from rope_ext.attention import decode, dispatch
from rope_ext.attention.call import Call, Places, RotatedBand, Rotation, each_table, part_of, wide
from rope_ext.attention.runs import BACK, Run, goes_back, within
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.geometry import Distance
from rope_ext.position import learned
from rope_ext.position.forward import FEW, PositionForward, in_cache, once
from rope_ext.position.layers import KeyProjection, Layout
from rope_ext.position.map import BandRotations, Decay, PositionMap, RotationTable
from rope_ext.position.masks import BatchMask, clipped, shown
from rope_ext.rotary import context

WHY = (
    "a position method compiles whole where the cache is empty or a StaticCache, without "
    "gradients through padding; see docs/limits.md"
)
GAPS = (
    "there is padding between the tokens of a row, where a position method in tensors would look "
    "for near keys in the wrong places; pad on the left (padding_side='left' of the tokenizer)"
)
BEYOND = (
    "the tokens of a row lie further apart by position than there are slots for them, and for as "
    "many distances a compiled bias is known; give them position ids that count one by one"
)


def traced(position_map: PositionMap, given: dict[str, Any]) -> PositionForward | None:
    """Create the forward for these arguments in tensors; None if tensors cannot express it."""
    if _reads_values(position_map, given):
        return None
    rows, count = context.shape_of(given)
    cache = context.cache_among(given)
    positions = given.get("position_ids")
    mask = context.mask_of_decoder(given.get("attention_mask"))
    forward = in_cache(position_map, cache, rows=rows, tokens=count)
    if forward is None:  # a cache that is neither empty nor static, or lies on another device
        return None
    padding = mask
    if isinstance(mask, BatchMask):
        if not mask.plain:  # packed documents, or a mask of another kind
            return None
        padding = mask.valid
    if padding is not None and padding.ndim != 2:  # whether it is causal depends on its values
        return None
    # Then a graph may assume tokens 0, 1, 2, ... of one sequence in every row.
    regular = isinstance(forward.filled, int) and mask is None and positions is None
    if not regular and not _counts_one_by_one(cache, mask, positions):
        return None
    if not regular and count > FEW and torch.is_grad_enabled():  # its operator has no gradients
        return None
    query_span = position_map.query_span
    if query_span is not None or position_map.encoding.scored():
        regular = False  # kernels for many queries do not support these as tensors
        if count > min(FEW, query_span or FEW):  # plain operations have all logits at once
            return None
    forward.regular = regular
    forward.exported = context.is_exporting()
    if padding is not None:
        forward.pad(padding)
    return forward


def _reads_values(position_map: PositionMap, given: dict[str, Any]) -> bool:
    """Whether the patch or the caller needs numbers that a graph does not know."""
    encoding = position_map.encoding
    if encoding.computes_positions() or encoding.entered or position_map.include_sliding:
        return True
    return context.forward_context.look is not None or bool(given.get("output_attentions"))


def _counts_one_by_one(cache: Any, mask: Any, positions: Tensor | None) -> bool:
    """Whether positions are one sequence per row on one axis, which the graph then asserts."""
    if positions is not None and positions.ndim > 2:
        return False
    # Positions without a mask and a cache may be those of several documents.
    return cache is not None or mask is not None


class Dense(NamedTuple):
    """One call of an attention layer, for plain operations."""

    query: Tensor  # [rows, heads, queries, columns], with its temperature
    key: Tensor  # [rows, kv_heads, keys, columns]
    call: Call  # with rotations for one row, or [rows, 1, tokens, pairs]
    places: Places

    def weights(self, queries: slice = slice(None)) -> Tensor:
        """Return attention weights of some queries, ``[rows, heads, queries, keys]``."""
        bands = [
            RotatedBand(band.geometry, part_of(band.query, queries), band.key)
            for band in self.call.bands
        ]
        at = self.places
        mask = at.mask
        if mask is not None and mask.shape[-2] != 1:  # else it is the same for all queries
            mask = mask[..., queries, :]
        newest = None if at.newest is None else at.newest[queries]
        places = Places(query=at.query[..., queries], key=at.key, mask=mask, newest=newest)
        call = replace(self.call, bands=bands)
        query = self.query[:, :, queries]
        return plain.attend(query=query, key=self.key, value=None, call=call, places=places)


def _seeing_ahead(
    position_map: PositionMap, rotations: BandRotations, ahead: int, by_distance: bool
) -> BandRotations:
    """Return them for a mask that shows queries up to ``ahead`` later tokens, as within an image.

    Later keys get the rotations of the nearest keys before a query. ``by_distance``: a bias or a
    decay depends on the distance, and is not defined for later keys.
    """
    if ahead == 0:
        return rotations
    farthest: float = 0
    seeing = []
    for band in rotations:
        geometry = band.geometry
        if isinstance(geometry, Distance) and geometry.first == 0 and not by_distance:
            farthest = math.inf if geometry.last is None else geometry.last - 1
            geometry = replace(geometry, first=-ahead)
        seeing.append(band._replace(geometry=geometry))
    if ahead > farthest:
        wider = "choose a larger window, or " if farthest else ""
        raise UnsupportedModelError(
            f"the attention mask shows a token another one that is {ahead} tokens after it (the "
            f"tokens of an image, or a prompt that is read in both directions), and "
            f"{position_map.named} can express {farthest} here; {wider}{position_map.instead}"
        )
    return seeing


@dataclass(eq=False)
class Layer:
    """A patch's state of an attention module."""

    map: PositionMap
    layout: Layout | None = None  # None: not changed by the map
    number: int = 0  # index of the layout, since graphs cannot use objects as keys
    window: int | None = None  # tokens that it attends to as trained; None: positions change
    biased: nn.Module | None = None  # the attention module or decoder with its bias, if any
    keys: KeyProjection | None = None  # of the attention module, if the bias uses it

    def __post_init__(self) -> None:
        self.rotations: BandRotations = []
        if self.layout is not None:
            self.rotations = self.map.rotations(self.layout, self.window)

    @property
    def rotations_both_ways(self) -> BandRotations:
        """The rotations of a forward in both directions."""
        if self.layout is None:
            return []
        return self.map.rotations(self.layout, self.window, both=True)

    def __reduce__(self) -> tuple[Any, ...]:  # rotations contain functions, which do not pickle
        return Layer, (self.map, self.layout, self.number, self.window, self.biased, self.keys)

    def projection(self, module: nn.Module, like: Tensor) -> Tensor | None:
        """Return the key projection of the attention module, if the bias uses it."""
        if self.keys is None:
            return None
        return self.keys.weight(module, like.device, like.dtype)

    def adding(self, layer_call: "LayerCall", forward: PositionForward) -> Call:
        """Return the attention call with this layer's bias or scores, for all distances."""
        call = layer_call.call
        holder = self.biased
        if holder is None:
            return call
        module = layer_call.module
        if forward.replica is not None:  # of nn.DataParallel, with parameters of its own
            holder = module if hasattr(module, learned.BIAS) else forward.replica
        bias = getattr(holder, learned.BIAS)  # looked up each time, since peft may wrap it
        query = layer_call.query
        like = {"device": query.device, "dtype": wide(query)}
        projection = self.projection(module, query)
        # The first argument by position, since peft's wrapper takes one. No modules: accelerate
        # moves all arguments to the device of an offloaded module.
        added = bias(forward.distances, **like, projection=projection, both=forward.both)
        return replace(call, **added)


class LayerCall(NamedTuple):
    """One call of the attention function by a layer."""

    module: nn.Module
    layer: Layer | None  # None: not on a patched decoder
    query: Tensor  # [rows, heads, queries, columns]
    key: Tensor  # [rows, kv_heads, keys, columns]
    value: Tensor
    call: Call  # without bands and bias
    mask: Any  # a BatchMask, or the mask of an unpatched layer
    dropout: float
    more: dict[str, Any]  # the layer's further arguments


class Step:
    """State that layers of one layout share in a forward, on one device.

    Never synchronizes with a GPU if it is traced, or continues a cache by few queries without mask.
    ``offset`` is the slot of the first key, for caches that keep only the last ones; ``mask`` is
    given if the forward is not traced. ``whole``: :meth:`dense` is needed, also if there are runs.

    What does not depend on the layer is computed in the first of them, and kept by dtype.
    """

    runs: list[Run] | None = None  # all queries in runs of consecutive tokens, if they are
    seen: Tensor | None = None  # [rows or 1, heads or 1, queries, keys]; None: earlier keys

    def __init__(
        self,
        forward: PositionForward,
        layer: Layer,
        offset: int = 0,
        mask: BatchMask | None = None,
        whole: bool = False,
    ) -> None:
        self.forward = forward
        self.rotations = layer.rotations
        self.offset = offset
        self.tempered = layer.window is None
        query_span = forward.map.query_span
        self.few = not forward.regular and forward.tokens <= min(FEW, query_span or FEW)
        self._bands_of_runs: dict[torch.dtype, list[tuple[Run, list[RotatedBand]]]] = {}
        self._bands: dict[tuple[torch.dtype, bool], list[RotatedBand]] = {}
        self._scales: dict[torch.dtype, Tensor | None] = {}
        self._places: Places | None = None
        self._ranges: decode.Ranges | None = None
        if mask is None:
            return
        if forward.both:
            self.rotations = layer.rotations_both_ways
            self._see_both_ways(mask, whole)
        else:
            decays = forward.map.query_span is not None
            self._see_earlier(mask, whole, by_distance=decays or layer.biased is not None)

    def _see_earlier(self, mask: BatchMask, whole: bool, by_distance: bool) -> None:
        """Set the runs of a causal forward, or the keys that its queries see."""
        forward = self.forward
        documents = forward.documents is not None
        near = clipped(self.rotations, mask.window)
        if near is not None and mask.causal and not whole and (documents or not self.few):
            self.runs = mask.runs(self.offset)
        # Runs count by one, and a continued cache was checked by `locate`. Otherwise a token whose
        # position goes back would see later tokens as near ones.
        unchecked = mask.given is None and not documents and forward.begins and self.runs is None
        if unchecked and bool(goes_back(mask.forward.key, mask.forward.real())):
            raise UnsupportedModelError(BACK)
        if near is not None:
            self.rotations = near
        # Else geometry and order of the slots already say what a query sees.
        if self.runs is None and (near is None or not mask.causal or documents):
            seen = mask.dense_on(forward.device)
            self.rotations = _seeing_ahead(
                forward.map, self.rotations, ahead=mask.ahead, by_distance=by_distance
            )
            if seen is not None:
                first = self.offset - mask.offset  # the mask may have keys that this layer dropped
                self.seen = shown(seen[..., first : forward.room - mask.offset])

    def _see_both_ways(self, mask: BatchMask, whole: bool) -> None:
        """Set the runs of a forward in both directions, or the keys that its queries see."""
        forward = self.forward
        window = (mask.arguments or {}).get("local_size")
        if mask.causal and window is not None:
            raise UnsupportedModelError(
                f"{forward.map.named} is called in both directions, and the layers with a window "
                f"of {window} tokens still get causal masks; set config.is_causal = False"
            )
        if mask.whole and not whole:
            self.runs = mask.runs()
        if self.runs is not None:
            return
        seen = None
        if not mask.whole:
            seen = mask.dense_on(forward.device)
        if seen is not None:
            seen = shown(seen[..., : forward.room])
        if forward.documents is not None:  # transformers' masks do not separate them here
            numbers = forward.documents.to(forward.device)
            same = (numbers[:, None, :, None] == numbers[:, None, None]) & forward.real()[:, None]
            seen = same if seen is None else seen & same
        self.seen = seen

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Compute attention: for few queries on a GPU, in runs, in a graph, or from positions.

        Tensors are ``[rows, heads, tokens, columns]``, as the result.
        """
        forward = self.forward
        if self.runs is not None:
            query = self._scaled(query)
            bands = self._in_runs(wide(query))
            calls = [(run, replace(call, bands=of_run)) for run, of_run in bands]
            return dispatch.attend_runs(query, key, value, found=calls, kernel=forward.map.kernel)
        if forward.traced and not self.few:
            return self._many(query, key, value, call=call)
        if self._has_kernel(query, key, value, call=call):
            return decode.attend(query, key, value, call=call, ranges=self._seen_ranges())
        dense = self.dense(query, key, call)
        return plain.attend(dense.query, dense.key, value, call=dense.call, places=dense.places)

    def _in_runs(self, dtype: torch.dtype) -> list[tuple[Run, list[RotatedBand]]]:
        """Return the runs with their bands, split where queries have to be rotated together."""
        banded = self._bands_of_runs.get(dtype)
        if banded is not None:
            return banded
        banded = []
        device = self.forward.device
        query_span = self.forward.map.query_span
        for run in within(self.runs or [], query_span):
            end = run.start + run.keys.stop - run.keys.start
            begin = end - (run.queries.stop - run.queries.start)
            # Factors of a decay stay representable only near its origin.
            origin = (begin + end - 1) // 2 if query_span else 0
            bands = [
                RotatedBand(
                    geometry=band.geometry,
                    query=band.query.between(begin, end, device=device, dtype=dtype, origin=origin),
                    key=band.key.between(run.start, end, device=device, dtype=dtype, origin=origin),
                )
                for band in self.rotations
            ]
            banded.append((run, bands))
        self._bands_of_runs[dtype] = banded
        return banded

    def _many(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Compute attention for many queries in a graph."""
        forward = self.forward
        query = self._scaled(query)
        call = replace(call, bands=self._rotated(wide(query)))
        if forward.regular:  # tokens 0, 1, 2, ...
            return dispatch.attend(query, key, value, call=call, kernel=forward.map.kernel)
        real = forward.real()
        if call.bias is not None and forward.begins and call.bias.shape[1] >= forward.room:
            # The bias of this graph ends at the last slot, and larger distances would repeat it.
            # Not among padding, whose positions are below 0.
            farthest = forward.key.where(real, 0).amax(1, keepdim=True)
            nearest = forward.key.where(real, farthest).amin(1, keepdim=True)
            torch._assert_async((farthest - nearest < forward.room).all(), BEYOND)
        sequences = real.long() - 1  # 0, or -1 without a token
        first = torch.as_tensor(forward.filled)
        at = [forward.key, sequences, first]
        return dispatch.attend_encoded(
            query, key, value, call=call, at=at, kernel=forward.map.kernel
        )

    def dense(self, query: Tensor, key: Tensor, call: Call) -> Dense:
        """Return the call for plain operations, whose logits are computed for all slots at once."""
        forward = self.forward
        dtype = wide(query)
        query_span = forward.map.query_span
        span = forward.distances if forward.begins else forward.tokens
        if query_span is not None and span > query_span:
            # Float64 represents the factors of a decay at this distance from their origin.
            query = query.double()
            key = key.double()
            dtype = torch.float64
            if span > Decay.MOST_SPANS * query_span:
                raise UnsupportedModelError(
                    f"positions of one forward lie {span} tokens apart, too far for the decay of "
                    f"{forward.map.named}; give it position ids that are at most "
                    f"{Decay.MOST_SPANS * query_span} apart"
                )
        call = replace(call, bands=self._rotated(dtype, by_head=True))
        return Dense(query=self._scaled(query), key=key, call=call, places=self._at_slots())

    def _has_kernel(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
        """Whether :mod:`rope_ext.attention.decode` supports a call."""
        forward = self.forward
        if decode.refusal(query, value, call.pairs) is not None:
            return False
        if forward.tokens > FEW or self.seen is not None or forward.map.kernel == "reference":
            return False
        if forward.both or forward.gaps:
            return False
        if call.scores is not None or forward.map.query_span is not None:
            return False
        if forward.begins:  # positions may jump, but the kernel treats them as slots
            return False
        tensors = (query, key, value, call.sinks, call.bias)
        learns = any(x is not None and x.requires_grad for x in tensors)
        return not (torch.is_grad_enabled() and learns)

    def _seen_ranges(self) -> decode.Ranges:
        """Return the slots that every query sees in each band, for the kernel of few queries."""
        if self._ranges is not None:
            return self._ranges
        forward = self.forward
        t = forward.query
        origin = forward.origin()
        if forward.padding is not None and not forward.reads:  # otherwise `locate` checked it
            gaps = (forward.slots() - origin != forward.key) & forward.real()
            torch._assert_async(~gaps.any(), GAPS)
        filled = forward.filled
        if isinstance(filled, int):  # filled on the device, without a copy
            filled = torch.full((1,), filled, device=forward.device)
        bands = [
            RotatedBand(
                geometry=band.geometry,
                query=self._at(band.query, t, torch.float32),
                key=self._everywhere(band.key),
            )
            for band in self.rotations
        ]
        self._ranges = decode.ranges_of(
            bands=bands,
            t=t,
            origin=origin[:, 0] - self.offset,
            filled=filled.view(1) - self.offset,
            temperature=self._temperature(torch.float32),
        )
        return self._ranges

    def _at(
        self, by: RotationTable | Decay, t: Tensor, dtype: torch.dtype, origin: Any = 0
    ) -> Rotation:
        """Return the rotation of tokens at ``t``, ``[rows or 1, tokens, pairs]``.

        Taken from the table where all positions are known to be below the room, its length.
        """
        counted = not self.forward.begins and self.forward.shown is None
        if by.idle or self.forward.traced or isinstance(by, Decay) or not counted:
            return by.at(t, dtype, origin)
        table = by.between(0, self.forward.room, device=t.device, dtype=dtype)
        return each_table(table, lambda x: x.expand(*t.shape, -1) if len(x) == 1 else x[t.clamp(0)])

    def _everywhere(self, by: RotationTable | Decay) -> Rotation:
        """Return the rotation of all positions below the room, float32, ``[room, pairs]``."""
        room = self.forward.room
        device = self.forward.device
        if self.forward.traced:
            return by.at(torch.arange(room, device=device), torch.float32)
        table = by.between(0, room, device=device, dtype=torch.float32)
        return each_table(table, lambda x: x.expand(room, -1).contiguous())

    def _temperature(self, dtype: torch.dtype) -> Tensor | None:
        """Return the factor of every query, ``[rows or 1, tokens]``; None: 1."""
        if not self.tempered:
            return None
        return self.forward.map.temperature(self.forward.tempered, dtype)

    def _scaled(self, query: Tensor) -> Tensor:
        """Multiply queries by their temperature, in the dtype of logits."""
        dtype = wide(query)
        if dtype not in self._scales:
            scale = self._temperature(dtype)
            self._scales[dtype] = None if scale is None else scale[:, None, :, None]
        scale = self._scales[dtype]
        return query if scale is None else (query * scale).to(query.dtype)

    def _rotated(self, dtype: torch.dtype, by_head: bool = False) -> list[RotatedBand]:
        """Return the bands, with rotations of shape ``[rows or 1, tokens, pairs]``.

        ``by_head``: with a dimension for heads, ``[rows, 1, tokens, pairs]``, or without that of
        rows if all rows are equal.
        """
        rotated = self._bands.get((dtype, by_head))
        if rotated is not None:
            return rotated
        query = self.forward.query
        key = self.forward.key[:, self.offset :]
        origin: Any = 0
        if self.forward.map.query_span is not None and by_head:  # of a decay, in each row's middle
            origin = (query.amin(1, keepdim=True) + query.amax(1, keepdim=True)) // 2
        flat: list[Tensor] = []
        for band in self.rotations:
            flat += self._at(band.query, t=query, dtype=dtype, origin=origin) or ()
            flat += self._at(band.key, t=key, dtype=dtype, origin=origin) or ()
        if by_head:
            # One operator for all tables keeps inductor from recomputing them in every layer.
            flat = [x[0] if len(x) == 1 else x[:, None] for x in once(flat)]
        elif self.forward.regular:
            flat = [x[0] for x in flat]
        tables = iter(flat)  # cosine and sine of each rotation, in the order of the loop above
        rotated = []
        for band in self.rotations:
            of_query = None if band.query.idle else (next(tables), next(tables))
            of_key = None if band.key.idle else (next(tables), next(tables))
            rotated.append(RotatedBand(geometry=band.geometry, query=of_query, key=of_key))
        self._bands[dtype, by_head] = rotated
        return rotated

    def _at_slots(self) -> Places:
        """Return the positions of queries and of the keys from ``offset`` on, and what is seen."""
        if self._places is None:
            forward = self.forward
            places = Places.in_slots(
                query=forward.query,
                key=forward.key[:, self.offset :],
                real=forward.real()[:, self.offset :],
                filled=forward.filled - self.offset,
                both=forward.both,
            )
            if self.seen is not None:  # a mask decides alone, also about later slots
                places = replace(places, mask=self.seen, newest=None)
            self._places = replace(places, visible={})
        return self._places
