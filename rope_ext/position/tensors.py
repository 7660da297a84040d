"""Shared state of layers with the same layout in a forward, as tensors, for compiled graphs.

A graph must work for every step of a sequence, so everything that depends on values is computed
from tensors: positions, the number of filled slots, and padding. Eager steps with few queries also
use this, to read no values on a GPU. Other forwards run eagerly, which breaks the graph.
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
from rope_ext.position.layers import Layout
from rope_ext.position.map import BandRotations, Decay, PositionMap, RotationTable
from rope_ext.position.masks import BatchMask, clipped, shown
from rope_ext.rotary import context

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


def traced(position_map: PositionMap, given: dict[str, Any]) -> PositionForward | None:
    """Create the forward for these arguments in tensors; None if tensors cannot express it."""
    encoding, reach = position_map.encoding, position_map.reach
    if encoding.computes_positions() or encoding.entered or position_map.include_sliding:
        return None
    if context.forward_context.look is not None or given.get("output_attentions"):
        return None
    rows, count = context.shape_of(given)
    cache, positions = context.cache_among(given), given.get("position_ids")
    mask = context.mask_of_decoder(given.get("attention_mask"))
    forward = in_cache(position_map, cache, rows, count)
    if forward is None or (isinstance(mask, BatchMask) and not mask.plain):
        return None
    padding = mask.valid if isinstance(mask, BatchMask) else mask
    if padding is not None and padding.ndim != 2:
        return None
    regular = isinstance(forward.filled, int) and mask is None and positions is None
    if not regular:
        # Positions without a mask may be of several documents, or have several axes.
        if (cache is None and mask is None) or (positions is not None and positions.ndim > 2):
            return None
        if count > FEW and torch.is_grad_enabled():
            return None
    if reach is not None or encoding.scored():
        regular = False  # kernels for many queries do not support these as tensors
        if count > min(FEW, reach or FEW):
            return None
    forward.regular, forward.exported = regular, context.is_exporting()
    if padding is not None:
        forward.pad(padding)
    return forward


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
        at, mask = self.places, self.places.mask
        mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., queries, :]
        newest = None if at.newest is None else at.newest[queries]
        places = Places(at.query[..., queries], at.key, mask, newest)
        call = replace(self.call, bands=bands)
        return plain.attend(self.query[:, :, queries], self.key, None, call, places)


def _seeing_ahead(
    position_map: PositionMap, rotations: BandRotations, ahead: int, biased: bool
) -> BandRotations:
    """Return them for a mask that shows queries up to ``ahead`` later tokens, as within an image.

    Later keys get the rotations of the nearest keys before a query.
    """
    if ahead == 0:
        return rotations
    reach, seeing = 0, []
    for geometry, *rotated in rotations:
        if isinstance(geometry, Distance) and geometry.first == 0 and not biased:
            reach = math.inf if geometry.last is None else geometry.last - 1
            geometry = replace(geometry, first=-ahead)
        seeing.append((geometry, *rotated))
    if ahead > reach:
        wider = "choose a larger window, or " if reach else ""
        raise UnsupportedModelError(
            f"the attention mask shows a token another one that is {ahead} tokens after it (the "
            f"tokens of an image, or a prompt that is read in both directions), and "
            f"{position_map.named} can express {reach} here; {wider}{position_map.instead}"
        )
    return seeing


@dataclass(eq=False)
class Layer:
    """A patch's state of an attention module."""

    map: PositionMap
    layout: Layout | None = None  # None: not changed by the map
    number: int = 0  # index of the layout, since graphs cannot use objects as keys
    window: int | None = None  # tokens that it attends to as trained; None: positions change
    biased: nn.Module | None = None  # the module with this layer's bias, if any

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
        return Layer, (self.map, self.layout, self.number, self.window, self.biased)

    def adding(self, call: Call, distances: int, like: Tensor, both: bool) -> Call:
        """Return ``call`` with this layer's bias or scores for all distances below a limit.

        ``both``: for attention in both directions.
        """
        if self.biased is None:
            return call
        module = getattr(self.biased, learned.BIAS)  # looked up each time, since peft may wrap it
        return replace(call, **module(distances, like.device, wide(like), self.biased, both))


