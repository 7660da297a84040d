"""Finds LongRoPE's numbers for a model, one per rotary pair, by evolution.

Evolution depends only on its seed and on the losses of the tables that it tries: an interrupted
search is replayed, and tables in its log are not measured again.

Ding et al. 2024, arXiv 2402.13753, sections 3.2 and 3.3.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from rope_eval.cases import digest
from rope_eval.folder import lock, replace_file, writing
from rope_eval.options import keywords_of
from rope_eval.reports.calibration import Calibration, fitness, mean, perplexity
from rope_eval.reports.intervals import sum_interval
from rope_eval.tune.fitness import (
    Hay,
    Prompt,
    fingerprint,
    losses_at_end,
    losses_of_answers,
    prompts_of,
    read,
    windows_of,
    witnesses,
)
from rope_eval.tune.options import CONFIDENCE, FEWEST_PROMPTS, SearchOptions
from rope_eval.tune.target import trained_rope
from rope_eval.tune.trial_log import ROOM, TrialLog, read_log
from rope_ext.config.record import method_to_json
from rope_ext.errors import MeasureError, OptionError
from rope_ext.methods import (
    NTK,
    PI,
    FrequencyMethod,
    LongRoPE,
    LongRoPE2,
    MrRoPE,
    Rope,
    YaRN,
)
from rope_ext.methods.kinds import FACTORS
from rope_ext.patching import patched
from rope_ext.rotary.sites import evaluating

START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""The numbers of start tokens that LongRoPE chooses from."""
_STEPS = 100  # numbers are searched in hundredths
_BEYOND = 1.25  # from 1 to this many times the factor
_BEYOND_CRITICAL = 2  # likewise, from the factor itself on, where there is a critical pair
_SCALES = tuple(range(100, 161, 5))  # of cos and sin, in hundredths
_REACH = 4  # pairs: a new number lies between those of pairs so far away, at most
_TRIES = 100  # to make a table that is new
_FINALISTS = 6  # the best tables found, and as many of those to start from, which are validated
_FIELD = "scores"  # of a line of the log
_EACH = "each"  # of the scores of a finalist: the losses of every window, and of every answer
_logger = logging.getLogger("rope_ext")
L = TypeVar("L", bound=FrequencyMethod)


@dataclass(frozen=True)
class Candidate:
    """The number of every pair in hundredths, ascending, and what goes with it.

    Args:
        table: the numbers.
        start: how many start tokens go without.
        scale: what cos and sin are multiplied by, in hundredths; None: it is not searched.
    """

    table: tuple[int, ...]
    start: int
    scale: int | None = None


@dataclass(frozen=True)
class Sample:
    """What tables are measured on.

    Args:
        windows: token ids, all of the target length.
        prompts: of the trained and the target length.
    """

    windows: Sequence[tuple[int, ...]]
    prompts: Sequence[Prompt]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """Token ids of all windows and prompts."""
        return [*self.windows, *(prompt.ids for prompt in self.prompts)]

    def __len__(self) -> int:
        return len(self.windows) + len(self.prompts)

    def counted(self, hays: Sequence[Hay], text: bool) -> Sample:
        """The prompts in ``hays`` alone, and the windows if ``text`` is scored."""
        prompts = [prompt for prompt in self.prompts if prompt.hay in hays]
        return Sample(self.windows if text else (), prompts)


