"""Represents and interprets the attention mask of a forward.

transformers' mask functions are recognized by their closures.

transformers combines simple functions of batch, head, query and key into one, and passes only the
result. They can only be distinguished by ``__qualname__`` and the closure, which are not public.

Unknown functions are treated as arbitrary masks: their layers compute dense logits, which is
correct but slow. Unrecognized packed documents raise an error, since their positions decrease.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
)

from rope_ext.attention.runs import Run, find_runs
from rope_ext.errors import UnsupportedModelError
from rope_ext.methods.geometry import Around, ChunkGap, Distance
from rope_ext.position.forward import PositionForward
from rope_ext.position.map import BandRotations
from rope_ext.rotary.masks import visible

_PACKED = "packed_sequence_mask_function."


def is_plain(function: Callable) -> bool:
    """Whether a transformers mask function is causal, possibly with a window or documents."""
    return all(
        part is causal_mask_function or _is(part, _PACKED, "sliding_window_overlay.")
        for part in _parts(function)
    )


def is_whole(function: Callable) -> bool:
    """Whether a transformers mask function shows all keys, possibly of one document."""
    return all(
        part is bidirectional_mask_function or _is(part, _PACKED) for part in _parts(function)
    )


def documents_of(function: Callable) -> Tensor | None:
    """Return the documents that a mask function separates, ``[rows, keys]``."""
    packed = [part for part in _parts(function) if _is(part, _PACKED)]
    return _held(packed[0])[0] if packed else None


def without_documents(function: Callable) -> Callable:
    """Return a mask function that does not separate documents."""
    parts = [part for part in _parts(function) if not _is(part, _PACKED)]
    return parts[0] if len(parts) == 1 else and_masks(*parts)


def _parts(function: Callable) -> list[Callable]:
    """Return the simple mask functions that transformers has combined into ``function``."""
    held = [one if isinstance(one, tuple) else (one,) for one in _held(function)]
    inner = [one for each in held for one in each if callable(one)]
    if _is(function, "or_masks."):  # without images, no blocks of tokens see later ones
        inner = [one for one in inner if not _is(one, "blockwise_overlay.") or _blocks(one)]
        if len(inner) != 1:
            return [function]
    elif not _is(function, "and_masks.", "remap_positions_for_packed_sequence."):
        return [function]
    return [part for one in inner for part in _parts(one)]


def _held(function: Callable) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _blocks(overlay: Callable) -> bool:
    """Whether any tokens belong to a block; tokens outside blocks have a negative number."""
    return any(isinstance(x, Tensor) and bool((x >= 0).any()) for x in _held(overlay))


def _is(function: Callable, *made_by: str) -> bool:
    """Whether transformers defined ``function`` inside one of the functions ``made_by``."""
    its = getattr(function, "__module__", None) == causal_mask_function.__module__
    return its and getattr(function, "__qualname__", "").startswith(made_by)


class StepKey(NamedTuple):
    """What the Step of a mask depends on."""

    layout: int  # its number
    offset: int  # slot of the first key
    device: torch.device
    whole: bool  # whether it has the attention weights of all queries


class BatchMask:
    """The attention mask of one forward under a position map.

    Args:
        owner: the forward; None if generate creates a static cache's mask before it.
        arguments: arguments with which transformers requested a mask, if it did.
        given: a ready mask, bool or additive, ``[rows, 1, queries, keys]``. Neither: causal.
    """

    ndim = 4  # transformers then treats it as a prepared mask

    def __init__(
        self,
        owner: PositionForward | None,
        arguments: dict[str, Any] | None = None,
        given: Tensor | None = None,
    ) -> None:
        self.owner = owner
        self.arguments = arguments
        self.given = given
        # Set if it is created before a forward, which may be compiled:
        self.valid: Tensor | None = None  # padding of all slots, [rows, slots]
        self.ready: Tensor | None = None  # the mask itself, for a single query
        self.plain = True  # whether it is causal, without documents
        # Shared by all layers:
        self.steps: dict[StepKey, Any] = {}
        self.moved: dict[torch.device, Tensor] = {}  # the dense mask on other devices
        self.runs_from: dict[int, list[Run] | None] = {}  # by the first slot of the keys
        # Masks of the requests in a row, by the number of their keys:
        self.requests: dict[tuple[PositionForward, int], BatchMask] = {}

    @property
    def forward(self) -> PositionForward:
        assert self.owner is not None, "generation made this mask, and no forward has used it yet"
        return self.owner

    def contiguous(self) -> "BatchMask":
        """Called by generate on a prepared mask."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that transformers would create."""
        names = ("batch_size", "q_length", "kv_length")
        rows, *rest = (cast("dict[str, Any]", self.arguments)[name] for name in names)
        return rows, 1, *rest

    @functools.cached_property
    def causal(self) -> bool:
        """Whether it is causal, possibly with a window or documents."""
        if self.arguments is None:
            return self.given is None
        return is_plain(self.arguments["mask_function"])

    @functools.cached_property
    def whole(self) -> bool:
        """Whether queries see their whole text in a forward in both directions.

        Where transformers needs no mask, a layer that is not causal sees all keys, although the
        mask function is causal.
        """
        if self.arguments is None:
            return self.given is None
        if self.arguments.get("local_size") is not None:
            return False
        if self.causal or is_whole(self.arguments["mask_function"]):
            return True
        seen = self.dense
        if seen is None:
            return True
        real = self.forward.real().to(seen.device)[:, None, None]  # a mask of the family's own
        return bool((seen | ~real | ~real.mT).all())

    def belong_to(self, forward: PositionForward) -> None:
        """Set the forward of a mask that was created before or in it."""
        self.owner = forward
        padding = self.padding
        of_itself = forward.both or self.causal  # not of cross-attention
        if padding is not None and of_itself and forward.padding is None and not forward.located:
            forward.pad(padding)  # some decoders find padding in their tokens
        documents = documents_of(self.arguments["mask_function"]) if self.arguments else None
        if documents is not None:
            forward.split(documents)

    def of_request(self, forward: PositionForward, keys: int) -> "BatchMask":
        """Return the mask of one request of a row, whose last ``keys`` tokens are there.

        It is the mask that transformers requests when a cache of this request is continued.
        """
        if self.arguments is None:
            if self.given is not None:
                raise UnsupportedModelError(
                    "continuous batching with an attention mask of your own is not supported by "
                    "position methods; leave it out"
                )
            return BatchMask(forward)
        arguments = {
            **self.arguments,
            "batch_size": 1,
            "q_length": forward.tokens,
            "kv_length": keys,
            "q_offset": forward.filled,
            "kv_offset": forward.room - keys,
            "mask_function": without_documents(self.arguments["mask_function"]),
        }
        return BatchMask(forward, arguments)

    def prepare(self) -> None:
        """Prepare what a compiled forward needs from a mask created before it."""
        padding = self.padding
        arguments = self.arguments or {}
        if padding is not None:
            slots = arguments["kv_length"]
            self.valid = torch.nn.functional.pad(padding, (0, slots - padding.shape[1]))
        if arguments.get("q_length") == 1:
            make = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
            self.ready = make(**{**arguments, "allow_is_causal_skip": False})
        elif arguments:
            self.plain = self.causal and documents_of(arguments["mask_function"]) is None

    @property
    def padding(self) -> Tensor | None:
        """The two-dimensional mask that it was created from."""
        return None if self.arguments is None else self.arguments.get("attention_mask")

    @functools.cached_property
    def dense(self) -> Tensor | None:
        """The mask for layers that the map does not change; None: causal."""
        if self.arguments is None:
            return self.given
        # Without a mask, one that shows every key could not be told from a causal one.
        whole = {"allow_is_bidirectional_skip": False}
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**{**self.arguments, **whole})

    def dense_on(self, device: torch.device) -> Tensor | None:
        """:attr:`dense` on the device of a layer, moved there once for all layers."""
        if self.dense is None or self.dense.device == device:
            return self.dense
        if device not in self.moved:
            self.moved[device] = self.dense.to(device)
        return self.moved[device]

    @functools.cached_property
    def ahead(self) -> int:
        """Maximum number of tokens that queries see after themselves; 0: the mask is causal."""
        forward = self.forward
        if self.causal or self.dense is None:
            return 0
        t = forward.key[:, self.offset :]
        seen = shown(self.dense[..., : t.shape[1]])
        t = t.to(seen.device).expand(forward.rows, -1)[:, None]
        newest = [  # position of the newest key that a query sees; [rows, heads, queries]
            torch.where(part, t.int()[:, :, None], -1).amax(-1) for part in seen.split(256, 2)
        ]
        after = torch.cat(newest, 2) - t[..., -forward.tokens :]
        # What padding sees does not matter; transformers shows it all or no keys.
        by_last = seen[..., -1:, -forward.tokens :].squeeze(2)
        after = after.where(by_last | ~seen.all(-1), 0)
        if forward.padding is not None:
            after = after * forward.padding[:, None, -forward.tokens :].to(after.device)
        return int(after.clamp(min=0).amax())

    @property
    def offset(self) -> int:
        """Index of the first key in the sequence; above 0 in sliding caches."""
        return 0 if self.arguments is None else self.arguments["kv_offset"]

    @functools.cached_property
    def window(self) -> int | None:
        """Window to which the mask limits every token; None: no such limit."""
        return self.arguments.get("local_size") if self.arguments and self.causal else None

    def runs(self, offset: int = 0) -> list[Run] | None:
        """Split the keys from ``offset`` on into runs of consecutive tokens."""
        if offset not in self.runs_from:
            forward = self.forward
            documents = self.forward.documents
            sequences = forward.real().long() - 1 if documents is None else documents
            places = forward.key[:, offset:]
            self.runs_from[offset] = find_runs(
                places=places,
                sequences=sequences[:, offset:],
                rows=forward.rows,
                first=places.shape[1] - forward.tokens,
            )
        return self.runs_from[offset]


def shown(mask: Tensor) -> Tensor:
    """Convert a bool or additive mask to the visible keys."""
    seen = visible(mask)
    if mask.dtype != torch.bool and not bool((~seen | (mask == 0)).all()):
        raise UnsupportedModelError(
            "an attention mask that adds to the logits instead of hiding tokens is not known to "
            "position methods; pass a mask of True and False, or use a frequency method"
        )
    return seen


def clipped(bands: BandRotations, window: int | None) -> BandRotations | None:
    """Restrict bands to a window; None if only a dense mask can express that."""
    if window is None:
        return bands
    clipped = []
    for band in bands:
        geometry = band.geometry
        if isinstance(geometry, Around):  # in both directions
            return None
        if not isinstance(geometry, ChunkGap) and geometry.first >= window:
            continue  # the window hides the whole band
        if not isinstance(geometry, Distance):
            return None
        last = window if geometry.last is None else min(window, geometry.last)
        clipped.append(band._replace(geometry=Distance(geometry.first, last)))
    return clipped