class Step:
    """State that layers of one layout share in a forward, on one device.

    Never synchronizes with a GPU if it is traced, or continues a cache by few queries without mask.
    ``offset`` is the slot of the first key, for caches that keep only the last ones; ``mask`` is
    given if the forward is not traced. ``whole``: :meth:`dense` is needed, also if there are runs.
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
        self.forward, self.rotations, self.offset = forward, layer.rotations, offset
        self.tempered, reach = layer.window is None, forward.map.reach
        self.few = not forward.regular and forward.tokens <= min(FEW, reach or FEW)
        self.made: dict[Any, Any] = {}
        if mask is None:
            return
        if forward.both:
            self.rotations = layer.rotations_both_ways
            self._see_both_ways(mask, whole)
            return
        documents = forward.documents is not None
        near = clipped(self.rotations, mask.window)
        if near is not None and mask.causal and not whole and (documents or not self.few):
            self.runs = mask.runs(offset)
        unchecked = mask.given is None and not documents and forward.begins and self.runs is None
        if unchecked and bool(goes_back(mask.forward.key, mask.forward.real())):
            raise UnsupportedModelError(BACK)
        self.rotations = near or self.rotations
        if self.runs is None and (near is None or not mask.causal or documents):
            seen, first = mask.dense_on(forward.device), offset - mask.offset
            biased = layer.biased is not None
            self.rotations = _seeing_ahead(forward.map, self.rotations, mask.ahead, biased)
            if seen is not None:
                self.seen = shown(seen[..., first : forward.room - mask.offset])

    def _see_both_ways(self, mask: BatchMask, whole: bool) -> None:
        """Set the runs of a forward in both directions, or the keys that its queries see."""
        forward, window = self.forward, (mask.arguments or {}).get("local_size")
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
        if forward.documents is not None:
            numbers = forward.documents.to(forward.device)
            same = (numbers[:, None, :, None] == numbers[:, None, None]) & forward.real()[:, None]
            seen = same if seen is None else seen & same
        self.seen = seen

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Compute attention: for few queries on a GPU, in runs, in a graph, or from positions."""
        if self.runs is not None:
            query, kernel = self._scaled(query), self.forward.map.kernel
            calls = [(run, replace(call, bands=x)) for run, x in self._in_runs(wide(query))]
            return dispatch.attend_runs(query, key, value, calls, kernel)
        if self.forward.traced and not self.few:
            return self._many(query, key, value, call)
        if self._has_kernel(query, key, value, call):
            return decode.attend(query, key, value, call, self._ranges())
        dense = self.dense(query, key, call)
        return plain.attend(dense.query, dense.key, value, dense.call, dense.places)

    def _in_runs(self, dtype: torch.dtype) -> list[tuple[Run, list[RotatedBand]]]:
        """Return the runs with their bands, split where queries have to be rotated together."""
        if ("runs", dtype) not in self.made:
            reach, made = self.forward.map.reach, []
            for run in within(self.runs or [], reach):
                end = run.start + run.keys.stop - run.keys.start
                begin = end - (run.queries.stop - run.queries.start)
                given = self.forward.device, dtype, (begin + end - 1) // 2 if reach else 0
                bands = [
                    RotatedBand(x, q.between(begin, end, *given), k.between(run.start, end, *given))
                    for x, q, k in self.rotations
                ]
                made.append((run, bands))
            self.made["runs", dtype] = made
        return self.made["runs", dtype]

    def _many(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Compute attention for many queries in a graph."""
        forward = self.forward
        query = self._scaled(query)
        call = replace(call, bands=self._bands(wide(query)))
        if forward.regular:  # tokens 0, 1, 2, ...
            return dispatch.attend(query, key, value, call, forward.map.kernel)
        if call.bias is not None and forward.begins and call.bias.shape[1] >= forward.room:
            torch._assert_async((forward.key.amax() - forward.key.amin()) < forward.room, BEYOND)
        sequences = forward.real().long() - 1
        first = torch.as_tensor(forward.filled)
        at = [forward.key, sequences, first]
        return dispatch.attend_encoded(query, key, value, call, at, forward.map.kernel)

    def dense(self, query: Tensor, key: Tensor, call: Call) -> Dense:
        forward, dtype, reach = self.forward, wide(query), self.forward.map.reach
        apart = forward.distances if forward.begins else forward.tokens
        if reach is not None and apart > reach:
            query, key, dtype = query.double(), key.double(), torch.float64
            if apart > Decay.MOST_REACHES * reach:
                raise UnsupportedModelError(
                    f"positions of one forward lie {apart} tokens apart, too far for the decay of "
                    f"{forward.map.named}; give it position ids that are at most "
                    f"{Decay.MOST_REACHES * reach} apart"
                )
        call = replace(call, bands=self._bands(dtype, apart=True))
        return Dense(self._scaled(query), key, call, self._places())

    def _has_kernel(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
        """Whether :mod:`rope_ext.attention.decode` supports a call."""
        forward = self.forward
        if decode.refusal(query, value, call.pairs) is not None:
            return False
        if forward.tokens > FEW or self.seen is not None or forward.map.kernel == "reference":
            return False
        if forward.both or forward.apart:
            return False
        if call.scores is not None or forward.map.reach is not None:
            return False
        if forward.begins:  # positions may jump, but the kernel treats them as slots
            return False
        tensors = (query, key, value, call.sinks, call.bias)
        learns = any(x is not None and x.requires_grad for x in tensors)
        return not (torch.is_grad_enabled() and learns)

    def _ranges(self) -> decode.Ranges:
        if "ranges" not in self.made:
            forward, t = self.forward, self.forward.query
            if forward.padding is not None and not forward.reads:  # otherwise already checked
                apart = (forward.slots() - forward.origin() != forward.key) & forward.real()
                torch._assert_async(~apart.any(), APART)
            filled = forward.filled
            if isinstance(filled, int):  # filled on the device, without a copy
                filled = torch.full((1,), filled, device=forward.device)
            filled = filled.view(1) - self.offset
            bands = [
                RotatedBand(geometry, self._at(q, t, torch.float32), self._everywhere(k))
                for geometry, q, k in self.rotations
            ]
            origin, temperature = forward.origin()[:, 0], self._temperature(torch.float32)
            given = bands, t, origin - self.offset, filled, temperature
            self.made["ranges"] = decode.ranges_of(*given)
        return self.made["ranges"]

    def _at(
        self, by: RotationTable | Decay, t: Tensor, dtype: torch.dtype, origin: Any = 0
    ) -> Rotation:
        """Return the rotation of tokens at ``t``, ``[rows or 1, tokens, pairs]``."""
        counted = not self.forward.begins and self.forward.shown is None  # and less than the room
        if by.idle or self.forward.traced or isinstance(by, Decay) or not counted:
            return by.at(t, dtype, origin)
        made = by.between(0, self.forward.room, t.device, dtype)
        return each_table(made, lambda x: x.expand(*t.shape, -1) if len(x) == 1 else x[t.clamp(0)])

    def _everywhere(self, by: RotationTable | Decay) -> Rotation:
        """Return the rotation of all positions below the room, float32, ``[room, pairs]``."""
        room, device = self.forward.room, self.forward.device
        if self.forward.traced:
            return by.at(torch.arange(room, device=device), torch.float32)
        made = by.between(0, room, device, torch.float32)
        return each_table(made, lambda x: x.expand(room, -1).contiguous())

    def _temperature(self, dtype: torch.dtype) -> Tensor | None:
        if not self.tempered:
            return None
        return self.forward.map.temperature(self.forward.tempered, dtype)

    def _scaled(self, query: Tensor) -> Tensor:
        name = "temperature", wide(query)
        if name not in self.made:
            made = self._temperature(name[1])
            self.made[name] = None if made is None else made[:, None, :, None]
        scale = self.made[name]
        return query if scale is None else (query * scale).to(query.dtype)

    def _bands(self, dtype: torch.dtype, apart: bool = False) -> list[RotatedBand]:
        """Return the bands, with rotations of shape ``[rows or 1, tokens, pairs]``.

        ``apart``: add a dimension for heads, or drop that of rows if all rows are equal.
        """
        if (name := ("bands", dtype, apart)) not in self.made:
            query, key, middle = self.forward.query, self.forward.key[:, self.offset :], 0
            if self.forward.map.reach is not None and apart:
                middle = (query.amin(1, keepdim=True) + query.amax(1, keepdim=True)) // 2
            flat: list[Tensor] = []
            for _, *both in self.rotations:
                for by, t in zip(both, (query, key), strict=True):
                    flat += self._at(by, t, dtype, middle) or ()
            if apart:
                flat = [x[0] if len(x) == 1 else x[:, None] for x in once(flat)]
            elif self.forward.regular:
                flat = [x[0] for x in flat]
            left, bands = iter(flat), []
            for geometry, *both in self.rotations:
                turned = [None if by.idle else (next(left), next(left)) for by in both]
                bands.append(RotatedBand(geometry, *turned))
            self.made[name] = bands
        return self.made[name]

    def _places(self) -> Places:
        if "places" not in self.made:
            forward, offset = self.forward, self.offset
            query, key, real = forward.query, forward.key[:, offset:], forward.real()[:, offset:]
            filled = forward.filled - offset
            made = Places.in_slots(query, key, real, filled, forward.both)
            if self.seen is not None:
                made = replace(made, mask=self.seen, newest=None)
            self.made["places"] = replace(made, made={})
        return self.made["places"]
