"""Caches of which layers with a window keep the tokens that they will attend to, and no others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rope_ext.errors import CacheError
from rope_ext.rotary.swapping import plain, swap, take_back

SPARE = 64
"""Tokens that a layer keeps beyond its window, which take the place of drafts that are removed."""


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer of a growing cache under a patch that gives it a window; see :func:`swap`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that are kept, with the new ones."""
        keys, values = DynamicLayer.update(self, key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        first = -(self.sliding_window - 1 + SPARE)
        self.keys, self.values = keys[:, :, first:], values[:, :, first:]
        return keys, values

    def reset(self) -> None:
        """An empty cache may be used with any model, so the layer keeps every token again."""
        super().reset()
        take_back(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens, as assisted decoding does.

        Raises:
            CacheError: the tokens before them are gone.
        """
        left = self.cumulative_length - abs(tokens_to_remove)
        kept = 0 if self.keys is None else self.keys.shape[-2] - abs(tokens_to_remove)
        if kept < min(left, self.sliding_window - 1):
            raise CacheError(
                f"this cache keeps the last {self.sliding_window} tokens of some layers and "
                f"{SPARE} more, so {abs(tokens_to_remove)} of them cannot be taken back; start "
                f"with an empty cache, or generate without drafts"
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
    if plain(cache) is not DynamicCache or cache.offloading:
        return
    while len(cache.layers) <= max(layers) and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    for number in layers:
        layer = cache.layers[number] if number < len(cache.layers) else None
        if type(layer) is not DynamicLayer:
            continue
        keys, values, filled = layer.keys, layer.values, layer.get_seq_length()
        swap(layer, WindowLayer)
        made = cast("WindowLayer", layer)
        WindowLayer.__init__(made, window)
        if keys is not None and values is not None:
            made.lazy_initialization(keys, values)
            made.cumulative_length = filled
            # Copies, so that the memory of the tokens before them is free.
            first = -(window - 1 + SPARE)
            made.keys, made.values = keys[:, :, first:].clone(), values[:, :, first:].clone()
