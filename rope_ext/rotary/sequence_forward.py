"""One forward under a method that follows sequences: which sequence each token belongs to.

A row of a batch may begin with padding, and may hold several documents one after the other.
Positions of a sequence count from its first token. Its frequencies follow from its length and stay
fixed, because the keys and values of earlier tokens were computed with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from rope_ext.methods import FrequencyMethod
from rope_ext.methods.temperature import SSMax, Temperature
from rope_ext.rotary.context import ForwardContext
from rope_ext.rotary.sites import RotarySite
from rope_ext.rotary.swapping import swap, take_back

# A mixin: swapping.swap puts it in front of whatever class of cache an object has.
_CacheMixin = Cache if TYPE_CHECKING else object
STARTED = "_rope_ext_started"  # attribute of a cache: the sequences in it, a Started
_EMPTY = "in a compiled forward every row needs a token to begin with; make the chunks longer"


@dataclass(frozen=True)
class Started:
    """The last sequence in each row of a batch, whose frequencies stay fixed.

    Args:
        method: the method of the patch.
        lengths: number of tokens that the frequencies of each row are made for, float64,
            ``[rows]``, on the CPU; 0 for rows with only padding so far. One row if all are equal.
        first: position of the first token of each, int64, same shape; -1 for rows with only
            padding so far.
        room: number of tokens for the whole batch including padding, as a cache counts them.
        made: frequencies and scaling, by site, device and dtype; and the copies of ``first``.
        begun: whether every row has a token.
    """

    method: FrequencyMethod
    lengths: torch.Tensor
    first: torch.Tensor
    room: int
    made: dict[tuple, Any] = field(default_factory=dict)
    begun: bool = True

    def first_on(self, device: torch.device) -> torch.Tensor:
        """``first`` on a device, copied there once: a CPU tensor keeps a graph from CUDA graphs."""
        key = ("first", device)
        if key not in self.made:
            with torch.inference_mode(False):  # it outlives the mode
                self.made[key] = self.first.to(device)
        return self.made[key]

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Started:
        """The sequences after rows were moved; ``move`` takes and returns ``[rows]``."""
        return replace(self, lengths=move(self.lengths), first=move(self.first), made={})

    def keep(self, cache: Cache) -> None:
        """Put it on a cache, whose class changes where sequences have to follow its rows."""
        setattr(cache, STARTED, self)
        if len(self.lengths) > 1:
            swap(cache, CacheOfSequences)


class CacheOfSequences(_CacheMixin):
    """Mixin for caches with different sequences in their rows, which follow when rows are moved."""

    def _move(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        setattr(self, STARTED, getattr(self, STARTED).moved(move))

    def reorder_cache(self, beam_idx: Any) -> Any:  # int64, [rows]; annotated LongTensor there
        self._move(lambda rows: rows[beam_idx.to(rows.device)])
        return super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> Any:
        self._move(lambda rows: rows[indices.to(rows.device)])
        return super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> Any:
        self._move(lambda rows: rows.repeat_interleave(repeats, dim=0))
        return super().batch_repeat_interleave(repeats)

    def reset(self) -> Any:
        result = super().reset()
        delattr(self, STARTED)
        take_back(self)
        return result


class SequenceForward(ForwardContext):
    """One forward of a decoder under a method that follows sequences.

    Eager and traced forwards hold the same tensors. An eager forward also reads values: to keep a
    single row where all rows are equal, and to compute frequencies once for each distinct length.

    Args:
        patch: the :class:`rope_ext.rotary.sequences.Sequences` of the decoder.
        rows, tokens, cache, traced: see :class:`ForwardContext`.
        filled: number of tokens already in the cache; 0 in a graph, where ``stored`` replaces it.
        stored: the sequences recorded on the cache; None: they begin with this forward.
        announced: lengths (float64, ``[rows]``) and room that a call of ``generate`` plans for;
            None: not known.
        mask: the attention mask that the decoder received.
    """

    def __init__(
        self,
        patch: Any,
        rows: int,
        tokens: int,
        filled: int,
        cache: Any,
        traced: bool,
        stored: Started | None,
        announced: tuple[torch.Tensor, int] | None = None,
        mask: Any = None,
    ) -> None:
        super().__init__(patch, rows, tokens, filled, cache, traced)
        self.announced, self.mask = announced, mask
        self._stored = stored
        # In a graph, a sequence that continues takes everything from its cache.
        self.started: Started | None = stored if traced else None
        self.lengths: torch.Tensor | None = None  # of sequences that begin here, [rows, tokens]
        self.first: torch.Tensor | None = None  # their first positions, same shape
        self.positions: torch.Tensor | None = None  # position ids of the model
        self._made: dict[tuple, Any] = {}

    def locate(self, positions: torch.Tensor) -> None:
        """Find the sequences from the position ids that the model itself uses."""
        if self.positions is None:
            self.positions = positions
        if self.started is not None:
            return
        if self._stored is not None and self._stored.begun:
            self.started = self._stored
        else:
            self.started = self._start(positions)
        if not self.traced:
            if self.cache is not None:
                self.started.keep(self.cache)
            self.mask = self.cache = None  # autograd may keep this object alive for long

    def _start(self, positions: torch.Tensor) -> Started:
        if positions.ndim == 3:  # axes, rows, tokens
            positions = positions.amax(0)
        positions = positions.reshape(-1, positions.shape[-1])
        if positions.shape[-1] != self.tokens:  # those of compressed keys
            positions = torch.arange(
                self.filled_count, self.filled_count + self.tokens, device=positions.device
            ).unsqueeze(0)
        positions = positions[-self.rows :].expand(self.rows, -1)
        real, edges = read(self.mask, self.filled_count, self.tokens)
        lengths, first, number = documents(positions, real, edges)
        if self.traced:
            self.require((first[:, -1] >= 0).all(), RuntimeError, _EMPTY)
            self.lengths, self.first = lengths.double(), first
            ends = self.lengths[:, -1].cpu(), first[:, -1].cpu()
            made = {("first", first.device): first[:, -1]}
            return Started(self.patch.method, *ends, self.tokens, made)
        return self._start_with_numbers(lengths, first, number > 1)

    def _start_with_numbers(
        self, lengths: torch.Tensor, first: torch.Tensor, packed: torch.Tensor
    ) -> Started:
        """Read them once, and keep a single row if all rows are equal."""
        found = torch.stack((lengths[:, -1], first[:, -1], packed[:, -1].long())).cpu()
        of_row, first_of_row = found[0].double(), found[1]
        stored = self._stored
        room = max(self.filled_count + self.tokens, int(of_row.max()))
        if self.announced is not None:
            announced, room = self.announced
            of_row = announced.repeat_interleave(self.rows // len(announced))
        elif stored is None and bool(found[2].any()):
            self.lengths, self.first = lengths.double().cpu(), first
        if stored is not None:  # rows that had only padding so far begin here
            of_row = torch.where(stored.lengths > 0, stored.lengths, of_row)
            first_of_row = torch.where(stored.first >= 0, stored.first, first_of_row)
            room = max(room, stored.room)
        of_row, first_of_row = of_row.expand(self.rows), first_of_row.expand(self.rows)
        if bool((of_row == of_row[0]).all() and (first_of_row == first_of_row[0]).all()):
            of_row, first_of_row = of_row[:1], first_of_row[:1]
        begun = bool((first_of_row >= 0).all())
        started = Started(self.patch.method, of_row, first_of_row, room, begun=begun)
        started.first_on(lengths.device)  # for the graphs that continue
        return started

    def frequencies(
        self, site: RotarySite, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Frequencies ``[rows, tokens, pairs]`` and scaling ``[rows, tokens, 1]``.

        Rows and tokens are 1 where all are equal.
        """
        started, by_token = self._started, self.lengths
        if by_token is not None and by_token.shape[1] != positions.shape[-1]:
            by_token = None
        key = (site.name, site.layer_type, positions.device, dtype)
        # Those on a cache serve every later forward of its sequences, including graphs.
        if self.traced and key not in started.made:
            started.made[key] = self._frequencies_at(
                site, started.lengths[:, None], positions.device, dtype
            )
        made = started.made if by_token is None else self._made
        if key not in made:
            lengths = started.lengths[:, None] if by_token is None else by_token.cpu()
            made[key] = self._frequencies_at(site, lengths, positions.device, dtype)
        return made[key]

    def _frequencies_at(
        self, site: RotarySite, lengths: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For ``lengths`` ``[rows, tokens]``; one row and one token if all are equal."""
        if self.traced:  # the number of distinct lengths would have to be read
            inv_freq, scaling = self.patch.at_lengths(site, lengths.flatten())
            inv_freq, scaling = inv_freq.unflatten(0, lengths.shape), scaling.view(lengths.shape)
        else:
            distinct, index = lengths.unique(return_inverse=True)
            index = index[:1, :1] if len(distinct) == 1 else index
            inv_freq, scaling = (x[index] for x in self.patch.at_lengths(site, distinct))
        return inv_freq.to(device, dtype), scaling.unsqueeze(-1).to(device, dtype)

    def query_scale(
        self, temperature: Temperature, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Factor of the queries, ``[rows or 1, 1, tokens, 1]``; None: 1 everywhere.

        Of a temperature that learns, the growth that its scales multiply; None: 0 everywhere.
        """
        key = ("query_scale", device, dtype)
        if key not in self._made:
            assert self.positions is not None
            positions = self.counted(self.positions)
            if positions.ndim == 3:  # axes, rows, tokens
                positions = positions.amax(0)
            t = positions.double().clamp(min=0)
            learned = isinstance(temperature, SSMax)
            tau = (temperature.growth(t) if learned else temperature.at(t)).to(device, dtype)
            # Reading it would synchronise with a GPU, and is impossible in a graph.
            readable = not self.traced and tau.device.type == "cpu"
            same = readable and bool((tau == (0 if learned else 1)).all())
            self._made[key] = None if same else tau[:, None, :, None]
        return self._made[key]

    def counted(self, positions: torch.Tensor) -> torch.Tensor:
        """``positions`` counted from the first token of each sequence."""
        first = self.first
        if first is None or first.shape[1] != positions.shape[-1]:
            if not self.traced and not bool(self._started.first.any()):
                return positions
            first = self._started.first_on(positions.device)[:, None]
        return positions - first.to(positions.device)

    @property
    def _started(self) -> Started:
        assert self.started is not None, "locate() comes first"
        return self.started


def read(mask: Any, filled: int, tokens: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which tokens are real, and at which a sequence begins; bool, ``[rows, tokens]``, or None."""
    if isinstance(mask, dict):  # one for each kind of layer, made before the forward
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if not isinstance(mask, torch.Tensor):
        return None, None
    if mask.ndim == 2:
        mask = mask[:, filled : filled + tokens]
        return (mask != 0 if mask.shape[1] == tokens else None), None
    if mask.ndim != 4 or filled or mask.shape[2] != tokens or mask.shape[3] < tokens:
        return None, None
    seen = mask if mask.dtype == torch.bool else mask.float().exp() > 0
    seen = seen[..., :tokens].any(1)
    real = seen.diagonal(dim1=1, dim2=2)
    place = torch.arange(tokens, device=mask.device)
    furthest = torch.where(real, seen.to(torch.uint8).argmax(2), place)
    # An edge is where no later token sees anything before it; windows and branches are no edges.
    return real, furthest.flip(1).cummin(1).values.flip(1) >= place


def documents(
    positions: torch.Tensor, real: torch.Tensor | None, edges: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Length, first position and index within the row of the sequence that each token belongs to.

    A row begins at its first real token. A new document begins where positions restart, as packing
    does, and where tokens see nothing before it.

    Args:
        positions: int64, ``[rows, tokens]``.
        real: bool, ``[rows or 1, tokens]``; None: all are real.
        edges: bool, same shape; None: no edges.

    Returns:
        Three int64 tensors, ``[rows, tokens]``; indices count from 1. Before the first real token
        of a row, the first position is -1, and the length and the index are 0.
    """
    device = positions.device
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real.to(device)
    real = real.expand(len(positions), -1)
    origin = positions.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
    begins = (positions.diff(dim=1, prepend=positions[:, :1]) <= 0) & (positions <= origin)
    if edges is not None:
        begins = begins | edges.to(device)
    begins = real & (begins | (real.cumsum(1) == 1))
    number = begins.cumsum(1)
    index = torch.arange(positions.shape[1], device=device)
    index = torch.where(begins, index, 0).cummax(1).values
    first = positions.gather(1, index)
    count = torch.where(real, positions - first + 1, 0)
    lengths = torch.zeros_like(positions).scatter_reduce(1, index, count, "amax").gather(1, index)
    began = number > 0
    return torch.where(began, lengths, 0), torch.where(began, first, -1), number
