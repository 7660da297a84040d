"""Differences from RoPE, paired by seed, with Student's t intervals."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

CONFIDENCE = 0.95
LEAST = 3
"""Minimum number of pairs for an interval: rates of a few words are often equal by chance."""
_STEPS = 200  # of the integral under Student's curve


@dataclass(frozen=True)
class Difference:
    """A mean difference with its interval, which needs at least ``LEAST`` pairs."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and (self.low > 0 or self.high < 0)

    def within(self, low: float, high: float) -> Difference:
        """The same difference, with the interval clipped to possible values."""
        return replace(self, low=max(self.low, low), high=min(self.high, high))


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The difference over common seeds; None if there are none."""
    pairs = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    if len(pairs) < LEAST:
        return Difference(mean, None, None, len(pairs))
    half = student(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(mean, mean - half, mean + half, len(pairs))


@functools.cache
def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t: 4.303 for 95 % and two degrees of freedom."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(freedom * math.pi)

    def inside(t: float) -> float:
        # With t = sqrt(freedom) tan(a) the curve is a power of a cosine, on a bounded range.
        end = math.atan(t / math.sqrt(freedom))
        points = [math.cos(end * k / _STEPS) ** (freedom - 1) for k in range(_STEPS + 1)]
        total = points[0] + points[-1] + 4 * sum(points[1::2]) + 2 * sum(points[2:-1:2])
        return 2 * scale * math.sqrt(freedom) * total * end / (3 * _STEPS)

    low, high = 0.0, 1.0
    while inside(high) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return high


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings of the same items; None if one is all ties."""

    def sign(x: float) -> int:
        return (x > 0) - (x < 0)

    total, ties = 0, [0, 0]
    for i in range(len(one)):
        for j in range(i):
            a, b = sign(one[i] - one[j]), sign(other[i] - other[j])
            total += a * b
            ties[0] += a != 0
            ties[1] += b != 0
    return total / math.sqrt(ties[0] * ties[1]) if all(ties) else None
