"""Tracks the sequences in a decoder's forwards, and keeps each sequence's frequencies fixed.

A row of a batch may start with padding, and may contain several documents. Positions of a sequence
count from its first token. Its frequencies depend on its length and stay fixed, because the keys
and values of earlier tokens were computed with them. A request's state is stored on its cache, or
in its thread while it runs, since several threads may serve one model.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod
from rope_ext.rotary.calls import (
    arguments,
    is_exporting,
    is_sharded,
    refuse_continuous_batching,
    refuse_sharded,
    runs_layers_again,
)
from rope_ext.rotary.context import (
    NOTE,
    UNKNOWN,
    ForwardContext,
    cache_among,
    caches_in,
    current,
    forward_context,
    is_paged,
    run,
    run_eagerly,
    shape_of,
)
from rope_ext.rotary.sites import PatchTarget, RotarySite
from rope_ext.rotary.swapping import Changes, wrap
from rope_ext.rotary.third_party import refuse_presses

_EMPTY = "in a compiled forward every row needs a token to begin with; make the chunks longer"
_FILLED = (
    "a cache that was reset has no sequence for a compiled step to continue; begin again with a "
    "forward that is not compiled"
)
_logger = logging.getLogger("rope_ext")


@dataclass(frozen=True)
class Started:
    """The last sequence in each row of a batch, whose frequencies stay fixed.

    It is stored on the cache, whose rows must keep their order, as in ``generate``.
    """

    patch: FrequencyMethod  # the method
    # number of tokens that each row's frequencies are computed for, [rows], on the CPU; 0 for rows
    # with only padding so far. One row if all are equal
    lengths: torch.Tensor
    room: int  # number of tokens in the whole batch including padding, as counted by a cache
    begun: bool = True  # whether every row has a token
    # frequencies and scaling, by site, device and dtype
    made: dict[tuple, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """A call of ``generate`` in progress, on the stack of its thread."""

    sequences: Sequences
    room: int | None  # planned number of tokens, including padding; None: not known
    guided: bool
    due: bool = False  # whether the next forward is its own, not a streamer's or criterion's
    lengths: torch.Tensor | None = None  # lengths of rows in its first forward
    patch = None  # not a forward
    exported = False


class SequenceForward(ForwardContext):
    """One forward under a dynamic method; in a graph, ``filled`` is 0.

    ``started`` are the sequences recorded on the cache; None: they start in this forward.
    """

    started: Started | None = None
    request: Request | None = None  # the call of generate that runs it
    mask: Any = None  # the attention mask that the decoder received
    lengths: torch.Tensor | None = None  # lengths of documents that start here, [rows, tokens]
    positions: torch.Tensor | None = None  # position ids of the model; one axis or several

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self._made: dict[tuple, Any] = {}

    def locate(self, positions: torch.Tensor) -> None:
        """Find the sequences from the model's position ids."""
        if self.positions is not None:
            return
        self.positions = positions
        if self.started is None or not self.started.begun:
            self.started = self._start(positions)

    def _start(self, positions: torch.Tensor) -> Started:
        filled, old = self.filled_count, self.started
        positions = positions.amax(0) if positions.ndim == 3 else positions
        if positions.shape[-1] != self.tokens:  # positions of compressed keys
            positions = torch.arange(filled, filled + self.tokens, device=positions.device)
        positions = positions.reshape(-1, self.tokens)[-self.rows :].expand(self.rows, -1)
        masked = read(self.mask, filled, self.tokens)
        lengths, start, number = documents(positions, *masked)
        if self.traced:
            self.require((lengths[:, -1] > 0).all(), RuntimeError, _EMPTY)
            self.lengths = lengths
            return Started(self.patch.method, lengths[:, -1].cpu(), self.tokens)
        # Read them once, since it synchronizes with the device.
        of_row, place, count = torch.stack([x[:, -1] for x in (lengths, start, number)]).cpu()
        room = max(filled + self.tokens, int(of_row.max()))
        if self.request is not None and self.request.room is not None:
            room = self.request.room
            of_row = torch.where(of_row > 0, room - filled - place, 0)
            if self.request.lengths is None:
                self.request.lengths = of_row
            elif self.request.guided:  # guidance subtracts the outputs of both branches
                of_row = self.request.lengths
        elif old is None and int(count.max()) > 1:
            self.lengths = lengths
        if old is not None:  # rows with only padding so far start here
            of_row = torch.where(old.lengths > 0, old.lengths, of_row)
            room = max(room, old.room)
        if bool((of_row == of_row[0]).all()):
            of_row = of_row[:1]
        return Started(self.patch.method, of_row, room, begun=bool((of_row > 0).all()))

    def frequencies(
        self, site: RotarySite, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Frequencies ``[rows, tokens, pairs]`` and scaling ``[rows, tokens, 1]``.

        Rows and tokens are 1 where all are equal.
        """
        assert self.started is not None, "locate() comes first"
        by_token = self.lengths
        if by_token is not None and by_token.shape[1] != positions.shape[-1]:
            by_token = None
        key = (site.name, site.layer_type, positions.device, dtype)
        # If stored on a cache, later forwards of its sequences reuse them, including graphs.
        tables = [(self.started.made, self.started.lengths[:, None])]
        if by_token is not None:
            tables.append((self._made, by_token))
        for made, lengths in tables:
            if key not in made:
                inv_freq, scaling = self.patch.at_lengths(site, lengths.flatten().cpu().double())
                made[key] = (
                    inv_freq.unflatten(0, lengths.shape).to(positions.device, dtype),
                    scaling.view(*lengths.shape, 1).to(positions.device, dtype),
                )
        return tables[-1][0][key]


def read(mask: Any, filled: int, tokens: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return masks of real tokens and of sequence starts; bool, ``[rows, tokens]``, or None."""
    if isinstance(mask, dict):  # one mask per kind of layer, created before the forward
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
    earliest = torch.where(real, seen.to(torch.uint8).argmax(2), place)
    # At an edge, no later token sees earlier ones; windows and branches are not edges.
    return real, earliest.flip(1).cummin(1).values.flip(1) >= place


def documents(
    positions: torch.Tensor, real: torch.Tensor | None, edges: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Find each token's sequence: its length, place and number in the row.

    A row starts at its first real token. A new document starts where positions restart, as in
    packing, and where tokens see no earlier ones. Before the first real token of a row, lengths and
    numbers are 0.

    Args:
        positions: int64, ``[rows, tokens]``.
        real: bool, ``[rows or 1, tokens]``; None: all are real.
        edges: bool, same shape; None: no edges.

    Returns:
        Three int64 tensors, ``[rows, tokens]``; places count from 0, numbers from 1.
    """
    device = positions.device
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real.to(device)
    real = real.expand(len(positions), -1)
    origin = positions.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
    # If a token's position is not above the previous one, but above the first, it is a branch.
    begins = (positions.diff(dim=1, prepend=positions[:, :1]) <= 0) & (positions <= origin)
    if edges is not None:
        begins = begins | edges.to(device)
    begins = real & (begins | (real.cumsum(1) == 1))
    number = begins.cumsum(1)
    start = torch.where(begins, torch.arange(positions.shape[1], device=device), 0).cummax(1).values
    first = positions.gather(1, start)
    count = torch.where(real, positions - first + 1, 0)
    lengths = torch.zeros_like(positions).scatter_reduce(1, start, count, "amax").gather(1, start)
    return torch.where(number > 0, lengths, 0), start, number


class Sequences:
    """Keeps the frequencies of every sequence fixed from its first token to its last.

    A decoder pre-hook starts a :class:`SequenceForward`, which the rotary module's hook uses.
    Continued sequences are recorded on their cache; new ones are found from positions and mask.
    """

    def __init__(self, place: PatchTarget, method: FrequencyMethod, changes: Changes) -> None:
        decoder, self.method, self.warned = place.decoder, method, False
        # Up to this length, no method changes anything.
        self.trained = min(site.rope.length for site in place.scaled)
        modules = decoder.modules()
        self.layers = [m for m in modules if isinstance(m.__dict__.get("layer_idx"), int)]
        self.cure = "pass length=TOKENS to fix the frequencies"
        self.unbatched = (
            f"continuous batching packs many sequences into one row, and {method.name} follows the "
            f"positions of each; {self.cure}, or call generate with a padded batch"
        )
        refuse_continuous_batching(place.model, self.unbatched, changes)
        begin = decoder.register_forward_pre_hook(self.begin, with_kwargs=True)
        end = decoder.register_forward_hook(self.end, with_kwargs=True, always_call=True)
        changes += [begin.remove, end.remove]
        wrap(place.model, "prepare_inputs_for_generation", self.prepare, changes)
        wrap(place.model, "generate", functools.partial(self.generate, place.model), changes)

    def at(self, positions: torch.Tensor) -> SequenceForward:
        """Return the forward in progress, whose position ids are ``positions``."""
        forward = current(self)
        if forward is None:
            raise UnsupportedModelError(
                f"a rotary module was run by itself, or again by gradient checkpointing, and "
                f"{self.method.name} follows the sequences of whole forwards; run the whole model, "
                f"without checkpointing, or {self.cure}"
            )
        forward.locate(positions)
        return forward

    def at_lengths(
        self, site: RotarySite, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[lengths, pairs]`` and ``[lengths]``, float64."""
        method: Any = self.method  # dynamic methods compute frequencies and scaling by length
        inv_freq = method.inv_freq_at(site.rope, lengths)
        # A row that needs no extension gets exactly the checkpoint's frequencies.
        same = torch.isclose(inv_freq, site.rope.inv_freq, rtol=1e-12, atol=0)
        inv_freq = torch.where(same, site.loaded.double(), inv_freq)
        return inv_freq, method.attention_scaling_at(site.rope, lengths) * site.scaling

    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decoder pre-hook: starts a forward."""
        given, traced = arguments(decoder, args, kwargs), None
        if torch.compiler.is_compiling() and not is_exporting():
            traced = self._traced(decoder, given)
        if traced is None:
            self._begin(given)
        else:
            forward_context.stack.append(traced)

    def _traced(self, decoder: nn.Module, given: dict[str, Any]) -> SequenceForward | None:
        """Create the forward for these arguments in tensors; None if tensors cannot express it."""
        if is_paged(given) or is_sharded() or runs_layers_again(decoder):
            return None
        rows, tokens = shape_of(given)
        cache, stored = cache_among(given), None
        filled = 0 if cache is None else cache.get_seq_length()
        if isinstance(filled, torch.Tensor) and not hasattr(cache, NOTE):
            torch._assert_async(filled == 0, UNKNOWN)
            filled = 0
        if isinstance(filled, torch.Tensor) or filled:
            stored = getattr(cache, NOTE, None)
            if stored is None or stored.patch is not self.method or not stored.begun:
                return None
            if len(stored.lengths) not in (1, rows):
                return None
            if isinstance(filled, torch.Tensor):
                if tokens > 1:  # may be the first tokens of a cache that was reset
                    return None
                torch._assert_async(filled > 0, _FILLED)
        elif self._request() is not None:
            return None  # the lengths of its sequences have to be read
        forward = SequenceForward(self, rows, tokens, 0, None, True)
        forward.started, forward.mask = stored, given.get("attention_mask")
        return forward

    @run_eagerly()
    def _begin(self, given: dict[str, Any]) -> None:
        """Start a forward whose values can be read."""
        name = self.method.name
        refuse_sharded(name)
        refuse_presses(self.layers, name, "pass length=TOKENS, or use another press", True)
        if is_exporting():
            raise UnsupportedModelError(
                f"{name} follows every sequence, which an exported graph cannot do; {self.cure}"
            )
        if is_paged(given):
            raise CacheError(self.unbatched)
        rows, tokens = shape_of(given)
        cache = cache_among(given)
        filled = 0 if cache is None else int(cache.get_seq_length())
        forward = SequenceForward(self, rows, tokens, filled, cache, False)
        forward.mask, request = given.get("attention_mask"), self._request()
        if filled:
            forward.started = self._stored(cache, rows, tokens + filled)
        if request is not None:
            due, request.due = request.due, False
            forward.request = request if due or request.guided else None
        forward_context.stack.append(forward)

    def _request(self) -> Request | None:
        requests = (r for r in reversed(forward_context.stack) if isinstance(r, Request))
        return next((request for request in requests if request.sequences is self), None)

    def prepare(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Mark the next forward as generate's own; called right before it."""
        inputs, request = original(*args, **kwargs), self._request()
        if request is not None:
            request.due = True
        return inputs

    def _stored(self, cache: Any, rows: int, reached: int) -> Started:
        """Return the sequences recorded on a cache that will have ``reached`` tokens.

        Warns once if a sequence has become longer than its frequencies are computed for.
        """
        stored = getattr(cache, NOTE, None)
        if stored is None or stored.patch != self.method:
            raise CacheError(
                f"this cache was started before the model was patched with {self.method} (or by "
                f"prefix tuning), so the length of its sequences is not known; start with an empty "
                f"cache, or {self.cure}"
            )
        if len(stored.lengths) not in (1, rows):
            raise CacheError(
                f"this cache was started with {len(stored.lengths)} rows and is continued with "
                f"{rows}; start with an empty cache, or {self.cure}"
            )
        beyond = reached > max(stored.room, self.trained)
        if beyond and not self.warned:
            self.warned = True
            _logger.warning(
                "rope_ext: %s: a sequence of %d tokens keeps the frequencies it started with, "
                "which are made for %d: by generate on a patched model (not its decoder), prompt "
                "plus max_new_tokens; else the first forward. To go on with a cache beyond that, "
                "in a chat for instance, pass length=TOKENS to rope_ext.patch",
                *(self.method.name, reached, stored.room),
            )
        return stored

    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: records the sequences on the cache, which the decoder may have created."""
        run(self, self._end, output)

    def _end(self, output: Any) -> None:
        forward: SequenceForward | None = current(self)
        if forward is None:  # an error was raised before it started
            return
        forward_context.stack.remove(forward)
        if forward.started is None or output is None:
            return
        for cache in (forward.cache, *caches_in(output)):
            if cache is not None and getattr(cache, NOTE, None) is not forward.started:
                setattr(cache, NOTE, forward.started)

    def generate(self, model: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the batch's prompt plus new tokens, then call generate."""
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        drafts = getattr(given.get("generation_config"), "is_assistant", False)
        if drafts and self._request() is not None:
            return original(*args, **kwargs)  # an assistant drafts for the same sequence
        request: Any = Request(self, *_room(model, given))
        forward_context.stack.append(request)
        try:
            return original(*args, **kwargs)
        finally:
            forward_context.stack.remove(request)


def _room(model: Any, given: dict[str, Any]) -> tuple[int | None, bool]:
    """Return the number of prompt (with padding) and generated tokens; None: unknown."""
    names = ("inputs_embeds", "input_ids", "inputs")
    prompt = next((given[name] for name in names if given.get(name) is not None), None)
    if not isinstance(prompt, torch.Tensor):
        return None, False
    configs = (given.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:  # in transformers' order
        values = (given.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    new, total = setting("max_new_tokens"), setting("max_length")
    if new is None:
        new = 20 if total is None else max(0, total - prompt.shape[1])
    return prompt.shape[1] + new, setting("guidance_scale") not in (None, 1)
