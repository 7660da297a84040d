"""Caches of which layers with a window keep the tokens that they will attend to, and no others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rope_ext.errors import CacheError

SPARE = 64
"""Tokens that a layer keeps beyond its window, which take the place of drafts that are removed."""


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer of a growing cache that keeps the last tokens."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that are kept, with the new ones."""
        keys, values = DynamicLayer.update(self, key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        first = -(self.sliding_window - 1 + SPARE)
        self.keys, self.values = keys[:, :, first:].clone(), values[:, :, first:].clone()
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens, as assisted decoding does.

        Raises:
            CacheError: the tokens before them are gone.
        """
        count = abs(tokens_to_remove)
        left = self.cumulative_length - count
        kept = 0 if self.keys is None else self.keys.shape[-2] - count
        if kept < min(left, self.sliding_window - 1):
            raise CacheError(
                f"this cache keeps the last {self.sliding_window} tokens of some layers and "
                f"{SPARE} more, so {count} of them cannot be taken back; start with an empty "
                f"cache, or generate without drafts"
            )
        DynamicLayer.crop(self, tokens_to_remove)
        self.cumulative_length = left


def shorten(cache: Any, layers: Collection[int], window: int) -> None:
    """Make some layers of a growing cache keep the last ``window - 1`` tokens, and some spare ones.

    The next token sees the former and itself. Static, quantized and offloaded caches stay as they
    are: they keep every token, and layers attend to their window in them.

    Args:
        cache: empty, or filled by a forward under the patch.
        layers: numbers of the layers.
        window: tokens.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        return
    while len(cache.layers) <= max(layers) and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    for number in layers:
        before = cache.layers[number]
        if type(before) is DynamicLayer:
            made = cache.layers[number] = WindowLayer(window)
            if before.keys is not None and before.values is not None:
                made.update(before.keys, before.values)
