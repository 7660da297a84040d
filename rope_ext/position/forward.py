"""One forward under a position map: which slots hold tokens, and their positions.

No log of positions is kept. The tokens of a cache count one by one, so the position of a cached key
is the number of tokens before it in the attention mask. Position ids that do not count are followed
within their own forward, and refused in the next one with the same cache.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, StaticLayer

from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.kinds import at
from rope_ext.methods.temperature import SSMax
from rope_ext.position.map import PositionMap
from rope_ext.rotary import calls, hooks
from rope_ext.rotary.context import ForwardContext
from rope_ext.rotary.sites import RotarySite

FEW = 16
"""The most queries of a forward whose logits on all slots are computed at once."""
FRACTIONS = (
    "position ids have to be whole numbers of tokens under this patch, and these have fractions; "
    "round them"
)
BACK = (
    "the position ids go back within one row, where a position method would have to attend to the "
    "future; give it one sequence in each row, padded on the left"
)
COUNTED = (
    "with a cache, position ids have to count the tokens of the attention mask one by one under "
    "this patch, and these do not; leave them out or give attention_mask.cumsum(-1) - 1, and pad "
    "on the left (padding_side='left' of the tokenizer)"
)
_KEYS = "_rope_ext_keys"  # attribute of a cache: its CachedKeys


@dataclass(frozen=True)
class CachedKeys:
    """What is known of the keys in a cache; the same for all rows, so that rows may be moved.

    Args:
        patch: what must match for the cache to be continued, see :attr:`PositionMap.key`.
        counted: number of slots up to which tokens count one by one; None: all.
        apart: whether there may be padding between tokens of a row.
    """

    patch: tuple[Any, ...]
    counted: int | None = None
    apart: bool = False


def keys_of(cache: Cache | None) -> CachedKeys | None:
    """What is known of the keys in a cache; None: they were put there without a position map."""
    return getattr(cache, _KEYS, None)


def whole(cache: Any) -> StaticLayer | None:
    """The first layer of a static cache that keeps every token; None for other caches."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, StaticLayer) and not layer.is_sliding:
            return layer
    return None


def reads_freely(device: torch.device) -> bool:
    """Whether reading a value of a tensor waits for nothing."""
    return device.type == "cpu"


