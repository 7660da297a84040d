"""Confidence intervals: Wilson for rates, bootstrap for means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch

CONFIDENCE = 0.95
RESAMPLES = 10_000


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson score interval of a rate: (low, high), both within [0, 1].

    Unlike the normal approximation it keeps its width at 0 and at ``trials`` successes.

    Raises:
        ValueError: ``successes`` is not within 0 .. ``trials``, or there are no trials.

    Wilson 1927, JASA 22 (158).
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"no rate has {successes} successes in {trials} trials")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / trials
    shrink = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At 0 and at all successes one end is the rate itself; rounding must not move it.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high


def bootstrap_mean(
    values: Sequence[float], seed: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of ``values``: (low, high), in their unit.

    ``RESAMPLES`` resamples with replacement, drawn from ``seed``. With one value both ends
    are that value; below about ten values the interval is somewhat too narrow.
    """
    data = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(data), (RESAMPLES, len(data)), generator=generator)
    means = data[picks].mean(1)
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.quantile(means, tails).tolist()
    return low, high
