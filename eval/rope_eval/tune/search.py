"""Searches LongRoPE's factors for a model, one per rotary pair, by evolution.

Evolution depends only on its seed and on the losses of the tables that it tries: an interrupted
search is replayed, and tables in its log are not measured again.

Ding et al. 2024, arXiv 2402.13753, sections 3.2 and 3.3.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from torch import nn
from typing_extensions import Unpack

from rope_eval.cases import digest
from rope_eval.folder import lock, replace_file, writing
from rope_eval.options import keyword_options
from rope_eval.reports.calibration import Calibration, mean, perplexity
from rope_eval.reports.intervals import sum_interval
from rope_eval.tasks.passkey import TEACHER_FORCED
from rope_eval.tune import fitness
from rope_eval.tune.options import CONFIDENCE, SearchKeywords, SearchOptions
from rope_ext.config.record import method_to_json
from rope_ext.errors import MeasureError, OptionError, RopeExtError
from rope_ext.methods import NTK, PI, FrequencyMethod, LongRoPE, LongRoPE2, MrRoPE, Rope, YaRN
from rope_ext.methods.checked import not_none
from rope_ext.methods.kinds import FACTORS
from rope_ext.methods.rope import factor_to
from rope_ext.patching import patched

_STEPS = 100  # numbers are searched in hundredths
_BEYOND = 1.25  # from 1 to this many times the factor
_BEYOND_CRITICAL = 2  # likewise, from the factor itself on, if there is a critical pair
_SCALES = tuple(range(100, 161, 5))  # of cos and sin, in hundredths
_NEAR = 0.1  # spread of the tables near those to start from, as a share of what is searched
_FINALISTS = 6  # the best tables found, and as many of those to start from, which are validated
RANKING = "ranking"
VALIDATION = "validation"
_logger = logging.getLogger("rope_ext")
F = TypeVar("F", bound=FrequencyMethod)


class Candidate(NamedTuple):
    """The number of every pair in hundredths, ascending, and the start tokens that go without.

    ``scale`` is what cos and sin are multiplied by, in hundredths; None: it is not searched.
    """

    table: tuple[int, ...]
    start: int
    scale: int | None = None


class Space(NamedTuple):
    """The search space: numbers from ``least`` to ``most``, ``starts`` and ``scales``.

    Numbers are in hundredths; those of pairs below ``critical`` are computed from the critical
    pair's.
    """

    most: int
    starts: Sequence[int]
    scales: Sequence[int] = ()
    critical: int = 0
    least: int = _STEPS

    def fitted(self, table: Iterable[float]) -> tuple[int, ...]:
        """Clip a table to the bounds, with NTK numbers below the critical pair."""
        tail = [min(max(round(n), self.least), self.most) for n in [*table][self.critical :]]
        top = tail[0] / _STEPS
        head = [round(_STEPS * top ** (i / self.critical)) for i in range(self.critical)]
        return (*head, *tail)

    def vector(self, one: Candidate) -> list[float]:
        """Encode a candidate for evolution: the searched numbers, and its choices."""
        return [*one.table[self.critical :], self.starts.index(one.start), one.scale or 0]

    def candidate(self, vector: Sequence[float]) -> Candidate:
        """The inverse of :meth:`vector`: numbers ascend, choices are the nearest ones."""
        *numbers, start, scale = vector
        table = self.fitted([0] * self.critical + sorted(numbers))
        near = min(self.scales, key=lambda one: abs(one - scale), default=None)
        return Candidate(table, self.starts[round(start)], near)

    def bounds(self, pairs: int) -> list[tuple[float, float]]:
        """Return the bounds of every number in a vector."""
        numbers = [(float(self.least), float(self.most))] * (pairs - self.critical)
        ends = (self.scales[0], self.scales[-1]) if self.scales else (0, 0)
        return [*numbers, (0, len(self.starts) - 1), ends]


def evolve(
    first: Sequence[Candidate],
    space: Space,
    loss: Callable[[Candidate], float],
    *,
    population: int,
    iterations: int,
    seed: int,
) -> None:
    """Run differential evolution from ``first`` and candidates near them.

    Storn and Price 1997, Journal of Global Optimization 11.
    """
    from scipy import optimize

    evolution: Any = optimize.differential_evolution  # newer versions call the seed rng
    rng = np.random.default_rng(seed)
    bounds = space.bounds(len(first[0].table))
    low, high = np.array(bounds).T
    begun = np.array([space.vector(first[i % len(first)]) for i in range(population)], dtype=float)
    # The first tables stay as they are, so that no search ends worse than they are.
    begun[len(first) :] += rng.normal(0, _NEAR, begun[len(first) :].shape) * (high - low)
    # tol 0: only maxiter ends it, so that a search with more iterations begins with the same ones.
    settings: Any = {"init": begun.clip(low, high), "maxiter": iterations, "tol": 0}
    settings |= {"polish": False, "seed": seed}
    try:
        evolution(lambda x: loss(space.candidate(x)), bounds, **settings)
    except RuntimeError as error:
        if isinstance(error.__cause__, RopeExtError):  # of the loss: scipy hides a ValueError
            raise error.__cause__ from None
        raise


def _space(given: SearchOptions, factor: float) -> Space:
    scales = () if given.attention_factor is not None else _SCALES
    most, least = (_BEYOND, 1.0) if given.critical is None else (_BEYOND_CRITICAL, factor)
    ends = round(most * factor * _STEPS), round(least * _STEPS)
    return Space(
        most=ends[0],
        starts=tuple(given.start_tokens),
        scales=scales,
        critical=given.critical or 0,
        least=ends[1],
    )


def _calibrated(start: Any) -> YaRN | None:
    """Return the YaRN to start from, or the one in a calibration file."""
    if isinstance(start, (str, os.PathLike)):
        start = Calibration.load(start).method
    if start is not None and not isinstance(start, YaRN):
        name = getattr(start, "name", repr(start))
        raise OptionError(f"start is {name}, not yarn; calibrate with methods='yarn' alone")
    return start


def _known(given: SearchOptions, factor: float, rope: Rope) -> list[FrequencyMethod]:
    """Return the methods to start from, with the given YaRN or all ramps of ``calibrate``."""
    yarn = cast("YaRN | None", given.start) or YaRN(factor=factor)
    if yarn.factor != factor:
        raise OptionError(
            f"start has factor={yarn.factor:g}, and target_length={given.target_length} needs "
            f"{factor:g}; calibrate at {given.target_length} tokens"
        )
    known: list[FrequencyMethod] = [PI(factor=factor), NTK(factor=factor), yarn]
    known += [MrRoPE(factor=factor), LongRoPE2(factor=factor)]
    ramps = {} if given.start is not None else YaRN(factor=factor).grids(rope)
    for name in ("beta_slow", "beta_fast"):
        known += [YaRN(factor=factor, **{name: value}) for value in ramps.get(name, ())]
    return list(dict.fromkeys(known))


def _first(given: SearchOptions, known: Sequence[FrequencyMethod], rope: Rope) -> list[Candidate]:
    """Return tables of known methods, the best first, with their own and other temperatures."""
    space = _space(given, known[0].factor)
    start = space.starts[0]
    tables = []
    own = []
    for method in known:
        ratio = (rope.inv_freq / method.inv_freq(rope)).nan_to_num(nan=method.factor)  # 0 / 0
        # cummax: numbers of a table ascend, and those of some methods fall for a few pairs.
        tables.append(space.fitted((ratio * _STEPS).round().int().cummax(0).values.tolist()))
        own.append(round(_STEPS * method.attention_scaling(rope)))
    if not space.scales:
        return [Candidate(table, start) for table in dict.fromkeys(tables)]
    near = [min(space.scales, key=lambda scale, own=own: abs(scale - own)) for own in own]
    candidates = [Candidate(table, start, scale) for table, scale in zip(tables, near, strict=True)]
    candidates += [Candidate(table, start, round(f * _STEPS)) for f in FACTORS for table in tables]
    return list(dict.fromkeys(candidates))[: max(2, given.population // 2)]


def _method(given: SearchOptions, one: Candidate, factor: float) -> LongRoPE:
    return LongRoPE(
        factor=factor,
        long_factor=[number / _STEPS for number in one.table],
        attention_factor=given.attention_factor if one.scale is None else one.scale / _STEPS,
        start_tokens=one.start,
    )


@keyword_options(SearchOptions)
def search(
    model: nn.Module,
    tokenizer: Any,
    target_length: int,
    text: str | os.PathLike[str] | Iterable[str],
    *,
    output: str | os.PathLike[str] | None = None,
    **options: Unpack[SearchKeywords],
) -> LongRoPE:
    """Search the factors by which ``longrope`` divides the frequencies of ``model``.

    The factors of a table ascend from 1 to at most 1.25 times the scaling factor. The first tables
    are those of PI, NTK, YaRN, MrRoPE and LongRoPE2, of YaRN with other ramps and temperatures, and
    tables near them. As in :func:`rope_ext.calibrate`, they are ranked by the loss on windows of
    text plus the loss of passkey answers at the trained and the target length; prompts count only
    where the unpatched model finds at least half of them within its trained length. Among the best
    tables, and the best of those to start from, other windows and prompts decide. New tables are
    made by differential evolution instead of the paper's mutation and crossover. The model is
    restored, also after an exception.

    Args:
        model: not patched.
        tokenizer: of the model.
        target_length: context to reach, tokens.
        text: a file, a folder or ``hf:ID``, as the evaluators read it, or documents; a string
            with a line break in it is one. Evaluate the result on another text.
        output: a ``.json`` file for the options of the best method so far. A ``.jsonl`` file next
            to it logs every table: the same call resumes from it, also with more ``iterations``.
        **options: the fields of :class:`~rope_eval.tune.options.SearchOptions`.

    Returns:
        The best method found, for :func:`rope_ext.patch`.

    Raises:
        OptionError: an option is not valid.
        MeasureError: the text cannot be read, is too short or repeats itself, ``output`` belongs
            to another search, or the loss is NaN or infinite.
        AlreadyPatchedError, AlreadyScaledError, NoRopeError, UnsupportedModelError: as
            :func:`rope_ext.patch`.

    Ding et al. 2024, arXiv 2402.13753, sections 3.2 and 3.3; Shang et al. 2025, arXiv 2502.20082,
    section 3.2.
    """
    given = SearchOptions(target_length=target_length, **options)
    given.start = _calibrated(given.start)
    if output is not None:
        check_output(output)
    rope = fitness.trained_rope(model, given)
    if given.critical is not None and given.critical >= rope.dim // 2:
        raise OptionError(
            f"critical={given.critical} is not valid; it must be below the {rope.dim // 2} pairs "
            f"of this model"
        )
    factor = factor_to(target_length, rope.length)
    known = _known(given, factor, rope)
    [first, *_] = _first(given, known, rope)
    for start in given.start_tokens:  # report models that cannot be patched before measuring
        with patched(model, _method(given, first._replace(start=start), factor), **given.arguments):
            pass
    samples = _samples(tokenizer, texts=fitness.read(text), rope=rope, given=given)
    fitness.require_tokens(model, samples)
    # Without `iterations`, so that a finished search can go on with more of them.
    settings = {name: value for name, value in vars(given).items() if name != "iterations"}
    # As the log returns it, with which it is compared.
    settings["start"] = given.start and method_to_json(cast("YaRN", given.start))
    settings["model"] = fitness.fingerprint(model)
    settings["text"] = digest([ids for sample in samples for ids in sample.tokens])
    path = None if output is None else Path(output)
    log = path and path.with_suffix(".jsonl")
    with nullcontext() if log is None else lock(log.parent, log.name, option="output"):
        trials = fitness.Trials(
            model=model, rope=rope, given=given, path=log, kind="search", settings=settings
        )
        return _searched(trials, given, known, samples=samples, output=path)


def _samples(
    tokenizer: Any, texts: Sequence[str], rope: Rope, given: SearchOptions
) -> list[fitness.Sample]:
    """Return the samples that rank tables, and those that decide between the best."""
    count = given.samples + given.validation_samples
    cure = (
        f"samples={given.samples} and validation_samples={given.validation_samples} are needed; "
        f"give more text, or fewer of them"
    )
    rows = fitness.windows_of(
        tokenizer, texts, length=given.target_length, count=count, seed=given.seed, cure=cure
    )
    samples = []
    parts = {RANKING: range(given.samples), VALIDATION: range(given.samples, count)}
    # Other seeds, hence other keys: a table must not be chosen on what ranked it.
    for (name, part), seed in zip(parts.items(), (given.seed, given.seed + 2), strict=True):
        own = rows.some(part)
        prompts = fitness.prompts_for(
            given, tokenizer, trained=rope.length, texts=own.windows, seed=seed
        )
        samples.append(fitness.Sample(name, own if given.scored else fitness.Rows(), prompts))
    return samples


def _searched(
    trials: fitness.Trials,
    given: SearchOptions,
    known: Sequence[FrequencyMethod],
    samples: Sequence[fitness.Sample],
    output: Path | None,
) -> LongRoPE:
    """Run evolution from the tables of known methods; stores the best in ``output``."""
    rope = trials.rope
    factor = given.target_length / rope.length
    scales = FACTORS if given.attention_factor is None and given.start is None else ()
    tables = given.population * (1 + given.iterations)
    most = (len(known) + len(scales) + tables, 2 * _FINALISTS + 1)
    with trials.progress(list(zip(samples, most, strict=True))):
        (ranking, validation), notes = trials.counting(samples)
        for note in notes:
            _logger.warning("rope_ext: %s", note)
        if not len(ranking):
            raise MeasureError(
                "no passkey prompt counts with this model, and scored=0 leaves out the text; "
                "leave scored out to score the text"
            )
        found = _Found(trials, given, factor, ranking=ranking, output=output)
        if min(map(found.measure, known)) == math.inf:
            raise MeasureError(
                f"the loss is NaN or infinite at {given.target_length} tokens; load the model in "
                f"float32 or bfloat16"
            )
        yarn = found.best_yarn()
        scaled = [replace(yarn, attention_factor=scale) for scale in scales]
        for each in scaled:
            found.measure(each)
        first = _first(given, found.ranked([*known, *scaled]), rope)
        sizes = {"population": given.population, "iterations": given.iterations}
        evolve(first, _space(given, factor), found.loss, **sizes, seed=given.seed)
        if len(validation):
            scores = {one: trials.scores(one, validation) for one in found.finalists(first)}
            found.keep(validated(scores))
    return not_none(found.best)


class _Found:
    """The methods that a search has tried, with their losses, and its best table.

    Args:
        trials: measures methods.
        given: options of the search.
        factor: extension factor of all tables.
        ranking: the sample by which tables are ranked.
        output: file with the options of the best table; None: it is not stored.
    """

    def __init__(
        self,
        trials: fitness.Trials,
        given: SearchOptions,
        factor: float,
        ranking: fitness.Sample,
        output: Path | None,
    ) -> None:
        self.trials = trials
        self.given = given
        self.factor = factor
        self.ranking = ranking
        self.output = output
        self.tried: dict[FrequencyMethod, float] = {}
        self.best: LongRoPE | None = None

    def measure(self, method: FrequencyMethod) -> float:
        self.tried[method] = self.trials.scores(method, self.ranking).loss
        return self.tried[method]

    def ranked(self, methods: Iterable[F]) -> list[F]:
        """Sort methods that were measured, the lowest loss first."""
        return sorted(methods, key=self.tried.__getitem__)

    def best_yarn(self) -> YaRN:
        return self.ranked(each for each in self.tried if isinstance(each, YaRN))[0]

    def loss(self, one: Candidate) -> float:
        """Measure a table, for evolution; the best one so far is kept."""
        method = _method(self.given, one, self.factor)
        value = self.measure(method)
        if self.best is None or value < self.tried[self.best]:
            # At once: a search that is stopped leaves its best table.
            self.keep(method)
            losses = (value, self.tried[self.best_yarn()])
            self.trials.show(description="loss {:.4f} (yarn {:.4f})".format(*losses))
        return value

    def keep(self, best: LongRoPE) -> None:
        self.best = best
        if self.output is not None:
            with writing(self.output, fitness.ROOM):
                replace_file(self.output, (json.dumps(_said(best.options())) + "\n").encode())

    def finalists(self, first: Sequence[Candidate]) -> list[LongRoPE]:
        """Return the tables to validate: YaRN's, which another one has to beat, and the best."""
        rope = self.trials.rope
        own = _method(self.given, _first(self.given, [self.best_yarn()], rope)[0], self.factor)
        begun = self.ranked(_method(self.given, each, self.factor) for each in first)
        tables = self.ranked(each for each in self.tried if isinstance(each, LongRoPE))
        return list(dict.fromkeys([own, *begun[:_FINALISTS], *tables[:_FINALISTS]]))