class PositionForward(ForwardContext):
    """One forward of a decoder under a position map.

    Eager and traced forwards keep positions in the same tensors. An eager forward also reads
    values, unless that would make every step of decoding wait for a GPU.

    Args:
        patch: the position map in force.
        rows, tokens, filled, cache, traced: see :class:`ForwardContext`.
        mask: ``[rows, slots]``, zero where there is no token; None: no padding.
        weights: whether layers also return their attention weights (``output_attentions``).
        room: number of slots that the layers see; None: those filled after this forward.
        regular: whether a graph may assume that every row holds tokens 0, 1, 2, ... of a sequence.
        shown: a mask of one's own, bool, ``[rows or 1, heads or 1, tokens, keys]``: its tokens may
            be a tree of drafts, with any positions behind those of the cache.

    Attributes:
        query: positions of the queries, int64, ``[rows or 1, tokens]``, counted from the first
            real token of each sequence; negative for padding before it. Set by :meth:`locate`.
        key: the same for all slots, ``[rows or 1, room]``. Set by :meth:`locate`.
        located: whether they are set.
        reads: whether values may be read.
        apart: whether there may be padding between the tokens of a row.
    """

    query: torch.Tensor
    key: torch.Tensor

    def __init__(
        self,
        patch: PositionMap,
        rows: int,
        tokens: int,
        filled: int | torch.Tensor,
        cache: Cache | None,
        traced: bool,
        mask: torch.Tensor | None = None,
        *,
        weights: bool = False,
        room: int | None = None,
        regular: bool = False,
        shown: torch.Tensor | None = None,
    ) -> None:
        super().__init__(patch, rows, tokens, filled, cache, traced)
        self.map, self.weights, self.regular, self.shown = patch, weights, regular, shown
        self.room: int = self.filled_count + tokens if room is None else room
        self.begins = isinstance(filled, int) and filled == 0
        self.located, self.reads, self.apart = False, False, False
        self.padding: torch.Tensor | None = None  # bool, [rows, room], False without a token
        self.documents: torch.Tensor | None = None  # packed documents, int64, [rows, room]
        self.entering: torch.Tensor | None = None  # what an input encoding adds, for all layers
        self.made: dict[Any, Any] = {}  # shared by all layers, keyed by the code that it serves
        if mask is not None:
            self.pad(mask)
        elif shown is not None and not self.begins:  # cached tokens that nobody sees are padding
            seen = shown[..., : self.filled_count].flatten(1, -2).any(1)
            self.pad(F.pad(seen, (0, tokens), value=True))

    def pad(self, mask: torch.Tensor) -> None:
        """Record the padding."""
        mask = mask[:, : self.room] != 0
        self.padding = F.pad(mask, (0, self.room - mask.shape[1]))

    def split(self, documents: torch.Tensor) -> None:
        """Record the documents that transformers keeps apart, int64, ``[rows, keys]``."""
        self.documents = documents
        if self.located:
            self._begin(self._given)

    def locate(self, positions: torch.Tensor) -> None:
        """Record the position ids that the model itself uses; sets ``query`` and ``key``."""
        if self.located:
            return
        self.located, self.device = True, positions.device
        known = keys_of(self.cache)
        self.apart = known is not None and known.apart
        in_step = not self.begins and self.tokens <= FEW and self.shown is None and not self.apart
        self.reads = not self.traced and (not in_step or reads_freely(self.device))
        if self.padding is not None:
            self.padding = self.padding.to(self.device)
            if self.reads and bool(self.padding.all()):
                self.padding = None
        positions = self._checked(positions)
        if self.regular:
            self.query = self.key = torch.arange(self.tokens, device=self.device)[None]
        elif self.begins:
            self._begin(positions)
        else:
            self._continue(positions)
        if self.reads and self.padding is not None:
            together = self.counted() == self.slots() - self.origin()
            self.apart = not bool((together | ~self.real()).all())
        if self.cache is not None:
            self.note(self.cache)

    def _checked(self, positions: torch.Tensor) -> torch.Tensor:
        """Position ids on one axis, int64, ``[rows or 1, tokens]``."""
        if positions.ndim == 3:
            if not self.traced:  # traced only if none were given, and then all axes are equal
                self.require(
                    (positions == positions[:1]).all(),
                    UnsupportedModelError,
                    f"this input has positions on several axes (an image or a video), and "
                    f"{self.map.named} attends by one axis only; {self.map.instead}",
                )
            positions = positions[0]
        if positions.is_floating_point():
            message = f"{FRACTIONS}, or {self.map.instead}"
            whole_numbers = (positions == positions.floor()).all()
            self.require(whole_numbers, UnsupportedModelError, message)
        positions = positions.reshape(-1, positions.shape[-1]).long()
        if self.reads and len(positions) > 1 and bool((positions == positions[:1]).all()):
            positions = positions[:1]
        return positions

    def _begin(self, positions: torch.Tensor) -> None:
        """Positions of the first tokens of their sequences, as they are given."""
        self._given = positions
        # Not always the first slot: under a mask of one's own, a suffix may precede its prefix.
        first = positions[:, :1] if self.traced else positions.amin(1, keepdim=True)
        if self.padding is not None:
            positions = positions.expand(len(self.padding), -1)
            first = positions.gather(1, self.origin().clamp(max=self.tokens - 1))
        elif self.documents is not None:
            documents = self.documents.to(self.device)
            positions = positions.expand(len(documents), -1)
            # Each document counts from its own beginning.
            first = positions.gather(1, torch.searchsorted(documents, documents))
        self.query = self.key = positions - first
        if self.room > self.tokens:
            self.key = F.pad(self.key, (0, self.room - self.tokens))
        if self.traced and self.cache is not None:  # what continues the cache relies on it
            torch._assert_async(self._counts(), COUNTED)
        elif self.traced and self.tokens <= FEW:
            future = self.visible() & (self.key[:, None] > self.query[:, :, None])
            torch._assert_async(~future.any(), BACK)

    def _continue(self, positions: torch.Tensor) -> None:
        """Positions behind those of a cache: they count the tokens of its rows, or the slots."""
        self.key = self.counted()
        new = self.filled + torch.arange(self.tokens, device=self.device)
        self.query = new[None] if self.padding is None else self.key.index_select(1, new)
        if self.shown is not None:  # perhaps a tree of drafts
            self.query, key = positions, self.key.expand(max(len(self.key), len(positions)), -1)
            self.key = key.index_copy(1, new, positions.expand(len(key), -1))
            return
        counts = positions == self.query
        if self.padding is not None:
            by_slot = positions == self.query + self.origin()
            counts = counts | by_slot | ~self.padding.index_select(1, new)
        if self.reads:
            self.require(counts.all(), UnsupportedModelError, COUNTED)
        else:
            torch._assert_async(counts.all(), COUNTED)

    def _counts(self) -> torch.Tensor:
        """Whether the tokens of every row count one by one, bool, no dimensions."""
        return ((self.key == self.counted()) | ~self.real()).all()

    def note(self, cache: Cache) -> None:
        """Record on a cache what is known of its keys."""
        if self.exported or not self.located:
            return
        behind = not self.begins and self.shown is None
        counts = behind or not self.reads or bool(self._counts())
        new = CachedKeys(self.map.key, None if counts else self.filled_count, self.apart)
        if keys_of(cache) != new:
            setattr(cache, _KEYS, new)

    def slots(self) -> torch.Tensor:
        """Numbers of all slots, int64, ``[room]``."""
        return torch.arange(self.room, device=self.device)

    def origin(self) -> torch.Tensor:
        """Slot of the first token of every row, int64, ``[rows or 1, 1]``."""
        if "origin" not in self.made:
            origin = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            if self.padding is not None:
                origin = self.padding.int().argmax(1, keepdim=True)
            self.made["origin"] = origin
        return self.made["origin"]

    def counted(self) -> torch.Tensor:
        """Number of tokens before each slot that has one, int64, ``[rows or 1, room]``."""
        if self.padding is None:
            return self.slots()[None]
        if "counted" not in self.made:
            self.made["counted"] = self.padding.long().cumsum(1) - 1
        return self.made["counted"]

    def real(self) -> torch.Tensor:
        """Which slots hold a token, bool, ``[rows or 1, room]``."""
        if "real" not in self.made:
            real = (self.slots() < self.filled + self.tokens)[None]
            self.made["real"] = real if self.padding is None else real & self.padding
        return self.made["real"]

    def visible(self) -> torch.Tensor:
        """Which slots each of few queries sees, bool, ``[rows or 1, tokens, room]``."""
        if "visible" not in self.made:
            new = self.filled + torch.arange(self.tokens, device=self.device)
            self.made["visible"] = (self.slots() <= new[:, None]) & self.real()[:, None]
        return self.made["visible"]

    def on(self, device: torch.device) -> PositionForward:
        """The same forward for layers on another device, copied there once for all of them."""
        if self.device == device:
            return self
        if ("on", device) not in self.made:
            moved = copy.copy(self)
            moved.query, moved.key = self.query.to(device), self.key.to(device)
            moved.padding = None if self.padding is None else self.padding.to(device)
            moved.device, moved.made = device, {}
            self.made["on", device] = moved
        return self.made["on", device]

    def growth(self, temperature: SSMax, dtype: torch.dtype) -> torch.Tensor | None:
        """The growth of a temperature, ``[rows or 1, 1, tokens, 1]``; None: 0 everywhere."""
        key = ("growth", dtype)
        if key not in self.made:
            made = temperature.growth(self.query.double().clamp(min=0)).to(dtype)
            # Reading it would synchronise with a GPU, and is impossible in a graph.
            readable = not self.traced and made.device.type == "cpu"
            idle = readable and bool((made == 0).all())
            self.made[key] = None if idle else made[:, None, :, None]
        return self.made[key]

    def embeddings(self, site: RotarySite, like: Any) -> Any:
        """Cosine and sine that the model rotates its queries and keys with."""
        key = ("embeddings", site.name, site.layer_type)
        if key not in self.made:
            made = stored_rotation(self.map, site, self.query, like)
            if self.traced:
                alone = isinstance(made, torch.Tensor)
                held = once([made] if alone else list(made))
                made = held[0] if alone else tuple(held)
            self.made[key] = made
        return self.made[key]


