"""Tracks one forward under a position map: which slots hold tokens, and their positions.

Positions are not stored. Cached tokens have consecutive positions, so a cached key's position is
the number of tokens before it in the attention mask. Other position ids are supported within one
forward, but the next forward with the same cache raises an error.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from rope_ext.attention.runs import BACK, goes_back
from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods.geometry import at
from rope_ext.position.map import PositionMap
from rope_ext.rotary import context, hooks
from rope_ext.rotary.context import NOTE, ForwardContext
from rope_ext.rotary.masks import beginnings, goes_on, tokens_among
from rope_ext.rotary.sites import RotarySite

FEW = 16
"""Maximum number of queries whose logits on all slots are computed at once."""
RE_PADDED = (
    "the attention mask hides other tokens at the beginning of a row than the masks with which "
    "this cache was filled, so the positions of its keys would not be those that they were cached "
    "with; give every forward the same padding, or start with an empty cache"
)
COUNTED = (
    "with a cache, position ids have to count the tokens of the attention mask one by one under "
    "this patch; leave them out or give attention_mask.cumsum(-1) - 1, with padding_side='left'"
)


@dataclass(frozen=True)
class CachedKeys:
    """Metadata of the keys in a cache; the same for all rows, so that rows can be reordered."""

    rotated_by: tuple[Any, ...]  # the map's key, which must match to continue the cache
    counted: int | None = None  # slots up to which tokens are consecutive; None: all
    gaps: bool = False  # whether rows may have padding between tokens
    # lowest and highest slot of a row's first token; None: not read, or a row has only padding
    origins: tuple[int, int] | None = None


def require_known(cache: Cache, position_map: PositionMap) -> None:
    """Raise CacheError unless a cache can be continued."""
    filled = int(cache.get_seq_length())
    keys = getattr(cache, NOTE, None)
    if not filled:
        return
    if keys is None or keys.rotated_by != position_map.key:
        raise CacheError(
            f"this cache was started before the model was patched with {position_map.key[0]} "
            f"(or by prefix tuning), so its keys carry other rotations; start with an empty cache, "
            f"or use a frequency method such as 'yarn'"
        )
    if keys.counted is not None and filled > keys.counted:
        raise CacheError(
            f"the position ids of the tokens in this cache did not count one by one, so "
            f"{position_map.method.name} cannot continue it; start with an empty cache"
        )


def in_cache(
    position_map: PositionMap, cache: Any, rows: int, tokens: int
) -> PositionForward | None:
    """Create a traced forward of new tokens after those in a cache, if tensors can express it."""
    filled = 0
    room = tokens
    keys = getattr(cache, NOTE, None)
    if cache is not None:
        if not isinstance(cache, Cache) or cache.offloading:
            return None
        layers = getattr(cache, "layers", ())
        static = [x for x in layers if isinstance(x, StaticLayer) and not x.is_sliding]
        if not static:
            length = cache.get_seq_length()
            if not isinstance(length, int) or length > 0:
                return None
        elif keys is not None and (keys.rotated_by != position_map.key or keys.counted is not None):
            return None
        else:
            layer = static[0]  # which keeps every token
            room = layer.max_cache_len
            if layer.is_initialized and (keys is not None or context.is_exporting()):
                filled = layer.cumulative_length.clone()  # since layers increment it in place
            elif layer.is_initialized:
                torch._assert_async(layer.cumulative_length == 0, context.UNKNOWN)
    forward = PositionForward(
        patched_by=position_map, rows=rows, tokens=tokens, filled=filled, cache=cache, traced=True
    )
    forward.room = room
    return forward


SPARE = 64
"""Tokens that a layer keeps beyond its window, so that drafts can be removed."""


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer of a growing cache that keeps only the last tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values, followed by the new ones."""
        keys, values = DynamicLayer.update(self, key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        first = -(self.sliding_window - 1 + SPARE)
        # Copies, since a view would keep the memory of the tokens that are dropped.
        self.keys = keys[:, :, first:].clone()
        self.values = values[:, :, first:].clone()
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        count = abs(tokens_to_remove)
        left = self.cumulative_length - count
        kept = 0 if self.keys is None else self.keys.shape[-2] - count
        if kept < min(left, self.sliding_window - 1):
            raise CacheError(
                f"this cache keeps the last {self.sliding_window} and {SPARE} more tokens; {count} "
                f"of them cannot be taken back; start with an empty one, or do without drafts"
            )
        DynamicLayer.crop(self, tokens_to_remove)
        self.cumulative_length = left

    def reset(self) -> None:
        """Keep every token again, since an empty cache may be used with any model."""
        super().reset()
        self.__class__ = DynamicLayer  # type: ignore[assignment]


def shorten(cache: Any, layers: Collection[int], window: int | None) -> None:
    """Make some layers of a growing cache keep the last ``window - 1`` tokens, plus spare ones.

    The next token sees those and itself. Static, quantized and offloaded caches are unchanged: they
    keep every token, and layers attend to a window of them.
    """
    if window is None or type(cache) is not DynamicCache or cache.offloading:
        return
    while len(cache.layers) <= max(layers) and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    for number in layers:
        before = cache.layers[number]
        if type(before) is DynamicLayer:
            shorter = WindowLayer(window)
            cache.layers[number] = shorter
            if before.keys is not None and before.values is not None:
                shorter.update(before.keys, before.values)


_OfRotary = tuple[str, str | None]
"""Name and layer type of a rotary module."""


@dataclass(eq=False)
class Shared:
    """What the first layer of a forward computes for all of its layers."""

    steps: dict[int, Any] = field(default_factory=dict)
    """The Step of every layout of a traced forward; those of others are on their masks."""
    embeddings: dict[_OfRotary, Any] = field(default_factory=dict)
    """Outputs of rotary modules at the positions of stored keys."""
    native: dict[_OfRotary, Any] = field(default_factory=dict)
    """Outputs of rotary modules as trained, for layers that are not changed."""
    growths: dict[torch.dtype, Tensor] = field(default_factory=dict)
    """By how much a learned temperature grows at every query, float64 ``[rows or 1, tokens]``."""
    copies: dict[torch.device, PositionForward] = field(default_factory=dict)
    """The forward on other devices."""
    given_masks: dict[int, Any] = field(default_factory=dict)
    """A BatchMask for every mask of the caller, by the id of its tensor, which it keeps alive."""
    computed: dict[nn.Module, Any] = field(default_factory=dict)
    """Rotations of attention modules that compute their positions, until they attend."""
    input: Tensor | None = None  # positions as vectors, [rows or 1, tokens, columns]
    tempered: Tensor | None = None
    distances: int | None = None


class PositionForward(ForwardContext):
    """One forward of a decoder under a position map.

    Eager and traced forwards store positions in the same tensors. An eager forward also reads
    values, unless that would make every decoding step wait for the GPU.

    Positions count from the first real token of each sequence.
    """

    query: Tensor  # positions of queries, int64, [rows or 1, tokens]; below 0 for padding
    key: Tensor  # positions of all slots, [rows or 1, room]
    regular = False  # whether a graph may assume tokens 0, 1, 2, ... of one sequence in every row
    located = False  # whether ``query`` and ``key`` are set
    reads = False  # whether values may be read
    gaps = False  # whether there may be padding between the tokens of a row
    weights = False  # whether it returns attention weights
    again = False  # whether gradient checkpointing reruns one of its layers
    both = False  # whether queries see later keys
    edges: Tensor | None = None  # slots where packed documents begin and end, for both directions
    padding: Tensor | None = None  # bool, [rows, room], False without a token
    documents: Tensor | None = None  # packed documents, int64, [rows, room]
    # A custom mask, bool, [rows or 1, heads or 1, tokens, keys]: its tokens may be a tree of
    # drafts, at any positions after the cache.
    shown: Tensor | None = None

    def __post_init__(self) -> None:
        self.map: PositionMap = self.patched_by
        self.room: int = self.filled + self.tokens  # number of slots
        self.begins = isinstance(self.filled, int) and self.filled == 0
        self.shared = Shared()

    def pad(self, mask: Tensor) -> None:
        """Record the padding from a mask ``[rows, slots]``, zero for slots without a token."""
        mask = mask[:, : self.room] != 0
        self.padding = F.pad(mask, (0, self.room - mask.shape[1]))

    def show(self, mask: Tensor) -> None:
        """Record :attr:`shown`, and as padding what it hides from every query."""
        if mask.shape[2] not in (1, self.tokens) or mask.shape[3] < self.room:
            raise UnsupportedModelError(
                f"the attention mask has {mask.shape[2]} queries and {mask.shape[3]} keys, but "
                f"this forward has {self.tokens} queries and {self.room} keys with those in the "
                f"cache; give a mask of all of them, or one of two axes"
            )
        self.shown = mask
        seen = mask[..., : self.room].expand(self.rows, -1, self.tokens, -1)
        tokens = tokens_among(seen, self.filled)
        known: CachedKeys | None = getattr(self.cache, NOTE, None)
        if not self.begins and known is not None and known.origins == (0, 0) and not known.gaps:
            # Cached tokens without padding still count where the mask hides them, as a window does.
            cached = tokens[:, : self.filled]
            tokens = torch.cat((cached.any(1, True).expand_as(cached), tokens[:, self.filled :]), 1)
        self.pad(tokens)

    def split(self, documents: Tensor) -> None:
        """Record the documents that transformers separates, int64, ``[rows, keys]``."""
        if self.both:  # which finds them by itself, since transformers does for causal models only
            return
        self.documents = documents
        if self.located:
            self._begin(self._given)

    def locate(self, positions: Tensor) -> None:
        """Record the model's position ids, ``[rows or 1, tokens]``; sets ``query`` and ``key``.

        Several axes in front are supported if they are equal. Does nothing the second time, since
        every rotary module calls it.

        Raises:
            UnsupportedModelError: these ids cannot be expressed, such as fractions, or several
                axes that differ; or, with a cache, they do not count its tokens.
            CacheError: rows of a cache get other padding than when it was filled.
        """
        if self.located:
            return
        self.located = True
        self.device = positions.device
        self.gaps = getattr(getattr(self.cache, NOTE, None), "gaps", False)
        self.reads = self._may_read()
        if self.padding is not None:
            self.padding = self.padding.to(self.device)
            if self.reads and bool(self.padding.all()):
                self.padding = None  # without it, all rows share positions and runs
        positions = self._checked(positions)
        if self.regular:
            self.query = self.key = torch.arange(self.tokens, device=self.device)[None]
        elif self.begins:
            self._begin(positions)
        else:
            self._continue(positions)
        if self.reads and self.padding is not None:  # kernels of decoding take positions for slots
            together = self.counted() == self.slots() - self.origin()
            self.gaps = not bool((together | ~self.real()).all())
        if self.cache is not None:
            self.note(self.cache)

    def _may_read(self) -> bool:
        """Whether this forward may read values, for which every step of decoding would wait.

        Steps with a custom mask or padding between tokens cannot do without.
        """
        if self.traced:
            return False
        decodes = not self.begins and self.tokens <= FEW
        without = decodes and self.shown is None and not self.gaps
        return not without or self.device.type == "cpu"

    def _checked(self, positions: Tensor) -> Tensor:
        """Return position ids on one axis, int64, ``[rows or 1, tokens]``."""
        if positions.is_floating_point():
            raise UnsupportedModelError(
                f"{self.map.named} takes position ids that are integers, not {positions.dtype}; "
                f"round them, or {self.map.instead}"
            )
        if positions.ndim == 3:
            # Traced only without position ids, and then all axes are equal.
            if not self.traced and bool((positions != positions[:1]).any()):
                raise UnsupportedModelError(
                    f"this input has positions on several axes (an image or a video), and "
                    f"{self.map.named} attends by one axis only; {self.map.instead}"
                )
            positions = positions[0]
        positions = positions.reshape(-1, positions.shape[-1]).long()
        if self.reads and len(positions) > 1 and bool((positions == positions[:1]).all()):
            positions = positions[:1]
        return positions

    def _begin(self, positions: Tensor) -> None:
        """Set the positions of a forward that starts its sequences, as passed to the model."""
        self._given = positions
        if self.both and self.shown is None:
            self._separate(positions)
        # Not always the first slot: with a custom mask, a suffix may precede its prefix.
        first = positions[:, :1] if self.traced else _lowest(positions, self.real())
        if self.shown is None and self.padding is not None and self.documents is None:
            positions = positions.expand(len(self.padding), -1)
            first = positions.gather(1, self.origin().clamp(max=self.tokens - 1))
        elif self.documents is not None:
            documents = self.documents.to(self.device)
            positions = positions.expand(len(documents), -1)
            # Each document counts from its own first token.
            first = positions.gather(1, _starts(documents))
        self.query = self.key = positions - first
        if self.room > self.tokens:
            self.key = F.pad(self.key, (0, self.room - self.tokens))
        if self.traced and self.cache is not None:  # later forwards with the cache rely on it
            torch._assert_async(self._counts(), COUNTED)
        elif self.traced and self.tokens <= FEW:
            torch._assert_async(~goes_back(self.key, self.real()), BACK)

    def _separate(self, positions: Tensor) -> None:
        """Set the documents of a forward in both directions: one begins where positions restart.

        Masks of transformers do not separate them there, but its flash attention does.
        """
        real = self.real()
        rows = max(len(positions), len(real))
        positions = positions.expand(rows, -1)
        real = real.expand(rows, -1)
        edges = None
        if self.edges is not None:
            edges = torch.isin(self.slots(), self.edges.to(self.device).flatten())
        # Without a cache there is no tree of drafts, so that a position that goes back restarts.
        begins = beginnings(real, ~goes_on(positions, real), edges)
        if bool((begins.sum(1) > 1).any()):
            self.documents = torch.where(real, begins.cumsum(1) - 1, -1)

    def _continue(self, positions: Tensor) -> None:
        """Set positions after those of a cache: they count the tokens of its rows, or the slots."""
        self.key = self.counted()
        new = self.filled + torch.arange(self.tokens, device=self.device)
        self.query = new[None] if self.padding is None else self.key.index_select(1, new)
        self._require_same_padding()
        if self.shown is not None:  # may be a tree of drafts
            self.query = positions = self._after_cache(positions)
            key = self.key.expand(max(len(self.key), len(positions)), -1)
            self.key = key.index_copy(1, new, positions.expand(len(key), -1))
            return
        counts = positions == self.query
        if self.padding is not None:
            by_slot = positions == self.query + self.origin()
            counts = counts | by_slot | ~self.padding.index_select(1, new)
        if not self.reads:
            torch._assert_async(counts.all(), COUNTED)
        elif not bool(counts.all()):
            raise UnsupportedModelError(COUNTED)

    def _require_same_padding(self) -> None:
        """Raise if rows begin in other slots than when their keys were cached."""
        known = None if self.traced else getattr(self.cache, NOTE, None)  # a graph cannot read it
        if known is None or known.origins is None:
            return
        low, high = known.origins
        if self.padding is None and low == 0:
            return
        origin = self.origin()
        as_cached = (origin >= low) & (origin <= high)
        # Rows may begin in this forward, or have only padding so far.
        same = (as_cached | (origin >= self.filled) | ~self.real().any(1, keepdim=True)).all()
        if not self.reads:
            torch._assert_async(same, RE_PADDED)
        elif not bool(same):
            raise CacheError(RE_PADDED)

    def _after_cache(self, positions: Tensor) -> Tensor:
        """Return the positions of new tokens under a custom mask, counted from each row's first."""
        if self.padding is None:
            return positions
        cached = self.key[:, self.filled - 1 : self.filled] + 1
        by_slot = _lowest(positions, self.real()[:, self.filled :]) - cached
        counts = (by_slot == 0) | (by_slot == self.origin()) | ~self.real().any(1, keepdim=True)
        if not bool(counts.all()):
            raise UnsupportedModelError(COUNTED)
        return positions - by_slot

    def _counts(self) -> Tensor:
        """Whether the tokens of every row are consecutive; a scalar bool tensor."""
        return ((self.key == self.counted()) | ~self.real()).all()

    def note(self, cache: Cache) -> None:
        """Record on a cache what its next forward has to know."""
        if self.exported or not self.located or self.both:
            return
        known: CachedKeys | None = None if self.begins else getattr(cache, NOTE, None)
        if self.traced:
            # Comparing would fail in a graph with dynamic shapes. If there are metadata, in_cache
            # has compared them. But several tokens may begin in a cache that was reset, so rows may
            # begin elsewhere. Steps of decoding change nothing, or the second would recompile.
            if known is None or (self.tokens > 1 and known.origins is not None):
                setattr(cache, NOTE, CachedKeys(self.map.key, None, self.gaps))
            return
        behind = not self.begins and self.shown is None
        counts = behind or not self.reads or bool(self._counts())
        origins = self._origins() if self.reads or known is None else known.origins
        new = CachedKeys(
            rotated_by=self.map.key,
            counted=None if counts else self.filled,
            gaps=self.gaps,
            origins=origins,
        )
        if getattr(cache, NOTE, None) != new:
            setattr(cache, NOTE, new)

    def _origins(self) -> tuple[int, int] | None:
        """Return :attr:`CachedKeys.origins`."""
        if not self.reads or not bool(self.real().any(1).all()):
            return None  # rows that have only padding so far begin later
        origin = self.origin()
        return int(origin.amin()), int(origin.amax())

    def slots(self) -> Tensor:
        """Indices of all slots, int64, ``[room]``."""
        return torch.arange(self.room, device=self.device)

    def origin(self) -> Tensor:
        """Slot of the first token of every row, int64, ``[rows or 1, 1]``."""
        if self.padding is None:
            return torch.zeros(1, 1, dtype=torch.long, device=self.device)
        return self.padding.int().argmax(1, keepdim=True)

    def counted(self) -> Tensor:
        """Number of tokens before each filled slot, int64, ``[rows or 1, room]``."""
        return self.slots()[None] if self.padding is None else self.padding.long().cumsum(1) - 1

    def real(self) -> Tensor:
        """Mask of slots with a token, bool, ``[rows or 1, room]``."""
        real = (self.slots() < self.filled + self.tokens)[None]
        return real if self.padding is None else real & self.padding

    @property
    def tempered(self) -> Tensor:
        """The position by which a temperature scales each query, int64, ``[rows or 1, tokens]``.

        In both directions, it is that of the last token that the query sees in its text.
        """
        if not self.both:
            return self.query
        if self.shared.tempered is None:
            self.shared.tempered = self._last_seen()
        return self.shared.tempered

    def _last_seen(self) -> Tensor:
        if self.shown is not None:
            return self.shown[..., : self.room].sum(-1).amax(1).expand(-1, self.tokens) - 1
        if self.documents is None:
            return (self.real().sum(1, keepdim=True) - 1).expand(-1, self.tokens)
        documents = self.documents.clamp(min=0)  # padding counts, but not as a token
        count = torch.zeros_like(documents).scatter_add(1, documents, self.real().long())
        return count.gather(1, documents) - 1

    @property
    def distances(self) -> int:
        """Number of possible distances, from 0 on; positions of a first forward may jump."""
        if self.traced or not self.begins:
            return self.room
        if self.shared.distances is None:
            self.shared.distances = max(self.room, int(self.key.amax()) + 1)
        return self.shared.distances

    def on(self, device: torch.device) -> PositionForward:
        """Return this forward for layers on another device, copied there once for all of them."""
        if self.device == device:
            return self
        copies = self.shared.copies
        if device not in copies:
            copies[device] = moved = copy.copy(self)
            moved.query = self.query.to(device)
            moved.key = self.key.to(device)
            moved.padding = None if self.padding is None else self.padding.to(device)
            moved.device = device
            moved.shared = Shared(distances=self.distances)
        return copies[device]

    def embeddings(self, site: RotarySite, like: Any) -> Any:
        """Return the rotary module's output, ``like``, for the positions of stored keys."""
        name = (site.name, site.layer_type)
        known = self.shared.embeddings
        if name in known:
            return known[name]
        t = self.query.double().clamp(min=0)
        stored = at(self.map.stored, t)
        phase = self.map.encoding.phase(t)
        inv_freq = self.map.inv_freq(site, t.device)
        scaling = self.map.frequencies[site][1]
        if stored.shape[-1] == 1 and phase is None:
            stored = stored.squeeze(-1)
        else:  # pairs have different positions: fold them into the frequencies, at position 1
            inv_freq = stored * inv_freq
            stored = torch.ones_like(t)
            inv_freq = inv_freq if phase is None else inv_freq + phase.unsqueeze(-1)
        output = hooks.rotation(
            site=site,
            t=stored,
            inv_freq=inv_freq,
            scaling=scaling,
            precise=self.map.precise,
            like=like,
        )
        known[name] = once([output])[0] if isinstance(output, Tensor) else tuple(once([*output]))
        return known[name]


def _starts(documents: Tensor) -> Tensor:
    """Return the first slot of every token's document, int64, ``[rows, slots]``.

    Documents have increasing numbers; what has a negative one belongs to the document before it.
    """
    documents = documents.cummax(1).values.contiguous()
    return torch.searchsorted(documents, documents).clamp(max=documents.shape[1] - 1)


def _lowest(positions: Tensor, real: Tensor) -> Tensor:
    """Return the lowest position of a real token in every row, ``[rows, 1]``; 0 if it has none."""
    highest = torch.iinfo(positions.dtype).max
    of_row = torch.where(real, positions, highest).amin(1, keepdim=True)
    return of_row.where(real.any(1, keepdim=True), 0)


def once(tensors: list[Tensor]) -> list[Tensor]:
    """Return the same tensors via a custom operator; inductor would recompute them per layer."""
    alone = context.is_exporting() or not torch.compiler.is_compiling()
    return tensors if alone else _held(tensors)


@torch.library.custom_op("rope_ext::held", mutates_args=())
def _held(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


@_held.register_fake
def _(tensors):  # noqa: ANN001, ANN202
    return [torch.empty_like(x) for x in tensors]
