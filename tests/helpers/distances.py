"""The papers' effective distances: query m, key n <= m; None where nothing is seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def rerope(m: int, n: int, window: int) -> float:
    return min(m - n, window)


def leaky_rerope(m: int, n: int, window: int, k: float) -> float:
    return m - n if m - n < window else window + (m - n - window) / k


def self_extend(m: int, n: int, window: int, group: int) -> float:
    if m - n < window:
        return m - n
    return m // group + (window - window // group) - n // group


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
    if m - n < window:
        return m - n
    return window if n < sinks else None


def unturned(m: int, n: int) -> float:
    return 0


FORMULAS: dict[str, Callable[..., float | None]] = {
    "rerope": rerope,
    "leaky_rerope": leaky_rerope,
    "self_extend": self_extend,
    "dual_chunk": dual_chunk,
    "string": string,
    "lm_infinite": lm_infinite,
    "unturned": unturned,
}


def formula(name: str, tokens: torch.Tensor, **constants: Any) -> torch.Tensor:
    """Effective distance between every two of ``tokens`` (positions); infinite where unseen."""
    result = torch.full((len(tokens), len(tokens)), math.inf, dtype=torch.float64)
    positions = tokens.tolist()
    for i, m in enumerate(positions):
        for j, n in enumerate(positions[: i + 1]):
            found = FORMULAS[name](m, n, **constants)
            if found is not None:
                result[i, j] = found
    return result
