"""From outcomes to estimates with intervals, to differences, and to one recommendation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rope_eval.cases import Outcome
from rope_eval.reports.intervals import bootstrap_mean, paired_rates, wilson
from rope_ext.method_options import UNPATCHED

MAX_COST = 0.05
"""Highest relative rise of perplexity within the trained context that is recommended."""
MAX_LOST = 0.05
"""Largest clear loss of the passkey rate there that is recommended."""


@dataclass(frozen=True)
class Estimate:
    """A number, its 95 % interval and the count of trials or windows behind it.

    The ends are None where a single document is resampled, of which nothing can be said.
    """

    value: float
    low: float | None
    high: float | None
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
    if len(losses) == 1:
        return Estimate(_exp(mean), None, None, 1)
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
        return _gap(a, b, seed)
    (a, weights), (b, _) = by_document(one), by_document(other)
    if not all(map(math.isfinite, (*a, *b))):
        return None
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    value = _exp(_mean(gaps, weights)) - 1
    if len(gaps) == 1:
        return Estimate(value, None, None, 1)
    low, high = (_exp(end) - 1 for end in bootstrap_mean(gaps, seed, weights))
    return Estimate(value, low, high, len(gaps))


def cost(
    method: Sequence[Outcome], unpatched: Sequence[Outcome], kind: str, seed: int
) -> Estimate | None:
    """What a method costs on the very same cases; a positive cost is worse, whatever the kind.

    Rates: the share that is lost. Losses: the relative rise of perplexity.
    """
    pair = (unpatched, method) if kind == "rate" else (method, unpatched)
    return difference(*pair, kind, seed)


def _gap(one: Sequence[float], other: Sequence[float], seed: int) -> Estimate:
    """The difference of two rates on the same trials."""
    gap = math.fsum(one) / len(one) - math.fsum(other) / len(other)
    if {*one, *other} <= {0.0, 1.0}:
        return Estimate(gap, *paired_rates(one, other), len(one))
    if len(one) == 1:
        return Estimate(gap, None, None, 1)
    gaps = [x - y for x, y in zip(one, other, strict=True)]
    return Estimate(gap, *bootstrap_mean(gaps, seed), len(one))


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


@dataclass(frozen=True)
class _Within:
    """What a method costs within the trained length.

    Args:
        length: where perplexity is compared; None: nothing was measured within.
        perplexity: relative rise.
        passkeys: share lost over all lengths within; None where these say nothing.
    """

    length: int | None
    perplexity: float
    passkeys: Estimate | None

    @property
    def loses(self) -> bool:
        """Whether it clearly finds fewer passkeys, and more than ``MAX_LOST`` fewer."""
        gap = self.passkeys
        return gap is not None and is_clear(gap) and gap.value > MAX_LOST

    @property
    def bearable(self) -> bool:
        """Whether it may be recommended."""
        return self.perplexity <= MAX_COST and not self.loses

    def __str__(self) -> str:
        if self.length is None:
            return "what it costs within the trained length was not measured"
        points = f" and {signed(self.passkeys)} points of passkeys" if self.passkeys else ""
        return f"at {self.length} tokens it costs {self.perplexity:+.1%} perplexity{points}"


def recommend(scores: Mapping[str, Scores], trained: int, seed: int) -> str:
    """One sentence that recommends a method, or says that none is worth it.

    The rule; a difference is clear where the 95 % interval on the very same cases excludes zero:

    1. Candidates are the methods that cost little within the trained length: at the longest length
       measured there, perplexity at most 5 % above the unpatched model's; over all lengths there,
       a passkey rate that is not clearly lower, or at most 5 points lower. (If no such length was
       measured, every method is a candidate.)
    2. Over all lengths beyond the trained one, candidates whose passkey rate is clearly below the
       best candidate's drop out.
    3. Of the rest, the lowest mean log perplexity beyond the trained length wins.
    4. The winner must also beat the unpatched model beyond the trained length: clearly in passkeys
       or in perplexity, and not be clearly worse in the other.

    A model that unpatched finds no passkey at all within its trained length cannot be judged by
    them: the sentence says so, and perplexity alone decides.

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
    inside = scores[UNPATCHED].passes_at(*within)
    blind = bool(inside) and not any(inside)
    names = [name for name in scores if name != UNPATCHED]
    costs = {name: _within(scores, name, within, blind, seed) for name in names}
    candidates = [name for name in names if costs[name].bearable]
    if not candidates:
        return (
            f"No method is recommended: within {trained} tokens each costs more than "
            f"{MAX_COST:.0%} perplexity or clearly loses passkeys ({_prices(costs, names)})"
            f"{_blindness(trained) if blind else ''}."
        )

    passes = {name: scores[name].passes_at(*beyond) for name in scores}
    found = {name: estimate_rate(values) for name, values in passes.items()}
    losses = {name: scores[name].losses_at(*beyond) for name in scores}
    weights = scores[UNPATCHED].weights
    mean = {name: _mean(values, weights) for name, values in losses.items()}

    def fewer(one: str, other: str) -> bool:
        """Whether ``one`` clearly finds fewer passkeys; of a blind model, nothing is clear."""
        return not blind and _clearly_fewer(passes[one], passes[other], seed)

    leader = max(candidates, key=lambda name: found[name].value)
    best = min((n for n in candidates if not fewer(n, leader)), key=mean.__getitem__)
    gains = [fewer(UNPATCHED, best), _lower(losses, weights, best, UNPATCHED, seed)]
    costly = [fewer(best, UNPATCHED), _lower(losses, weights, UNPATCHED, best, seed)]
    if any(gains) and not any(costly):
        verdict = f"{best} is recommended{' by perplexity alone' if blind else ''}"
        worse = [name for name in candidates if fewer(name, best)]
        if worse:
            verdict += f", clearly better at passkeys than {_listed(worse)}"
        tied = [
            name
            for name in candidates
            if name not in (best, *worse) and not _lower(losses, weights, best, name, seed)
        ]
        if tied:
            labels = [f"{name} ({_perplexity(mean[name])})" for name in tied]
            verdict += f", not clearly better in perplexity than {_listed(labels)}"
    else:
        verdict = f"No method clearly beats the unpatched model; the best of them is {best}"
    retrieval = (
        ""
        if blind
        else (
            f" and it finds {percent(found[best])} of the passkeys "
            f"(unpatched {percent(found[UNPATCHED])})"
        )
    )
    dear = [name for name in names if name not in candidates]
    left_out = f"; left out for what they cost there: {_prices(costs, dear)}" if dear else ""
    return (
        f"{verdict}: beyond {trained} tokens its perplexity is {_perplexity(mean[best])} "
        f"(unpatched {_perplexity(mean[UNPATCHED])}){retrieval}; {costs[best]}{left_out}"
        f"{_blindness(trained) if blind else ''}."
    )


