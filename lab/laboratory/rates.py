"""Learning rates chosen for each encoding, so that all are compared with equal effort.

An encoding whose parameters learn too slowly looks like a worse encoding: with the rate of the
model's other vectors, a T5 bias can change by 0.4 nats in 300 steps, but needs four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

SEED = 1000
"""Seed of models for choosing rates; reported models have seeds from 0."""
ENCODING = (1.0, 5.0, 25.0, 125.0)
INITIAL = (1.0, 5.0, 25.0)
MODEL = (0.5, 1.0, 2.0)
NORMAL = ("deberta", "repo", "shaw", "transformer_xl")
"""Encodings with tables from a normal distribution, whose initial size is chosen, too."""
_BEYOND = 2  # values to try beyond the end of a list while the end is best


@dataclass(frozen=True)
class Rates:
    """Factors of the default learning rates, and of initial tables.

    Args:
        model: factor of the rate of all parameters of the model; 1 is ``--learning-rate``.
        encoding: factor of the rate of the encoding's own parameters; 1 is the default rate of
            the model's vectors.
        initial: factor of the encoding's initial tables, if these are random.
    """

    model: float = 1.0
    encoding: float = 1.0
    initial: float = 1.0


@dataclass(frozen=True)
class Choice:
    """Chosen rates and all tried ones with their held-out losses in nats.

    The loss is infinite if training diverged.
    """

    rates: Rates
    tried: tuple[tuple[Rates, float], ...]


def choose(loss: Callable[[Rates], float], own: bool, normal: bool = False) -> Choice:
    """Find the rates with the lowest loss: the encoding's, its initial size, then the model's.

    A list of values is extended while its first or last one is the best, at most twice.

    Args:
        loss: trains a model with these rates and returns its held-out loss, nats; raises
            FloatingPointError if it diverges.
        own: whether the encoding has parameters.
        normal: whether these are initialized from a normal distribution.
    """
    tried: dict[Rates, float] = {}

    def measure(rates: Rates) -> float:
        if rates not in tried:
            try:
                tried[rates] = loss(rates)
            # The worst of all, so that the search goes the other way.
            except FloatingPointError:
                tried[rates] = math.inf
        return tried[rates]

    best = Rates()
    lists = {"encoding": ENCODING * own, "initial": INITIAL * normal, "model": MODEL}
    for which, values in lists.items():
        best = _lowest(values, start=best, which=which, measure=measure)
    return Choice(best, tuple(tried.items()))


def _lowest(
    values: Sequence[float], start: Rates, which: str, measure: Callable[[Rates], float]
) -> Rates:
    """The best variant of ``start`` with one of these values in the field ``which``."""
    found = [replace(start, **{which: value}) for value in values] or [start]
    for _ in range(_BEYOND if values else 0):
        best = min(found, key=measure)
        step = values[1] / values[0]
        if best == found[-1]:
            found.append(replace(best, **{which: getattr(best, which) * step}))
        elif best == found[0]:
            found.insert(0, replace(best, **{which: getattr(best, which) / step}))
        else:
            break
    return min(found, key=measure)
