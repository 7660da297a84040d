"""How many tokens, rows or numbers the kernels handle at a time.

They trade memory for speed and change results by rounding only. Kernels read them at every call;
tests assign small ones to reach with few tokens what otherwise takes thousands.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Way = Literal["forward", "backward"]

NARROW = 1024
"""Tokens; a band less wide than this is narrow."""


class TileRows(NamedTuple):
    """Rows of a tile along a band, by the width of the band; ``narrow`` is at most ``BIASED``."""

    narrow: int
    wide: int

    def rows_for(self, first: int, last: int | None) -> int:
        """For a band of the distances ``first .. last - 1``, in tokens."""
        return self.narrow if last is not None and last - first < NARROW else self.wide


# 32 rows, one step of the kernel, compute the fewest hidden logits; backward takes two steps, since
# the keys of each tile are copied. From 192 rows on the kernel takes steps of 64. In half precision
# it packs the keys of each call if there are enough rows, which costs as much as 170 rows, and is
# slow if there are not.
TILES: dict[tuple[Way, bool], TileRows] = {
    ("forward", False): TileRows(32, 192),
    ("backward", False): TileRows(64, 192),
    ("forward", True): TileRows(192, 384),
    ("backward", True): TileRows(192, 192),
}
"""By direction, and by whether it is half precision."""
BIASED = 256
"""The most rows of a tile with a bias, unless it hides nothing."""
TALL = 1024
"""Rows of a tile with a bias that hides nothing, and keys of a tile whose bias is learned."""
TILES_BACKWARD = 4
"""Tiles of one backward call, unless there are more threads: copied keys then stay in the cache."""
STEPS = 768
"""Rows from which the kernel takes its largest steps."""
ROTATED = 1024
"""Tokens rotated at a time."""
MERGED = 2**18
"""Elements of an output that are cast to float32 at a time."""
SPARE_KEYS = 256
"""Spare keys in the ring of a decode step: it moves to new memory once in so many steps."""
NEAR_LOGITS = 2**21
"""Logits of the near band of relative tables held at a time: 8 MiB in float32."""
NEAR_ROWS = 64
"""Rows of a block of it: fewer repeat too many keys, more compute too many hidden logits."""
SCORED_LOGITS = 2**22
"""Logits of a block of scored attention held at a time: 16 MiB in float32."""
SCORED_ROWS = 256
"""Queries of such a block at most."""
FIRE_NUMBERS = 2**23
"""Numbers of a tile of FIRE's scores: 32 MiB in float32."""
FIRE_ROWS = STEPS
"""Queries of a block of them."""
FIRE_ROWS_BACKWARD = 256
"""Fewer in the backward pass, so that a tile stays in the processor's cache while it is used."""
