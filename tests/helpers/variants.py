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


def dape_fire(learned, query, key, content, apart, scale) -> Parts:
    c, multiplier = learned["fire_c"].abs(), learned["fire_multiplier"].abs()
    place = apart[:, :, :1].double()  # from the first key, which is at 0
    x = torch.log(1 + c * apart) / (
        torch.log(1 + c * torch.maximum(place, 512 * multiplier)) + 1e-6
    )
    inner = (x[..., None] @ learned["fire_first_weight"].mT + learned["fire_first_bias"]).relu()
    bias = inner @ learned["fire_second_weight"].mT + learned["fire_second_bias"]
    bias = bias.movedim(-1, 1).expand_as(content)
    return content + bias + _adapted(learned, torch.cat((content, bias), 1)), None


def dape_alone(learned, query, key, content, apart, scale) -> Parts:
    return content + _adapted(learned, content), None


def _adapted(learned, given: torch.Tensor) -> torch.Tensor:
    """The network of version 1, for one pair of query and key at a time."""
    inner = given.movedim(1, -1) @ learned["first_weight"].mT + learned["first_bias"]
    inner = torch.where(inner > 0, inner, 0.01 * inner)
    return (inner @ learned["second_weight"].mT + learned["second_bias"]).movedim(-1, 1)


VARIANTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "alibi learned": ("alibi", {"learned": True}, alibi),
    "t5 offsets": ("t5", {"buckets": "offsets", "max_distance": 7}, t5),
    "shaw sinusoidal": ("shaw", {"clip": 7, "table": "sinusoidal"}, nezha),
    "shaw keys": ("shaw", {"clip": 7, "p_min": 2, "values": False}, keys_only),
    "dape on fire": ("dape", {"on": "fire"}, dape_fire),
    "dape on nothing": ("dape", {"on": None}, dape_alone),
}
"""An encoding, its options, and a function as those of :data:`tests.helpers.relative.RELATIVE`."""
