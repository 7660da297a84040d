"""Follows the sequences that a decoder runs, and keeps the frequencies of each fixed.

The state of a request is stored on its cache, or in the state of the thread while the request
runs: the same model may serve several threads, and one of them may start a second request within
the first.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod
from rope_ext.rotary.calls import (
    is_exporting,
    is_sharded,
    parameters,
    refuse_continuous_batching,
    refuse_sharded,
    replace_method,
    runs_layers_again,
)
from rope_ext.rotary.context import (
    UNKNOWN,
    cache_among,
    caches_in,
    current,
    enter,
    forward_context,
    is_paged,
    leave,
    run_eagerly,
)
from rope_ext.rotary.sequence_forward import STARTED, SequenceForward, Started
from rope_ext.rotary.sites import RotarySite
from rope_ext.rotary.swapping import Changes
from rope_ext.rotary.third_party import refuse_rerotation

_logger = logging.getLogger("rope_ext")
_FILLED = (
    "a cache that was reset has no sequence for a compiled step to continue; begin again with a "
    "forward that is not compiled"
)


@dataclass(eq=False)
class Request:
    """A call of ``generate`` in progress.

    Args:
        sequences: the sequences of the model that generates.
        lengths: number of tokens that each row will have, float64, ``[rows]``; None: not known.
        room: the same for the whole batch, including padding.
        guided: whether ``guidance_scale`` runs a second branch without the prompt. It gets the
            frequencies of the first, since the two are subtracted from each other.
        due: whether the next forward belongs to the call, and not to a streamer, a stopping
            criterion or the like.
    """

    sequences: Sequences
    lengths: torch.Tensor | None
    room: int
    guided: bool
    due: bool = False


class Sequences:
    """Keeps the frequencies of every sequence fixed from its first token to its last.

    A decoder pre-hook begins a :class:`SequenceForward`, which the hook of the rotary module uses.
    Sequences that continue are recorded on their cache; those that start are found from positions
    and mask.

    Args:
        method: its frequencies depend on the length of a sequence or on the position of a token.
        trained: trained length, up to which no method changes anything.
    """

    def __init__(self, method: FrequencyMethod, trained: int) -> None:
        self.method, self.trained = method, trained
        self.layers: list[nn.Module] = []  # that attend
        self.names: tuple[str, ...] = ()  # of the decoder's arguments
        self.warned = False

    def current(self) -> SequenceForward | None:
        """The forward in progress."""
        forward = current(self)
        if forward is None and torch._C._current_graph_task_id() != -1:
            # Gradient checkpointing runs a layer again.
            forward = forward_context.recomputed
            if forward is not None and forward.patch is not self:
                forward = None
        return forward

    def at(self, positions: torch.Tensor) -> SequenceForward:
        """The forward in progress; if there is none, one made from ``positions`` alone."""
        forward = self.current()
        if forward is None:
            forward = SequenceForward(self, 1, positions.shape[-1], 0, None, False, None)
            length = positions.max().double().cpu().reshape(1) + 1
            first = torch.zeros(1, dtype=torch.long, device="cpu")
            forward.started = Started(self.method, length, first, int(length))
        forward.locate(positions)
        return forward

    def _request(self) -> Request | None:
        """The innermost call of ``generate`` in progress."""
        for request in reversed(forward_context.requests):
            if request.sequences is self:
                return request
        return None

    def at_lengths(
        self, site: RotarySite, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[lengths, pairs]`` and ``[lengths]``, float64."""
        method: Any = self.method  # methods that adapt have frequencies and scaling by length
        inv_freq = method.inv_freq_at(site.rope, lengths)
        # A row that needs no extension gets exactly the frequencies of the checkpoint.
        same = torch.isclose(inv_freq, site.rope.inv_freq, rtol=1e-12, atol=0)
        inv_freq = torch.where(same, site.loaded.double(), inv_freq)
        return inv_freq, method.attention_scaling_at(site.rope, lengths) * site.scaling

    def begin(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decoder pre-hook."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        traced = None
        if torch.compiler.is_compiling() and not is_exporting():
            traced = self._traced(decoder, given)
        if traced is None:
            self._begin(given)
        else:
            enter(traced)

    def _traced(self, decoder: nn.Module, given: dict[str, Any]) -> SequenceForward | None:
        """The forward with these arguments in tensors; None if tensors cannot express it."""
        if is_paged(given) or is_sharded() or runs_layers_again(decoder):
            return None
        tokens = given.get("input_ids")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        rows, length = tokens.shape[:2]
        cache, stored = cache_among(given), None
        filled = 0 if cache is None else cache.get_seq_length()
        if isinstance(filled, torch.Tensor) and not hasattr(cache, STARTED):
            torch._assert_async(filled == 0, UNKNOWN)
            filled = 0
        if isinstance(filled, torch.Tensor) or filled:
            stored = getattr(cache, STARTED, None)
            if stored is None or stored.method is not self.method or not stored.begun:
                return None
            if len(stored.lengths) not in (1, rows):
                return None
            if isinstance(filled, torch.Tensor):
                if length > 1:  # perhaps the first tokens of a cache that was reset
                    return None
                torch._assert_async(filled > 0, _FILLED)
        for request in forward_context.requests:
            if request.sequences is self:
                if stored is None:  # only a request knows how long they will be
                    return None
                request.due = False
        mask = given.get("attention_mask")
        return SequenceForward(self, rows, length, 0, None, True, stored, mask=mask)

    @run_eagerly()
    def _begin(self, given: dict[str, Any]) -> None:
        """Begin a forward whose values can be read."""
        name, request = self.method.name, self._request()
        if request is not None and not (request.due or request.guided):
            request = None
        elif request is not None:
            request.due = False
        does, cure = self._does()
        refuse_sharded(name)
        if self.method.is_dynamic:
            refuse_rerotation(self.layers, name)
        if is_exporting():
            raise UnsupportedModelError(
                f"{name} {does} of every sequence as it comes, which an exported graph cannot do; "
                f"{cure}"
            )
        if is_paged(given):
            raise CacheError(self.unbatched())
        tokens = given.get("input_ids")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        cache = cache_among(given)
        rows, length = tokens.shape[:2]
        filled = 0 if cache is None else int(cache.get_seq_length())
        stored = self._stored(cache, rows) if filled else None
        if stored is not None and self.method.is_dynamic:
            self._warn(stored, filled + length)
        announced = None
        lengths = None if request is None else request.lengths
        if request is not None and lengths is not None and rows % len(lengths) == 0:
            announced = lengths, request.room
        mask = given.get("attention_mask")
        enter(SequenceForward(self, rows, length, filled, cache, False, stored, announced, mask))

    def unbatched(self) -> str:
        """Why continuous batching is refused, and what to do."""
        does, cure = self._does()
        return (
            f"continuous batching packs many sequences into one row, and {self.method.name} {does} "
            f"of each by itself; {cure}, or call generate with a padded batch"
        )

    def _does(self) -> tuple[str, str]:
        """What the method does to every sequence, and how to avoid it."""
        if self.method.is_dynamic:
            return "chooses the frequencies", "pass length=TOKENS to fix them"
        if self.method.start_tokens:
            return "chooses the frequencies", "leave start_tokens out"
        return "scales the queries", "give temperature= a number, or leave it out"

    def _stored(self, cache: Any, rows: int) -> Started | None:
        """The sequences recorded on a cache that has tokens."""
        name, stored = self.method.name, getattr(cache, STARTED, None)
        if not self.method.is_dynamic and stored is None:
            return Started(
                self.method,
                torch.zeros(1, device="cpu"),
                torch.zeros(1, dtype=torch.long, device="cpu"),
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
        """Warn once that a sequence has become longer than its frequencies are made for."""
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

    def end(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Decoder hook: records the sequences on a cache that the decoder created, too."""
        forward = current(self)
        if forward is None or not forward.traced:
            self._end(decoder, output)
            return
        leave(forward)
        for cache in caches_in(output):
            if forward.started is not None and getattr(cache, STARTED, None) is not forward.started:
                setattr(cache, STARTED, forward.started)

    @run_eagerly()
    def _end(self, decoder: nn.Module, output: Any) -> None:
        forward = current(self)
        if forward is None:  # an error was raised before it began
            return
        leave(forward)
        if forward.started is None or output is None:
            return
        for cache in caches_in(output):
            forward.started.keep(cache)
        hidden = output[0]
        if decoder.training and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            # With gradient checkpointing, layers run again in the thread that goes backward.
            hidden.register_hook(lambda gradient: setattr(forward_context, "recomputed", forward))

    def generate(self, model: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Announce prompt plus new tokens of every row, then generate."""
        names = tuple(inspect.signature(type(model).generate).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        drafts = getattr(given.get("generation_config"), "is_assistant", False)
        if drafts and self._request() is not None:  # an assistant drafts for the same sequence
            return original(*args, **kwargs)
        prepare = getattr(model.prepare_inputs_for_generation, "func", None)
        # PEFT's prompt tuning prepares inputs differently: take the first forward at least.
        request = Request(self, *_announced(model, given), due=prepare != self.prepare)
        forward_context.requests.append(request)
        try:
            return original(*args, **kwargs)
        finally:
            forward_context.requests.remove(request)

    def prepare(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """What generate calls right before each forward of its own."""
        inputs = original(*args, **kwargs)
        request = self._request()
        if request is not None:
            request.due = True
        return inputs


def _announced(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor | None, int, bool]:
    """``lengths``, ``room`` and ``guided`` of a :class:`Request`."""
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
    """Make ``sequences`` follow everything that ``decoder`` or ``model.generate`` runs."""
    sequences.names = parameters(type(decoder))
    sequences.layers = [
        m for m in decoder.modules() if isinstance(m.__dict__.get("layer_idx"), int)
    ]
    refuse_continuous_batching(model, sequences.unbatched(), changes)
    begin = decoder.register_forward_pre_hook(sequences.begin, with_kwargs=True)
    end = decoder.register_forward_hook(sequences.end, with_kwargs=True, always_call=True)
    changes += [begin.remove, end.remove]
    if not sequences.method.is_dynamic or not hasattr(type(model), "generate"):
        return
    calls = {
        "generate": functools.partial(sequences.generate, model),
        "prepare_inputs_for_generation": sequences.prepare,
    }
    for name, call in calls.items():
        replace_method(model, name, call, changes)
