"""Keys that stay rotated from one step of decoding to the next, stored beside their cache.

The cache is the source of truth. Rotated keys are reused only if a step begins with the very tensor
of keys that the last step left: moving rows, cropping or replacing keys leaves another tensor, and
the keys are rotated again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from rope_ext.attention.step import Ring
from rope_ext.caches import Move

_ROTATED_KEYS = "_rope_ext_rotated_keys"  # attribute of a cache: its RotatedKeys
Rings = dict[int, Ring]
"""By the index of the band."""


class RotatedKeys:
    """The rings of every layer of a cache, and the keys that they were made from."""

    kind = None

    def __init__(self) -> None:
        self.layers: dict[int, tuple[weakref.ref, Rings]] = {}

    def moved(self, move: Move) -> RotatedKeys:
        """After rows were moved, rings are made again."""
        return RotatedKeys()

    def emptied(self) -> None:
        """Nothing remains when a cache is reset."""

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of a cache starts without rings
        return RotatedKeys, ()


class RotatedKeyStep:
    """One step of decoding with the rings of a cache.

    It takes them off the cache before keys are added, and puts back those that it has updated, so
    that a copy of the cache that shares its layers makes new ones.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache, self._layers = cache, getattr(cache, "layers", [])
        self._taken: dict[int, Rings] = {}
        known = getattr(cache, _ROTATED_KEYS, None)
        kept = {} if known is None else known.layers
        for number, layer in enumerate(self._layers):
            left, rings = kept.pop(number, (None, None))
            keys = None if left is None else left()
            if keys is not None and keys is layer.keys and _untouched(keys):
                self._taken[number] = rings

    def rings(self, module: nn.Module, keys: torch.Tensor) -> Rings | None:
        """The rings of an attention layer; None unless ``keys`` are all its cached keys."""
        number = getattr(module, "layer_idx", None)
        if not isinstance(number, int):
            return None
        rings = self._taken.get(number)
        if rings is None:
            if number >= len(self._layers):
                return None
            layer = self._layers[number]  # a DynamicLayer makes a new tensor for every new key
            if not isinstance(layer, DynamicLayer) or layer.is_sliding:
                return None
            rings = self._taken[number] = {}
        if self._layers[number].keys is not keys:
            return None
        known = getattr(self._cache, _ROTATED_KEYS, None)
        if known is None:
            known = RotatedKeys()
            setattr(self._cache, _ROTATED_KEYS, known)
        known.layers[number] = weakref.ref(keys), rings
        return rings


def _untouched(keys: torch.Tensor) -> bool:
    """Whether nothing was changed in place; inference tensors have no version counter."""
    return keys.is_inference() or keys._version == 0
