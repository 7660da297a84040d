"""From outcomes to estimates with intervals, to differences, and to one recommendation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rope_ext.measure.cases import Outcome
from rope_ext.measure.intervals import bootstrap_mean, paired_rates, wilson

UNPATCHED = "none"
MAX_COST = 0.05
"""Highest relative rise of perplexity within the trained context that is recommended."""


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval and the count of trials or windows behind it."""

    value: float
    low: float
    high: float
    count: int


def estimate_perplexity(
    losses: Sequence[float], seed: int, weights: Sequence[float] | None = None
) -> Estimate:
    """Perplexity of documents with these mean losses (nats per token), bootstrapped over them.

    Args:
        losses: of each document or window.
        seed: of the bootstrap.
        weights: tokens behind each loss; equal if None.
    """
    mean = _mean(losses, weights)
    if not math.isfinite(mean):
        return Estimate(math.inf, math.inf, math.inf, len(losses))
    low, high = bootstrap_mean(losses, seed, weights)
    return Estimate(_exp(mean), _exp(low), _exp(high), len(losses))


def estimate_rate(passes: Sequence[float]) -> Estimate:
    """Mean share of answers found, with its Wilson interval."""
    return Estimate(math.fsum(passes) / len(passes), *_wilson(passes), len(passes))


def _wilson(passes: Sequence[float]) -> tuple[float, float]:
    return wilson(min(math.fsum(passes), len(passes)), len(passes))


def estimate(outcomes: Sequence[Outcome], kind: str, seed: int) -> Estimate:
    """One cell of a table: a rate, or a perplexity bootstrapped over documents."""
    if kind == "rate":
        return estimate_rate([outcome.value for outcome in outcomes])
    losses, weights = by_document(outcomes)
    return estimate_perplexity(losses, seed, weights)


def by_document(outcomes: Sequence[Outcome]) -> tuple[list[float], list[int]]:
    """Mean loss of each document over all its windows, and the tokens behind it."""
    sums: dict[int, list[float]] = {}
    for outcome in outcomes:
        total = sums.setdefault(outcome.group, [0.0, 0])
        total[0] += outcome.value * outcome.tokens
        total[1] += outcome.tokens
    return [total / tokens for total, tokens in sums.values()], [n for _, n in sums.values()]


def difference(
    one: Sequence[Outcome], other: Sequence[Outcome], kind: str, seed: int
) -> Estimate | None:
    """How much ``one`` is above ``other`` on the very same cases; None if they are not the same.

    Rates: the difference, Newcombe's paired interval (bootstrap over cases where answers can be
    found in part). Losses: the relative change of perplexity, bootstrap over documents.
    """
    if not one or [o.prompt for o in one] != [o.prompt for o in other]:
        return None
    if kind == "rate":
        a, b = [outcome.value for outcome in one], [outcome.value for outcome in other]
        gap = math.fsum(a) / len(a) - math.fsum(b) / len(b)
        if set(a) | set(b) <= {0.0, 1.0}:
            return Estimate(gap, *paired_rates(a, b), len(a))
        gaps = [x - y for x, y in zip(a, b, strict=True)]
        return Estimate(gap, *bootstrap_mean(gaps, seed), len(a))
    (a, weights), (b, _) = by_document(one), by_document(other)
    if not all(map(math.isfinite, (*a, *b))):
        return None
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    low, high = bootstrap_mean(gaps, seed, weights)
    low, value, high = (_exp(x) - 1 for x in (low, _mean(gaps, weights), high))
    return Estimate(value, low, high, len(gaps))


@dataclass(frozen=True)
class Scores:
    """Everything measured for one method.

    Args:
        losses: mean loss of every document (nats per token), by length.
        passes: 1 or 0 for every passkey trial, by (length, depth bin).
        weights: tokens behind each document, at any of the lengths; equal if empty.
    """

    losses: dict[int, Sequence[float]] = field(default_factory=dict)
    passes: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)

    def passes_at(self, *lengths: int) -> list[float]:
        """The trials of these lengths, all depths together."""
        return [
            x for (length, _), values in self.passes.items() if length in lengths for x in values
        ]

    def losses_at(self, *lengths: int) -> list[float]:
        """Mean loss over these lengths, document by document."""
        rows = zip(*(self.losses[length] for length in lengths), strict=True)
        return [math.fsum(row) / len(row) for row in rows]


def gather(outcomes: Sequence[Outcome]) -> dict[str, Scores]:
    """The perplexity and passkey outcomes, by system."""
    losses: dict[tuple[str, int], list[Outcome]] = {}
    scores: dict[str, Scores] = {}
    for outcome in outcomes:
        score = scores.setdefault(outcome.system, Scores())
        if outcome.task == "perplexity":
            losses.setdefault((outcome.system, outcome.length), []).append(outcome)
        elif outcome.task == "passkey":
            score.passes.setdefault((outcome.length, outcome.bin or 0), []).append(outcome.value)
    for (system, length), group in losses.items():
        scores[system].losses[length], scores[system].weights[:] = by_document(group)
    return scores


