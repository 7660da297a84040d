"""Differences from RoPE, paired by seed, with Student's t intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from rope_eval.reports.intervals import CONFIDENCE

LEAST = 3
"""Minimum number of pairs for an interval: rates of a few words are often equal by chance."""


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
        return Difference(mean=mean, low=None, high=None, pairs=len(pairs))
    t = float(stdtrit(len(pairs) - 1, (1 + CONFIDENCE) / 2))
    half = t * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(mean=mean, low=mean - half, high=mean + half, pairs=len(pairs))
