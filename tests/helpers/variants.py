"""Options that change the formula of an encoding: each by its formula, dense, in float64."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.relative import Parts


def alibi(learned, query, key, content, apart, scale) -> Parts:
    return content - learned["slope"][:, None, None] * apart[:, None], None


def t5(learned, query, key, content, apart, scale) -> Parts:
    return content + learned["beta"][:, apart[0].clamp(max=7)], None


def nezha(learned, query, key, content, apart, scale) -> Parts:
    """Equations 5 and 6, of ``j - i`` clipped, for keys and values."""
    columns = query.shape[-1]
    table = torch.zeros(*apart.shape, columns, dtype=torch.float64)
    for k in range(columns // 2):
        angle = -apart.clamp(max=7).double() / 10000 ** (2 * k / columns)
        table[..., 2 * k], table[..., 2 * k + 1] = angle.sin(), angle.cos()
    return content + scale * torch.einsum("bhid,aijd->bhij", query, table), table


def keys_only(learned, query, key, content, apart, scale) -> Parts:
    by_key = learned["key"][apart.clamp(2, 7) - 2]
    return content + scale * torch.einsum("bhid,aijd->bhij", query, by_key), None


VARIANTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "alibi learned": ("alibi", {"learned": True}, alibi),
    "t5 offsets": ("t5", {"buckets": "offsets", "max_distance": 7}, t5),
    "shaw sinusoidal": ("shaw", {"clip": 7, "table": "sinusoidal"}, nezha),
    "shaw keys": ("shaw", {"clip": 7, "p_min": 2, "values": False}, keys_only),
}
"""An encoding, its options, and a function as those of :data:`tests.helpers.relative.RELATIVE`."""
