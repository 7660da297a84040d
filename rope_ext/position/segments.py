"""The batch of one forward as segments of consecutive tokens, with the rotations of each."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from transformers.masking_utils import sdpa_mask

from rope_ext.attention import placed
from rope_ext.attention.call import RotatedBand
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.geometry import Distance
from rope_ext.position.forward import PositionForward
from rope_ext.position.layers import Layout
from rope_ext.position.masks import documents_of, is_plain
from rope_ext.position.tables import BandRotations


class Segment(NamedTuple):
    """Consecutive tokens, in all rows that have them in the same slots.

    ``queries`` and ``keys`` index the tokens of this forward and of the cache; the first key is
    at position ``start`` of its sequence. ``rows=None`` means all rows.
    """

    rows: list[int] | None
    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    start: int


class RotatedSegment(NamedTuple):
    """A segment with its rotations in every band and the factors of its queries."""

    segment: Segment
    bands: list[RotatedBand]
    temperature: torch.Tensor | None


class BatchMask:
    """The attention mask of one forward under a position map.

    Args:
        owner: the forward; None where generation makes the mask of a static cache before it.
        arguments: arguments with which transformers requested a mask; None: it was given ready.
        given: that mask, bool or additive, ``[rows, 1, queries, keys]``.

    Attributes:
        plain: whether it is causal, as far as a compiled forward needs to know.
    """

    ndim = 4  # transformers then takes it for a mask that is already prepared

    def __init__(
        self,
        owner: PositionForward | None,
        arguments: dict[str, Any] | None = None,
        given: torch.Tensor | None = None,
    ) -> None:
        self.owner, self.arguments, self.given = owner, arguments, given
        self.valid: torch.Tensor | None = None
        self.made: torch.Tensor | None = None
        self.plain = True
        self._rotated_segments: dict[tuple, list[RotatedSegment] | None] = {}
        self._moved: dict[torch.device, torch.Tensor] = {}

    @property
    def forward(self) -> PositionForward:
        """The forward that the mask belongs to."""
        assert self.owner is not None, "generation made this mask, and no forward has used it yet"
        return self.owner

    def contiguous(self) -> BatchMask:
        """Called by generation on a mask that is already prepared."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the tensor that transformers would make."""
        if self.given is not None:
            return tuple(self.given.shape)
        names = ("batch_size", "q_length", "kv_length")
        rows, *rest = (cast("dict[str, Any]", self.arguments)[name] for name in names)
        return rows, 1, *rest

    @functools.cached_property
    def causal(self) -> bool:
        """Whether transformers asked for a causal mask, perhaps in a window or by document."""
        return self.arguments is not None and is_plain(self.arguments["mask_function"])

    def belong_to(self, forward: PositionForward) -> None:
        """Set the forward, of a mask that was made before it or in it."""
        self.owner = forward
        documents = documents_of(self.arguments["mask_function"]) if self.arguments else None
        if documents is not None:
            forward.split(documents)

    def prepare(self) -> None:
        """Prepare what a compiled forward needs of a mask that is made before it.

        Sets ``valid``, the padding of all slots, whose shape then stays the same (``[rows,
        slots]``), and for a single query ``made``, the mask itself; for several, ``plain``.
        """
        padding, arguments = self.padding, self.arguments or {}
        if padding is not None:
            slots = arguments["kv_length"]
            self.valid = torch.nn.functional.pad(padding, (0, slots - padding.shape[1]))
        if arguments.get("q_length") == 1:
            self.made = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
        elif arguments:
            self.plain = self.causal and documents_of(arguments["mask_function"]) is None

    @property
    def padding(self) -> torch.Tensor | None:
        """The two-dimensional mask that it was made from."""
        return None if self.arguments is None else self.arguments.get("attention_mask")

    @functools.cached_property
    def dense(self) -> torch.Tensor | None:
        """The mask for layers that the map leaves alone; None: causal."""
        return self.given if self.arguments is None else sdpa_mask(**self.arguments)

    def dense_on(self, device: torch.device) -> torch.Tensor | None:
        """:attr:`dense` on the device of a layer, moved there once for all layers."""
        if self.dense is None or self.dense.device == device:
            return self.dense
        if device not in self._moved:
            self._moved[device] = self.dense.to(device)
        return self._moved[device]

    @functools.cached_property
    def ahead(self) -> list[int]:
        """How far queries see beyond themselves at most, tokens, by row; 0: the mask is causal."""
        forward = self.forward
        if self.causal or self.dense is None:
            return [0] * forward.rows
        visible = shown(self.dense[..., : self.keys])
        t = self.positions.to(visible.device).expand(forward.rows, -1)[:, None]
        newest = [  # position of the newest key that a query sees; [rows, heads, queries]
            torch.where(part, t.int()[:, :, None], -1).amax(-1) for part in visible.split(256, 2)
        ]
        after = torch.cat(newest, 2) - t[..., -forward.tokens :]
        # What padding sees does not matter; transformers shows it nothing, or everything.
        seen = visible[..., -1:, -forward.tokens :].squeeze(2)
        after = after.where(seen | ~visible.all(-1), 0)
        if forward.padding is not None:
            after = after * forward.padding[:, None, -forward.tokens :].to(after.device)
        return after.clamp(min=0).amax((1, 2)).tolist()

    @functools.cached_property
    def offset(self) -> int:
        """Index of the first key in the sequence; above 0 in sliding caches."""
        return 0 if self.arguments is None else self.arguments["kv_offset"]

    @property
    def keys(self) -> int:
        """Number of filled keys; a static cache has room for more."""
        return self.forward.filled_count + self.forward.tokens - self.offset

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Position of every key, ``[rows or 1, keys]``."""
        return self.forward.key[:, self.offset :]

    @functools.cached_property
    def window(self) -> int | None:
        """Window to which the mask limits every token."""
        return None if self.arguments is None else self.arguments.get("local_size")

    @functools.cached_property
    def segments(self) -> list[Segment] | None:
        """The batch as segments of consecutive tokens; None if it cannot be split into them."""
        forward, keys = self.forward, self.keys
        if not self.causal:
            return None
        t = forward.key_known()[:, self.offset :]
        steady = t.diff() == 1
        valid = forward.padding_known  # no forward that is traced comes here
        valid = None if valid is None else valid[:, self.offset :]
        if valid is None and forward.documents is None:
            if not bool(steady.all()) or not bool((t[:, 0] == t[0, 0]).all()):
                return None
            everything = slice(0, forward.tokens)
            return [Segment(None, everything, slice(0, keys), int(t[0, 0]))]
        found: dict[tuple[tuple[int, ...], bool, int], list[int]] = {}
        for row in range(forward.rows):
            for slots in self._documents_of(row, valid):
                positions = t[row if len(t) > 1 else 0][slots]
                if not bool((positions.diff() == 1).all()):
                    return None
                first, last = int(slots[0]), int(slots[-1]) + 1
                whole = last - first == len(slots)
                place = (first, last) if whole else tuple(slots.tolist())
                found.setdefault((place, whole, int(positions[0])), []).append(row)
        return [
            self._segment(place, whole, start, rows)
            for (place, whole, start), rows in found.items()
        ]

    @functools.cached_property
    def few(self) -> bool:
        """Whether it is a plain causal mask of few queries, which products can have at once."""
        forward = self.forward
        if forward.documents is not None or forward.tokens > placed.FEW:
            return False
        if self.offset or self.window is not None or self.segments is None:
            return False
        # With gaps between the slots of a row, its near keys may be anywhere.
        return all(isinstance(s.keys, slice) for s in self.segments)

    @property
    def padded_rows(self) -> bool:
        """Whether its rows are padded differently."""
        return self.segments is not None and len(self.segments) > 1

    def rotated_segments(
        self, layout: Layout, device: torch.device, dtype: torch.dtype
    ) -> list[RotatedSegment] | None:
        """Every segment with its rotations, made once per layout; None without :attr:`segments`."""
        key = (layout, device, dtype)
        if key not in self._rotated_segments:
            self._rotated_segments[key] = self._rotate_segments(layout, device, dtype)
        return self._rotated_segments[key]

    def _rotate_segments(
        self, layout: Layout, device: torch.device, dtype: torch.dtype
    ) -> list[RotatedSegment] | None:
        position_map = self.forward.map
        bands = _clipped(position_map.rotations(layout), self.window)
        if self.segments is None or bands is None:
            return None
        made = []
        for segment in _within(position_map.reach, self.segments):
            last = segment.start + _count(segment.keys)
            first = last - _count(segment.queries)
            middle = (first + last) // 2
            rotated = [
                RotatedBand(
                    geometry,
                    of_query.about(middle).between(first, last, device, dtype),
                    of_key.about(middle).between(segment.start, last, device, dtype),
                )
                for geometry, of_query, of_key in bands
            ]
            t = torch.arange(first, last, device=device)
            made.append(RotatedSegment(segment, rotated, position_map.temperature(t, dtype)))
        return made

    def goes_back(self, row: int) -> Literal["document", "padding"] | None:
        """Why positions of a sequence decrease: a new document, or padding within it.

        None if they do not.
        """
        if self.given is not None:  # a tree of drafts
            return None
        forward = self.forward
        t = self.positions[row if len(self.positions) > 1 else 0]
        if forward.padding is not None:
            slots = torch.nonzero(forward.padding[row, self.offset :].to(t.device)).flatten()
            back = t[slots].diff() < 0
            if bool((back & (slots.diff() > 1)).any()):
                return "padding"
        else:
            back = t.diff() < 0
            if forward.documents is not None:
                back &= forward.documents[row if len(forward.documents) > 1 else 0].diff() == 0
        return "document" if bool(back.any()) else None

    def _documents_of(self, row: int, valid: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Slots of each document of a row that has queries, on the CPU."""
        documents, parts = self.forward.documents, []
        if documents is not None:
            of_row = documents[row if len(documents) > 1 else 0].cpu()
            parts = [torch.nonzero(of_row == i).flatten() for i in of_row.unique()]
        elif valid is not None:
            parts = [torch.nonzero(valid[row]).flatten()]
        for slots in parts:
            if len(slots) and slots[-1] >= self.keys - self.forward.tokens:
                yield slots

    def _segment(self, place: tuple[int, ...], whole: bool, start: int, rows: list[int]) -> Segment:
        before = self.keys - self.forward.tokens
        if whole:
            first, last = place
            return Segment(
                rows, slice(max(first - before, 0), last - before), slice(first, last), start
            )
        slots = torch.tensor(place, device="cpu")
        return Segment(rows, slots[slots >= before] - before, slots, start)


