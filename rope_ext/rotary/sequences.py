"""Tracks the sequences of dynamic methods, whose frequencies depend on a sequence's length.

A row of a batch may start with padding, and may contain several documents. Positions of a sequence
count from its first token. Its frequencies depend on its length and stay fixed, because the keys
and values of earlier tokens were computed with them. A request's state is stored on its cache, or
in its thread while it runs, since several threads may serve one model.
"""

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rope_ext.errors import CacheError, UnsupportedModelError
from rope_ext.methods import FrequencyMethod
from rope_ext.rotary import context, masks
from rope_ext.rotary.sites import PatchTarget, RotarySite, no_text
from rope_ext.rotary.swapping import Changes, wrap

_EMPTY = "in a compiled forward every row needs a token to begin with; make the chunks longer"
_FILLED = (
    "a cache that was reset has no sequence for a compiled step to continue; begin again with a "
    "forward that is not compiled"
)
_logger = logging.getLogger("rope_ext")


Tables = dict[tuple[str, str | None, torch.device, torch.dtype], tuple[Tensor, Tensor]]
"""Frequencies and scaling, by name and layer type of the site, device and dtype."""


@dataclass(frozen=True)
class Started:
    """The last sequence in each row of a batch, whose frequencies stay fixed.

    It is stored on the cache, whose rows must keep their order, as in ``generate``.
    """

    rotated_by: FrequencyMethod
    # number of tokens that each row's frequencies are computed for, [rows], on the CPU; 0 for rows
    # with only padding so far. One row if all are equal
    lengths: Tensor
    room: int  # number of tokens in the whole batch including padding, as counted by a cache
    begun: bool = True  # whether every row has a token
    tables: Tables = field(default_factory=dict)  # for these lengths


@dataclass(eq=False)
class Packed:
    """The documents of a forward that starts several in one row."""

    lengths: Tensor  # of every token's document, [rows, tokens]
    tables: Tables = field(default_factory=dict)  # for these lengths


@dataclass(eq=False)
class Request:
    """A call of ``generate`` in progress, on the stack of its thread."""

    patched_by: object  # ``requests`` of a Sequences
    room: int | None = None  # planned number of tokens, including padding; None: not known
    guided: bool = False  # whether guidance runs further forwards
    due: bool = False  # whether the next forward is its own, not a streamer's or criterion's
    lengths: Tensor | None = None  # of rows in its first forward
    exported = False


class SequenceForward(context.ForwardContext):
    """One forward under a dynamic method; in a graph, ``filled`` is 0.

    ``started`` are the sequences recorded on the cache; None: they start in this forward.
    """

    started: Started | None = None
    request: Request | None = None  # the call of generate that runs it
    mask: Any = None  # the attention mask that the decoder received
    packed: Packed | None = None

    def begin(self, positions: Tensor) -> Started:
        """Find the sequences from ``positions``, the model's position ids.

        These are ``[rows or 1, tokens]``, or have several axes in front, of which the largest
        position counts.
        """
        filled = self.filled
        old = self.started
        real, edges = masks.read(self.mask, filled, self.tokens)
        lengths = documents(self._by_row(positions), real, edges)
        of_row = lengths[:, -1]
        if self.traced:  # a graph cannot tell whether there are several documents
            torch._assert_async((of_row > 0).all(), _EMPTY)
            self.packed = Packed(lengths)
            return Started(self.patched_by.method, of_row.cpu(), self.tokens)
        packed = ((lengths != of_row[:, None]) & (lengths > 0)).any()
        # Read them once, since it synchronizes with the device.
        *of_row, packed = torch.cat((of_row, packed.view(1))).tolist()
        of_row = torch.tensor(of_row, device="cpu")
        room = max(filled + self.tokens, int(of_row.max()))
        if self.request is not None and self.request.room is not None:
            room = self.request.room
            of_row = torch.where(of_row > 0, of_row + (room - filled - self.tokens), 0)
            if self.request.lengths is None:
                self.request.lengths = of_row
            elif self.request.guided:  # guidance subtracts the outputs of both branches
                of_row = self.request.lengths
        elif old is None and packed:
            self.packed = Packed(lengths)
        if old is not None:  # rows with only padding so far start here
            of_row = torch.where(old.lengths > 0, old.lengths, of_row)
            room = max(room, old.room)
        if bool((of_row == of_row[0]).all()):
            of_row = of_row[:1]  # one set of frequencies for all rows
        return Started(self.patched_by.method, of_row, room, begun=bool((of_row > 0).all()))

    def _by_row(self, positions: Tensor) -> Tensor:
        """Return position ids on one axis, ``[rows, tokens]``."""
        positions = positions.amax(0) if positions.ndim == 3 else positions
        if positions.shape[-1] != self.tokens:  # positions of compressed keys
            first = self.filled
            positions = torch.arange(first, first + self.tokens, device=positions.device)
        return positions.reshape(-1, self.tokens)[-self.rows :].expand(self.rows, -1)


