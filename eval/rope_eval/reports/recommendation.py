"""Recommends a method from perplexity and passkeys, by the rule in ``docs/evaluate.md``.

A difference is clear if its interval on identical cases excludes zero and it is at least
``SMALLEST_EFFECT``. The intervals are Bonferroni-corrected, 95 % together for all methods, so that
equal methods are recommended in at most 5 % of cases. A method helps if, beyond the trained length,
it is clearly better than the unpatched model in perplexity or passkeys, and clearly worse in
neither.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rope_eval.cases import Outcome
from rope_eval.reports import summary
from rope_eval.reports.intervals import CONFIDENCE
from rope_eval.tasks.passkey import MIN_FOUND
from rope_ext.command.method_options import UNPATCHED

MAX_COST = 0.05
"""Highest relative rise of perplexity, and largest clear loss of passkeys, within the trained
length of a method that "costs little"."""


@dataclass(frozen=True)
class Scores:
    """All measurements of one method.

    By length: ``losses`` of every document (nats per token, weighted by ``weights``), and
    ``passes``, 1 or 0, of every passkey.
    """

    losses: dict[int, Sequence[float]] = field(default_factory=dict)
    passes: dict[int, list[float]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)

    def passes_at(self, lengths: Sequence[int]) -> list[float]:
        return [x for length in lengths for x in self.passes.get(length, ())]

    def losses_at(self, lengths: Sequence[int]) -> list[float]:
        """Return each document's mean loss over these lengths."""
        rows = zip(*(self.losses[length] for length in lengths), strict=True)
        return [math.fsum(row) / len(row) for row in rows]


def gather(places: Mapping[tuple[str, str, int], Sequence[Outcome]]) -> dict[str, Scores]:
    """Collect perplexity and passkeys by system, from outcomes by (task, system, length)."""
    scores: dict[str, Scores] = defaultdict(Scores)
    for (task, system, length), group in places.items():
        score = scores[system]
        if task == "perplexity":
            score.losses[length], score.weights[:] = summary.by_document(group)
        elif task == "passkey":
            score.passes[length] = [outcome.value for outcome in group]
    return scores


@dataclass(frozen=True)
class Evidence:
    """Results of one method; differences are from the unpatched model, on the same cases.

    ``loss`` and ``found`` are beyond the trained length; ``cost``, the relative rise of perplexity,
    and ``lost``, the share of passkeys, within it (None: not measured, or passkeys do not count).
    """

    name: str
    loss: float
    found: summary.Estimate | None
    cost: summary.Estimate | None
    lost: summary.Estimate | None
    helps: bool
    harms: bool
    engines: tuple[str, ...]

    def costs_at_most(self, rise: float | None) -> bool:
        """Whether perplexity rises, and passkeys drop, by at most ``MAX_COST``."""
        loses = self.lost is not None and summary.is_clear(self.lost) and self.lost.value > MAX_COST
        return rise is not None and rise <= MAX_COST and not loses

    @property
    def cheap(self) -> bool:
        """Whether it certainly costs little within the trained length."""
        return self.costs_at_most(self.cost and self.cost.high)

    @property
    def maybe_cheap(self) -> bool:
        """Whether it is unclear if it costs little."""
        cost = self.cost  # without an interval, 0 is possible, or NaN if it is infinite
        low = cost and (0 * cost.value if cost.low is None else cost.low)
        return not self.cheap and self.costs_at_most(low)


class Pick(NamedTuple):
    """The best of several methods, and those that are not significantly different."""

    best: Evidence
    rivals: Sequence[Evidence]


