"""Options that change the formula of an encoding: each by its formula, dense, in float64."""

from __future__ import annotations

from typing import Any

from tests.helpers.relative import Parts


def alibi(learned, query, key, content, apart, scale) -> Parts:
    return content - learned["slope"][:, None, None] * apart[:, None], None


def t5(learned, query, key, content, apart, scale) -> Parts:
    return content + learned["beta"][:, apart[0].clamp(max=7)], None


VARIANTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "alibi learned": ("alibi", {"learned": True}, alibi),
    "t5 offsets": ("t5", {"buckets": "offsets", "max_distance": 7}, t5),
}
"""An encoding, its options, and a function as those of :data:`tests.helpers.relative.RELATIVE`."""
