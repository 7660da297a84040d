"""What a thread is in the middle of: the one place for it, since a model may serve several.

What belongs to a request beyond one call lives on its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Here(threading.local):
    """Of the thread that asks. Where calls can nest, the innermost is last."""

    def __init__(self) -> None:
        self.positions: list[Any] = []  # forwards under a position map (position.tokens)
        self.traced: list[Any] = []  # those that torch.compile traces (position.compiled)
        self.sequences: list[Any] = []  # forwards under a method that follows sequences (rotary)
        self.followed: list[Any] = []  # those that torch.compile traces (rotary.compiled)
        self.requests: list[Any] = []  # calls of generate under such a method
        self.recomputed: Any = None  # the forward of which gradient checkpointing repeats layers
        self.probed: list[tuple] | None = None  # what layers have shown to the probe of layouts
        self.look: Callable[..., None] | None = None  # who watches layers attend


here = _Here()
