"""Effective distances from the papers: query m, key n <= m; None if masked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def rerope(m: int, n: int, window: int) -> float:
    return min(m - n, window)


def leaky_rerope(m: int, n: int, window: int, k: float) -> float:
    return m - n if m - n < window else window + (m - n - window) / k


def self_extend(m: int, n: int, window: int, group: int) -> float:
    return m - n if m - n < window else m // group + (window - window // group) - n // group


def jet_long(
    m: int, n: int, window: int, step: int, factor: float = 4, kept: Sequence[float] | None = None
) -> float | list[float]:
    """As in reading a text that ends with the query; groups grow up to the factor."""
    group = min(-(-(m + 1) // step), math.ceil(factor))
    if kept is None:
        return m - n if m - n <= window else m // group - n // group
    return [(m - n) * (1 if m - n <= window else share + (1 - share) / group) for share in kept]


def dual_chunk(m: int, n: int, chunk: int, local: int) -> float:
    size = chunk - local
    place_of_query, place_of_key = m % size, n % size
    if m // size == n // size:
        return place_of_query - place_of_key
    if m // size == n // size + 1:
        return min(place_of_query + size, chunk) - place_of_key
    return chunk - place_of_key


def string(m: int, n: int, shift: int, window: int) -> float:
    return m - n if m - n < shift else m - n - shift + window


def lm_infinite(m: int, n: int, window: int, sinks: int) -> float | None:
    return m - n if m - n < window else window if n < sinks else None


def unturned(m: int, n: int) -> float:
    return 0


def dpe(m: int, n: int, window: int, scales: Sequence[int], groups: Any = None) -> list[float]:
    """Distances of each group of pairs."""
    return [self_extend(m, n, window, group) for group in scales]


def lampe(m: int, n: int, length: int, head: int, mapped: int, tail: int) -> float:
    """The mapped positions are those of the release: floor(mapped / (length - 1) * position)."""

    def place(position: int) -> int:
        return position * mapped // (length - 1)

    while tail + 1 < length and place(tail + 1) == place(tail):
        tail += 1
    near, end = head - (place(head) + 1), length - 1 - tail
    if m - n < head or end < head:
        return m - n
    return m - n - (end - place(end) - near) if m - n > end else place(m) + near - place(n)


FORMULAS: dict[str, Callable[..., Any]] = {
    "rerope": rerope,
    "leaky_rerope": leaky_rerope,
    "self_extend": self_extend,
    "jet_long": jet_long,
    "dpe": dpe,
    "lampe": lampe,
    "dual_chunk": dual_chunk,
    "string": string,
    "lm_infinite": lm_infinite,
}


EVERY = {**FORMULAS, "unturned": unturned}


def formula(name: str, tokens: torch.Tensor, **constants: Any) -> torch.Tensor:
    """Return effective distances between ``tokens`` (positions); infinite if masked.

    The last axis is for methods that use different distances for groups of pairs.
    """
    of_groups = constants.get("scales") or constants.get("kept")
    shape = (len(tokens), len(tokens), *([len(of_groups)] if of_groups else []))
    result = torch.full(shape, math.inf, dtype=torch.float64)
    positions = tokens.tolist()
    for i, m in enumerate(positions):
        for j, n in enumerate(positions[: i + 1]):
            found = EVERY[name](m, n, **constants)
            if found is not None:
                result[i, j] = torch.tensor(found, dtype=torch.float64)
    return result
