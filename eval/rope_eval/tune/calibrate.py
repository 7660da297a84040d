"""Tunes the scalar options of a method for a model and a text, mainly its temperature.

Coordinate descent over the grids that a method declares: the attention factor first, then windows,
groups and ramps, then the attention factor again with the values found. One half of the text and of
the prompts selects values. The other half tests them against the published default, which is kept
unless the new values are better beyond noise at an acceptable cost.
"""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from torch import nn
from typing_extensions import Unpack

from rope_eval.cases import digest
from rope_eval.data.prompts import beginning
from rope_eval.data.text import python_library
from rope_eval.folder import Folder, lock
from rope_eval.options import keyword_options
from rope_eval.reports.calibration import SCALAR, Calibration, Change, Choice, Trial, mean
from rope_eval.reports.intervals import paired_rates, sum_interval
from rope_eval.tune import fitness
from rope_eval.tune.options import (
    CONFIDENCE,
    FEWEST_SAMPLES,
    CalibrationKeywords,
    CalibrationOptions,
)
from rope_ext.advice.recommend import NAME
from rope_ext.config.record import method_to_json
from rope_ext.errors import MeasureError, OptionError, RopeExtError, nearest
from rope_ext.methods import Method, Rope, build_method
from rope_ext.methods.rope import factor_to
from rope_ext.patching import patched
from rope_ext.rotary.sites import text_decoder

LOG, RESULT, PICTURE = (f"{NAME}.{end}" for end in ("jsonl", "json", "png"))
_STEP = 0.1  # step of the attention factor, beyond its grid and around the previous value
_FINEST = 0.05  # smaller gaps are not halved
_WALK = 4  # maximum number of steps beyond the grid
Grid = Mapping[str, tuple[Any, ...]]


@keyword_options(CalibrationOptions)
def calibrate(
    model: nn.Module,
    tokenizer: Any,
    target_length: int,
    text: str | os.PathLike[str] | Iterable[str] | None = None,
    *,
    methods: str | Method | Iterable[str | Method] = "yarn",
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    **options: Unpack[CalibrationKeywords],
) -> Calibration:
    """Tune the scalar options of a method for ``model`` on a text: temperature, windows, ramps.

    One half of the data selects values by the loss of the text at the target length plus the loss
    of passkey answers, hidden in filler and in the text, at the trained and the target length. The
    answers are given, after a lead-in and without a chat template, and scored by one forward: what
    a chat model writes by itself can differ, and is measured by ``compare``. The other half tests
    them. A value replaces the published default only if that sum is lower beyond
    noise (99 %, paired), neither part is higher beyond noise, and perplexity rises by at most
    ``cost`` at the upper end of its interval, both within the trained length and at the target
    length. Prompts do not count where the unpatched model finds less than half of them within its
    trained length. The model is restored, also after an exception.

    Args:
        model: not patched.
        tokenizer: of the model.
        target_length: context to reach, tokens.
        text: as in :func:`rope_ext.search`. None: Python's library, without the part that
            evaluations use by default. Better pass text like yours.
        methods: names, or objects whose options count as the published ones.
        output: a directory for the results: ``calibration.jsonl`` with every candidate as it is
            measured, ``calibration.json``, and a picture if matplotlib is installed.
        resume: continue an interrupted calibration in ``output``.
        **options: the fields of :class:`~rope_eval.tune.options.CalibrationOptions`.

    Returns:
        The method found and its numbers; ``print`` it.

    Raises:
        UnknownMethodError, OptionError: a method or an option is not valid, or a method has no
            options to tune.
        MeasureError: the text cannot be read, is too short or repeats itself, ``output`` belongs
            to another calibration or is in use, or the loss is NaN or infinite.
        AlreadyPatchedError, AlreadyScaledError, NoRopeError, UnsupportedModelError: as
            :func:`rope_ext.patch`.
    """
    given = CalibrationOptions(target_length=target_length, **options)
    rope = fitness.trained_rope(model, given)
    starts = _starts(model, rope, methods, given=given)
    both = [(start, _grid(start, rope, given.options)) for start in starts]
    if resume and output is None:
        raise OptionError("resume=True needs output=FOLDER to resume from")
    folder = None if output is None else Path(output)
    with nullcontext() if folder is None else lock(folder, option="output"):
        if folder is not None:
            Folder(folder).check([RESULT, PICTURE])
            require_free(folder, resume, cure="resume=True", output="output")
        texts = python_library("train") if text is None else fitness.read(text)
        halves, notes = _halves(tokenizer, texts, rope, given=given)
        fitness.require_tokens(model, halves)
        known = asdict(given) | {
            "model": fitness.fingerprint(model),
            "text": digest([half.rows.windows for half in halves]),
            "methods": [method_to_json(start) for start in starts],
        }
        trials = fitness.Trials(
            model=model,
            rope=rope,
            given=given,
            path=folder and folder / LOG,
            kind=NAME,
            settings=known,
        )
        found = _calibrated(trials, given, starts=both, halves=halves, notes=notes)
        if folder is not None:
            _keep(found, folder)
    return found