def stored_rotation(position_map: PositionMap, site: RotarySite, t: torch.Tensor, like: Any) -> Any:
    """Output of the rotary module of ``site`` for tokens at ``t`` (``[rows or 1, tokens]``)."""
    t = t.double().clamp(min=0)
    stored = at(position_map.stored, t)
    inv_freq, scaling = position_map.inv_freq(site, t.device), position_map.frequencies[site][1]
    phase = position_map.phase(t)
    if stored.shape[-1] == 1 and phase is None:
        stored = stored.squeeze(-1)
    else:  # each pair has its own position, so put it into the frequency of a token at 1
        stored, inv_freq = torch.ones_like(t), stored * inv_freq
        inv_freq = inv_freq if phase is None else inv_freq + phase.unsqueeze(-1)
    made = hooks.rotation(site, stored, inv_freq, scaling, position_map.precise, like)
    if not isinstance(like, torch.Tensor) and like[0].ndim == 4:
        made = tuple(part.expand(like[0].shape) for part in made)
    return made


def once(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, behind an operator: inductor would recompute them in every layer."""
    alone = calls.is_exporting() or not torch.compiler.is_compiling()
    return tensors if alone else _held(tensors)


@torch.library.custom_op("rope_ext::held", mutates_args=())
def _held(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in tensors]


@_held.register_fake
def _(tensors):  # noqa: ANN001, ANN202
    return [torch.empty_like(x) for x in tensors]
