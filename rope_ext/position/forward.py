"""One forward under a position map: which slots hold tokens, and their positions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.attention import placed
from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods.kinds import at
from rope_ext.methods.temperature import SSMax
from rope_ext.position.cache import KeyPositions, keep, kept, whole
from rope_ext.position.map import PositionMap
from rope_ext.rotary import calls, hooks
from rope_ext.rotary.context import ForwardContext
from rope_ext.rotary.sites import RotarySite

FRACTIONS = (
    "position ids have to be whole numbers of tokens under this patch, and these have fractions; "
    "round them"
)


class PositionForward(ForwardContext):
    """One forward of a decoder under a position map.

    Eager and traced forwards keep positions in the same tensors. An eager forward also reads
    values: to reject invalid input early, and to keep a single row where all rows are equal.

    Args:
        patch: the position map in force.
        rows, tokens, filled, cache, traced: see :class:`ForwardContext`.
        mask: ``[rows, slots]``, zero where there is no token; None: no padding.
        weights: whether layers also return their attention weights (``output_attentions``).
        room: number of slots that the layers see; None: those filled after this forward.
        known: positions of the keys in a static cache; given in traced forwards only.
        regular: whether a graph may assume that every row holds tokens 0, 1, 2, ... of a sequence.

    Attributes:
        query: positions of the queries, int64, ``[rows or 1, tokens]``, counted from the first
            real token of each sequence; negative for padding before it. Set by :meth:`locate`.
        key: the same for all slots, ``[rows or 1, room]``. Set by :meth:`locate`.
        located: whether they are set.
    """

    logs_positions = True
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
        known: KeyPositions | None = None,
        regular: bool = False,
    ) -> None:
        super().__init__(patch, rows, tokens, filled, cache, traced)
        self.map, self.weights, self.known, self.regular = patch, weights, known, regular
        self.room: int = self.filled_count + tokens if room is None else room
        self.located = False
        self.new_known: torch.Tensor | None = None  # new position ids on the CPU, read once
        self.places_known: torch.Tensor | None = None  # those of all slots on the CPU
        self.padding: torch.Tensor | None = None  # bool, [rows, room], False without a token
        self.padding_known: torch.Tensor | None = None  # the same on the CPU, read once
        self.documents: torch.Tensor | None = None  # packed documents, int64, [rows, room]
        self.entering: torch.Tensor | None = None  # what an input encoding adds, for all layers
        self.made: dict[Any, Any] = {}  # tensors shared by all layers, keyed by the code they serve
        if mask is not None:
            self.pad(mask)

    def pad(self, mask: torch.Tensor) -> None:
        """Record the padding."""
        if self.traced:
            self.padding = nn.functional.pad(mask != 0, (0, self.room - mask.shape[1]))
            return
        padding = mask[:, : self.room].bool()
        padding = nn.functional.pad(padding, (0, self.room - padding.shape[1]))
        known = padding.cpu()  # read once, since reading waits for a GPU
        if not bool(known.all()):
            self.padding, self.padding_known = padding, known

    def locate(self, positions: torch.Tensor) -> None:
        """Record the position ids that the model itself uses; sets ``query`` and ``key``."""
        if self.located:
            return
        positions = self._checked(positions)
        places = self._log(positions) if self.traced else self._log_eagerly(positions)
        self._count(positions, places)
        if self.traced and not self.regular and self.tokens <= placed.FEW:
            future = self.visible() & (self.key[:, None] > self.query[:, :, None])
            self.require(~future.any(), UnsupportedModelError, placed.BACK)

    def split(self, documents: torch.Tensor) -> None:
        """Record the documents that transformers keeps apart, int64, ``[rows, keys]``."""
        self.documents = documents
        if self.located and self.known is not None:
            places = self.known.positions
            self._count(places[:, self.filled_count :], places)

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
        if not self.traced:
            known = positions.cpu()
            if len(known) > 1 and bool((known == known[:1]).all()):
                positions, known = positions[:1], known[:1]
            self.new_known = known
        return positions

    def _log_eagerly(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions of all slots, which are recorded on the cache."""
        places, self.places_known = positions, self.new_known
        if self.filled:
            known = self._continued()
            places = _joined(known.positions[:, : self.filled_count].to(positions.device), places)
            assert self.new_known is not None, "an eager forward has read them"
            self.places_known = _joined(known.on_host(self.filled_count), self.new_known)
        self.known = KeyPositions(self.map.key, places, self.places_known)
        if self.cache is not None:
            keep(self.cache, self.known, self.rows)
        return places

    def _log(self, positions: torch.Tensor) -> torch.Tensor:
        """The same in a graph, which writes the new positions to the log of a static cache."""
        if self.cache is None or whole(self.cache) is None:
            self.known = KeyPositions(self.map.key, positions)
            return positions
        slots = self.filled + torch.arange(self.tokens, device=positions.device)
        if calls.is_exporting():
            return self._counted(positions, slots)
        if self.known is None:
            empty = torch.zeros(self.rows, self.room, dtype=torch.long, device=positions.device)
            self.known = KeyPositions(self.map.key, empty)
        places = self.known.positions
        places.index_copy_(1, slots, positions.expand(self.rows, -1))
        return places

    def _count(self, positions: torch.Tensor, places: torch.Tensor) -> None:
        """Set ``query`` and ``key``, counted from the first token of each sequence."""
        device, self.located = positions.device, True
        if self.regular:
            self.query = self.key = torch.arange(self.tokens, device=device)[None]
            return
        # Not always the first slot: under a mask of one's own, a suffix may precede its prefix.
        first = of_queries = places[:, :1] if self.traced else places.amin(1, keepdim=True)
        if self.padding is not None:
            padding = self.padding.to(device)
            places = places.expand(len(padding), -1)  # a single row if no positions were given
            first = of_queries = places.gather(1, padding.int().argmax(1, keepdim=True))
        elif self.documents is not None:
            documents = self.documents.to(device)
            places = places.expand(len(documents), -1)
            # Each document counts from its own beginning.
            first = places.gather(1, torch.searchsorted(documents, documents))
            of_queries = first[:, self.filled_count :]
        self.query, self.key = positions - of_queries, places - first

    def real(self) -> torch.Tensor:
        """Which slots hold a token, bool, ``[rows or 1, room]``."""
        if "real" not in self.made:
            slots = torch.arange(self.room, device=self.key.device)
            real = (slots < self.filled + self.tokens)[None]
            if self.padding is not None:
                real = real & self.padding.to(self.key.device)
            self.made["real"] = real
        return self.made["real"]

    def visible(self) -> torch.Tensor:
        """Which slots each of few queries sees, bool, ``[rows or 1, tokens, room]``."""
        if "visible" not in self.made:
            slots = torch.arange(self.room, device=self.key.device)
            new = self.filled + torch.arange(self.tokens, device=self.key.device)
            self.made["visible"] = (slots <= new[:, None]) & self.real()[:, None]
        return self.made["visible"]

    def on(self, device: torch.device) -> PositionForward:
        """The same forward for layers on another device, copied there once for all of them."""
        if self.key.device == device:
            return self
        if ("on", device) not in self.made:
            moved = copy.copy(self)
            moved.query, moved.key, moved.made = self.query.to(device), self.key.to(device), {}
            self.made["on", device] = moved
        return self.made["on", device]

    def _counted(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Positions of all slots in an exported program, which cannot keep a log on the cache.

        Slots are counted without padding, and the given positions of the new tokens, which are in
        ``slots``, determine where the count starts.
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

    def _continued(self) -> KeyPositions:
        """The positions recorded on the cache."""
        known, filled = kept(self.cache), self.filled_count
        if known is None or known.positions.shape[1] < filled:
            raise CacheError(
                f"this cache was begun before the model was patched with "
                f"{self.map.method.name} (or by prefix tuning), so its keys carry other "
                f"rotations; start with an empty cache, or use a frequency method such as 'yarn'"
            )
        if known.key != self.map.key:
            raise CacheError(
                f"this cache was begun under another patch ({known.key[0]}) than the one in force "
                f"({self.map.key[0]}); start with an empty cache"
            )
        return known

    def key_known(self) -> torch.Tensor:
        """:attr:`key` of an eager forward on the CPU, from what was read already."""
        if self.documents is not None or self.places_known is None:
            return self.key.cpu()
        places, first = self.places_known, self.places_known.amin(1, keepdim=True)
        if self.padding_known is not None:
            places = places.expand(len(self.padding_known), -1)
            first = places.gather(1, self.padding_known.int().argmax(1, keepdim=True))
        return places - first

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


def _joined(before: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Positions of the keys in a cache, and of new tokens; a single row stands for all."""
    if len(before) != len(new):
        rows = max(len(before), len(new))
        if min(len(before), len(new)) != 1:
            raise CacheError(
                f"this cache was begun with {len(before)} rows and is continued with {len(new)}; "
                f"start again with an empty cache"
            )
        before, new = before.expand(rows, -1), new.expand(rows, -1)
    return torch.cat((before, new), 1)


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