def _starts(
    model: nn.Module,
    rope: Rope,
    methods: str | Method | Iterable[str | Method],
    given: CalibrationOptions,
) -> list[Method]:
    """Return the published defaults, each tried on the model so that errors appear early."""
    listed = [methods] if isinstance(methods, (str, Method)) else list(methods)
    factor = factor_to(given.target_length, rope.length)
    starts: list[Method] = []
    for one in listed:
        start = build_method(one, factor=factor) if isinstance(one, str) else one
        if start.target_length(rope) < given.target_length:
            raise OptionError(
                f"{start} reaches {start.target_length(rope)} tokens, and "
                f"target_length={given.target_length}; give it factor={factor:g}"
            )
        if start in starts:
            raise OptionError(f"{start.name} is given twice; leave one out")
        with patched(model, start, **given.arguments):
            starts.append(start)
    if not starts:
        raise OptionError("no method is given; choose some, such as 'yarn', 'ntk'")
    return starts


def _grid(method: Method, rope: Rope, options: Iterable[str] | None) -> Grid:
    """Return the options of a method to tune and their values, the attention factor first."""
    grid = method.grids(rope)
    for name in options or ():
        if name not in grid:
            known = f"its options are {', '.join(grid)}" if grid else "it has none"
            raise OptionError(
                f"{method.name}: calibrate cannot tune {name!r}{nearest(name, grid)}; {known}"
            )
    if not grid:
        raise OptionError(f"{method.name} has no options to calibrate; leave it out")
    chosen = [name for name in grid if options is None or name in options]
    return {name: grid[name] for name in sorted(chosen, key=lambda name: name != SCALAR)}


def require_free(folder: Path, resume: bool, cure: str, output: str) -> None:
    """Raise MeasureError if there is a log of a calibration; ``cure`` tells how to resume it."""
    if (folder / LOG).exists() and not resume:
        raise MeasureError(
            f"{folder / LOG} already exists; give {cure} to continue it, or another {output}"
        )


def _keep(found: Calibration, folder: Path) -> None:
    files = {RESULT: found.to_json().encode()}
    picture = io.BytesIO()
    with suppress(MeasureError):  # without matplotlib, write the numbers only
        found.plot(picture)
        files[PICTURE] = picture.getvalue()
    Folder(folder).write(files)


def _halves(
    tokenizer: Any, texts: Sequence[str], rope: Rope, given: CalibrationOptions
) -> tuple[list[fitness.Sample], list[str]]:
    """Return windows and prompts of both halves, of different documents if possible; and notes."""
    cure = (
        f"samples={given.samples} are needed for each of two halves; give more text, or fewer "
        f"samples"
    )
    target = given.target_length
    notes = []
    halves = []
    rows = fitness.windows_of(
        tokenizer, texts, length=target, count=2 * given.samples, seed=given.seed, cure=cure
    )
    if len(set(rows.documents)) < 2:
        notes.append("all windows are from one document: the halves are not of different texts")
    numbers = in_halves(rows.documents)
    first = beginning(tokenizer)
    for place, name in enumerate(("choosing", "judging")):
        own = rows.some(i for i, half in enumerate(numbers) if half == place)
        inside = tuple(tuple(cut(window, rope.length, first)) for window in own.windows)
        # No half of one calibration has the prompts of a half of another.
        seed = 2 * given.seed + place
        prompts = fitness.prompts_for(
            given, tokenizer, trained=rope.length, texts=own.windows, seed=seed
        )
        halves.append(fitness.Sample(name=name, rows=own, prompts=prompts, inside=inside))
    if given.prompts and not halves[0].prompts:
        notes.append(
            f"answers do not count: no prompt fits into the {rope.length} trained tokens (the "
            f"shortest has {min(fitness.shortest(tokenizer, hay) for hay in fitness.HAY)})"
        )
    return halves, notes