def documents(positions: Tensor, real: Tensor | None, edges: Tensor | None) -> Tensor:
    """Return the length of each token's sequence, int64, as ``positions``: ``[rows, tokens]``.

    A row starts at its first ``real`` token; tokens before it get 0. A new document starts where
    positions restart, as in packing, and at ``edges``, where tokens see no earlier ones. Both masks
    are bool, ``[rows or 1, tokens]``.
    """
    device = positions.device
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real.to(device)
    real = real.expand(len(positions), -1)
    origin = positions.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
    # If a token's position is not above the previous one, but above the first, it is a branch.
    restarts = ~masks.goes_on(positions, real) & (positions <= origin)
    begins = masks.beginnings(real, restarts, None if edges is None else edges.to(device))
    start = torch.where(begins, torch.arange(positions.shape[1], device=device), 0).cummax(1).values
    first = positions.gather(1, start)
    count = torch.where(real, positions - first + 1, 0)
    return torch.zeros_like(positions).scatter_reduce(1, start, count, "amax").gather(1, start)


class Sequences(context.Tracker):
    """Keeps the frequencies of every sequence fixed from its first token to its last.

    Continued sequences are recorded on their cache; new ones are found from positions and mask.
    """

    def __init__(self, place: PatchTarget, method: FrequencyMethod, changes: Changes) -> None:
        decoder = place.decoder
        self.method = method
        self.warned = False
        self.requests = object()
        self.cure = "pass length=TOKENS to fix the frequencies"
        if not {"input_ids", "inputs_embeds"} & {*context.parameters(type(decoder))}:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: {no_text(decoder)}, so {method.name} cannot follow its "
                f"sequences; {self.cure}"
            )
        # Up to this length, no method changes anything.
        self.trained = min(site.rope.length for site in place.scaled)
        self.layers = [m for m in decoder.modules() if isinstance(vars(m).get("layer_idx"), int)]
        self.unbatched = (
            f"continuous batching packs many sequences into one row, and {method.name} follows the "
            f"positions of each; {self.cure}, or call generate with a padded batch"
        )
        self.track(decoder, changes)
        if place.is_encoder:
            return
        wrap(place.model, name="generate", function=self.generate, changes=changes)
        refuse = functools.partial(context.refuse_batching, self.unbatched)
        context.watch_generation(place.model, refuse, changes)  # around self.generate
        wrap(
            place.model,
            name="prepare_inputs_for_generation",
            function=self.prepare,
            changes=changes,
        )
        wrap(place.model, name="_prepare_cache_for_generation", function=self.plan, changes=changes)

    @property
    def patched_by(self) -> Any:
        return self

    @context.as_forward
    def frequencies(self, site: RotarySite, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Frequencies ``[rows, tokens, pairs]`` and scaling ``[rows, tokens, 1]``.

        They are those of the forward in progress, whose position ids are ``t``. Rows and tokens are
        1 where all are equal.
        """
        forward: SequenceForward | None = context.current(self)
        if forward is None:
            raise UnsupportedModelError(
                f"a rotary module was run by itself, or again by gradient checkpointing, and "
                f"{self.method.name} follows the sequences of whole forwards; call the model "
                f"itself, without checkpointing, or {self.cure}"
            )
        if forward.started is None or not forward.started.begun:
            forward.started = forward.begin(t)
        key = (site.name, site.layer_type, t.device, dtype)
        # Made even if this forward uses others: with the cache that stores them, later forwards of
        # its sequences reuse them, including graphs.
        tables = forward.started.tables
        if key not in tables:
            tables[key] = self._table(
                site, lengths=forward.started.lengths[:, None], device=t.device, dtype=dtype
            )
        packed = forward.packed
        if packed is None or packed.lengths.shape[1] != t.shape[-1]:
            return tables[key]
        if key not in packed.tables:
            packed.tables[key] = self._table(site, packed.lengths, t.device, dtype=dtype)
        return packed.tables[key]

    def _table(
        self, site: RotarySite, lengths: Tensor, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return frequencies, ``[rows, tokens, pairs]``, and scaling for ``[rows, tokens]``."""
        inv_freq, scaling = self._at_lengths(site, lengths.flatten().cpu().double())
        inv_freq = inv_freq.unflatten(0, lengths.shape)
        scaling = scaling.view(*lengths.shape, 1)
        return inv_freq.to(device, dtype), scaling.to(device, dtype)

    def _at_lengths(self, site: RotarySite, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """``[lengths, pairs]`` and ``[lengths]``, float64."""
        method: Any = self.method  # dynamic methods compute frequencies and scaling by length
        inv_freq = method.inv_freq_at(site.rope, lengths)
        # A row that needs no extension gets exactly the checkpoint's frequencies.
        same = torch.isclose(inv_freq, site.rope.inv_freq, rtol=1e-12, atol=0)
        inv_freq = torch.where(same, site.loaded.double(), inv_freq)
        return inv_freq, method.attention_scaling_at(site.rope, lengths) * site.scaling

    def trace(self, given: dict[str, Any]) -> SequenceForward | None:
        """Return a forward whose lengths are tensors; None if some number has to be read for it."""
        if context.is_exporting():
            return None
        rows, tokens = context.shape_of(given)
        cache = context.cache_among(given)
        stored = None
        filled = 0 if cache is None else cache.get_seq_length()
        if isinstance(filled, Tensor) and not hasattr(cache, context.NOTE):
            torch._assert_async(filled == 0, context.UNKNOWN)
            filled = 0
        if isinstance(filled, Tensor) or filled:
            stored = getattr(cache, context.NOTE, None)
            if stored is None or stored.rotated_by is not self.method or not stored.begun:
                return None
            if len(stored.lengths) not in (1, rows):
                return None
            if isinstance(filled, Tensor):
                if tokens > 1:  # may be the first tokens of a cache that was reset
                    return None
                torch._assert_async(filled > 0, _FILLED)
        elif context.current(self.requests) is not None:
            return None  # the lengths of its sequences have to be read
        forward = SequenceForward(
            patched_by=self, rows=rows, tokens=tokens, filled=0, cache=None, traced=True
        )
        forward.started = stored
        forward.mask = given.get("attention_mask")
        return forward

    @context.run_eagerly()
    def start(self, given: dict[str, Any]) -> None:
        """Put a forward on the stack; raises where sequences cannot be told apart."""
        name = self.method.name
        context.refuse_sharded(name, "use a fixed frequency method such as 'yarn'")
        context.refuse_presses(
            self.layers,
            method=name,
            instead="pass length=TOKENS, or use another press",
            rerotating=True,
        )
        if context.is_exporting():
            raise UnsupportedModelError(
                f"{name} follows every sequence, which an exported graph cannot do; {self.cure}"
            )
        if context.is_paged(given):
            raise CacheError(self.unbatched)
        rows, tokens = context.shape_of(given)
        cache = context.cache_among(given)
        filled = 0 if cache is None else int(cache.get_seq_length())
        forward = SequenceForward(
            patched_by=self, rows=rows, tokens=tokens, filled=filled, cache=cache, traced=False
        )
        forward.mask = given.get("attention_mask")
        request = context.current(self.requests)
        if filled:
            reached = tokens + filled
            if request is not None and request.room is not None:
                reached = min(reached, request.room)  # drafted tokens beyond it are dropped
            forward.started = self._stored(cache, rows, reached)
        if request is not None:
            due = request.due
            request.due = False
            forward.request = request if due or request.guided else None
        context.forward_context.stack.append(forward)

    def _stored(self, cache: Any, rows: int, reached: int) -> Started:
        """Return the sequences recorded on a cache that will have ``reached`` tokens.

        Warns once if a sequence has become longer than its frequencies are computed for.
        """
        stored = getattr(cache, context.NOTE, None)
        if stored is None or stored.rotated_by != self.method:
            raise CacheError(
                f"this cache was started before the patch with {self.method} (or by prefix tuning) "
                f"and lacks its sequences' lengths; start with an empty cache, or {self.cure}"
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
                self.method.name,
                reached,
                stored.room,
            )
        return stored

    def finish(self, forward: SequenceForward, output: Any) -> None:
        if forward.started is None or output is None:
            return
        for cache in (forward.cache, *context.caches_in(output)):  # the decoder may create one
            if cache is not None and getattr(cache, context.NOTE, None) is not forward.started:
                setattr(cache, context.NOTE, forward.started)

    def generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run generate as a request, unless an assistant drafts for the sequences of one."""
        drafts = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if drafts and context.current(self.requests) is not None:
            return original(*args, **kwargs)
        context.forward_context.stack.append(Request(self.requests))
        return original(*args, **kwargs)

    def plan(self, original: Any, config: Any, *args: Any) -> Any:
        """Record how many tokens there will be at most, which generate has found."""
        request = context.current(self.requests)
        if request is not None and request.room is None:  # not an assistant's
            request.room = args[-1] + 1
            request.guided = config.guidance_scale not in (None, 1)
        return original(config, *args)

    def prepare(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Mark the next forward as generate's own; called right before it."""
        request = context.current(self.requests)
        if request is not None:
            request.due = True
        return original(*args, **kwargs)
