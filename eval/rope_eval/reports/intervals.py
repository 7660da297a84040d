"""Confidence intervals: Wilson for rates, bootstrap for means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch

CONFIDENCE = 0.95
RESAMPLES = 10_000


def wilson(successes: float, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson score interval of a rate: (low, high), both within [0, 1].

    Unlike the normal approximation it keeps its width at 0 and at ``trials`` successes. Where a
    trial can succeed in part, ``successes`` is the sum of the shares and the interval errs on the
    wide side, since nothing between 0 and 1 varies more than a coin of the same mean.

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
    values: Sequence[float],
    seed: int,
    weights: Sequence[float] | None = None,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the (weighted) mean of ``values``: (low, high).

    ``RESAMPLES`` resamples with replacement, drawn from ``seed``; a value is drawn together with
    its weight. With one value both ends are that value; below about ten values the interval is
    somewhat too narrow.

    Efron 1979, Annals of Statistics 7 (1).
    """
    return _percentiles(_resampled(values, weights, _generator(seed)), confidence)


def bootstrap_sum(
    samples: Sequence[tuple[Sequence[float], Sequence[float] | None]],
    seed: int,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """As :func:`bootstrap_mean`, of the sum of the means of independent samples.

    Args:
        samples: values, and their weights or None, of each.
        seed: of the resamples.
        confidence: of the interval.
    """
    generator = _generator(seed)
    means = [_resampled(values, weights, generator) for values, weights in samples]
    return _percentiles(torch.stack(means).sum(0), confidence)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _resampled(
    values: Sequence[float], weights: Sequence[float] | None, generator: torch.Generator
) -> torch.Tensor:
    """The (weighted) means of the resamples: float64, ``[RESAMPLES]``."""
    data = torch.tensor(values, dtype=torch.float64, device="cpu")
    weight = torch.ones_like(data) if weights is None else data.new_tensor(weights)
    picks = torch.randint(len(data), (RESAMPLES, len(data)), generator=generator, device="cpu")
    return (data * weight)[picks].sum(1) / weight[picks].sum(1)


def _percentiles(means: torch.Tensor, confidence: float) -> tuple[float, float]:
    tails = torch.tensor(
        [(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64, device="cpu"
    )
    low, high = torch.quantile(means, tails).tolist()
    return low, high


def paired_rates(
    one: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of the difference of two rates on the same trials: (low, high).

    Newcombe's hybrid of two Wilson intervals (his method 10), which keeps its width where the two
    agree on every trial, and gains from their agreeing on most.

    Args:
        one: 1 or 0 for each trial.
        other: the same, in the same order.
        confidence: of the interval.

    Newcombe 1998, Statistics in Medicine 17, 2635-2650.
    """
    trials = len(one)
    p, q = sum(one) / trials, sum(other) / trials
    low_p, high_p = wilson(sum(one), trials, confidence)
    low_q, high_q = wilson(sum(other), trials, confidence)
    both = sum(x * y for x, y in zip(one, other, strict=True))
    only_one, only_other = sum(one) - both, sum(other) - both
    neither = trials - both - only_one - only_other
    spread = math.sqrt(
        (both + only_one) * (only_other + neither) * (both + only_other) * (only_one + neither)
    )
    agreement = both * neither - only_one * only_other
    if agreement > 0:
        agreement = max(agreement - trials / 2, 0)
    phi = agreement / spread if spread else 0.0
    below = _hybrid(p - low_p, high_q - q, phi)
    above = _hybrid(high_p - p, q - low_q, phi)
    return p - q - below, p - q + above


def _hybrid(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))
