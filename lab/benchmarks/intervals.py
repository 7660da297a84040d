"""Simulates the coverage of report intervals, and how often equal systems look different.

    python -m lab.benchmarks.intervals

Runs the functions of :mod:`rope_eval.reports.intervals` on documents with a known true mean, next
to Student's t. ``covers`` is the share of nominal 95 % intervals that contain the truth, and
``clear`` the share of pairs of equal systems that are called clearly different.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rope_eval.reports.intervals import CONFIDENCE, paired_ends, rate_interval, sum_ends

COUNTS = (4, 5, 6, 8, 12, 20)
RATES = np.linspace(0.005, 0.995, 199)
UNLIKE = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Shares of prompts that only one of two systems answers."""
WINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of these that the better system answers."""

Ends = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Losses:
    """A distribution of the mean losses of documents.

    Args:
        draw: draws losses of a given shape.
        mean: true mean.
        weight: standard deviation of the logarithm of tokens per document.
    """

    draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
    mean: float
    weight: float = 0.0


def _lognormal(spread: float) -> Losses:
    return Losses(lambda rng, shape: rng.lognormal(0, spread, shape), np.exp(spread**2 / 2))


LOSSES: dict[str, Losses] = {
    "normal": Losses(lambda rng, shape: rng.normal(0, 1, shape), 0.0),
    "heavy tails (t, 3)": Losses(lambda rng, shape: rng.standard_t(3, shape), 0.0),
    "skewed (lognormal, 0.3)": _lognormal(0.3),
    "very skewed (lognormal, 0.5)": _lognormal(0.5),
    "normal, weighted": Losses(lambda rng, shape: rng.normal(0, 1, shape), 0.0, 0.5),
    "very skewed, weighted": Losses(_lognormal(0.5).draw, _lognormal(0.5).mean, 0.5),
    "normal, very uneven weights": Losses(lambda rng, shape: rng.normal(0, 1, shape), 0.0, 1.0),
}

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _quarters(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.integers(0, 5, shape) / 4


def _mostly_equal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    # The same for both systems, whose answers then differ on a fifth of the prompts.
    kept = _quarters(np.random.default_rng(1), shape)
    return np.where(rng.random(shape) < 0.2, _quarters(rng, shape), kept)


PARTIAL: dict[str, tuple[Draw, Draw]] = {
    "quarters": (_quarters, _quarters),
    "mostly equal": (_mostly_equal, _mostly_equal),
    "near 0 or 1": (lambda rng, shape: rng.beta(0.3, 0.3, shape),) * 2,
    "one fails rarely, but wholly": (
        lambda rng, shape: (rng.random(shape) > 0.1).astype(float),
        lambda rng, shape: np.full(shape, 0.9),
    ),
}
"""Two systems with equal means and partly correct answers."""


def student(values: np.ndarray, weights: np.ndarray) -> Ends:
    """Student's t with the standard error of a ratio of sums."""
    share = weights / weights.sum(1, keepdims=True)
    count = values.shape[1]
    mean = (share * values).sum(1)
    square = (share**2 * (values - mean[:, None]) ** 2).sum(1) * count / (count - 1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.sqrt(square)
    return mean - half, mean + half


def covered(ends: Ends, truth: float) -> float:
    """Share of intervals that contain the truth, with a tolerance for rounding."""
    return float(np.mean((ends[0] - 1e-9 <= truth) & (truth <= ends[1] + 1e-9)))


def without_zero(ends: Ends) -> float:
    """Share of intervals that exclude zero."""
    return float(np.mean((ends[0] > 0) | (ends[1] < 0)))


def means(rng: np.random.Generator, samples: int) -> Iterator[list[str]]:
    """Coverage of intervals of mean losses: one row per distribution and number of documents."""
    for name, losses in LOSSES.items():
        for count in COUNTS:
            shape = (samples, count)
            values = losses.draw(rng, shape)
            weights = rng.lognormal(0, losses.weight, shape)
            found = student(values, weights), sum_ends([(values, weights)])
            yield [name, str(count), *(f"{covered(ends, losses.mean):.3f}" for ends in found)]


def rates() -> Iterator[list[str]]:
    """Exact coverage of intervals of one rate: the mean and the minimum over all rates."""
    for count in COUNTS:
        found = np.arange(count + 1)
        chances = stats.binom.pmf(found, count, RATES[:, None])
        low, high = np.array([rate_interval(int(k), count) for k in found]).T
        held = (low <= RATES[:, None]) & (RATES[:, None] <= high)
        covers = (chances * held).sum(1)
        yield [str(count), f"{covers.mean():.3f}", f"{covers.min():.3f}"]


def outcomes(trials: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All possible scores of two systems on some prompts, right or wrong.

    Returns:
        Scores of either system, ``[outcomes, trials]``, and the number of prompts that only one
        system answers, for each. Prompts answered by both or by neither all count as answered by
        both: our interval does not distinguish them.
    """
    only = [(a, b) for a in range(trials + 1) for b in range(trials + 1 - a)]
    one, other = np.ones((2, len(only), trials))
    for row, (a, b) in enumerate(only):
        other[row, :a] = 0
        one[row, a : a + b] = 0
    return one, other, *np.array(only).T


def pairs() -> Iterator[list[str]]:
    """Paired rates of right and wrong answers, by enumeration of all outcomes."""
    for trials in COUNTS:
        one, other, wins, losses = outcomes(trials)
        table = np.stack([wins, losses, trials - wins - losses], axis=1)
        low, high = paired_ends(one, other)
        covers = []
        clear = []
        for unlike, share in itertools.product(UNLIKE, WINS):
            chances = [unlike * share, unlike * (1 - share), 1 - unlike]
            # Rounded, since scipy refuses shares whose sum is a little more than 1.
            odds = stats.multinomial.pmf(table, trials, np.round(chances, 12))
            gap = chances[0] - chances[1]
            covers.append(odds @ ((low - 1e-9 <= gap) & (gap <= high + 1e-9)))
            if share == 0.5:
                clear.append(odds @ ((low > 0) | (high < 0)))
        yield [str(trials), f"{min(covers):.3f}", f"{max(clear):.3f}"]


def partial(rng: np.random.Generator, samples: int) -> Iterator[list[str]]:
    """Paired rates of partly correct answers, for systems with equal means."""
    for name, (one, other) in PARTIAL.items():
        for count in COUNTS:
            shape = (samples, count)
            drawn = one(rng, shape), other(rng, shape)
            gaps = drawn[0] - drawn[1]
            found = student(gaps, np.ones_like(gaps)), paired_ends(*drawn)
            yield [name, str(count), *(f"{without_zero(ends):.3f}" for ends in found)]


def table(title: str, header: Sequence[str], rows: Iterator[list[str]]) -> None:
    """Print a Markdown table, each row as soon as it is computed."""
    print(f"{title}\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8000, help="simulations for each number")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args(arguments)
    rng = np.random.default_rng(args.seed)
    table(
        "Mean loss: share of 95 % intervals that hold the truth",
        ("losses", "documents", "Student's t", "reports"),
        means(rng, args.samples),
    )
    table(
        "One rate: mean and least share of 95 % intervals that hold the truth, over all rates",
        ("prompts", "mean", "least"),
        rates(),
    )
    table(
        "Paired rates, right or wrong: least share that holds the truth, and largest share of "
        "equal systems called clearly different",
        ("prompts", "covers", "clear"),
        pairs(),
    )
    table(
        "Paired rates, found in part: share of equal systems called clearly different",
        ("scores", "prompts", "Student's t", "reports"),
        partial(rng, args.samples),
    )


if __name__ == "__main__":
    main()