def shown(mask: torch.Tensor) -> torch.Tensor:
    """The visible keys of a mask, bool or additive.

    Raises:
        UnsupportedModelError: it is a bias, which does more than hide keys.
    """
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= -1e4
    if not bool((hidden | (mask == 0)).all()):
        raise UnsupportedModelError(
            "an attention mask that adds to the logits instead of hiding tokens is not known to "
            "position methods; pass a mask of True and False, or use a frequency method"
        )
    return ~hidden


def _within(reach: int | None, segments: list[Segment]) -> Iterator[Segment]:
    """The segments, split so that the queries of each are at most ``reach`` tokens apart."""
    for segment in segments:
        queries, keys = _count(segment.queries), _count(segment.keys)
        if reach is None or queries <= reach:
            yield segment
            continue
        for first in range(0, queries, reach):
            last = min(first + reach, queries)
            seen = slice(0, keys - queries + last)
            yield segment._replace(
                queries=_part(segment.queries, slice(first, last)), keys=_part(segment.keys, seen)
            )


def _part(index: slice | torch.Tensor, part: slice) -> slice | torch.Tensor:
    if isinstance(index, slice):
        return slice(index.start + part.start, index.start + part.stop)
    return index[part]


def _count(index: slice | torch.Tensor) -> int:
    return index.stop - index.start if isinstance(index, slice) else len(index)


def _clipped(bands: BandRotations, window: int | None) -> BandRotations | None:
    """The bands within a window; None if only a dense mask can express that."""
    if window is None:
        return bands
    clipped = []
    for geometry, *rotations in bands:
        if not isinstance(geometry, Distance):
            return None
        last = window if geometry.last is None else min(window, geometry.last)
        if geometry.first < last:
            clipped.append((Distance(geometry.first, last), *rotations))
    return clipped