def _within(
    scores: Mapping[str, Scores], name: str, within: Sequence[int], blind: bool, seed: int
) -> _Within:
    if not within:
        return _Within(None, 0.0, None)
    rise = _rise(scores, name, within[-1])
    pair = [scores[key].passes_at(*within) for key in (UNPATCHED, name)]
    return _Within(within[-1], rise, None if blind or not all(pair) else _gap(*pair, seed))


def _prices(costs: Mapping[str, _Within], names: Sequence[str]) -> str:
    """Every method with what speaks against it."""
    labels = []
    for name in names:
        cost, against = costs[name], []
        if cost.perplexity > MAX_COST:
            against.append(f"{cost.perplexity:+.1%} perplexity")
        if cost.loses:
            against.append(f"{100 * cost.passkeys.value:+.1f} points of passkeys")
        labels.append(f"{name} ({', '.join(against)})")
    return _listed(labels)


def _blindness(trained: int) -> str:
    return (
        f"; unpatched, the model finds no passkey even within its {trained} tokens, so it cannot "
        f"be judged by retrieval"
    )


def _clearly_fewer(one: Sequence[float], other: Sequence[float], seed: int) -> bool:
    gap = _gap(one, other, seed) if one else None
    return gap is not None and is_clear(gap) and gap.value < 0


def percent(estimate: Estimate, digits: int = 0) -> str:
    """A rate and its interval, such as ``80% [49, 94]``."""
    return f"{estimate.value:.{digits}%} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"


def signed(estimate: Estimate) -> str:
    """A difference of rates or a relative change, and its interval: ``+12.0 [+3.1, +21.4]``."""
    value = f"{100 * estimate.value:+.1f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def is_clear(gap: Estimate) -> bool:
    """Whether the interval of a difference excludes zero; one document alone shows nothing."""
    if gap.low is None or gap.high is None or gap.count == 1:
        return False
    return gap.low > 0 or gap.high < 0


def interval(estimate: Estimate) -> str:
    """A perplexity and its interval, such as ``7.84 [5.95, 10.6]``."""
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def is_unpatched(system: str) -> bool:
    """Whether the name of a system, ``METHOD`` or ``MODEL METHOD``, is that of no method."""
    return system.split(" ")[-1] == UNPATCHED


def number(value: float) -> str:
    """A positive number to three digits, or to the whole if it has more."""
    if not 0.001 < value < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _rise(scores: Mapping[str, Scores], name: str, length: int) -> float:
    """Relative rise of perplexity at that length."""
    weights = scores[UNPATCHED].weights
    method, unpatched = (_mean(scores[key].losses_at(length), weights) for key in (name, UNPATCHED))
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