def recommend(scores: Mapping[str, Scores], trained: int, seed: int) -> str:
    """One sentence that recommends a method, or says that none is worth it.

    The rule:

    1. Candidates are the methods whose perplexity within the trained context is at most 5 %
       above the unpatched model's, compared at the longest measured length that is not
       beyond it. (If no such length was measured, every method is a candidate.)
    2. Over all lengths beyond the trained one, candidates whose passkey rate is clearly below
       the best candidate's (95 % intervals do not overlap) drop out.
    3. Of the rest, the lowest mean log perplexity beyond the trained length wins. It is
       called clearly better than another where the bootstrap interval of the difference on
       the same windows excludes zero.
    4. The winner must also beat the unpatched model beyond the trained length: by a clearly
       higher passkey rate, or by a clearly lower perplexity without a clearly lower rate.

    Args:
        scores: by method, the unpatched model under ``"none"``.
        trained: trained context, tokens.
        seed: of the bootstrap.
    """
    lengths = sorted(scores[UNPATCHED].losses)
    beyond = [length for length in lengths if length > trained]
    within = [length for length in lengths if length <= trained]
    if not beyond:
        return (
            f"No recommendation: no length beyond the trained {trained} tokens was measured; "
            f"give --lengths some."
        )
    costs = {name: _cost(scores, name, within) for name in scores if name != UNPATCHED}
    candidates = [name for name in costs if costs[name] <= MAX_COST]
    if not candidates:
        nearest = min(costs, key=costs.__getitem__)
        return (
            f"No method is recommended: each raises perplexity at {within[-1]} tokens by more than "
            f"{MAX_COST:.0%}, {nearest} by the least ({costs[nearest]:+.1%})."
        )

    found = {name: estimate_rate(scores[name].passes_at(*beyond)) for name in scores}
    losses = {name: scores[name].losses_at(*beyond) for name in scores}
    weights = scores[UNPATCHED].weights
    mean = {name: _mean(values, weights) for name, values in losses.items()}
    leader = max(candidates, key=lambda name: found[name].value)
    leading = [name for name in candidates if found[name].high >= found[leader].low]
    best = min(leading, key=mean.__getitem__)

    more = found[best].low > found[UNPATCHED].high
    fewer = found[best].high < found[UNPATCHED].low
    better = more or (not fewer and _lower(losses, weights, best, UNPATCHED, seed))
    if better:
        verdict = f"{best} is recommended"
        worse = [name for name in candidates if found[name].high < found[best].low]
        if worse:
            verdict += f", clearly better at passkeys than {_listed(worse)}"
        tied = [
            name
            for name in leading
            if name != best and not _lower(losses, weights, best, name, seed)
        ]
        if tied:
            labels = [f"{name} ({_perplexity(mean[name])})" for name in tied]
            verdict += f", not clearly better in perplexity than {_listed(labels)}"
    else:
        verdict = f"No method clearly beats the unpatched model; the best of them is {best}"
    price = "what it costs within the trained length was not measured"
    if within:
        price = f"at {within[-1]} tokens it costs {costs[best]:+.1%} perplexity"
    dear = [name for name in costs if name not in candidates]
    if dear:
        price += f"; left out, since they cost more than {MAX_COST:.0%} there: {_listed(dear)}"
    return (
        f"{verdict}: beyond {trained} tokens its perplexity is {_perplexity(mean[best])} "
        f"(unpatched {_perplexity(mean[UNPATCHED])}) and it finds {percent(found[best])} of the "
        f"passkeys (unpatched {percent(found[UNPATCHED])}); {price}."
    )


def percent(estimate: Estimate, digits: int = 0) -> str:
    """A rate and its interval, such as ``80% [49, 94]``."""
    return f"{estimate.value:.{digits}%} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"


def signed(estimate: Estimate) -> str:
    """A difference of rates or a relative change, and its interval: ``+12.0 [+3.1, +21.4]``."""
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def is_clear(gap: Estimate) -> bool:
    """Whether the interval of a difference excludes zero; one document alone shows nothing."""
    return gap.count > 1 and (gap.low > 0 or gap.high < 0)


def interval(estimate: Estimate) -> str:
    """A perplexity and its interval, such as ``7.84 [5.95, 10.6]``."""
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def is_unpatched(system: str) -> bool:
    """Whether the name of a system, ``METHOD`` or ``MODEL METHOD``, is that of no method."""
    return system.split(" ")[-1] == UNPATCHED


def number(value: float) -> str:
    """A positive number to three digits, or to the whole if it has more."""
    if not 0.001 < value < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _cost(scores: Mapping[str, Scores], name: str, within: Sequence[int]) -> float:
    """Relative rise of perplexity at the longest of the lengths; 0 where there are none."""
    if not within:
        return 0.0
    weights = scores[UNPATCHED].weights
    method, unpatched = (
        _mean(scores[key].losses_at(within[-1]), weights) for key in (name, UNPATCHED)
    )
    return _exp(method - unpatched) - 1


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    weights = weights or [1.0] * len(values)
    return math.fsum(x * w for x, w in zip(values, weights, strict=True)) / math.fsum(weights)


def _lower(
    losses: Mapping[str, Sequence[float]],
    weights: Sequence[float],
    one: str,
    other: str,
    seed: int,
) -> bool:
    """Whether the losses of ``one`` are clearly below those of ``other`` on the same windows."""
    if not all(map(math.isfinite, losses[other])):  # differences would not be numbers
        return all(map(math.isfinite, losses[one]))
    differences = [a - b for a, b in zip(losses[one], losses[other], strict=True)]
    # One document alone shows nothing.
    return len(differences) > 1 and bootstrap_mean(differences, seed, weights or None)[1] < 0


def _perplexity(loss: float) -> str:
    return number(_exp(loss))


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp(710) is beyond float64


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
