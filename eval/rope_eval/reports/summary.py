"""Computes estimates with intervals from outcomes, and differences on the same cases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rope_eval.cases import Outcome
from rope_eval.reports.intervals import CONFIDENCE, mean_interval, paired_rates, rate_interval
from rope_ext.command.arguments import UNPATCHED

SMALLEST_EFFECT = 0.005
"""Smaller differences are never clear: half a percent of perplexity, half a point of a rate."""
TOO_FEW = "too few documents"
TOO_FEW_PROMPTS = "too few prompts"


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval (None: too few, see ``note``), and how many there are."""

    value: float
    low: float | None
    high: float | None
    count: int
    note: str = ""


def _estimate(value: float, ends: Sequence[float] | None, count: int, note: str) -> Estimate:
    low, high = ends or (None, None)
    return Estimate(value=value, low=low, high=high, count=count, note="" if ends else note)


def estimate_perplexity(
    losses: Sequence[float], weights: Sequence[float] | None = None
) -> Estimate:
    """Compute the perplexity of documents with these mean losses (nats), weighted by tokens."""
    mean = weighted_mean(losses, weights)
    if not math.isfinite(mean):
        return Estimate(value=math.inf, low=math.inf, high=math.inf, count=len(losses))
    # No perplexity is below 1.
    ends = mean_interval(losses, weights)
    ends = ends and [perplexity(max(0.0, end)) for end in ends]
    return _estimate(perplexity(mean), ends=ends, count=len(losses), note=TOO_FEW)


def estimate_rate(passes: Sequence[float], trials: int | None = None) -> Estimate:
    """Compute the mean share of answers found, with its exact interval.

    ``trials`` is the number of independent ones; None: each is.
    """
    trials = len(passes) if trials is None else trials
    # Sums of shares may exceed the number of prompts by rounding.
    total = min(math.fsum(passes), len(passes))
    interval = rate_interval(total * trials / len(passes), trials)
    return Estimate(total / len(passes), *interval, trials)


def estimate(outcomes: Sequence[Outcome], kind: str) -> Estimate:
    """Compute one cell of a table: a rate, or the perplexity over documents.

    A rate is the mean over prompts; its interval is over questions.
    """
    if kind == "loss":
        return estimate_perplexity(*by_document(outcomes))
    return estimate_rate([outcome.value for outcome in outcomes], len(by_question(outcomes)))


def by_question(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the mean value of each question, which may be asked in several prompts.

    Answers to one question are not independent: it is one trial, whose value is a share. An
    interval of these holds however similar the answers are.
    """
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number, outcome in enumerate(outcomes):
        values[outcome.group, 0 if outcome.group else number].append(outcome.value)
    return [math.fsum(answers) / len(answers) for answers in values.values()]


def by_document(outcomes: Sequence[Outcome]) -> tuple[list[float], list[int]]:
    """Return the mean loss of each document over all its windows, and its number of tokens."""
    losses: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    for outcome in outcomes:
        # Weighted by tokens: the mean of means of windows is not the mean over tokens.
        losses[outcome.group] += outcome.value * outcome.tokens
        tokens[outcome.group] += outcome.tokens
    return [losses[group] / tokens[group] for group in losses], list(tokens.values())


def difference(one: Sequence[Outcome], other: Sequence[Outcome], kind: str) -> Estimate | None:
    """Return ``one`` minus ``other`` on the same cases; None if the cases differ.

    For rates, the difference over questions; for losses, the relative change of perplexity over
    documents.
    """
    if not one or [o.prompt for o in one] != [o.prompt for o in other]:
        return None
    if kind == "rate":
        return rate_difference(by_question(one), by_question(other))
    losses, weights = by_document(one)
    others, _ = by_document(other)
    return loss_difference(losses, others, weights)


def loss_difference(
    one: Sequence[float],
    other: Sequence[float],
    weights: Sequence[float] | None = None,
    confidence: float = CONFIDENCE,
) -> Estimate | None:
    """Return the relative change of perplexity on the same documents; None if infinite."""
    if not all(map(math.isfinite, (*one, *other))):
        return None
    gaps = [x - y for x, y in zip(one, other, strict=True)]
    # A difference of losses is the logarithm of the ratio of perplexities.
    value = perplexity(weighted_mean(gaps, weights)) - 1
    ends = mean_interval(gaps, weights, confidence)
    ends = ends and [perplexity(end) - 1 for end in ends]
    return _estimate(value, ends, count=len(gaps), note=TOO_FEW)


def rate_difference(
    one: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate:
    """Return the difference of two rates on the same trials."""
    gap = math.fsum(one) / len(one) - math.fsum(other) / len(other)
    return _estimate(
        gap, ends=paired_rates(one, other, confidence), count=len(one), note=TOO_FEW_PROMPTS
    )


def is_clear(gap: Estimate | None) -> bool:
    """Whether a difference is shown in bold: its interval excludes zero, and it is not tiny."""
    if gap is None or gap.low is None or gap.high is None:
        return False
    return abs(gap.value) >= SMALLEST_EFFECT and (gap.low > 0 or gap.high < 0)


def percent(estimate: Estimate, digits: int = 0) -> str:
    """Format a rate and its interval, such as ``80% [44, 97]``."""
    return _with_ends(f"{estimate.value:.{digits}%}", estimate, lambda end: f"{100 * end:.0f}")


def signed(estimate: Estimate) -> str:
    """Format a difference of rates or relative change: ``+12.0 [+3.1, +21.4]``."""
    return _with_ends(_points(estimate.value), estimate, _points)


def bold_if_clear(gap: Estimate | None) -> str:
    """Format a difference for Markdown, in bold if it is clear; empty if there is none."""
    if gap is None:
        return ""
    return f"**{signed(gap)}**" if is_clear(gap) else signed(gap)


def interval(estimate: Estimate) -> str:
    """Format a perplexity and its interval, such as ``7.84 [5.95, 10.6]``."""
    return _with_ends(number(estimate.value), estimate, number)


def shown(estimate: Estimate, kind: str) -> str:
    """Format a cell of a table: a perplexity or a rate."""
    return interval(estimate) if kind == "loss" else percent(estimate)


def _points(share: float) -> str:
    return f"{100 * share + 0.0:+.1f}"  # no -0.0


def _with_ends(value: str, estimate: Estimate, shown: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{value} ({estimate.note})" if estimate.note else value
    return f"{value} [{shown(estimate.low)}, {shown(estimate.high)}]"


def is_unpatched(system: str) -> bool:
    """Whether a system's name, ``METHOD`` or ``MODEL METHOD``, is that of an unpatched model."""
    return system.split(" ")[-1] == UNPATCHED


def number(value: float) -> str:
    """Round a positive number to three digits, or to an integer if it has more."""
    if not 0.001 < value < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def weighted_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the weighted mean of values; weights are equal if None."""
    weights = weights or [1.0] * len(values)
    return math.fsum(x * w for x, w in zip(values, weights, strict=True)) / math.fsum(weights)


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats per token."""
    return math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows float64