@dataclass(frozen=True)
class Space:
    """What evolution chooses from.

    Args:
        most: the largest number, in hundredths.
        starts: numbers of start tokens.
        probability: that a mutation changes a number.
        scales: what cos and sin are multiplied by, in hundredths, ascending; none: not searched.
        critical: the first pair that is searched; those below it follow from its number.
        least: the smallest number of those searched, in hundredths.
    """

    most: int
    starts: Sequence[int]
    probability: float
    scales: Sequence[int] = ()
    critical: int = 0
    least: int = _STEPS

    def fitted(self, table: Sequence[int]) -> tuple[int, ...]:
        """A table with its numbers within bounds, and those below the critical pair as of NTK."""
        tail = [min(max(number, self.least), self.most) for number in table[self.critical :]]
        top = tail[0] / _STEPS
        head = [round(_STEPS * top ** (i / self.critical)) for i in range(self.critical)]
        return (*head, *tail)

    def mutated(self, one: Candidate, rng: random.Random) -> Candidate:
        """Some numbers drawn anew, or one of them and all others moved along; ascending again."""
        old = one.table[self.critical :]
        reach = rng.randint(1, _REACH)
        near = [self.least] * reach + [*old] + [self.most] * reach
        drawn = [rng.randint(near[i], near[i + 2 * reach]) for i in range(len(old))]
        if rng.random() < 0.5:
            pairs = zip(old, drawn, strict=True)
            new = sorted(new if self._changes(rng) else number for number, new in pairs)
        else:
            i = rng.randrange(len(drawn))
            new = [self._moved(number, old[i], drawn[i]) for number in old]
        start = rng.choice(self.starts) if self._changes(rng) else one.start
        scale = one.scale
        if self.scales and scale is not None and self._changes(rng):
            now = scale
            i = min(range(len(self.scales)), key=lambda i: abs(self.scales[i] - now))
            scale = rng.choice(self.scales[max(0, i - 2) : i + 3])
        return Candidate(self.fitted([*one.table[: self.critical], *new]), start, scale)

    def _changes(self, rng: random.Random) -> bool:
        return rng.random() < self.probability

    def _moved(self, number: int, old: int, new: int) -> int:
        """Where ``number`` goes if ``old`` becomes ``new``, between bounds that stay."""
        bound = self.least if number <= old else self.most
        share = (number - bound) / (old - bound) if old != bound else 1
        return round(bound + share * (new - bound))

    def crossed(self, one: Candidate, other: Candidate, rng: random.Random) -> Candidate:
        """Numbers of either parent; sorted, which keeps each between those of the two."""
        table = sorted(map(rng.choice, zip(one.table, other.table, strict=True)))
        start = rng.choice((one.start, other.start))
        scale = rng.choice((one.scale, other.scale)) if self.scales else one.scale
        return Candidate(self.fitted(table), start, scale)


