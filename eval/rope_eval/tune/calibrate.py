"""Tunes the scalar options of a method for a model and a text, above all its temperature.

Coordinate descent over the grids that a method declares: the attention factor first, then windows,
groups and ramps, then the attention factor again with what was found. One half of the text and of
the prompts selects values. The other half tests them against the published default, which stays
unless the new values are better beyond noise and cost no more than is allowed.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_eval.cases import digest
from rope_eval.data.prompts import beginning
from rope_eval.data.text import python_library
from rope_eval.folder import Folder, lock, writing
from rope_eval.options import keywords_of
from rope_eval.reports.calibration import (
    NAME,
    SCALAR,
    Calibration,
    Change,
    Choice,
    Trial,
    mean,
)
from rope_eval.reports.intervals import paired_rates, sum_interval
from rope_eval.tune.fitness import (
    HAY,
    Needles,
    Prompt,
    Rows,
    fingerprint,
    losses_at_end,
    losses_of_answers,
    prompts_of,
    read,
    windows_of,
    witnesses,
)
from rope_eval.tune.options import CONFIDENCE, FEWEST_SAMPLES, CalibrationOptions
from rope_eval.tune.target import trained_rope
from rope_eval.tune.trial_log import TrialLog
from rope_ext.config.record import method_to_json
from rope_ext.errors import MeasureError, OptionError, RopeExtError, nearest
from rope_ext.methods import Method, Rope, build_method
from rope_ext.methods.rope import factor_to
from rope_ext.patching import patched
from rope_ext.rotary.sites import evaluating, text_decoder

LOG, RESULT, PICTURE = (f"{NAME}.{end}" for end in ("jsonl", "json", "png"))
_STEP = 0.1  # of the attention factor, beyond its grid and around the value found before
_FINEST = 0.05  # smaller gaps are not halved
_WALK = 4  # steps beyond the grid, at most
_UNKNOWN = (-math.inf, math.inf)  # too few documents or prompts for an interval
CHOOSING, JUDGING = "choosing", "judging"


@dataclass(frozen=True)
class Half:
    """One half of the data.

    Args:
        name: ``choosing`` or ``judging``.
        rows: windows of the target length.
        inside: for each of them, the windows of the trained length that it is cut into.
        prompts: of the trained and of the target length.
    """

    name: str
    rows: Rows
    inside: tuple[tuple[tuple[int, ...], ...], ...]
    prompts: tuple[Prompt, ...]

    @property
    def pieces(self) -> list[tuple[int, ...]]:
        """All windows of the trained length."""
        return [piece for pieces in self.inside for piece in pieces]

    def weighed(self, losses: Sequence[float]) -> tuple[list[float], list[float]]:
        """The mean loss of each document, and how many windows it has.

        With fewer than ``FEWEST_SAMPLES`` documents, each window counts as one.
        """
        groups = self.rows.by_document(losses)
        if len(groups) < FEWEST_SAMPLES:
            return list(losses), [1.0] * len(losses)
        return [mean(group) for group in groups], [len(group) for group in groups]


@dataclass(frozen=True)
class Scores:
    """Scores of a model on one half; see :class:`~rope_eval.reports.calibration.Trial`.

    Args:
        far: of every window.
        inside: of every window, the mean over the windows of the trained length in it.
        answers: of every prompt.
        found: of every prompt.
    """

    far: tuple[float, ...]
    inside: tuple[float, ...]
    answers: tuple[float, ...]
    found: tuple[bool, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, None for infinite losses."""
        plain = {name: getattr(self, name) for name in ("far", "inside", "answers")}
        plain = {name: [x if x < math.inf else None for x in xs] for name, xs in plain.items()}
        return {**plain, "found": list(self.found)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scores:
        """The inverse."""
        losses = {
            name: tuple(math.inf if x is None else x for x in data[name])
            for name in ("far", "inside", "answers")
        }
        return cls(**losses, found=tuple(data["found"]))

    @property
    def finite(self) -> bool:
        """Whether all losses are numbers."""
        return max(*self.far, *self.inside, *self.answers) < math.inf


@keywords_of(CalibrationOptions)
def calibrate(
    model: nn.Module,
    tokenizer: Any,
    target_length: int,
    text: str | os.PathLike[str] | Iterable[str] | None = None,
    *,
    methods: str | Method | Iterable[str | Method] = "yarn",
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    **options: Any,
) -> Calibration:
    """Tune the scalar options of a method for ``model`` on a text: temperature, windows, ramps.

    One half of the data selects values by the loss of the text at the target length plus the loss
    of passkey answers, hidden in filler and in the text, at the trained and the target length. The
    other half tests them. A value replaces the published default only if that sum is lower beyond
    noise (99 %, paired), neither part is higher beyond noise, and perplexity rises by at most
    ``cost`` at the upper end of its interval, both within the trained length and at the target
    length. Prompts do not count where the unpatched model finds less than half of them within its
    trained length.

    The model is restored, also after an exception. Compiled models run eagerly, since every
    candidate would be compiled again.

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
    rope = trained_rope(model, given, given.scored)
    starts = _starts(model, rope, methods, given)
    grids = [_grids(start, rope, given.chosen) for start in starts]
    folder = None if output is None else Path(output)
    with _ours(folder, resume), _eager(model):
        texts = python_library("train") if text is None else read(text)
        rows, notes = _rows(tokenizer, texts, given)
        halves, more = _halves(tokenizer, rows, rope, given)
        known = given.__dict__ | {
            "model": fingerprint(model),
            "text": digest([half.rows.windows for half in halves]),
            "methods": [method_to_json(start) for start in starts],
        }
        log = TrialLog(None, "scores", {})
        if folder is not None:
            log = TrialLog.open(folder / LOG, NAME, "scores", known)
        with evaluating(model):
            found = Run(model, rope, given, log).result(starts, grids, halves, [*notes, *more])
        if folder is not None:
            _keep(found, folder)
    return found


def _eager(model: nn.Module) -> AbstractContextManager[Any]:
    """Compiled modules run eagerly."""
    compiled = (getattr(module, "_compiled_call_impl", None) for module in model.modules())
    if hasattr(model, "_orig_mod") or any(compiled):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _starts(
    model: nn.Module,
    rope: Rope,
    methods: str | Method | Iterable[str | Method],
    given: CalibrationOptions,
) -> list[Method]:
    """The published defaults, each tried on the model so that errors show early."""
    asked = [methods] if isinstance(methods, (str, Method)) else list(methods)
    factor = factor_to(given.target_length, rope.length)
    starts: list[Method] = []
    for one in asked:
        if not isinstance(one, (str, Method)):
            raise OptionError(
                f"methods={one!r} is not valid; give names such as 'yarn', or method objects such "
                f"as rope_ext.YaRN(factor={factor:g})"
            )
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


def _grids(method: Method, rope: Rope, options: Sequence[str] | None) -> dict[str, tuple[Any, ...]]:
    """The options of a method to tune and their values, the attention factor first.

    Raises:
        OptionError: an option is unknown, or the method has none.
    """
    grids = method.grids(rope)
    for name in options or ():
        if name not in grids:
            known = f"its options are {', '.join(grids)}" if grids else "it has none"
            raise OptionError(
                f"{method.name}: calibrate cannot tune {name!r}{nearest(name, grids)}; {known}"
            )
    if not grids:
        raise OptionError(f"{method.name} has no options to calibrate; leave it out")
    chosen = {name: values for name, values in grids.items() if options is None or name in options}
    return {name: chosen[name] for name in sorted(chosen, key=lambda name: name != SCALAR)}


@contextmanager
def _ours(folder: Path | None, resume: bool) -> Iterator[None]:
    """Lock the output directory, and check that no file of others would be overwritten.

    Raises:
        MeasureError: it cannot be written, is in use, or holds such a file.
    """
    if folder is None:
        if resume:
            raise OptionError("resume=True needs output=FOLDER to resume from")
        yield
        return
    with writing(folder, "give another output"):
        folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        Folder(folder).check([RESULT, PICTURE])
        require_free(folder, resume, "resume=True", "output")
        yield


def require_free(folder: Path, resume: bool, cure: str, output: str) -> None:
    """Raise MeasureError for the log of a calibration that nobody said to continue.

    Args:
        folder: for the results.
        resume: whether to continue.
        cure: how ``resume`` is given.
        output: how ``output`` is given.
    """
    if (folder / LOG).exists() and not resume:
        raise MeasureError(
            f"{folder / LOG} already exists; give {cure} to continue it, or another {output}"
        )


def _keep(found: Calibration, folder: Path) -> None:
    """Write the results, with a picture if it can be drawn."""
    files = {RESULT: found.to_json().encode()}
    try:
        picture = io.BytesIO()
        found.plot(picture)
        files[PICTURE] = picture.getvalue()
    except MeasureError:  # no matplotlib: the numbers are worth more
        pass
    Folder(folder).write(files)


def _rows(
    tokenizer: Any, texts: Sequence[str], given: CalibrationOptions
) -> tuple[Rows, list[str]]:
    cure = (
        f"samples={given.samples} are needed for each of two halves; give more text, or fewer "
        f"samples"
    )
    if not texts:
        raise MeasureError("there is no text; give a file with text in it")
    count = 2 * given.samples
    rows = windows_of(tokenizer, texts, given.target_length, count, given.seed, cure)
    alone = len(set(rows.documents)) < 2
    note = "all windows are from one document: the halves are not of different texts"
    return rows, [note] * alone


def _halves(
    tokenizer: Any, rows: Rows, rope: Rope, given: CalibrationOptions
) -> tuple[tuple[Half, Half], list[str]]:
    """Windows and prompts of both halves, which share no document if there are two."""
    numbers = in_halves(rows.documents)
    halves, notes = [], []
    first = beginning(tokenizer)
    for place, name in enumerate((CHOOSING, JUDGING)):
        chosen = [i for i, half in enumerate(numbers) if half == place]
        windows = tuple(rows.windows[i] for i in chosen)
        inside = tuple(tuple(cut(window, rope.length, first)) for window in windows)
        lengths, seed = (rope.length, given.target_length), 2 * given.seed + place
        asked = prompts_of(tokenizer, lengths, given.prompts, windows, seed)
        documents = tuple(rows.documents[i] for i in chosen)
        halves.append(Half(name, Rows(windows, documents), inside, asked))
    if given.prompts and not halves[0].prompts:
        notes.append(
            f"answers do not count: no prompt fits into the {rope.length} trained tokens (the "
            f"shortest has {min(map(Needles(tokenizer).least, HAY))})"
        )
    return (halves[0], halves[1]), notes


def cut(window: tuple[int, ...], length: int, first: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The windows of ``length`` tokens in a window, each with the beginning-of-sequence token."""
    text, step = window[len(first) :], length - len(first)
    for start in range(0, len(text) - step + 1, step):
        yield (*first, *text[start : start + step])


def in_halves(documents: Sequence[int]) -> list[int]:
    """0 or 1 for each window: halves of different documents, as equal as they can be."""
    if len(set(documents)) == 1:
        return [i % 2 for i in range(len(documents))]
    sizes = {one: documents.count(one) for one in documents}
    halves, filled = {}, [0, 0]
    for one in sorted(sizes, key=lambda one: -sizes[one]):
        halves[one] = filled.index(min(filled))
        filled[halves[one]] += sizes[one]
    return [halves[one] for one in documents]


class Run:
    """A calibration under way.

    Args:
        model: not patched.
        rope: its trained embedding.
        given: the settings.
        log: what was measured.
    """

    def __init__(
        self, model: nn.Module, rope: Rope, given: CalibrationOptions, log: TrialLog
    ) -> None:
        self.model, self.rope, self.given, self.log = model, rope, given, log
        self.rows = 0  # that were run, now or before
        self.advance: Callable[[int], None] = lambda rows: None

    def result(
        self,
        starts: Sequence[Method],
        grids: Sequence[Mapping[str, tuple[Any, ...]]],
        halves: tuple[Half, Half],
        notes: Sequence[str],
    ) -> Calibration:
        """Descend from every start, and judge."""
        from rope_ext.command.terminal import progress  # rich is not loaded with it

        choices = []
        with progress() as shown:
            one = halves[0]
            each = len(one.rows.windows) + len(one.pieces) + len(one.prompts)
            most = each * (2 + sum(map(_most, grids)))
            words = f"at most {most} forwards of {self.given.target_length} tokens"
            bar = shown.add_task(words, total=most)
            self.advance = lambda rows: shown.advance(bar, rows)
            unpatched = [self.scores(None, half) for half in halves]
            halves, more = self._counting(halves, unpatched)
            one = halves[0]
            each = len(one.rows.windows) + len(one.pieces) + len(one.prompts)
            ends = [self.rows + each * sum(map(_most, grids[: i + 1])) for i in range(len(grids))]
            shown.update(bar, total=ends[-1], completed=self.rows)
            for start, grid, end in zip(starts, grids, ends, strict=True):
                shown.update(bar, description=start.name)
                choices.append(self._choice(start, grid, halves))
                shown.update(bar, completed=end)
        return Calibration(
            model=type(text_decoder(self.model)).__name__,
            trained_length=self.rope.length,
            target_length=self.given.target_length,
            scored=self.given.tail,
            seed=self.given.seed,
            cost=self.given.cost,
            prompts=sum(p.length == self.rope.length for p in halves[1].prompts),
            rows=self.rows,
            inside=mean(unpatched[1].inside),
            choices=tuple(choices),
            notes=(*notes, *more),
        )

    def _counting(
        self, halves: tuple[Half, Half], unpatched: Sequence[Scores]
    ) -> tuple[tuple[Half, Half], list[str]]:
        """The halves without the prompts that the unpatched model cannot answer anyway."""
        length = self.rope.length
        asked = [p for half in halves for p in half.prompts if p.length == length]
        found = [hit for scores in unpatched for hit in scores.found]
        counting, notes = witnesses(asked, found)
        one, other = (
            dataclasses.replace(half, prompts=tuple(p for p in half.prompts if p.hay in counting))
            for half in halves
        )
        return (one, other), notes

    def scores(self, method: Method | None, half: Half) -> Scores:
        """Of a method, or within the trained length of the unpatched model.

        Raises:
            _Refused: the model does not accept the method.
            MeasureError: the log cannot be written.
        """
        length, pieces = self.rope.length, half.pieces
        windows = () if method is None else half.rows.windows
        prompts = [p for p in half.prompts if method is not None or p.length == length]
        rows = len(windows) + len(pieces) + len(prompts)
        self.rows += rows
        what = {"method": method and method_to_json(method), "half": half.name}
        known = self.log.get(what)
        if known is not None:
            self.advance(rows)
            return Scores.from_json(known)
        with self._under(method):
            far = tuple(self._losses(windows, self.given.tail))
            losses = iter(self._losses(pieces, length - 1))
            inside = tuple(mean([next(losses) for _ in each]) for each in half.inside)
            answers = losses_of_answers(self.model, prompts, self.advance)
        scores = Scores(far, inside, tuple(x for x, _ in answers), tuple(x for _, x in answers))
        self.log.add(what, scores.to_json())
        return scores

    def _losses(self, rows: Sequence[Sequence[int]], scored: int) -> list[float]:
        return losses_at_end(self.model, rows, scored, self.advance)

    @contextmanager
    def _under(self, method: Method | None) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                if method is not None:
                    stack.enter_context(patched(self.model, method, **self.given.arguments))
            except RopeExtError as error:
                raise _Refused from error
            yield

    def trial(self, method: Method, scores: Scores, half: Half) -> Trial:
        """The means of some scores."""
        near, beyond = self._parted(scores, half)
        return Trial(
            method=method,
            attention_factor=float(method.attention_scaling(self.rope)),
            far=mean(scores.far),
            inside=mean(scores.inside),
            answers=mean(scores.answers) if scores.answers else None,
            found_inside=mean(near) if near else None,
            found_beyond=mean(beyond) if beyond else None,
        )

    def _choice(
        self, start: Method, grid: Mapping[str, tuple[Any, ...]], halves: tuple[Half, Half]
    ) -> Choice:
        choosing, judging = halves
        descent = Descent(self, start, choosing)
        proposed = descent.best(grid)
        before = after = self.scores(start, judging)
        if proposed != start:
            after = self.scores(proposed, judging)
        judged = self.changes(start, proposed, before, after, judging)
        reasons = ["no other value is better on the half of the text that selects"]
        if proposed != start:
            reasons = self.objections(judged)
            if not judged["score"].better:
                reasons.append(f"{_named(start, proposed)} is not better beyond noise")
        return Choice(start, proposed, judged, tuple(reasons), descent.trials)

    def changes(
        self, start: Method, other: Method, before: Scores, after: Scores, half: Half
    ) -> dict[str, Change]:
        """What becomes of every score."""
        one, two = self.trial(start, before, half), self.trial(other, after, half)
        far = half.weighed(_less(after.far, before.far))
        inside = half.weighed(_less(after.inside, before.inside))
        answers = (_less(after.answers, before.answers), None)
        samples = {"far": [far], "inside": [inside], "score": [far]}
        if half.prompts:
            samples |= {"answers": [answers], "score": [far, answers]}
        found = {}
        for name, parts in samples.items():
            ends = (math.inf, math.inf)
            if before.finite and after.finite:
                ends = sum_interval(parts, CONFIDENCE) or _UNKNOWN
            found[name] = Change(getattr(one, name), getattr(two, name), *ends)
        if half.prompts:
            hits = zip(self._parted(after, half), self._parted(before, half), strict=True)
            for name, (new, old) in zip(("found_inside", "found_beyond"), hits, strict=True):
                ends = paired_rates(new, old, CONFIDENCE) or _UNKNOWN
                found[name] = Change(getattr(one, name), getattr(two, name), *ends)
        return found

    def _parted(self, scores: Scores, half: Half) -> tuple[list[bool], list[bool]]:
        """Which prompts of the trained length were answered, and which of the target length."""
        both = list(zip(half.prompts, scores.found, strict=True))
        near, beyond = self.rope.length, self.given.target_length
        return (
            [hit for prompt, hit in both if prompt.length == near],
            [hit for prompt, hit in both if prompt.length == beyond],
        )

    def objections(self, changes: Mapping[str, Change]) -> list[str]:
        """Why a method is no replacement for the published default."""
        if not changes["score"].after < math.inf:
            return ["its loss is NaN or infinite"]
        found = []
        for name, length in (("inside", self.rope.length), ("far", self.given.target_length)):
            change, where = changes[name], f"perplexity at {length} tokens"
            if change.low > math.log1p(self.given.cost) or (name == "far" and change.worse):
                found.append(f"its {where} rises by {change.percent}")
            elif change.high > math.log1p(self.given.cost):
                found.append(
                    f"cannot tell whether its {where} rises by less than "
                    f"{100 * self.given.cost:g} %: {change.percent} (more samples may)"
                )
        if "answers" in changes and changes["answers"].worse:
            found.append("its loss on the answers rises beyond noise")
        return found


class _Refused(Exception):
    """A model does not accept a method."""


class Descent:
    """Coordinate descent for one method, on the half that chooses.

    Args:
        run: measures.
        start: the published default.
        half: of the data.

    Raises:
        MeasureError: a loss of the published default is NaN or infinite.
    """

    def __init__(self, run: Run, start: Method, half: Half) -> None:
        self.run, self.start, self.half = run, start, half
        self.before = run.scores(start, half)
        if not self.before.finite:
            raise MeasureError(
                f"the loss is NaN or infinite at {run.given.target_length} tokens under {start}; "
                f"load the model in float32 or bfloat16"
            )
        self.tried: dict[str, Trial] = {}
        self.fit: dict[str, float] = {}  # scores of those without objections
        self.add(start, self.before)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Everything tried, in order."""
        return tuple(self.tried.values())

    def best(self, grid: Mapping[str, tuple[Any, ...]]) -> Method:
        """The best method that is found along these options."""
        best = self.start
        for name, values in grid.items():
            best = self._along(best, name, values)
        if SCALAR in grid and self._without(best) != self._without(self.start):
            here = self._value(best, SCALAR)
            best = self._along(best, SCALAR, (here - _STEP, here + _STEP))
        return best

    def _along(self, best: Method, name: str, values: Sequence[Any]) -> Method:
        """The best with another value of one option."""
        line = [best]

        def add(value: Any) -> bool:
            made = self._try(best, name, value)
            if made is not None and made not in line:
                line.append(made)
            return made is not None

        for value in values:
            add(value)
        if name != SCALAR:
            return self._least(line)
        for _ in range(_WALK):
            known = sorted(self._value(one, SCALAR) for one in line)
            here = self._value(self._least(line), SCALAR)
            beyond = here + _STEP if here == known[-1] else here - _STEP
            if known[0] < here < known[-1] or beyond <= 0 or not add(_rounded(beyond)):
                break
        known = [self._value(one, SCALAR) for one in line]
        here = self._value(self._least(line), SCALAR)
        for side in (
            max((value for value in known if value < here), default=here),
            min((value for value in known if value > here), default=here),
        ):
            if abs(side - here) > _FINEST:
                add(_rounded((side + here) / 2))
        return self._least(line)

    def _try(self, method: Method, name: str, value: Any) -> Method | None:
        """The method with that value, measured; None where it is refused."""
        if self._value(method, name) == value:
            return method
        if name == SCALAR:
            value = _rounded(value)
        try:
            made = dataclasses.replace(method, **{name: value})
            made.resolved(self.run.rope)
            if _key(made) not in self.tried:
                self.add(made, self.run.scores(made, self.half))
        except (OptionError, _Refused):
            return None
        return made

    def add(self, method: Method, scores: Scores) -> None:
        trial = self.run.trial(method, scores, self.half)
        self.tried[_key(method)] = trial
        changes = self.run.changes(self.start, method, self.before, scores, self.half)
        if method == self.start or not self.run.objections(changes):
            self.fit[_key(method)] = trial.score

    def _least(self, methods: Sequence[Method]) -> Method:
        """The best of them, of equal ones the first."""
        return min(methods, key=lambda one: self.fit.get(_key(one), math.inf))

    def _value(self, method: Method, name: str) -> Any:
        if name == SCALAR:
            return float(method.attention_scaling(self.run.rope))
        if name == "temperature":
            return method.temperature or method.own_temperature()
        return getattr(method.resolved(self.run.rope), name)

    def _without(self, method: Method) -> Method:
        return dataclasses.replace(method, **{SCALAR: None})


def _key(method: Method) -> str:
    return str(method_to_json(method))


def _rounded(value: float) -> float:
    return round(value, 4)


def _named(start: Method, other: Method) -> str:
    """The options in which a method differs."""
    before = start.options()
    changed = {name: value for name, value in other.options().items() if value != before[name]}
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())


def _less(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(after, before, strict=True)]


def _most(grid: Mapping[str, tuple[Any, ...]]) -> int:
    """Measurements of a descent and its judgement, at most."""
    again = 2 + _WALK + 2 if SCALAR in grid and len(grid) > 1 else 0
    first = _WALK + 2 if SCALAR in grid else 0
    return 1 + sum(map(len, grid.values())) + first + again + 2
