"""Which sequence every token belongs to, and the frequencies that its sequence keeps.

A row of a batch may begin with padding, and may hold several documents one after the other. A
sequence counts from its own first token, and gets the frequencies of its own length.

What belongs to a request lives on its cache, or in a thread-local as long as it is under way: the
same model may serve several threads, and one of them may start a second request within the first.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rope_ext.caches import CacheWithMetadata, Move, attach, watch
from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod
from rope_ext.methods.temperature import Temperature
from rope_ext.rotary.buffers import ABSENT, Changes
from rope_ext.rotary.calls import (
    is_exporting,
    parameters,
    refuse_continuous_batching,
    refuse_sharded,
)
from rope_ext.rotary.sites import RotarySite
from rope_ext.rotary.third_party import refuse_rerotation
from rope_ext.under_way import here

STARTED = "_rope_ext_started"  # on a cache: the sequences in it, a Started
_logger = logging.getLogger("rope_ext")


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


@dataclass(eq=False)
class Request:
    """A call of ``generate`` under way.

    Args:
        sequences: of the model that generates.
        lengths: tokens that each row will have, float64, ``[rows]``; None: not known.
        room: the same for the whole batch, with the padding.
        guided: by ``guidance_scale``: a second branch without the prompt runs beside the first
            and gets its frequencies, since the two are subtracted from each other.
        due: whether the next forward is its own, and not one that a streamer, a stopping
            criterion or the like makes for itself.
    """

    sequences: Sequences
    lengths: torch.Tensor | None
    room: int
    guided: bool
    due: bool = False


class Forward:
    """One forward of the decoder.

    Args:
        sequences: of the decoder.
        rows, tokens: of the batch.
        filled: tokens in the cache before.
        cache: may be None.
        stored: what the cache knows of its sequences.
        request: the call of ``generate`` that makes it.
        mask: the attention mask, as the decoder got it.
    """

    def __init__(
        self,
        sequences: Sequences,
        rows: int,
        tokens: int,
        filled: int,
        cache: Any,
        stored: Started | None,
        request: Request | None,
        mask: Any,
    ) -> None:
        self.sequences, self.rows, self.tokens, self.filled = sequences, rows, tokens, filled
        self.cache, self.stored, self.request, self.mask = cache, stored, request, mask
        self.started: Started | None = None
        self.lengths: torch.Tensor | None = None  # of packed rows, [rows, tokens]
        self.first: torch.Tensor | None = None  # likewise
        self.positions: torch.Tensor | None = None  # as the model has them
        self._made: dict[tuple, Any] = {}

    def locate(self, positions: torch.Tensor) -> None:
        """Find the sequences, from the position ids that the model itself uses."""
        if self.positions is None:
            self.positions = positions
        if self.started is not None:
            return
        stored = self.stored
        if stored is not None and stored.begun:
            self.started = stored
        else:
            self.started = self._start(positions)
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
        packed = number > 1
        found = torch.stack((lengths[:, -1], first[:, -1], packed[:, -1].long())).cpu()
        of_row, first_of_row = found[0].double(), found[1]
        request, stored = self.request, self.stored
        room = max(self.filled + self.tokens, int(of_row.max()))
        if request is not None and request.lengths is not None:
            of_row = request.lengths.repeat_interleave(self.rows // len(request.lengths))
            room = request.room
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
        return Started(self.sequences.method, of_row, first_of_row, room, begun=begun)

    def frequencies(
        self, site: RotarySite, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, tokens, pairs]`` and ``[rows, tokens, 1]``, or 1 where all are equal."""
        packed = self.lengths is not None and self.lengths.shape[1] == positions.shape[-1]
        lengths = self.lengths if packed else self.started.lengths.unsqueeze(1)
        made = self._made if packed else self.started.made
        key = (site.name, site.layer_type, positions.device, dtype)
        if key not in made:
            found = self.sequences.frequencies(site, lengths)
            made[key] = tuple(x.to(positions.device, dtype) for x in found)
        return made[key]

    def query_scale(
        self, temperature: Temperature, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What multiplies queries, ``[rows or 1, 1, tokens, 1]``; None: 1 everywhere."""
        key = ("query_scale", device, dtype)
        if key not in self._made:
            positions = self.counted(self.positions)
            if positions.ndim == 3:  # axes, rows, tokens
                positions = positions.amax(0)
            tau = temperature.at(positions.double().clamp(min=0)).to(device, dtype)
            same = tau.device.type == "cpu" and bool((tau == 1).all())  # elsewhere, it would wait
            self._made[key] = None if same else tau[:, None, :, None]
        return self._made[key]

    def counted(self, positions: torch.Tensor) -> torch.Tensor:
        """``positions`` counted from the first token of each sequence."""
        first = self.first
        if first is None or first.shape[1] != positions.shape[-1]:
            first = self.started.first.unsqueeze(1)
            if not bool(first.any()):
                return positions
        return positions - first.to(positions.device)


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


class Sequences:
    """Keeps the frequencies of every sequence fixed from its first token to its last.

    A decoder pre-hook begins a :class:`Forward`; the rotary module's hook asks it. Sequences under
    way are known from their cache; those that start now are read off positions and mask.

    Args:
        method: whose frequencies depend on the length or on the place of a token.
        trained: tokens below which no method changes anything.
    """

    def __init__(self, method: FrequencyMethod, trained: int) -> None:
        self.method, self.trained = method, trained
        self.layers: list[nn.Module] = []  # that attend
        self.names: tuple[str, ...] = ()  # of the decoder's arguments
        self.warned = False

    def under_way(self) -> Forward | None:
        """The forward under way."""
        forward = self._innermost(here.sequences)
        if forward is None and torch._C._current_graph_task_id() != -1:
            # Gradient checkpointing runs a layer again.
            forward = here.recomputed
            if forward is not None and forward.sequences is not self:
                forward = None
        return forward

    def traced(self) -> Any:
        """The innermost forward that torch.compile traces."""
        return self._innermost(here.followed) if here.followed else None

    def at(self, positions: torch.Tensor) -> Forward:
        """The forward under way; outside of any, one made of ``positions`` alone."""
        forward = self.under_way()
        if forward is None:
            forward = Forward(self, 1, positions.shape[-1], 0, None, None, None, None)
            length = positions.max().double().cpu().reshape(1) + 1
            forward.started = Started(
                self.method, length, torch.zeros(1, dtype=int, device="cpu"), int(length)
            )
        forward.locate(positions)
        return forward

    def _innermost(self, under_way: list[Any]) -> Any:
        for one in reversed(under_way):
            if one.sequences is self:
                return one
        return None

    def frequencies(
        self, site: RotarySite, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, tokens, pairs]`` and ``[rows, tokens, 1]``, float64, of ``lengths``.

        One row and one token if all are equal.
        """
        lengths, index = lengths.unique(return_inverse=True)
        if len(lengths) == 1:
            index = index[:1, :1]
        inv_freq, scaling = self.at_lengths(site, lengths)
        return inv_freq[index], scaling[index].unsqueeze(-1)

    def at_lengths(
        self, site: RotarySite, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[lengths, pairs]`` and ``[lengths]``, float64."""
        inv_freq = self.method.inv_freq_at(site.rope, lengths)
        # A row that needs no extension gets the very numbers the checkpoint came with.
        same = torch.isclose(inv_freq, site.rope.inv_freq, rtol=1e-12, atol=0)
        inv_freq = torch.where(same, site.loaded.double(), inv_freq)
        return inv_freq, self.method.attention_scaling_at(site.rope, lengths) * site.scaling

    @torch.compiler.disable
    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decoder pre-hook."""
        name, request = self.method.name, self._innermost(here.requests)
        if request is not None and not (request.due or request.guided):
            request = None
        elif request is not None:
            request.due = False
        does, cure = self._does()
        refuse_sharded(name)
        if self.method.adapts:
            refuse_rerotation(self.layers, name)
        if is_exporting():
            raise UnsupportedModelError(
                f"{name} {does} of every sequence as it comes, which an exported graph cannot do; "
                f"{cure}"
            )
        given = {**dict(zip(parameters(type(decoder)), args, strict=False)), **kwargs}
        if given.get("cache") is not None:  # a paged one; all others are past_key_values
            raise CacheError(self.unbatched())
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        cache = given.get("past_key_values")
        rows, length = tokens.shape[:2]
        filled = 0 if cache is None else int(cache.get_seq_length())
        stored = self._stored(cache, rows) if filled else None
        if stored is not None and self.method.adapts:
            self._warn(stored, filled + length)
        if request is not None and request.lengths is not None and rows % len(request.lengths):
            request = None
        mask = given.get("attention_mask")
        forward = Forward(self, rows, length, filled, cache, stored, request, mask)
        here.sequences.append(forward)

    def unbatched(self) -> str:
        """Why continuous batching is refused, and what to do."""
        does, cure = self._does()
        return (
            f"continuous batching packs many sequences into one row, and {self.method.name} {does} "
            f"of each by itself; {cure}, or call generate with a padded batch"
        )

    def _does(self) -> tuple[str, str]:
        """What the method does to every sequence, and how to do without."""
        if self.method.adapts:
            return "chooses the frequencies", "pass length=TOKENS to fix them"
        if self.method.start_tokens:
            return "chooses the frequencies", "leave start_tokens out"
        return "scales the queries", "give temperature= a number, or leave it out"

    def _stored(self, cache: Any, rows: int) -> Started | None:
        """What a cache that has tokens knows of its sequences."""
        name, stored = self.method.name, getattr(cache, STARTED, None)
        if not self.method.adapts and stored is None:
            return Started(
                self.method,
                torch.zeros(1, device="cpu"),
                torch.zeros(1, dtype=int, device="cpu"),
                0,
            )
        if stored is None:
            raise CacheError(
                f"this cache was begun before the model was patched with {name} (or by prefix "
                f"tuning), so the length of its sequences is not known; start with an empty cache, "
                f"or pass length=TOKENS to fix the frequencies"
            )
        if stored.method != self.method:
            raise CacheError(
                f"this cache was begun under another patch ({stored.method}) than the one in "
                f"force ({self.method}); start with an empty cache"
            )
        if len(stored.lengths) not in (1, rows):
            raise CacheError(
                f"this cache was begun with {len(stored.lengths)} rows and is continued with "
                f"{rows}; start again with an empty cache, or set length= to fix the frequencies"
            )
        return stored

    def _warn(self, stored: Started, reached: int) -> None:
        """Say once that a sequence has become longer than its frequencies are made for."""
        if self.warned or reached <= max(stored.room, self.trained):
            return
        self.warned = True
        _logger.warning(
            "rope_ext: %s: a sequence of %d tokens keeps the frequencies it started with, which "
            "are made for %d: by generate on a patched model (not its decoder), prompt plus "
            "max_new_tokens; else the first forward. To go on with a cache beyond that, in a "
            "chat for instance, pass length=TOKENS to rope_ext.patch",
            self.method.name,
            reached,
            stored.room,
        )

    @torch.compiler.disable
    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: a cache that the decoder made itself knows the sequences too."""
        forward = self._innermost(here.sequences)
        if forward is None:  # refused before it began
            return
        here.sequences.remove(forward)
        if forward.started is None or output is None:
            return
        for part in output if isinstance(output, tuple) else (output,):
            cache = getattr(part, "past_key_values", part)
            if hasattr(cache, "get_seq_length"):
                attach(cache, STARTED, forward.started)
        hidden = output[0]
        if decoder.training and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            # With gradient checkpointing, layers run again in the thread that goes backward.
            hidden.register_hook(lambda gradient: setattr(here, "recomputed", forward))

    def generate(self, model: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Announce prompt plus new tokens of every row, then generate."""
        names = tuple(inspect.signature(type(model).generate).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        drafts = getattr(given.get("generation_config"), "is_assistant", False)
        if drafts and self._innermost(here.requests) is not None:  # for itself: the same sequence
            return original(*args, **kwargs)
        prepare = getattr(model.prepare_inputs_for_generation, "func", None)
        # PEFT's prompt tuning prepares in a way of its own: take the first forward at least.
        request = Request(self, *_announced(model, given), due=prepare != self.prepare)
        here.requests.append(request)
        try:
            return original(*args, **kwargs)
        finally:
            here.requests.remove(request)

    def prepare(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """What generate calls right before each forward of its own."""
        inputs = original(*args, **kwargs)
        request = self._innermost(here.requests)
        if request is not None:
            request.due = True
        return inputs


def _announced(model: nn.Module, given: dict[str, Any]) -> tuple[torch.Tensor | None, int, bool]:
    """Of a :class:`Request`: ``lengths``, ``room`` and ``guided``."""
    tokens = given.get("inputs") if given.get("input_ids") is None else given["input_ids"]
    embeds = given.get("inputs_embeds")
    prompt = tokens if embeds is None else embeds
    if not isinstance(prompt, torch.Tensor):
        return None, 0, False  # every row keeps the length of its prompt
    configs = (given.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:  # in the order of transformers
        values = (given.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    mask, pad, eos = given.get("attention_mask"), setting("pad_token_id"), setting("eos_token_id")
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if mask is None and embeds is None and pad is not None and pad not in ends:
        mask = prompt.ne(pad)  # as generate infers it
    real = torch.full((len(prompt),), prompt.shape[1], dtype=torch.float64, device="cpu")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        real = mask.sum(-1).double().cpu()
    new = setting("max_new_tokens")
    if new is None:
        total = setting("max_length")
        new = 20 if total is None else max(0, total - prompt.shape[1])
    return real + new, prompt.shape[1] + new, setting("guidance_scale") not in (None, 1)


def follow(decoder: nn.Module, model: nn.Module, sequences: Sequences, changes: Changes) -> None:
    """Tell ``sequences`` of all that ``decoder`` or ``model.generate`` runs."""
    watch()
    sequences.names = parameters(type(decoder))
    sequences.layers = [
        m for m in decoder.modules() if isinstance(m.__dict__.get("layer_idx"), int)
    ]
    refuse_continuous_batching(model, sequences.unbatched(), changes)
    changes.handles.append(decoder.register_forward_pre_hook(sequences.begin, with_kwargs=True))
    changes.handles.append(
        decoder.register_forward_hook(sequences.end, with_kwargs=True, always_call=True)
    )
    if not sequences.method.adapts or not hasattr(type(model), "generate"):
        return
    calls = {
        "generate": functools.partial(sequences.generate, model),
        "prepare_inputs_for_generation": sequences.prepare,
    }
    for name, call in calls.items():
        original = getattr(model, name)
        replacement = functools.partial(call, original)
        replacement.__wrapped__ = original  # from whose arguments transformers reads what it takes
        changes.replaced.append((model, name, model.__dict__.get(name, ABSENT)))
        setattr(model, name, replacement)
