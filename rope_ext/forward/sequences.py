"""One forward under a method that follows sequences: which one every token belongs to.

A row of a batch may begin with padding, and may hold several documents one after the other. A
sequence counts from its own first token, and gets the frequencies of its own length, which stay
what they are: keys and values of earlier tokens were computed under them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rope_ext.caches import CacheWithMetadata, Move, attach
from rope_ext.forward.context import ForwardContext
from rope_ext.methods import FrequencyMethod
from rope_ext.methods.temperature import Temperature
from rope_ext.rotary.sites import RotarySite

STARTED = "_rope_ext_started"  # on a cache: the sequences in it, a Started
_EMPTY = "in a compiled forward every row needs a token to begin with; make the chunks longer"


@dataclass(frozen=True)
class Started:
    """The sequences at the end of the rows of a batch, whose frequencies stay what they are.

    Args:
        method: that of the patch.
        lengths: tokens that the frequencies of each row are made for, float64, ``[rows]``, CPU;
            0 where there was nothing but padding yet. One row if all are alike.
        first: position of the first token of each, int64, likewise; -1: still to come.
        room: tokens for the whole batch, with the padding, as a cache counts them.
        made: frequencies and scaling, by site and device.
        begun: no row is still to come.
    """

    method: FrequencyMethod
    lengths: torch.Tensor
    first: torch.Tensor
    room: int
    made: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    begun: bool = True

    @property
    def kind(self) -> type[CacheWithMetadata] | None:
        """What a cache with it has to be."""
        return CacheWithMetadata if len(self.lengths) > 1 else None

    def moved(self, move: Move) -> Started:
        """The sequences of other rows."""
        if len(self.lengths) == 1:
            return self
        return replace(self, lengths=move(self.lengths), first=move(self.first), made={})

    def emptied(self) -> None:
        """Nothing is left of them when a cache is reset."""


class SequenceForward(ForwardContext):
    """One forward of a decoder under a method that follows sequences.

    Eager and traced, it holds the same tensors. Where it is not traced, numbers are read to keep
    one row where all are alike, and to make frequencies once for each different length.

    Args:
        patch: the :class:`rope_ext.rotary.sequences.Sequences` of the decoder.
        rows, tokens, filled, cache, traced: as :class:`ForwardContext` has them.
        stored: what the cache knows of its sequences; None: they begin.
        announced: lengths, float64, ``[rows]``, and room that a call of ``generate`` has
            announced; None: not known.
        mask: the attention mask, as the decoder got it.
    """

    def __init__(
        self,
        patch: Any,
        rows: int,
        tokens: int,
        filled: int | torch.Tensor,
        cache: Any,
        traced: bool,
        stored: Started | None,
        announced: tuple[torch.Tensor, int] | None = None,
        mask: Any = None,
    ) -> None:
        super().__init__(patch, rows, tokens, filled, cache, traced)
        self.announced, self.mask = announced, mask
        self._stored = stored
        # In a graph the cache of a sequence that goes on says everything.
        self.started: Started | None = stored if traced else None
        self.lengths: torch.Tensor | None = None  # of sequences that begin, [rows, tokens]
        self.first: torch.Tensor | None = None  # likewise
        self.positions: torch.Tensor | None = None  # as the model has them
        self._made: dict[tuple, Any] = {}

    def locate(self, positions: torch.Tensor) -> None:
        """Find the sequences, from the position ids that the model itself uses."""
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
                attach(self.cache, STARTED, self.started)
            self.mask = self.cache = None  # a graph may hold on to this

    def _start(self, positions: torch.Tensor) -> Started:
        if positions.ndim == 3:  # axes, rows, tokens
            positions = positions.amax(0)
        positions = positions.reshape(-1, positions.shape[-1])
        if positions.shape[-1] != self.tokens:  # those of compressed keys
            positions = torch.arange(
                self.filled, self.filled + self.tokens, device=positions.device
            ).unsqueeze(0)
        positions = positions[-self.rows :].expand(self.rows, -1)
        real, edges = read(self.mask, self.filled, self.tokens)
        lengths, first, number = documents(positions, real, edges)
        if self.traced:
            self.require((first[:, -1] >= 0).all(), RuntimeError, _EMPTY)
            self.lengths, self.first = lengths.double(), first
            ends = self.lengths[:, -1].cpu(), first[:, -1].cpu()
            return Started(self.patch.method, *ends, self.tokens)
        return self._start_with_numbers(lengths, first, number > 1)

    def _start_with_numbers(
        self, lengths: torch.Tensor, first: torch.Tensor, packed: torch.Tensor
    ) -> Started:
        """Read them once, and keep one row where all are alike."""
        found = torch.stack((lengths[:, -1], first[:, -1], packed[:, -1].long())).cpu()
        of_row, first_of_row = found[0].double(), found[1]
        stored = self._stored
        room = max(self.filled + self.tokens, int(of_row.max()))
        if self.announced is not None:
            announced, room = self.announced
            of_row = announced.repeat_interleave(self.rows // len(announced))
        elif stored is None and bool(found[2].any()):
            self.lengths, self.first = lengths.double().cpu(), first
        if stored is not None:  # rows that had nothing but padding before begin here
            of_row = torch.where(stored.lengths > 0, stored.lengths, of_row)
            first_of_row = torch.where(stored.first >= 0, stored.first, first_of_row)
            room = max(room, stored.room)
        of_row, first_of_row = of_row.expand(self.rows), first_of_row.expand(self.rows)
        if bool((of_row == of_row[0]).all() and (first_of_row == first_of_row[0]).all()):
            of_row, first_of_row = of_row[:1], first_of_row[:1]
        begun = bool((first_of_row >= 0).all())
        return Started(self.patch.method, of_row, first_of_row, room, begun=begun)

    def frequencies(
        self, site: RotarySite, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, tokens, pairs]`` and ``[rows, tokens, 1]``, or 1 where all are equal."""
        started = self._started
        by_token = self.lengths is not None and self.lengths.shape[1] == positions.shape[-1]
        key = (site.name, site.layer_type, positions.device, dtype)
        # On a cache, those of its sequences serve every later forward, graphs too.
        if self.traced and key not in started.made:
            started.made[key] = self._frequencies_at(
                site, started.lengths[:, None], positions.device, dtype
            )
        made = self._made if by_token else started.made
        if key not in made:
            lengths = self.lengths.cpu() if by_token else started.lengths[:, None]
            made[key] = self._frequencies_at(site, lengths, positions.device, dtype)
        return made[key]

    def _frequencies_at(
        self, site: RotarySite, lengths: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ``lengths`` ``[rows, tokens]``; one row and one token if all are equal."""
        if self.traced:  # how many different lengths there are, only a number could say
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
        """What multiplies queries, ``[rows or 1, 1, tokens, 1]``; None: 1 everywhere."""
        key = ("query_scale", device, dtype)
        if key not in self._made:
            assert self.positions is not None
            positions = self.counted(self.positions)
            if positions.ndim == 3:  # axes, rows, tokens
                positions = positions.amax(0)
            tau = temperature.at(positions.double().clamp(min=0)).to(device, dtype)
            # On a GPU the question would wait for it, and in a graph it cannot be asked.
            same = not self.traced and tau.device.type == "cpu" and bool((tau == 1).all())
            self._made[key] = None if same else tau[:, None, :, None]
        return self._made[key]

    def counted(self, positions: torch.Tensor) -> torch.Tensor:
        """``positions`` counted from the first token of each sequence."""
        first = self.first
        if first is None or first.shape[1] != positions.shape[-1]:
            first = self._started.first[:, None]
            if not self.traced and not bool(first.any()):
                return positions
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
    # Where no token from here on sees anything before: windows and branches are no edges.
    return real, furthest.flip(1).cummin(1).values.flip(1) >= place


def documents(
    positions: torch.Tensor, real: torch.Tensor | None, edges: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the sequence of each token: its length, its first position, its number within the row.

    A row begins at its first real token. Another document begins where positions fall back to
    there, as packing restarts them, and where nothing before is seen.

    Args:
        positions: int64, ``[rows, tokens]``.
        real: bool, ``[rows or 1, tokens]``; None: all.
        edges: bool, likewise; None: none.

    Returns:
        Three int64 tensors, ``[rows, tokens]``; numbers count from 1. Where a row has no real
        token up to there, the first position is -1, and the length and the number are 0.
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
