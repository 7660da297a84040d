"""Which method to use, judged from perplexity and passkeys: the decision, then its words.

The rule, which ``docs/evaluate.md`` repeats:

1. A difference is clear where its interval on the very same cases excludes zero and it is at least
   ``SMALLEST_EFFECT``. All intervals of one recommendation are those of Bonferroni, 95 % together
   for as many methods as there are, so that equal methods are recommended in 5 % of cases at most.
2. Passkeys count only if the unpatched model finds at least half of them within the trained length.
   A model that does not find them there shows nothing by finding or losing a few.
3. The best of some methods: those that clearly find fewer passkeys beyond the trained length than
   the one that finds most drop out; of the rest, the lowest mean log perplexity there wins.
4. It helps if, beyond the trained length, it is clearly better than the unpatched model in
   perplexity or passkeys, and clearly worse in neither.
5. Three are named: the best of all, the best of those that cost at most 5 % within the trained
   length, judged by the upper end of the interval, and the best of those that an engine can serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rope_eval.cases import Outcome
from rope_eval.reports.intervals import CONFIDENCE
from rope_eval.reports.summary import (
    Estimate,
    by_document,
    estimate_rate,
    is_clear,
    loss_difference,
    number,
    percent,
    perplexity,
    rate_difference,
    signed,
    weighted_mean,
)
from rope_eval.tasks.passkey import MIN_FOUND
from rope_ext.command.method_options import UNPATCHED

MAX_COST = 0.05
"""Highest relative rise of perplexity, and largest clear loss of passkeys, within the trained
length of a method that "costs little"."""


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

    def passes_at(self, lengths: Sequence[int]) -> list[float]:
        """The trials of these lengths, all depths together."""
        return [
            x for (length, _), values in self.passes.items() if length in lengths for x in values
        ]

    def losses_at(self, lengths: Sequence[int]) -> list[float]:
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
class Evidence:
    """What is known of one method; differences are from the unpatched model, on the same cases.

    Args:
        name: of the method.
        loss: mean over documents beyond the trained length, nats per token.
        found: passkeys found there; None: not measured.
        cost: relative rise of perplexity within the trained length; None: not measured.
        lost: share of passkeys lost there; None: not measured, or passkeys do not count.
        helps: whether it is clearly better beyond, and clearly worse in nothing.
        harms: whether it is clearly worse beyond, in perplexity or passkeys.
        engines: that can serve it.
    """

    name: str
    loss: float
    found: Estimate | None
    cost: Estimate | None
    lost: Estimate | None
    helps: bool
    harms: bool
    engines: tuple[str, ...] = ()

    @property
    def cheap(self) -> bool:
        """Whether it surely costs at most ``MAX_COST`` within the trained length."""
        high = math.inf if self.cost is None or self.cost.high is None else self.cost.high
        return high <= MAX_COST and not self._loses

    @property
    def maybe_cheap(self) -> bool:
        """Whether it may cost at most ``MAX_COST``."""
        return self.cost is not None and self.cost.value <= MAX_COST and not self._loses

    @property
    def _loses(self) -> bool:
        return self.lost is not None and is_clear(self.lost) and self.lost.value > MAX_COST


@dataclass(frozen=True)
class Pick:
    """The best of some methods, and those that cannot be told apart from it."""

    best: Evidence
    rivals: tuple[Evidence, ...]


@dataclass(frozen=True)
class Recommendation:
    """The decision; ``print`` it for its words.

    Args:
        trained: trained length, tokens.
        reference: the longest length measured within it; None: there is none.
        counts: whether passkeys count.
        found_within: passkeys that the unpatched model finds within; None: not measured.
        unpatched: what is known of the unpatched model.
        beyond: the best of all; None: nothing was measured beyond the trained length.
        cheap: the best of those that cost little within it; None: there is none.
        maybe_cheap: whether others may cost as little.
        served: the best that an engine can serve; None: there is none, or it is not known.
        engines_known: whether the engines were asked.
        broken: whether the unpatched model has a loss that is NaN or infinite within it.
    """

    trained: int
    reference: int | None
    counts: bool
    found_within: Estimate | None
    unpatched: Evidence | None
    beyond: Pick | None
    cheap: Pick | None
    maybe_cheap: bool
    served: Pick | None
    engines_known: bool
    broken: bool = False

    @property
    def choice(self) -> Evidence | None:
        """The method to go on with, of those that help: served and cheap before the rest."""
        picks = [pick.best for pick in (self.cheap, self.served, self.beyond) if pick]
        helping = [best for best in picks if best.helps]
        both = [best for best in helping if best.cheap and best.engines]
        return next(iter(both or helping), None)

    def __str__(self) -> str:
        return _words(self)


class _Comparison:
    """All methods on the same cases."""

    def __init__(
        self,
        scores: Mapping[str, Scores],
        trained: int,
        engines: Mapping[str, Sequence[str]] | None,
    ) -> None:
        self.scores, self.engines = scores, engines or {}
        lengths = sorted(scores[UNPATCHED].losses)
        self.within = [length for length in lengths if length <= trained]
        self.beyond = [length for length in lengths if length > trained]
        self.names = [name for name in scores if name != UNPATCHED]
        self.weights = scores[UNPATCHED].weights or None
        self.confidence = 1 - (1 - CONFIDENCE) / max(1, len(self.names))

    @property
    def broken(self) -> bool:
        """Whether the unpatched model has a loss that is NaN or infinite where it was trained."""
        losses = self.scores[UNPATCHED].losses
        return not all(math.isfinite(loss) for length in self.within for loss in losses[length])

    @cached_property
    def found_within(self) -> Estimate | None:
        """Passkeys that the unpatched model finds within the trained length."""
        passes = self.scores[UNPATCHED].passes_at(self.within)
        return estimate_rate(passes) if passes else None

    @cached_property
    def counts(self) -> bool:
        """Whether passkeys count."""
        return self.found_within is not None and self.found_within.value >= MIN_FOUND

    def lower(self, one: str, other: str) -> bool:
        """Whether the perplexity of ``one`` is clearly lower beyond the trained length."""
        a, b = (self.scores[name].losses_at(self.beyond) for name in (one, other))
        if not all(map(math.isfinite, b)):  # there is no difference to infinity
            return all(map(math.isfinite, a))
        gap = loss_difference(a, b, self.weights, self.confidence)
        return gap is not None and is_clear(gap) and gap.value < 0

    def fewer(self, one: str, other: str) -> bool:
        """Whether ``one`` clearly finds fewer passkeys beyond the trained length."""
        pair = [self.scores[name].passes_at(self.beyond) for name in (one, other)]
        if not (self.counts and all(pair)):
            return False
        gap = rate_difference(pair[0], pair[1], self.confidence)
        return is_clear(gap) and gap.value < 0

    def evidence(self, name: str) -> Evidence:
        """What is known of a method."""
        score = self.scores[name]
        passes = score.passes_at(self.beyond)
        better = self.lower(name, UNPATCHED) or self.fewer(UNPATCHED, name)
        worse = self.lower(UNPATCHED, name) or self.fewer(name, UNPATCHED)
        return Evidence(
            name=name,
            loss=weighted_mean(score.losses_at(self.beyond), self.weights),
            found=estimate_rate(passes) if passes else None,
            cost=self._cost(name),
            lost=self._lost(name),
            helps=better and not worse,
            harms=worse,
            engines=tuple(self.engines.get(name, ())),
        )

    def _cost(self, name: str) -> Estimate | None:
        if not self.within:
            return None
        pair = [self.scores[key].losses_at(self.within[-1:]) for key in (name, UNPATCHED)]
        gap = loss_difference(pair[0], pair[1], self.weights)
        if gap is None:  # infinite
            return Estimate(math.inf, None, None, len(pair[0]))
        return gap

    def _lost(self, name: str) -> Estimate | None:
        pair = [self.scores[key].passes_at(self.within) for key in (UNPATCHED, name)]
        if not (self.counts and all(pair)):
            return None
        return rate_difference(pair[0], pair[1], self.confidence)

    def pick(self, methods: Sequence[Evidence]) -> Pick | None:
        """The best of these."""
        if not methods:
            return None
        leader = max(methods, key=lambda e: e.found.value if self.counts and e.found else 0.0)
        left = [e for e in methods if not self.fewer(e.name, leader.name)]
        best = min(left, key=lambda e: e.loss)
        rivals = [
            e
            for e in left
            if e is not best
            and not self.lower(best.name, e.name)
            and not self.fewer(e.name, best.name)
        ]
        return Pick(best, tuple(sorted(rivals, key=lambda e: e.loss)))


def recommend(
    scores: Mapping[str, Scores],
    trained: int,
    engines: Mapping[str, Sequence[str]] | None = None,
) -> Recommendation:
    """Which method to use; the rule is that of this module.

    Args:
        scores: by method, the unpatched model under ``"none"``.
        trained: trained context, tokens.
        engines: that can serve each method; None: not known.
    """
    of = _Comparison(scores, trained, engines)
    reference = of.within[-1] if of.within else None
    known = (trained, reference, of.counts, of.found_within)
    if not of.beyond:
        return Recommendation(*known, None, None, None, False, None, engines is not None)
    methods = [of.evidence(name) for name in of.names]
    return Recommendation(
        *known,
        unpatched=of.evidence(UNPATCHED),
        beyond=of.pick(methods),
        cheap=of.pick([e for e in methods if e.cheap]),
        maybe_cheap=any(e.maybe_cheap and not e.cheap for e in methods),
        served=of.pick([e for e in methods if e.engines]),
        engines_known=engines is not None,
        broken=of.broken,
    )


def _words(made: Recommendation) -> str:
    if made.broken:
        return (
            f"No recommendation: within {made.trained} tokens the loss of the unpatched model is "
            f"NaN or infinite. Check its weights, or give --dtype float32 or bfloat16."
        )
    if made.unpatched is None or made.beyond is None:
        return (
            f"No recommendation: no length beyond the trained {made.trained} tokens was measured; "
            f"give longer --lengths."
        )
    parts = [_verdict(made, made.beyond, made.unpatched)]
    parts += _cheapest(made, made.beyond)
    parts += _served(made, made.beyond)
    if not made.counts and made.unpatched.found is not None:
        parts.append(_blindness(made))
    return " ".join(parts)


def _verdict(made: Recommendation, pick: Pick, unpatched: Evidence) -> str:
    best = pick.best
    if best.helps:
        start = f"Beyond {made.trained} tokens, {best.name} is best"
    elif best.harms:
        start = f"No method helps beyond {made.trained} tokens: the best, {best.name}, is clearly "
        start += "worse than the unpatched model in perplexity or passkeys"
    else:
        start = f"Cannot tell whether any method helps beyond {made.trained} tokens: the best, "
        start += f"{best.name}, is not clearly better than the unpatched model"
    plain = f"unpatched: {_beyond(unpatched)}"
    return f"{start}: {_numbers(made, best)} ({plain}).{_ties(pick)}"


def _cheapest(made: Recommendation, pick: Pick) -> list[str]:
    if made.reference is None:
        return ["The cost within the trained length was not measured."]
    at = f"at most {MAX_COST:.0%} at {made.reference} tokens"
    if made.cheap is None and made.maybe_cheap:
        return [f"Cannot tell whether a method costs {at}."]
    if made.cheap is None:
        return [f"No method costs {at}."]
    if made.cheap.best is pick.best:
        return [f"It costs {at}."]
    best = made.cheap.best
    words = f"Best method that costs {at}: {best.name}, {_numbers(made, best)}"
    return [f"{words}{_doubt(best)}.{_ties(made.cheap)}"]


def _served(made: Recommendation, pick: Pick) -> list[str]:
    if not made.engines_known:
        return []
    if made.served is None:
        return ["No supported engine can serve any of them."]
    best = made.served.best
    names = _listed(best.engines)
    if best is pick.best:
        return [f"{names} can serve it."]
    if made.cheap is not None and best is made.cheap.best:
        return [f"{names} can serve {best.name}, the best method that an engine supports."]
    words = f"Best method that an engine can serve ({names}): {best.name}, {_numbers(made, best)}"
    return [f"{words}{_doubt(best)}.{_ties(made.served)}"]


def _doubt(best: Evidence) -> str:
    return "" if best.helps else ", not clearly better than the unpatched model"


def _beyond(evidence: Evidence) -> str:
    words = f"perplexity {number(perplexity(evidence.loss))}"
    return words if evidence.found is None else f"{words}, {percent(evidence.found)} of passkeys"


def _numbers(made: Recommendation, evidence: Evidence) -> str:
    words = _beyond(evidence)
    if evidence.cost is None:
        return words
    words += f"; at {made.reference} tokens, {signed(evidence.cost)} % perplexity"
    if evidence.lost is not None:
        lost = evidence.lost
        ends = (None, None) if lost.low is None or lost.high is None else (-lost.high, -lost.low)
        gained = Estimate(
            0.0 - lost.value,
            *ends,  # no -0.0
            lost.count,
            lost.note,
        )
        words += f" and {signed(gained)} points of passkeys"
    return words


def _ties(pick: Pick) -> str:
    if not pick.rivals:
        return ""
    labels = [f"{e.name} ({number(perplexity(e.loss))})" for e in pick.rivals]
    return f" Not significantly different: {_listed(labels)}."


def _blindness(made: Recommendation) -> str:
    if made.found_within is None:
        why = "they were not measured within the trained length"
    else:
        why = (
            f"within {made.trained} tokens the unpatched model finds "
            f"{percent(made.found_within)}, less than half"
        )
    return f"Passkeys do not count here: {why}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