def evolve(
    first: Sequence[Candidate],
    space: Space,
    loss: Callable[[Candidate], float],
    *,
    population: int,
    iterations: int,
    mutations: int,
    crossovers: int,
    seed: int,
) -> Iterator[Candidate]:
    """The best candidate of the first population, then that after every iteration.

    The better half of a population are the parents of the next one, and stay in it. No candidate
    is made twice.
    """
    rng = random.Random(f"search:{seed}")
    young = list(dict.fromkeys(first))
    seen = set(young)
    parents: list[Candidate] = []

    def add(make: Callable[[], Candidate]) -> None:
        for _ in range(_TRIES):
            made = make()
            if made not in seen:
                seen.add(made)
                young.append(made)
                return

    def crossed() -> Candidate:
        one, other = rng.sample(parents, 2)
        return space.crossed(one, other, rng)

    for turn in range(population - len(young)):
        add(partial(space.mutated, first[turn % len(first)], rng))
    losses: dict[Candidate, float] = {}
    for iteration in range(iterations + 1):
        if iteration:
            young.clear()
            for _ in range(mutations):
                add(lambda: space.mutated(rng.choice(parents), rng))
            for _ in range(crossovers):
                add(crossed)
        losses |= {one: loss(one) for one in young}
        parents[:] = sorted([*parents, *young], key=losses.__getitem__)[: population // 2]
        yield parents[0]


def _rope(model: nn.Module, given: SearchOptions) -> Rope:
    """The trained embedding of ``model``.

    Raises:
        OptionError: the options do not fit the model.
    """
    rope = trained_rope(model, given, given.scored)
    pairs = rope.dim // 2
    if given.critical is not None and given.critical >= pairs:
        raise OptionError(
            f"critical={given.critical} is not valid; it must be below the {pairs} pairs of "
            f"this model"
        )
    return rope


def _space(given: SearchOptions, factor: float) -> Space:
    """What evolution can choose from."""
    scales = () if given.attention_factor is not None else _SCALES
    most, critical, least = _BEYOND * factor, 0, 1.0
    if given.critical is not None:
        most, critical, least = _BEYOND_CRITICAL * factor, given.critical, factor
    return Space(
        round(most * _STEPS),
        given.starts,
        given.mutation_probability,
        scales,
        critical,
        round(least * _STEPS),
    )


def _calibrated(start: Any) -> YaRN | None:
    """The YaRN to start from, or the one in the file of a calibration.

    Raises:
        OptionError: it is another method.
        MeasureError: the file cannot be read.
    """
    if isinstance(start, (str, os.PathLike)):
        start = Calibration.load(start).method
    if start is not None and not isinstance(start, YaRN):
        name = getattr(start, "name", repr(start))
        raise OptionError(f"start is {name}, not yarn; calibrate with methods='yarn' alone")
    return start


def _known(given: SearchOptions, factor: float, rope: Rope) -> list[FrequencyMethod]:
    """The methods to start from, YaRN as given or with every ramp that ``calibrate`` tries.

    Raises:
        OptionError: ``given.start`` has another factor.
    """
    yarn = cast("YaRN | None", given.start) or YaRN(factor=factor)
    if yarn.factor != factor:
        raise OptionError(
            f"start has factor={yarn.factor:g}, and target_length={given.target_length} needs "
            f"{factor:g}; calibrate at {given.target_length} tokens"
        )
    known: list[FrequencyMethod] = [PI(factor=factor), NTK(factor=factor), yarn]
    known += [MrRoPE(factor=factor), LongRoPE2(factor=factor)]
    if given.start is not None:
        return known
    ramps = YaRN(factor=factor).grids(rope)
    for name in ("beta_slow", "beta_fast"):
        known += [YaRN(factor=factor, **{name: value}) for value in ramps[name]]
    return list(dict.fromkeys(known))


def _first(given: SearchOptions, known: Sequence[FrequencyMethod], rope: Rope) -> list[Candidate]:
    """The tables of known methods, the best first, with their temperatures and others."""
    space, start = _space(given, known[0].factor), given.starts[0]
    tables = [space.fitted(_table(each, rope)) for each in known]
    if not space.scales:
        return [Candidate(table, start) for table in dict.fromkeys(tables)]
    own = [round(_STEPS * each.attention_scaling(rope)) for each in known]
    near = [min(space.scales, key=lambda scale, own=own: abs(scale - own)) for own in own]
    made = [Candidate(table, start, scale) for table, scale in zip(tables, near, strict=True)]
    made += [Candidate(table, start, round(f * _STEPS)) for f in FACTORS for table in tables]
    return list(dict.fromkeys(made))[: max(2, given.population // 2)]


def _method(given: SearchOptions, one: Candidate, factor: float) -> LongRoPE:
    """The method with these numbers."""
    return LongRoPE(
        factor=factor,
        long_factor=[number / _STEPS for number in one.table],
        attention_factor=given.attention_factor if one.scale is None else one.scale / _STEPS,
        start_tokens=one.start,
    )


def _settings(
    given: SearchOptions,
    model: nn.Module,
    parts: Iterable[Sample],
) -> dict[str, Any]:
    """What scores in the log depend on.

    ``iterations`` is left out, so that a finished search can go on with more of them.
    """
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    del values["iterations"]
    values["start"] = given.start and method_to_json(cast("YaRN", given.start))
    text = digest([ids for part in parts for ids in part.rows])
    return {"model": fingerprint(model), "text": text, **values}


@keywords_of(SearchOptions)
def search(
    model: nn.Module,
    tokenizer: Any,
    target_length: int,
    text: str | os.PathLike[str] | Iterable[str],
    *,
    output: str | os.PathLike[str] | None = None,
    **options: Any,
) -> LongRoPE:
    """Search the factors by which ``longrope`` divides the frequencies of ``model``.

    The factors of a table ascend from 1 to at most 1.25 times the scaling factor. The first tables
    are those of PI, NTK, YaRN, MrRoPE and LongRoPE2, of YaRN with other ramps and temperatures, and
    mutations of them. As in :func:`rope_ext.calibrate`, they are ranked by the loss on windows of
    text plus the loss of passkey answers at the trained and the target length; prompts count only
    where the unpatched model finds at least half of them within its trained length. Among the best
    tables, and the best of those to start from, other windows and prompts decide. In addition to
    the paper's mutation, which draws some factors again, one moves the other factors along, since
    half of YaRN's factors are equal. The model is restored, also after an exception.

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
    given = replace(given, start=_calibrated(given.start))
    if output is not None:
        check_output(output)
    rope = _rope(model, given)
    factor = target_length / rope.length
    known = _known(given, factor, rope)
    first = _first(given, known, rope)
    for start in given.starts:  # what cannot be patched shows before anything is measured
        with patched(
            model, _method(given, replace(first[0], start=start), factor), **given.arguments
        ):
            pass
    samples, seed = given.samples, given.seed
    cure = (
        f"samples={samples} and validation_samples={given.validation_samples} are needed; give "
        f"more text, or fewer of them"
    )
    count = samples + given.validation_samples
    windows = windows_of(tokenizer, read(text), target_length, count, seed, cure).windows
    lengths = (rope.length, target_length)
    parts = [
        Sample(part, prompts_of(tokenizer, lengths, given.prompts, part, of))
        for part, of in ((windows[:samples], seed), (windows[samples:], seed + 2))
    ]
    some = 2 * FEWEST_PROMPTS * bool(parts[0].prompts)
    deciding = prompts_of(tokenizer, lengths[:1], some, windows[:samples], seed + 1)
    with log_beside(output, _settings(given, model, parts)) as log, evaluating(model):
        hays = _counting(model, deciding, given)
        ranking, validation = (part.counted(hays, bool(given.scored)) for part in parts)
        return _searched(model, ranking, validation, given, rope, log)


def _counting(model: nn.Module, deciding: Sequence[Prompt], given: SearchOptions) -> list[Hay]:
    """Where answers count, by what the unpatched model finds of those that decide.

    Raises:
        MeasureError: they count nowhere, and no text is scored either.
    """
    answers = losses_of_answers(model, deciding, lambda rows: None)
    hays, notes = witnesses(deciding, [hit for _, hit in answers])
    for note in notes:
        _logger.warning("rope_ext: %s", note)
    if not given.scored and not hays:
        raise MeasureError(
            "no passkey prompt counts with this model, and scored=0 leaves out the text; leave "
            "scored out to score the text"
        )
    return hays


class _Measuring:
    """Measures methods, unless the log has their scores.

    Args:
        model: not patched.
        given: the options.
        log: of all methods that were measured.
        advance: called with the number of finished windows and prompts.
    """

    def __init__(
        self, model: nn.Module, given: SearchOptions, log: _Log, advance: Callable[[int], None]
    ) -> None:
        self.model, self.given, self.log, self.advance = model, given, log, advance

    def scores(self, method: FrequencyMethod, sample: Sample, **part: str) -> dict[str, Any]:
        """Scores of ``method`` on ``sample``; ``part`` says in the log which one it is."""
        what = {**_what(method), **part}
        if (known := self.log.get(what)) is not None:
            self.advance(len(sample))
            return known
        with patched(self.model, method, **self.given.arguments):
            far = losses_at_end(self.model, sample.windows, self.given.tail, self.advance)
            answers = losses_of_answers(self.model, sample.prompts, self.advance)
        scores = {"far": mean(far) if far else None, "answers": None, "found": None}
        if answers:
            beyond = [
                hit
                for prompt, (_, hit) in zip(sample.prompts, answers, strict=True)
                if prompt.length == self.given.target_length
            ]
            scores["answers"] = mean([loss for loss, _ in answers])
            scores["found"] = [sum(beyond), len(beyond)]
        if part:
            scores[_EACH] = [list(far), [loss for loss, _ in answers]]
        self.log.add(what, scores)
        return scores


def _searched(
    model: nn.Module,
    ranking: Sample,
    validation: Sample,
    given: SearchOptions,
    rope: Rope,
    log: _Log,
) -> LongRoPE:
    """Evolution from the tables of known methods; the best is kept in the log."""
    from rope_ext.command.terminal import progress  # rich is not loaded with the package

    factor = given.target_length / rope.length
    known = _known(given, factor, rope)
    tries = given.attention_factor is None and given.start is None
    scales = FACTORS if tries else ()
    with progress() as shown:
        total = (len(known) + len(scales) + given.tables) * len(ranking)
        total += (2 * _FINALISTS + 1) * len(validation)
        words = f"at most {total} forwards of {given.target_length} tokens"
        bar = shown.add_task(words, total=total)
        measuring = _Measuring(model, given, log, partial(shown.advance, bar))
        tried: dict[FrequencyMethod, dict[str, Any]] = {}

        def measured(each: FrequencyMethod) -> float:
            tried[each] = measuring.scores(each, ranking)
            return _loss(tried[each])

        def loss_of(each: FrequencyMethod) -> float:
            return _loss(tried[each])

        def best_yarn() -> FrequencyMethod:
            return min((each for each in tried if isinstance(each, YaRN)), key=loss_of)

        if min(map(measured, known)) == math.inf:
            raise MeasureError(
                f"the loss is NaN or infinite at {given.target_length} tokens; load the model in "
                f"float32 or bfloat16"
            )
        scaled = [replace(best_yarn(), attention_factor=scale) for scale in scales]
        for each in scaled:
            measured(each)
        yarn = best_yarn()  # as calibration would find it; a table has to beat it
        first = _first(given, sorted([*known, *scaled], key=loss_of), rope)
        bests = evolve(
            first,
            _space(given, factor),
            lambda one: measured(_method(given, one, factor)),
            iterations=given.iterations,
            seed=given.seed,
            **given.growth,
        )
        for best in bests:
            found = _method(given, best, factor)
            texts = [_said(tried[each]) for each in (found, yarn)]
            shown.update(bar, description=f"{texts[0]} (yarn {texts[1]})")
            log.keep(found)
        if len(validation):
            tables = [each for each in tried if isinstance(each, LongRoPE)]
            begun = [_method(given, each, factor) for each in first]
            groups = [sorted(group, key=loss_of)[:_FINALISTS] for group in (begun, tables)]
            own = _method(given, _first(given, [yarn], rope)[0], factor)
            found = validated(
                {
                    each: measuring.scores(each, validation, validation=_EACH)
                    for each in dict.fromkeys([own, *chain(*groups)])
                }
            )
            log.keep(found)
    return found


def validated(scores: Mapping[L, Mapping[str, Any]]) -> L:
    """The finalist to keep, by scores on windows and answers that ranked nothing.

    It is the first one, the table of YaRN, unless the sum of both losses of another is lower beyond
    noise (99 %, paired) and neither loss is higher. Of several such the one with the lowest sum.
    """
    own = next(iter(scores))

    def replaces(other: L) -> bool:
        pairs = zip(scores[other][_EACH], scores[own][_EACH], strict=True)
        changes = [[x - y for x, y in zip(*pair, strict=True)] for pair in pairs]
        changes = [change for change in changes if change]
        if not all(mean(change) <= 0 for change in changes):
            return False
        ends = sum_interval([(change, None) for change in changes], CONFIDENCE)
        return ends is not None and ends[1] < 0

    if _loss(scores[own]) == math.inf:
        return min(scores, key=lambda each: _loss(scores[each]))
    return min([own, *filter(replaces, scores)], key=lambda each: _loss(scores[each]))


def _loss(scores: Mapping[str, Any]) -> float:
    """What evolution minimizes; see :func:`fitness`."""
    return fitness(scores["far"], scores["answers"])


def _said(scores: Mapping[str, Any]) -> str:
    """Perplexity and answers found, those that were measured."""
    parts = [] if scores["far"] is None else [f"{perplexity(scores['far']):>8}"]
    if scores["found"] is not None:
        parts.append("{:>3} of {} answers".format(*scores["found"]))
    return "  ".join(parts)


class _Log(TrialLog):
    """The tables that were tried; the best is kept in the ``.json`` beside the log."""

    def keep(self, best: LongRoPE) -> None:
        """Replace the options in the output, at once."""
        if self.log is None:
            return
        output = self.log.path.with_suffix(".json")
        with writing(output, ROOM):
            replace_file(output, (json.dumps(_given(best.options())) + "\n").encode())


@contextmanager
def log_beside(
    output: str | os.PathLike[str] | None, settings: Mapping[str, Any]
) -> Iterator[_Log]:
    """The log beside ``output``: a new one, or one of the same settings; locked.

    Files that are not of this very search stay as they are.

    Raises:
        MeasureError: it is of other settings, cannot be read or written, or is in use; or what is
            in ``output`` does not come from it.
    """
    if output is None:
        yield _Log(None, _FIELD, {})
        return
    path = Path(output).with_suffix(".jsonl")
    with lock(path.parent, path.name):
        check_output(output)  # what another search may have changed
        yield _Log.open(path, "search", _FIELD, settings)


def check_output(output: str | os.PathLike[str]) -> None:
    """Check that a search may write ``output``, before a model is loaded.

    Raises:
        OptionError: its name does not end in .json.
        MeasureError: its folder cannot be made, or what is there does not come from a search.
    """
    output = Path(output)
    if output.suffix != ".json":
        raise OptionError(f"output={str(output)!r} is not valid; it must end in .json")
    path = output.with_suffix(".jsonl")
    with writing(path, "give another output"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if output.exists() and not path.exists():
        raise MeasureError(
            f"{output} exists, without the {path.name} that a search could go on from; "
            f"delete it, or give another output"
        )
    if output.exists() and not _comes_from(read_log(path, "search", _FIELD)[1], output):
        raise MeasureError(
            f"{output} is not what the search in {path.name} found; move it away, or "
            f"give another output"
        )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a table's options: those that say something."""
    return {name: value for name, value in options.items() if value}


def _options(method: Mapping[str, Any]) -> dict[str, Any]:
    """The options in what :func:`_what` writes of a method."""
    return {name: value for name, value in method.items() if name != "name"}


def _comes_from(tried_scores: Mapping[str, Any], output: Path) -> bool:
    """Whether ``output`` holds one of the tables in a log."""
    try:
        found = json.loads(output.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    tried = (json.loads(what)["method"] for what in tried_scores)
    return any(one["name"] == LongRoPE.name and _given(_options(one)) == found for one in tried)


def _what(method: FrequencyMethod) -> dict[str, Any]:
    """What is written of a table that is tried."""
    return {"method": {"name": method.name, **method.options()}}


def summary(output: Path) -> str:
    """What is in the log beside ``output``, for people to read."""
    settings, found = read_log(output.with_suffix(".jsonl"), "search", _FIELD)
    trials = [(json.loads(what), scores) for what, scores in found.items()]
    tried = [(trial["method"], scores) for trial, scores in trials if "validation" not in trial]
    finalists = [(trial, scores) for trial, scores in trials if _EACH in scores]
    tables = [scores for method, scores in tried if method["name"] == LongRoPE.name]
    target, scored = settings["target_length"], settings["scored"]
    lines = [
        f"perplexity of the last {scored} tokens of {settings['samples']} windows of {target}, and "
        f"passkeys found at {target}:"
    ]
    known = [
        (f"{method['name']} {method.get('attention_factor') or ''}".rstrip(), scores)
        for method, scores in tried
        if method["name"] != LongRoPE.name
    ]
    for name, scores in [*known, (LongRoPE.name, min(tables, key=_loss))]:
        lines.append(f"  {name:<10}{_said(scores)}")
    lines.append(f"the last is the best of {len(tables)} tables on this very text")
    if finalists:
        kept = json.loads(output.read_text(encoding="utf-8"))
        (scores,) = (s for trial, s in finalists if _given(_options(trial["method"])) == kept)
        lines.append(
            f"{settings['validation_samples']} other windows and other passkeys, of "
            f"{len(finalists)} finalists the one to keep:\n  {LongRoPE.name:<10}{_said(scores)}"
        )
        if scores is finalists[0][1]:
            lines.append(
                "it is the table of yarn: none is better beyond noise without a higher loss of "
                "text or of answers"
            )
    return "\n".join(lines)


def _table(method: FrequencyMethod, rope: Rope) -> tuple[int, ...]:
    """What ``method`` divides each frequency by, in hundredths."""
    ratio = (rope.inv_freq / method.inv_freq(rope)).nan_to_num(nan=method.factor)  # 0 / 0
    return tuple((ratio * _STEPS).round().int().cummax(0).values.tolist())
