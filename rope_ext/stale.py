"""Refuses caches that were filled before the patch on a model changed.

Their keys carry the rotation of that time. A cache does not know its model, and recording the
patch in every forward would slow down fixed frequency maps, under which no code of this package
runs. Instead, a change of patch marks every cache that has tokens, and the model gets a hook that
refuses marked caches and removes itself once there are none.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from rope_ext.caches import CacheWithMetadata, Move, attach, forget, is_filled, living, settle
from rope_ext.errors import CacheError
from rope_ext.forward.context import cache_among, run_eagerly
from rope_ext.methods import Method
from rope_ext.rotary.calls import parameters

_STALE = "_rope_ext_stale"  # attribute of a cache: its Stale
_decoders: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Decoders whose patch has changed, each with the name used for it in the marks on caches."""


@dataclass(frozen=True)
class FilledUnder:
    """Everything about a patch that affects the keys in a cache.

    Args:
        method: the method in force.
        more: everything else that must match, by name.
    """

    method: Method
    more: Mapping[str, Any]

    def unlike(self, other: FilledUnder | None) -> str:
        """The method, and the settings that differ from ``other``."""
        if other is None:
            return str(self.method)
        named = [f"{k}={v!r}" for k, v in self.more.items() if v != other.more[k]]
        return " with ".join([str(self.method), *filter(None, [", ".join(named)])])


@dataclass(frozen=True)
class Stale:
    """The patch under which a cache was filled, by decoder whose patch has changed since.

    Nothing records which decoder filled the cache, so each of them refuses it.
    """

    under: dict[str, FilledUnder | None] = field(default_factory=dict)

    @property
    def kind(self) -> type[CacheWithMetadata]:
        """Another class than an unmarked cache has, which makes graphs check their guards again."""
        return CacheWithMetadata

    def moved(self, move: Move) -> Stale:
        """The same: it is about the whole cache."""
        return self

    def emptied(self) -> None:
        """After a reset, the cache may be used under any patch."""


def mark(decoder: nn.Module, under: FilledUnder | None) -> None:
    """Mark every cache with tokens, before the patch on ``decoder`` changes.

    Args:
        decoder: the patched decoder.
        under: its current patch; None if it has none.
    """
    name = _decoders.setdefault(decoder, str(uuid.uuid4()))
    layers = sum(isinstance(m.__dict__.get("layer_idx"), int) for m in decoder.modules())
    for cache in _filled(layers):
        there = _marks(cache)
        if name not in there:
            settle(cache)
            attach(cache, _STALE, Stale({**there, name: under}))


def _filled(layers: int) -> list[Cache]:
    """Every cache with tokens that a model with this many layers may have filled."""
    fitting = (one for one in living() if len(getattr(one, "layers", ())) <= layers)
    return [cache for cache in fitting if is_filled(cache)]


def refuse(decoder: nn.Module, now: FilledUnder | None) -> None:
    """Make ``decoder`` refuse caches that were filled under another patch than ``now``."""
    name, stale = _decoders[decoder], False
    for cache in living():
        there = _marks(cache)
        if name in there and there[name] == now:
            _unmark(cache, name)
        stale = stale or (name in there and there[name] != now)
    for hook in list(decoder._forward_pre_hooks.values()):
        if isinstance(hook, Refusal):
            hook.leave(decoder)
    if stale:
        hook = Refusal(name, now, parameters(type(decoder)))
        decoder.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        # Dynamo looks a hook up by its place in the dict, where prepending moved nothing.
        hooks = list(decoder._forward_pre_hooks.items())
        decoder._forward_pre_hooks.clear()
        decoder._forward_pre_hooks.update(hooks)


class Refusal:
    """Decoder pre-hook, installed as long as there are caches to refuse.

    Args:
        name: name of the decoder in the marks.
        now: the patch in force; None if there is none.
        names: names of the decoder's arguments.
    """

    def __init__(self, name: str, now: FilledUnder | None, names: tuple[str, ...]) -> None:
        self.name, self.now, self.names = name, now, names

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
        if kwargs is None:  # another thread has just removed the hook, with nothing to refuse
            return
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = cache_among(given)
        cache = getattr(cache, "self_attention_cache", cache)
        # Marks for other decoders must not break a graph of this one.
        if self.name in _marks(cache):
            self._check(cache)
        elif not torch.compiler.is_compiling():
            self._leave_if_idle(decoder)

    @run_eagerly()
    def _check(self, cache: Cache) -> None:
        there = _marks(cache)
        if not is_filled(cache):  # cropped, or its layers were reset one by one
            _unmark(cache, self.name)
            return
        raise CacheError(f"{_reason(there[self.name], self.now)}; start with an empty cache")

    def _leave_if_idle(self, decoder: nn.Module) -> None:
        if not any(self.name in _marks(cache) for cache in living()):
            self.leave(decoder)

    def leave(self, decoder: nn.Module) -> None:
        """Remove the hook from a decoder, which may be a copy of the one it was installed on."""
        for number, hook in list(decoder._forward_pre_hooks.items()):
            if hook is self:
                decoder._forward_pre_hooks.pop(number, None)
                decoder._forward_pre_hooks_with_kwargs.pop(number, None)


def _reason(before: FilledUnder | None, now: FilledUnder | None) -> str:
    """Why a cache is refused that was filled under ``before``, which is not ``now``."""
    if now is None:
        filled_by = "another patch" if before is None else str(before.method)
        return (
            f"the keys in this cache carry the rotation of {filled_by}, and this model is not "
            f"patched with it"
        )
    if before is None:
        return (
            f"this cache was begun before the model was patched with {now.method}, so its keys "
            f"carry other rotations"
        )
    return (
        f"this cache was begun under another patch ({before.unlike(now)}) than the one in force "
        f"({now.unlike(before)})"
    )


def _marks(cache: Cache) -> dict[str, FilledUnder | None]:
    there = getattr(cache, _STALE, None)
    return {} if there is None else there.under


def _unmark(cache: Cache, name: str) -> None:
    left = {other: under for other, under in _marks(cache).items() if other != name}
    if left:
        attach(cache, _STALE, Stale(left))
    else:
        forget(cache, _STALE)
