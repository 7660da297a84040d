"""Recommends a method from perplexity and passkeys, by the rule in ``docs/evaluate.md``.

For embedders, from the questions whose document is found, by the same rule without perplexity.

A difference is clear if its interval on identical cases excludes zero and it is at least
``SMALLEST_EFFECT``. The intervals are Bonferroni-corrected, 95 % together for all methods, so that
equal methods are recommended in at most 5 % of cases. A method helps if, beyond the trained length,
it is clearly better than the unpatched model in perplexity or passkeys, and clearly worse in
neither. The best is one that helps, if any does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rope_eval.cases import Outcome
from rope_eval.reports import summary
from rope_eval.reports.intervals import CONFIDENCE
from rope_eval.tasks.passkey import MIN_FOUND
from rope_ext.command.arguments import UNPATCHED

MAX_COST = 0.05
"""Highest relative rise of perplexity within the trained length of a method that "costs little",
and the largest clear loss of passkeys there."""


@dataclass(frozen=True)
class Scores:
    """All measurements of one method.

    By length: ``losses`` of every document (nats per token, weighted by ``weights``; none for
    embedders), and ``passes``, 1 or 0, of every passkey or question.
    """

    losses: dict[int, Sequence[float]] = field(default_factory=dict)
    passes: dict[int, list[float]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)

    def passes_at(self, lengths: Sequence[int]) -> list[float]:
        return [x for length in lengths for x in self.passes.get(length, ())]

    def rate_at(self, lengths: Sequence[int]) -> summary.Estimate | None:
        """Return the share that was found at these lengths together; None without any."""
        passes = self.passes_at(lengths)
        return summary.estimate_rate(passes) if passes else None

    def losses_at(self, lengths: Sequence[int]) -> list[float]:
        """Return each document's mean loss over these lengths; none if there are no losses."""
        if not self.losses:
            return []
        rows = zip(*(self.losses[length] for length in lengths), strict=True)
        return [math.fsum(row) / len(row) for row in rows]


def gather(
    places: Mapping[tuple[str, str, int], Sequence[Outcome]], passes: Sequence[str] = ("passkey",)
) -> dict[str, Scores]:
    """Collect perplexity and what is found by system, from outcomes by (task, system, length).

    ``passes`` are the names of the tasks whose answers are found or not.
    """
    scores: dict[str, Scores] = defaultdict(Scores)
    for (task, system, length), group in places.items():
        score = scores[system]
        if task == "perplexity":
            score.losses[length], score.weights[:] = summary.by_document(group)
        elif task in passes:
            score.passes.setdefault(length, []).extend(outcome.value for outcome in group)
    return scores


@dataclass(frozen=True)
class Evidence:
    """Results of one method; differences are from the unpatched model, on the same cases.

    ``loss`` and ``found`` are beyond the trained length; ``cost``, the relative rise of perplexity,
    and ``lost``, the share of passkeys, within it (None: not measured, or passkeys do not count).
    An embedder has no ``loss`` and no ``cost``.
    """

    name: str
    loss: float | None
    found: summary.Estimate | None
    cost: summary.Estimate | None
    lost: summary.Estimate | None
    helps: bool
    harms: bool
    engines: tuple[str, ...]
    plugins: tuple[str, ...] = ()

    @property
    def costs_little(self) -> bool | None:
        """Whether perplexity rises by at most ``MAX_COST`` within the trained length.

        The interval decides, not the estimate: True if all of it is at most ``MAX_COST``, False if
        none of it is, None if some of it is or it was not measured. Passkeys are another question:
        a perplexity that stays says nothing about them.
        """
        if self.cost is None:
            return None
        if self.cost.low is None or self.cost.high is None:  # too few documents, or infinite
            return None if math.isfinite(self.cost.value) else False
        if self.cost.high <= MAX_COST:
            return True
        return None if self.cost.low <= MAX_COST else False

    @property
    def loses_passkeys(self) -> bool:
        """Whether clearly fewer passkeys are found within the trained length than unpatched.

        The interval of the difference excludes zero, and the loss is more than ``MAX_COST``.
        """
        lost = self.lost
        return lost is not None and summary.is_clear(lost) and lost.value > MAX_COST

    @property
    def cheap(self) -> bool:
        """Whether the method can be called cheap: it costs little and keeps the passkeys."""
        little = self.lost is not None if self.loss is None else self.costs_little is True
        return little and not self.loses_passkeys


class Pick(NamedTuple):
    """The best of several methods, and those that are not significantly different."""

    best: Evidence
    rivals: Sequence[Evidence]


