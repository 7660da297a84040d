"""Caches of which layers with a window keep the tokens that they will attend to, and no others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rope_ext.errors import CacheError
from rope_ext.rotary.caches import RECORDS
from rope_ext.rotary.swapping import plain, swap, take_back


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer of a growing cache under a patch that gives it a window; see :func:`swap`."""

    def reset(self) -> None:
        """An empty cache may be used with any model, so the layer keeps every token again."""
        super().reset()
        take_back(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens, as assisted decoding does."""
        self.require_past(tokens_to_remove)
        if tokens_to_remove or self.record_past:
            super().crop(tokens_to_remove)

    def require_past(self, tokens_to_remove: int) -> None:
        """Check that tokens can be taken back.

        Raises:
            CacheError: the tokens before them are gone.
        """
        is_full = self.cumulative_length >= self.sliding_window
        if tokens_to_remove and is_full and not self.record_past:
            raise CacheError(
                f"this cache keeps the last {self.sliding_window} tokens of some layers, so "
                f"{abs(tokens_to_remove)} of them cannot be taken back; call "
                f"activate_past_recording() of the cache before its first forward, or generate "
                f"without drafts (assistant_model, assistant_early_exit, prompt lookup) if the "
                f"model starts a new cache by itself, as Phi-3 does"
            )


def shorten(cache: Any, layers: Collection[int], window: int) -> None:
    """Make some layers of a growing cache keep the last ``window - 1`` tokens.

    The next token sees these and itself. Static, quantized and offloaded caches stay as they are:
    they keep every token, and layers attend to their window in them.

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
        made.record_past = getattr(layer, RECORDS, False)
        if keys is not None and values is not None:
            made.lazy_initialization(keys, values)
            made.cumulative_length = filled
            # Copies, so that the memory of the tokens before them is free.
            made.keys = keys[:, :, -window + 1 :].clone()
            made.values = values[:, :, -window + 1 :].clone()
