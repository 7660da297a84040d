"""Refuses a cache that was filled before the patch on a model changed.

Its keys carry the rotation of that time. A cache does not know its model, and a note in every
forward would slow down fixed frequency maps, under which no code of this package runs. So it is
when a patch changes that every cache with tokens is marked, and the model gets a hook that refuses
marked caches and leaves when there are none.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.caches import CacheWithMetadata, Move, attach, forget, is_filled, living, settle
from rope_ext.errors import CacheError
from rope_ext.methods import Method
from rope_ext.rotary.calls import parameters

_STALE = "_rope_ext_stale"  # on a cache: the Stale that it is
_decoders: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Decoders whose patch has changed, and the name of each for the marks on caches."""


@dataclass(frozen=True)
class FilledUnder:
    """A patch, as far as what it leaves in a cache depends on it.

    Args:
        method: in force.
        more: all else that must be the same, by name.
    """

    method: Method
    more: Mapping[str, Any]

    def unlike(self, other: FilledUnder | None) -> str:
        """The method, with what is not the same in ``other``."""
        if other is None:
            return str(self.method)
        named = [f"{k}={v!r}" for k, v in self.more.items() if v != other.more[k]]
        return " with ".join([str(self.method), *filter(None, [", ".join(named)])])


@dataclass(frozen=True)
class Stale:
    """Under which patch a cache was filled, by the names of decoders that have another one now.

    Which of them filled it is not known: each refuses it for itself.
    """

    kind: ClassVar[type[CacheWithMetadata]] = (
        CacheWithMetadata  # another class, so that graphs look again
    )
    under: dict[str, FilledUnder | None] = field(default_factory=dict)

    def moved(self, move: Move) -> Stale:
        """The same on other rows."""
        return self

    def emptied(self) -> None:
        """A cache that was reset may go on under any patch."""


def mark(decoder: nn.Module, under: FilledUnder | None) -> None:
    """Mark every cache with tokens, before the patch on ``decoder`` changes.

    Args:
        decoder: whose patch it is.
        under: which there is; None: none.
    """
    name = _decoders.setdefault(decoder, str(uuid.uuid4()))
    layers = sum(isinstance(m.__dict__.get("layer_idx"), int) for m in decoder.modules())
    for cache in _filled(layers):
        there = _marks(cache)
        if name not in there:
            settle(cache)
            attach(cache, _STALE, Stale({**there, name: under}))


def _filled(layers: int) -> list[Cache]:
    """Every cache with tokens that a model of so many layers may have filled."""
    fitting = (one for one in living() if len(getattr(one, "layers", ())) <= layers)
    return [cache for cache in fitting if is_filled(cache)]


def refuse(decoder: nn.Module, now: FilledUnder | None) -> None:
    """Have ``decoder`` refuse the caches that were filled under another patch than ``now``."""
    name, stale = _decoders[decoder], False
    for cache in living():
        there = _marks(cache)
        if name in there and there[name] == now:
            _unmark(cache, name)
        stale = stale or (name in there and there[name] != now)
    for hook in list(decoder._forward_pre_hooks.values()):
        if isinstance(hook, _Refusal):
            hook.leave(decoder)
    if stale:
        hook = _Refusal(name, now, parameters(type(decoder)))
        decoder.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


class _Refusal:
    """Decoder pre-hook, as long as there are caches that it refuses.

    Args:
        name: of the decoder.
        now: the patch in force; None: none.
        names: of the decoder's arguments.
    """

    def __init__(self, name: str, now: FilledUnder | None, names: tuple[str, ...]) -> None:
        self.name, self.now, self.names = name, now, names

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        cache = getattr(cache, "self_attention_cache", cache)
        if getattr(cache, _STALE, None) is not None:
            self._check(cache)
        elif not torch.compiler.is_compiling():
            self._leave_if_idle(decoder)

    @torch.compiler.disable
    def _check(self, cache: Cache) -> None:
        there = _marks(cache)
        if self.name not in there:
            return
        if not is_filled(cache):  # cropped, or its layers were reset one by one
            _unmark(cache, self.name)
            return
        before = there[self.name]
        if before is None:
            reason = (
                f"this cache was begun before the model was patched with {self.now.method}, so its "
                f"keys carry other rotations"
            )
        elif self.now is None:
            reason = (
                f"the keys in this cache carry the rotation of {before.method}, and this model is "
                f"not patched with it"
            )
        else:
            reason = (
                f"this cache was begun under another patch ({before.unlike(self.now)}) than the "
                f"one in force ({self.now.unlike(before)})"
            )
        raise CacheError(f"{reason}; start with an empty cache")

    def _leave_if_idle(self, decoder: nn.Module) -> None:
        if not any(self.name in _marks(cache) for cache in living()):
            self.leave(decoder)

    def leave(self, decoder: nn.Module) -> None:
        """Take the hook off a decoder, a copy of the one it was put on too."""
        for number, hook in list(decoder._forward_pre_hooks.items()):
            if hook is self:
                decoder._forward_pre_hooks.pop(number, None)
                decoder._forward_pre_hooks_with_kwargs.pop(number, None)


def _marks(cache: Cache) -> dict[str, FilledUnder | None]:
    there = getattr(cache, _STALE, None)
    return {} if there is None else there.under


def _unmark(cache: Cache, name: str) -> None:
    left = {other: under for other, under in _marks(cache).items() if other != name}
    if left:
        attach(cache, _STALE, Stale(left))
    else:
        forget(cache, _STALE)