class Recommendation:
    """A recommended method; ``print`` it for its text. See this module for the rule.

    ``scores`` are by method, the unpatched model under ``"none"``, and ``engines`` those that can
    serve each method (None: not known). ``beyond``, ``cheap`` and ``served`` are the best of all,
    of those that cost little within the trained length, and of those that an engine can serve.
    """

    def __init__(
        self,
        scores: Mapping[str, Scores],
        trained: int,
        engines: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.scores, self.trained, self.engines = scores, trained, engines
        unpatched = scores[UNPATCHED]
        lengths = sorted(unpatched.losses)
        self.within = [length for length in lengths if length <= trained]
        self.far = [length for length in lengths if length > trained]
        names = [name for name in scores if name != UNPATCHED]
        self.weights = unpatched.weights or None
        self.confidence = 1 - (1 - CONFIDENCE) / max(1, len(names))
        passes = unpatched.passes_at(self.within)
        self.found_within = summary.estimate_rate(passes) if passes else None
        self.counts = self.found_within is not None and self.found_within.value >= MIN_FOUND
        self.methods = [self._evidence(name) for name in names] if self.far else []
        self.beyond = self._pick(self.methods)
        self.cheap = self._pick([e for e in self.methods if e.cheap])
        self.served = self._pick([e for e in self.methods if e.engines])

    @property
    def broken(self) -> bool:
        return not all(map(math.isfinite, self.scores[UNPATCHED].losses_at(self.within)))

    @property
    def choice(self) -> Evidence | None:
        """The method to continue with, of those that help: served and cheap ones first."""
        picks = [pick.best for pick in (self.cheap, self.served, self.beyond) if pick]
        helping = [best for best in picks if best.helps]
        both = [best for best in helping if best.cheap and best.engines]
        return next(iter(both or helping), None)

    def _lower(self, one: str, other: str) -> bool:
        """Whether the perplexity of ``one`` is clearly lower beyond the trained length."""
        a, b = (self.scores[name].losses_at(self.far) for name in (one, other))
        if not all(map(math.isfinite, b)):  # no difference from infinity
            return all(map(math.isfinite, a))
        return _negative(summary.loss_difference(a, b, self.weights, self.confidence))

    def _fewer(self, one: str, other: str) -> bool:
        return _negative(self._rates(one, other, self.far))

    def _rates(self, one: str, other: str, lengths: Sequence[int]) -> summary.Estimate | None:
        a, b = (self.scores[name].passes_at(lengths) for name in (one, other))
        return summary.rate_difference(a, b, self.confidence) if self.counts and a and b else None

    def _evidence(self, name: str) -> Evidence:
        score, unpatched = self.scores[name], self.scores[UNPATCHED]
        passes, cost = score.passes_at(self.far), None
        if at := self.within[-1:]:
            cost = summary.loss_difference(
                score.losses_at(at), unpatched.losses_at(at), self.weights
            )
            cost = cost or summary.Estimate(math.inf, None, None, len(score.losses_at(at)))
        better = self._lower(name, UNPATCHED) or self._fewer(UNPATCHED, name)
        worse = self._lower(UNPATCHED, name) or self._fewer(name, UNPATCHED)
        return Evidence(
            name=name,
            loss=summary.weighted_mean(score.losses_at(self.far), self.weights),
            found=summary.estimate_rate(passes) if passes else None,
            cost=cost,
            lost=self._rates(UNPATCHED, name, self.within),
            helps=better and not worse,
            harms=worse,
            engines=tuple((self.engines or {}).get(name, ())),
        )

    def _pick(self, methods: Sequence[Evidence]) -> Pick | None:
        if not methods:
            return None
        leader = max(methods, key=lambda e: e.found.value if self.counts and e.found else 0.0)
        left = [e for e in methods if not self._fewer(e.name, leader.name)]
        best, *others = sorted(left, key=lambda e: e.loss)
        behind = {e.name for e in others if self._fewer(e.name, best.name)}
        behind |= {e.name for e in others if self._lower(best.name, e.name)}
        return Pick(best, [e for e in others if e.name not in behind])

    def __str__(self) -> str:
        if self.beyond is None:
            return (
                f"No recommendation: no length beyond the trained {self.trained} tokens was "
                f"measured; give longer --lengths."
            )
        if self.broken:
            return (
                f"No recommendation: within {self.trained} tokens the loss of the unpatched model "
                f"is NaN or infinite. Check its weights, or give --dtype float32 or bfloat16."
            )
        best, where = self.beyond.best, f"beyond {self.trained} tokens"
        start = (
            f"Cannot tell whether any method helps {where}: the best, {best.name}, is not clearly "
            f"better than the unpatched model"
        )
        if best.helps:
            start = f"{where.capitalize()}, {best.name} is best"
        elif best.harms:
            start = (
                f"No method helps {where}: the best, {best.name}, is clearly worse than the "
                f"unpatched model in perplexity or passkeys"
            )
        plain, unsure = self._evidence(UNPATCHED), any(e.maybe_cheap for e in self.methods)
        parts = [f"{start}: {self._numbers(best)} (unpatched: {_far(plain)}).{_ties(self.beyond)}"]
        if self.within:
            costs = f"costs at most {MAX_COST:.0%} at {self.within[-1]} tokens"
            none = f"{'Cannot tell whether a method' if unsure else 'No method'} {costs}."
            parts.append(self._of(self.cheap, costs, f"It {costs}.", none))
        else:
            parts.append("The cost within the trained length was not measured.")
        if self.engines is not None:
            names = "" if self.served is None else _listed(self.served.best.engines)
            none = "No supported engine can serve any of them."
            serves = f"an engine can serve ({names})"
            parts.append(self._of(self.served, serves, f"{names} can serve it.", none))
        if not self.counts and plain.found is not None:
            why = "they were not measured within the trained length"
            if self.found_within is not None:
                why = (
                    f"within {self.trained} tokens the unpatched model finds "
                    f"{summary.percent(self.found_within)}, less than half"
                )
            parts.append(f"Passkeys do not count here: {why}.")
        return " ".join(parts)

    def _of(self, pick: Pick | None, what: str, same: str, none: str) -> str:
        """Name the best method that ``what``, unless there is none or it is the best of all."""
        if pick is None or self.beyond is None:
            return none
        best = pick.best
        if best is self.beyond.best:
            return same
        doubt = "" if best.helps else ", not clearly better than the unpatched model"
        named = f"{best.name}, {self._numbers(best)}{doubt}"
        return f"Best method that {what}: {named}.{_ties(pick)}"

    def _numbers(self, evidence: Evidence) -> str:
        words = _far(evidence)
        if evidence.cost is not None:
            words += f"; at {self.within[-1]} tokens, {summary.signed(evidence.cost)} % perplexity"
            if gained := self._rates(evidence.name, UNPATCHED, self.within):
                words += f" and {summary.signed(gained)} points of passkeys"
        return words


def _negative(gap: summary.Estimate | None) -> bool:
    return gap is not None and summary.is_clear(gap) and gap.value < 0


def _far(evidence: Evidence) -> str:
    words = f"perplexity {summary.number(summary.perplexity(evidence.loss))}"
    found = evidence.found
    return words if found is None else f"{words}, {summary.percent(found)} of passkeys"


def _ties(pick: Pick) -> str:
    labels = [f"{e.name} ({summary.number(summary.perplexity(e.loss))})" for e in pick.rivals]
    return f" Not significantly different: {_listed(labels)}." if labels else ""


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