def cut(window: tuple[int, ...], length: int, first: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Split a window into windows of ``length`` tokens, each with the start token."""
    text = window[len(first) :]
    step = length - len(first)
    for start in range(0, len(text) - step + 1, step):
        yield (*first, *text[start : start + step])


def in_halves(documents: Sequence[int]) -> list[int]:
    """Return 0 or 1 for each window: halves of different documents, of nearly equal size."""
    if len(set(documents)) == 1:
        return [i % 2 for i in range(len(documents))]
    halves = {}
    filled = [0, 0]
    # The largest first, each into the emptier half.
    for one, size in Counter(documents).most_common():
        halves[one] = filled.index(min(filled))
        filled[halves[one]] += size
    return [halves[one] for one in documents]


def _calibrated(
    trials: fitness.Trials,
    given: CalibrationOptions,
    starts: Sequence[tuple[Method, Grid]],
    halves: Sequence[fitness.Sample],
    notes: Sequence[str],
) -> Calibration:
    """Run the descent from every start on one half, and test on the other."""
    choices = []
    most = sum(map(_most, (grid for _, grid in starts)))
    with trials.progress([(halves[0], most), (halves[1], 2 * len(starts))]):
        inside = mean(trials.scores(None, halves[1]).inside)
        (choosing, judging), more = trials.counting(halves)
        for start, grid in starts:
            trials.show(description=start.name)
            descent = Descent(trials, start, choosing)
            judge = Judge(trials, start, judging)
            proposed = descent.best(grid)
            judged = judge.changes(proposed)
            reasons = ["no other value is better on the half of the text that selects"]
            if proposed != start:
                reasons = judge.objections(judged)
                if not judged["score"].better:
                    before = start.options()
                    new = proposed.options().items()
                    changed = ", ".join(f"{k}={v!r}" for k, v in new if v != before[k])
                    reasons.append(f"{changed} is not better beyond noise")
            tried = tuple(map(descent.trial, descent.tried.values()))
            choices.append(
                Choice(
                    published=start,
                    proposed=proposed,
                    judged=judged,
                    reasons=tuple(reasons),
                    tried=tried,
                )
            )
    return Calibration(
        model=type(text_decoder(trials.model)).__name__,
        trained_length=trials.rope.length,
        target_length=given.target_length,
        scored=given.tail,
        seed=given.seed,
        cost=given.cost,
        prompts=sum(p.length == trials.rope.length for p in judging.prompts),
        rows=trials.forwards,
        inside=inside,
        choices=tuple(choices),
        notes=(*notes, *more),
        arguments=given.arguments,
    )


def _most(grid: Grid) -> int:
    """Maximum number of measurements of a descent."""
    scalar = (1 + (len(grid) > 1)) * (_WALK + 2) + 2 * (len(grid) > 1) if SCALAR in grid else 0
    return 1 + sum(map(len, grid.values())) + scalar


class Judge:
    """Compares methods with the published default ``start`` on one half of the data."""

    def __init__(self, trials: fitness.Trials, start: Method, half: fitness.Sample) -> None:
        self.trials = trials
        self.start = start
        self.half = half
        self.given = cast(CalibrationOptions, trials.given)
        self.lengths = {"inside": trials.rope.length, "far": self.given.target_length}
        self.before = self.scores(start)

    def scores(self, method: Method) -> fitness.Scores:
        return self.trials.scores(method, self.half)

    def found(self, method: Method) -> list[list[bool]]:
        """Return which answers are found within the trained length, and at the target length."""
        scores = self.scores(method)
        return [scores.found_at(length, self.half) for length in self.lengths.values()]

    def trial(self, method: Method) -> Trial:
        scores = self.scores(method)
        found_inside, found_beyond = self.found(method)
        return Trial(
            method=method,
            attention_factor=float(method.attention_scaling(self.trials.rope)),
            far=mean(scores.far),
            inside=mean(scores.inside),
            answers=mean(scores.answers) if scores.answers else None,
            found_inside=mean(found_inside) if found_inside else None,
            found_beyond=mean(found_beyond) if found_beyond else None,
        )

    def changes(self, method: Method) -> dict[str, Change]:
        """Compare a method with the published default, by measure; intervals are over documents."""
        before = self.before
        after = self.scores(method)
        far = self._by_document(_less(after.far, before.far))
        answers = (_less(after.answers, before.answers), None)
        inside = self._by_document(_less(after.inside, before.inside))
        samples = {"far": [far], "inside": [inside], "score": [far]}
        if self.half.prompts:
            samples |= {"answers": [answers], "score": [far, answers]}
        never = (math.inf, math.inf)
        unknown = (-math.inf, math.inf)  # too few values for an interval
        known = before.finite and after.finite
        ends = {
            name: (sum_interval(parts, CONFIDENCE) or unknown) if known else never
            for name, parts in samples.items()
        }
        if self.half.prompts:
            pairs = zip(self.found(method), self.found(self.start), strict=True)
            for name, pair in zip(("found_inside", "found_beyond"), pairs, strict=True):
                ends[name] = paired_rates(*pair, CONFIDENCE) or unknown
        one = self.trial(self.start)
        two = self.trial(method)
        return {name: Change(getattr(one, name), getattr(two, name), *ends[name]) for name in ends}

    def _by_document(self, gaps: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the mean and number of windows of each document; if there are few, use windows."""
        groups = self.half.rows.by_document(gaps)
        if len(groups) < FEWEST_SAMPLES:
            groups = [[gap] for gap in gaps]
        return [mean(group) for group in groups], [len(group) for group in groups]

    def objections(self, changes: Mapping[str, Change]) -> list[str]:
        """Return reasons against replacing the published default by a method."""
        if not changes["score"].after < math.inf:
            return ["its loss is NaN or infinite"]
        found = []
        # Perplexity rises by a share if the loss rises by the logarithm of one more than it.
        limit = math.log1p(self.given.cost)
        for name, length in self.lengths.items():
            change = changes[name]
            where = f"perplexity at {length} tokens"
            if change.low > limit or (name == "far" and change.worse):
                found.append(f"its {where} rises by {change.percent}")
            elif change.high > limit:
                found.append(
                    f"cannot tell whether its {where} rises by less than "
                    f"{100 * self.given.cost:g} %: {change.percent} (more samples may)"
                )
        if "answers" in changes and changes["answers"].worse:
            found.append("its loss on the answers rises beyond noise")
        return found


class Descent(Judge):
    """Run coordinate descent for one method, on the half that selects."""

    def __init__(self, trials: fitness.Trials, start: Method, half: fitness.Sample) -> None:
        super().__init__(trials, start, half)
        if not self.before.finite:
            raise MeasureError(
                f"the loss is NaN or infinite at {trials.given.target_length} tokens under "
                f"{start}; load the model in float32 or bfloat16"
            )
        self.tried: dict[str, Method] = {_key(start): start}
        self.losses: dict[str, float] = {_key(start): self.before.loss}  # without objections

    def best(self, grid: Grid) -> Method:
        """Return the best method found along these options."""
        best = self.start
        free = {SCALAR: None}
        for name, values in grid.items():
            best = self._along(best, name, values)
        if SCALAR in grid and replace(best, **free) != replace(self.start, **free):
            here = self._value(best, SCALAR)
            best = self._along(best, SCALAR, (here - _STEP, here + _STEP))
        return best

    def _along(self, best: Method, name: str, values: Sequence[Any]) -> Method:
        """Return the best method with another value of one option."""
        line = {self._value(best, name): best}
        for value in values:
            self._add(line, best, name, value=value)
        if name == SCALAR:
            self._walk(line, best)
            self._halve(line, best)
        return line[self._lowest(line)]

    def _add(self, line: dict[Any, Method], best: Method, name: str, value: Any) -> bool:
        """Measure ``best`` with a value of one option; returns whether it is in ``line`` now."""
        # A value that is reached by different steps is measured once.
        value = round(value, 4) if name == SCALAR else value
        if value not in line and (candidate := self._made(best, name, value)) is not None:
            line[value] = candidate
        return value in line

    def _lowest(self, line: Mapping[Any, Method]) -> Any:
        """Return the value with the lowest loss, of those without objections."""
        return min(line, key=lambda value: self.losses.get(_key(line[value]), math.inf))

    def _walk(self, line: dict[Any, Method], best: Method) -> None:
        """Go on beyond the end of the grid that is best, until the best value has neighbors."""
        for _ in range(_WALK):
            here = self._lowest(line)
            beyond = here + (_STEP if here == max(line) else -_STEP)
            if min(line) < here < max(line) or beyond <= 0:
                break
            if not self._add(line, best, SCALAR, value=beyond):
                break

    def _halve(self, line: dict[Any, Method], best: Method) -> None:
        """Try the middles between the best value and its neighbors, where they are apart."""
        middle = self._lowest(line)
        below = max((x for x in line if x < middle), default=middle)
        above = min((x for x in line if x > middle), default=middle)
        for side in (below, above):
            if abs(side - middle) > _FINEST:
                self._add(line, best, SCALAR, value=(side + middle) / 2)

    def _made(self, method: Method, name: str, value: Any) -> Method | None:
        """Measure the method with that value; None if it or the model does not accept the value."""
        try:
            candidate = replace(method, **{name: value})
            candidate.resolved(self.trials.rope)
            if _key(candidate) not in self.tried:
                if not self.objections(self.changes(candidate)):
                    self.losses[_key(candidate)] = self.scores(candidate).loss
                self.tried[_key(candidate)] = candidate
        except MeasureError:  # such as a full disk, which says nothing of this value
            raise
        except RopeExtError:
            return None
        return candidate

    def _value(self, method: Method, name: str) -> Any:
        if name == SCALAR:
            return float(method.attention_scaling(self.trials.rope))
        if name == "temperature":
            return method.temperature or method.own_temperature()
        return getattr(method.resolved(self.trials.rope), name)


def _key(method: Method) -> str:
    return str(method_to_json(method))


def _less(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(after, before, strict=True)]