def validated(scores: Mapping[F, fitness.Scores]) -> F:
    """Choose a finalist, by scores on windows and answers that were not used for ranking.

    The first one, YaRN's table, is kept unless the sum of both losses of another is lower beyond
    noise (99 %, paired) and neither loss is higher. Among several, the lowest sum wins.
    """
    own = next(iter(scores))

    def replaces(other: F) -> bool:
        one = scores[other]
        two = scores[own]
        pairs = ((one.far, two.far), (one.answers, two.answers))
        changes = [[x - y for x, y in zip(*pair, strict=True)] for pair in pairs if pair[0]]
        if not all(mean(change) <= 0 for change in changes):
            return False
        ends = sum_interval([(change, None) for change in changes], CONFIDENCE)
        return ends is not None and ends[1] < 0

    better = scores if scores[own].loss == math.inf else [own, *filter(replaces, scores)]
    return min(better, key=lambda each: scores[each].loss)


def check_output(output: str | os.PathLike[str]) -> None:
    """Check that a search may write ``output``, before a model is loaded."""
    output = Path(output)
    log = output.with_suffix(".jsonl")
    if output.suffix != ".json":
        raise OptionError(f"output={str(output)!r} is not valid; it must end in .json")
    with writing(log, "give another output"):
        log.parent.mkdir(parents=True, exist_ok=True)
    if output.exists() and not log.exists():
        raise MeasureError(
            f"{output} exists, without the {log.name} that a search could go on from; "
            f"delete it, or give another output"
        )


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a table that differ from the defaults."""
    return {name: value for name, value in options.items() if value and name != "name"}


def summary(output: Path) -> str:
    """Summarize the log next to ``output``."""
    settings, log = fitness.read_log(output.with_suffix(".jsonl"), "search")
    both = [(json.loads(trial), fitness.Scores.from_json(scores)) for trial, scores in log.items()]
    tried = {
        sample: [(t["method"], s) for t, s in both if t["method"] and t["sample"] == sample]
        for sample in (RANKING, VALIDATION)
    }
    passkeys = f", and passkey {TEACHER_FORCED}" * any(scores.found for _, scores in tried[RANKING])
    lines = [
        f"perplexity of the last {settings['scored']} tokens of {settings['samples']} windows of "
        f"{settings['target_length']}{passkeys}:"
    ]
    best: dict[str, fitness.Scores] = {}  # of yarn with other ramps and temperatures
    for method, scores in tried[RANKING]:
        best[method["name"]] = min(scores, best.get(method["name"], scores), key=lambda s: s.loss)
    for name, scores in best.items():
        count = sum(method["name"] == name for method, _ in tried[RANKING])
        what = "tables" if name == LongRoPE.name else "settings"
        lines.append(f"  {name:<10}{_numbers(scores)}" + f", best of {count} {what}" * (count > 1))
    kept = json.loads(output.read_text(encoding="utf-8"))
    for place, (method, scores) in enumerate(tried[VALIDATION]):
        if _said(method) == kept:
            yarn = ": it is the table of yarn, none is better beyond noise" * (place == 0)
            of = len(tried[VALIDATION])
            lines.append(f"kept of {of}, on other windows:{_numbers(scores)}{yarn}")
    return "\n".join(lines)


def _numbers(scores: fitness.Scores) -> str:
    """Format perplexity and the answers that are the most likely ones, if measured."""
    parts = [f"{perplexity(mean(scores.far)):>8}"] if scores.far else []
    if scores.found:
        parts.append(f"{sum(scores.found):>3} of {len(scores.found)} answers")
    return "  ".join(parts)