class Recommendation:
    """A recommended method; ``print`` it for its text. See this module for the rule.

    ``scores`` are by method, the unpatched model under ``"unpatched"``, ``engines`` those that can
    serve each method by themselves (None: not known), and ``plugins`` those that can with this
    package installed beside them. ``beyond``, ``cheap`` and ``served`` are the best of
    all, of those that cost little within the trained length, and of those that an engine can serve.
    """

    def __init__(
        self,
        scores: Mapping[str, Scores],
        trained: int,
        engines: Mapping[str, Sequence[str]] | None = None,
        things: str = "passkeys",
        plugins: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.scores = scores
        self.trained = trained
        self.engines = engines
        self.plugins = plugins or {}
        self.things = things
        unpatched = scores[UNPATCHED]
        lengths = sorted(unpatched.losses or unpatched.passes)
        self.measures = f"perplexity or {things}" if unpatched.losses else things
        self.within = [length for length in lengths if length <= trained]
        self.far = [length for length in lengths if length > trained]
        names = [name for name in scores if name != UNPATCHED]
        self.weights = unpatched.weights or None
        # Bonferroni: each method is compared with the unpatched model.
        self.confidence = 1 - (1 - CONFIDENCE) / max(1, len(names))
        self.found_within = unpatched.rate_at(self.within[-1:])
        # An embedder chooses one of many documents, so even few questions are no chance.
        enough = MIN_FOUND if unpatched.losses else 0
        self.counts = self.found_within is not None and self.found_within.value >= enough
        self.methods = list(map(self._evidence, names)) if self.far else []
        self.beyond = self._pick(self.methods)
        self.cheap = self._pick([e for e in self.methods if e.cheap])
        self.served = self._pick([e for e in self.methods if e.engines])

    @property
    def broken(self) -> bool:
        return not all(map(math.isfinite, self.scores[UNPATCHED].losses_at(self.within)))

    @property
    def choice(self) -> Evidence | None:
        """The method to continue with: of the best and its rivals that help, served and cheap ones.

        What is clearly worse beyond the trained length is no choice, however cheap.
        """
        if self.beyond is None:
            return None
        helping = [e for e in (self.beyond.best, *self.beyond.rivals) if e.helps]
        return max(helping, key=lambda e: (e.cheap + bool(e.engines), e.cheap), default=None)

    def _lower(self, one: str, other: str) -> bool:
        """Whether the perplexity of ``one`` is clearly lower beyond the trained length."""
        a, b = (self.scores[name].losses_at(self.far) for name in (one, other))
        if not a:
            return False
        if not all(map(math.isfinite, b)):  # no difference from infinity
            return all(map(math.isfinite, a))
        return _negative(
            summary.loss_difference(a, other=b, weights=self.weights, confidence=self.confidence)
        )

    def _fewer(self, one: str, other: str) -> bool:
        return _negative(self._rates(one, other, self.far))

    def _rates(self, one: str, other: str, lengths: Sequence[int]) -> summary.Estimate | None:
        a, b = (self.scores[name].passes_at(lengths) for name in (one, other))
        return summary.rate_difference(a, b, self.confidence) if self.counts and a and b else None

    def _evidence(self, name: str) -> Evidence:
        score = self.scores[name]
        unpatched = self.scores[UNPATCHED]
        cost = None
        losses = score.losses_at(self.far)
        at = self.within[-1:]
        if at and losses:
            cost = summary.loss_difference(
                score.losses_at(at), unpatched.losses_at(at), self.weights
            )
            cost = cost or summary.Estimate(
                value=math.inf, low=None, high=None, count=len(score.losses_at(at))
            )
        better = self._lower(name, UNPATCHED) or self._fewer(UNPATCHED, name)
        worse = self._lower(UNPATCHED, name) or self._fewer(name, UNPATCHED)
        return Evidence(
            name=name,
            loss=summary.weighted_mean(losses, self.weights) if losses else None,
            found=score.rate_at(self.far),
            cost=cost,
            lost=self._rates(UNPATCHED, name, at),
            helps=better and not worse,
            harms=worse,
            engines=tuple((self.engines or {}).get(name, ())),
            plugins=tuple(self.plugins.get(name, ())),
        )

    def _pick(self, methods: Sequence[Evidence]) -> Pick | None:
        if not methods:
            return None
        # One that helps goes before all others: the best number of one measure may be bought with a
        # clear loss in the other. Next, one that does not harm.
        first = [e for e in methods if e.helps] or [e for e in methods if not e.harms] or methods
        # Among these, what finds clearly less than the leader is out, then perplexity decides.
        leader = max(first, key=lambda e: e.found.value if self.counts and e.found else 0.0)
        best = min((e for e in first if not self._fewer(e.name, leader.name)), key=_rank)
        others = sorted((e for e in methods if e is not best), key=_rank)
        behind = {e.name for e in others if self._fewer(e.name, best.name)}
        behind |= {e.name for e in others if self._lower(best.name, e.name)}
        behind |= {e.name for e in others if e.harms and not best.harms}
        return Pick(best, [e for e in others if e.name not in behind])

    @property
    def bullets(self) -> list[str]:
        """The recommendation: beyond the trained length, within it, and the engines."""
        if self.beyond is None:
            return [
                f"No recommendation: no length beyond the trained {self.trained} tokens was "
                f"measured; give longer --lengths."
            ]
        if self.broken:
            return [
                f"No recommendation: within {self.trained} tokens the loss of the unpatched model "
                f"is NaN or infinite. Check its weights, or give --dtype float32 or bfloat16."
            ]
        return [self._beyond(self.beyond), self._within(self.beyond.best), *self._engines()]

    def __str__(self) -> str:
        return "\n".join(self.bullets)

    def _beyond(self, pick: Pick) -> str:
        """Say what the best method does beyond the trained length.

        It helps if it is clearly better than the unpatched model in perplexity or passkeys, and
        clearly worse in neither. Only one of several methods is called the best.
        """
        best = pick.best
        where = f"beyond {self.trained} tokens"
        alone = len(self.methods) == 1
        it = "it" if alone else f"the best, {best.name},"
        if best.helps:
            verdict = f"{where.capitalize()}, {best.name} {'helps' if alone else 'is best'}"
        elif best.harms:
            which = f"{best.name} does not help" if alone else "No method helps"
            verdict = (
                f"{which} {where}: {it} is clearly worse than the unpatched model in "
                f"{self.measures}"
            )
        else:
            which = best.name if alone else "any method"
            verdict = (
                f"Cannot tell whether {which} helps {where}: {it} is not clearly better than the "
                f"unpatched model"
            )
        plain = self._evidence(UNPATCHED)
        text = f"{verdict}: {self._far(best)} (unpatched: {self._far(plain)}).{_ties(pick)}"
        return text + self._uncounted(plain)

    def _within(self, best: Evidence) -> str:
        """Say what the best method costs within the trained length, and name a cheap one."""
        if not self.within:
            return "The cost within the trained length was not measured."
        where = f"at {self.within[-1]} tokens"
        text = f"Cost {where}, {best.name}: {self._cost(best)}."
        little = f"costs at most {MAX_COST:.0%}" if best.loss is not None else "shows no clear loss"
        if best.cheap or self.cheap is None:
            none = self.cheap is None and len(self.methods) > 1
            verdict = f" Of no method is it clear that it {little}."
            if best.loss is None:
                verdict = " Every method clearly loses some."
            return text + verdict * none
        return f"{text} Best that {little}: {self._other(self.cheap)}"

    def _engines(self) -> list[str]:
        if self.engines is None or self.beyond is None:
            return []
        best = self.beyond.best
        beside = ""
        if best.plugins:
            beside = f" {_listed(best.plugins)} can serve {best.name} with rope_ext installed."
        if self.served is None:
            them = "it" if len(self.methods) == 1 else "any of them"
            alone = " by itself" if beside else ""
            return [f"No supported engine can serve {them}{alone}.{beside}"]
        names = _listed(self.served.best.engines)
        if self.served.best is best:
            return [f"{names} can serve {best.name}."]
        return [f"Best that an engine can serve ({names}): {self._other(self.served)}{beside}"]

    def _other(self, pick: Pick) -> str:
        doubt = "" if pick.best.helps else ", not clearly better than the unpatched model"
        return f"{pick.best.name}, {self._far(pick.best)}{doubt}.{_ties(pick)}"

    def _uncounted(self, plain: Evidence) -> str:
        """Say why passkeys do not count, if they were measured and do not."""
        if self.counts or plain.found is None:
            return ""
        why = "they were not measured within the trained length"
        if self.found_within is not None:
            why = (
                f"at {self.within[-1]} tokens the unpatched model finds "
                f"{summary.percent(self.found_within)}, less than half"
            )
        return f" {self.things.capitalize()} do not count here: {why}."

    def _cost(self, evidence: Evidence) -> str:
        """Return the cost within the trained length: perplexity by its interval, and passkeys."""
        cost = evidence.cost
        parts = []
        if cost is not None:
            known = {True: "at most", False: "more than", None: "cannot tell whether at most"}
            most = f"{known[evidence.costs_little]} {MAX_COST:.0%} of perplexity"
            few = f", {cost.note}" if cost.low is None and cost.note else ""
            parts.append(f"{most} ({summary.signed(replace(cost, note=''))} %{few})")
        if evidence.lost is not None:
            clear = "clearly fewer" if evidence.loses_passkeys else "no clear loss of"
            parts.append(f"{clear} {self.things}")
        return "; ".join(parts) or "not measured"

    def _far(self, evidence: Evidence) -> str:
        found = evidence.found
        parts = []
        if evidence.loss is not None:
            perplexity = summary.perplexity(evidence.loss)
            parts.append(f"perplexity {summary.number(perplexity)}")
        if found is not None:
            parts.append(f"{found.value:.0%} of {self.things}")
        return ", ".join(parts)


def _rank(evidence: Evidence) -> tuple[float, float]:
    """Sort by perplexity or, without it, by what is found, the best first."""
    if evidence.loss is not None:
        return evidence.loss, 0.0
    return 0.0, -evidence.found.value if evidence.found else 0.0


def _negative(gap: summary.Estimate | None) -> bool:
    return gap is not None and summary.is_clear(gap) and gap.value < 0


def _number(evidence: Evidence) -> str:
    if evidence.loss is not None:
        return summary.number(summary.perplexity(evidence.loss))
    return f"{evidence.found.value:.0%}" if evidence.found else ""


def _ties(pick: Pick) -> str:
    labels = [f"{e.name} ({_number(e)})" for e in pick.rivals]
    return f" Not significantly different: {_listed(labels)}." if labels else ""


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
