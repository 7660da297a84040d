"""Confidence intervals whose coverage ``python -m lab.benchmarks.intervals`` simulates.

* :func:`rate_interval`: a share of prompts.
* :func:`mean_interval`, :func:`sum_interval`: mean losses of documents, or differences of them.
* :func:`paired_rates`: the difference of two shares on the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
MIN_DOCUMENTS = 4
"""Minimum number of documents, or pairs of prompts, for an interval."""

Interval = tuple[float, float]
Sample = tuple[ArrayLike, ArrayLike | None]
"""Values ``[..., documents]``, and the tokens behind each; equal if None."""


def rate_interval(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Exact (Clopper-Pearson) interval of a rate: (low, high), both within [0, 1].

    Its coverage is at least ``confidence``, for any rate and number of trials. If trials can
    partially succeed, ``successes`` is the sum of the shares; the interval is then conservative,
    because a share never has a higher variance than a binary outcome with the same mean.

    Clopper and Pearson 1934, Biometrika 26 (4).
    """
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    failures = trials - successes
    low = betaincinv(successes, failures + 1, tail) if successes else 0.0
    high = betaincinv(successes + 1, failures, 1 - tail) if failures else 1.0
    return float(low), float(high)


def mean_interval(
    values: Sequence[float], weights: Sequence[float] | None = None, confidence: float = CONFIDENCE
) -> Interval | None:
    """Return the interval of the mean of ``values``: :func:`sum_interval` of one sample."""
    return sum_interval([(values, weights)], confidence)


def sum_interval(
    samples: Sequence[tuple[Sequence[float], Sequence[float] | None]],
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Return the interval of the sum of the (weighted) means of independent samples.

    Returns None if a sample has fewer than ``MIN_DOCUMENTS``.

    Student's t, extended on the side to which the values are skewed by the second-order
    (Cornish-Fisher) term of the studentised mean: a few documents rarely show a tail. Degrees of
    freedom are those of Kish's effective number of documents, joined by Welch and Satterthwaite. A
    sample has a value for each document, and the tokens behind it (equal if None).

    Student 1908, Biometrika 6 (1); Johnson 1978, JASA 73 (363); Hall 1992, JRSS B 54 (1); Welch
    1947, Biometrika 34; Satterthwaite 1946, Biometrics Bulletin 2 (6).
    """
    if any(len(values) < MIN_DOCUMENTS for values, _ in samples):
        return None
    low, high = sum_ends(samples, confidence)
    return float(low), float(high)


def sum_ends(
    samples: Sequence[Sample], confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return low and high ends ``[...]`` of many intervals, as in :func:`sum_interval`."""
    value, variance, third, freedom = map(np.array, zip(*map(_moments, samples), strict=True))
    total = variance.sum(0)
    some = np.where(total > 0, total, 1)  # of equal values, the interval is their mean
    parts = (variance**2 / freedom).sum(0)
    t = _student(np.where(total > 0, total**2 / np.where(parts > 0, parts, 1), 1), confidence)
    # Hall's second-order term: (1 + 2 t**2) times the skewness of the mean, over 6.
    shift = third.sum(0) / some**1.5 / 6 * (1 + 2 * t * t)
    middle = value.sum(0)
    error = np.sqrt(total)
    return middle - error * (t - np.minimum(shift, 0)), middle + error * (t + np.maximum(shift, 0))


def _moments(sample: Sample) -> tuple[np.ndarray, ...]:
    """Return a weighted mean, variance and third moment of its error, and degrees of freedom."""
    data = np.asarray(sample[0], dtype=np.float64)
    share = np.ones_like(data) if sample[1] is None else np.asarray(sample[1], dtype=np.float64)
    share = share / share.sum(-1, keepdims=True)
    # Kish's effective number: documents of equal weight with the same precision.
    number = 1 / (share**2).sum(-1)
    value = (share * data).sum(-1)
    error = data - value[..., None]
    biased = (share * error**2).sum(-1)
    variance = biased * number / np.maximum(number - 1, 1)
    # The usual skewness correction for small samples; undefined below three.
    n = np.maximum(number, 3)
    skewness = (share * error**3).sum(-1) / np.where(biased > 0, biased, 1) ** 1.5
    skewness = skewness * np.sqrt(n * (n - 1)) / (n - 2)
    third = skewness * variance**1.5 / number**2
    return value, variance / number, third, np.maximum(number - 1, 1)


def paired_rates(
    one: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Return the interval of the difference of two rates on the same trials.

    None below ``MIN_DOCUMENTS``. Student's t over the trials' differences and two more, +1 and -1,
    which keep the width positive if all differences are equal. For binary answers, zero is excluded
    only if the exact McNemar test agrees.

    After Agresti and Min 2005, Statistics in Medicine 24 (5); McNemar 1947, Psychometrika 12 (2).
    """
    if len(one) < MIN_DOCUMENTS:
        return None
    low, high = paired_ends(one, other, confidence)
    return float(low), float(high)


def paired_ends(
    one: ArrayLike, other: ArrayLike, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return low and high ends ``[...]`` of many intervals, as in :func:`paired_rates`."""
    one, other = (np.asarray(values, dtype=np.float64) for values in (one, other))
    gaps = one - other
    # Agresti and Min: one more trial in favour of each.
    count = gaps.shape[-1] + 2
    centre = gaps.sum(-1) / count
    spread = ((gaps**2).sum(-1) + 2) / count - centre**2
    half = _student(count - 1, confidence) * np.sqrt(spread / (count - 1))
    low = np.maximum(centre - half, -1)
    high = np.minimum(centre + half, 1)
    whole = ((one % 1 == 0) & (other % 1 == 0)).all(-1)
    # For answers that are only right or wrong, the exact test has the last word.
    doubtful = whole & (mcnemar((gaps > 0).sum(-1), (gaps < 0).sum(-1)) > 1 - confidence)
    low = np.where(doubtful, np.minimum(low, 0), low)
    return low, np.where(doubtful, np.maximum(high, 0), high)


def mcnemar(one: ArrayLike, other: ArrayLike) -> np.ndarray:
    """Return the two-sided p of the exact McNemar test, for trials that only one system answers."""
    from scipy.special import bdtr

    one = np.asarray(one)
    other = np.asarray(other)
    return np.minimum(2 * bdtr(np.minimum(one, other), one + other, 0.5), 1)


def _student(freedom: ArrayLike, confidence: float) -> np.ndarray:
    from scipy.special import stdtrit

    return stdtrit(freedom, (1 + confidence) / 2)
