"""Puts the same cases to several methods, on one model or several, and writes each result down.

``prepare`` checks everything that can be checked without the weights; ``run`` loads the models
and works batch by batch, the longest first. Batches are a function of the plan alone, and a batch
that is not finished is done again as a whole: a run that was killed and resumed computes the very
numbers of one that was not.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

import rope_ext
from rope_ext.errors import MeasureError, OptionError, RopeExtError
from rope_ext.loading import SIDECAR
from rope_ext.measure import models
from rope_ext.measure.cases import (
    Case,
    Outcome,
    Questions,
    adding,
    digest,
    read_outcomes,
    require_positive,
    write_outcomes,
)
from rope_ext.measure.folder import Folder, log_name, writing
from rope_ext.measure.forward import Advance, cost, score, write
from rope_ext.measure.prompts import Chat, Frame
from rope_ext.measure.summary import UNPATCHED
from rope_ext.methods import Method, build_method, method_class, reach
from rope_ext.record import ARGUMENTS, Record

RESULTS, PAGE = "results.json", "report.html"
LOG = log_name(0)
TABLES = ("cells.csv", "table.md")
LARGEST_SEED = 2**32 - 1  # numpy's
ADAPTER = "adapter"
"""In place of a method: the one under which the adapter was trained."""
_SHOWS_ONLY = {
    *("cli.py", "drawing.py", "figures.py", "pictures.py"),
    *("report.py", "summary.py", "intervals.py", "terminal.py"),
}


class Task(Protocol):
    """What is measured: a name, the kind of its values and its cases."""

    name: str
    kind: str  # "rate": shares between 0 and 1; "loss": nats per token

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All cases, the same ones for every method."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every evaluator is told.

    Args:
        models: folders or Hub ids.
        methods: names, or ``adapter`` for the patch under which the adapter was trained; the
            unpatched model is always measured too.
        lengths: context lengths, tokens. The trained length is added where some are longer.
        factor: of every method but ``adapter``.
        options: further options, by method.
        adapter: folder or Hub id of a PEFT adapter, in use wherever a method is.
        seed: of texts, prompts and bootstrap.
        dtype: ``auto`` or one of ``DTYPES``; see ``load_model``.
        attn: transformers' name of an attention implementation; None leaves the choice to it.
        device: a torch device or ``auto``.
        batch_size: rows per forward; None takes as many as make up ``automatic_tokens``, and
            halves a batch that does not fit into memory.
        chat: whether prompts go through the chat template.
        trained_length: trained context, tokens; None reads it from the configuration.
        compose: patch on top of the checkpoint's own scaling.
        force: measure lengths beyond what a method is meant to reach, and an adapter under
            another patch than the one it was trained under.
        output: folder for results.
        resume: use what is in ``output`` already.
        overwrite: delete it.
    """

    models: tuple[str, ...]
    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    factor: float = 4.0
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    adapter: str | None = None
    seed: int = 0
    dtype: str = "auto"
    attn: str | None = None
    device: str = "auto"
    batch_size: int | None = None
    chat: Chat = "auto"
    trained_length: int | None = None
    compose: bool = False
    force: bool = False
    output: Path = Path("runs/eval")
    resume: bool = False
    overwrite: bool = False

    def to_json(self) -> dict[str, Any]:
        """What determines the results, as plain data."""
        names = set(self.__dataclass_fields__) - {"output", "resume", "overwrite", "force"}
        return {name: getattr(self, name) for name in sorted(names)}


@dataclass(frozen=True, eq=False)
class System:
    """A model under a method: what gets a row in the report.

    Args:
        name: the method, with the model before it where there are several.
        model: as given.
        method: its name, or ``none``.
        options: of the method, and what the adapter's patch has beside them.
        trained: trained context of the model, tokens.
        adapts: whether frequencies depend on the length of the text.
        identity: what its results depend on besides the case.
    """

    name: str
    model: str
    method: str
    options: Mapping[str, Any]
    trained: int
    adapts: bool
    identity: str

    def key(self, case: Case) -> str:
        """Digest of everything that determines the outcome."""
        return digest(self.identity, case.task, case.length, case.bin, case.seed, case.prompt)


@dataclass(frozen=True)
class Plan:
    """Settings that are checked, and all cases.

    Args:
        settings: as given.
        tasks: what is measured.
        lengths: ascending, tokens, with the trained ones.
        systems: rows of the report; the unpatched model comes first of each model.
        questions: by (model, name of a task).
        identities: of every model.
        notes: what a reader of the results should know.
    """

    settings: Settings
    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    systems: tuple[System, ...]
    questions: Mapping[tuple[str, str], Questions]
    identities: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]

    def cases(self, system: System) -> Iterator[Case]:
        """Everything that is asked of ``system``, in the order of the report."""
        for task in self.tasks:
            yield from self.questions[system.model, task.name].cases

    def batches(self, system: System) -> list[list[Case]]:
        """The forwards of ``system``, longest first; rows of a batch are alike."""
        needed = [c for c in self.cases(system) if not self._nested(system, c)]
        needed.sort(key=lambda case: (-case.length, -case.tokens))  # stable
        groups: dict[tuple, list[Case]] = {}
        for case in needed:
            written = case.count if case.mode == "write" else None
            groups.setdefault((case.length, case.task, case.mode, written), []).append(case)
        batches = []
        for (length, *_), cases in groups.items():
            size = self.settings.batch_size or max(1, automatic_tokens(self.settings) // length)
            batches += [cases[i : i + size] for i in range(0, len(cases), size)]
        return batches

    def _nested(self, system: System, case: Case) -> bool:
        return case.nested and not system.adapts and case.length < self.lengths[-1]

    @cached_property
    def folder(self) -> Folder:
        """Where results go."""
        return Folder(self.settings.output)

    @cached_property
    def stored(self) -> dict[str, Outcome]:
        """Outcomes of earlier runs, by key; some may belong to other settings."""
        return read_outcomes(self.folder.logs) if self.settings.resume else {}

    def left(self, system: System) -> list[list[Case]]:
        """The batches of ``system`` that no earlier run has finished."""
        return [
            batch
            for batch in self.batches(system)
            if any(system.key(case) not in self.stored for case in batch)
        ]

    @cached_property
    def size(self) -> tuple[int, int]:
        """Cases in all, and cases left to measure (less what follows from others)."""
        total = sum(len(batch) for system in self.systems for batch in self.batches(system))
        left = sum(len(batch) for system in self.systems for batch in self.left(system))
        return total, left

    def collect(self, done: Mapping[str, Outcome]) -> list[Outcome]:
        """The outcome of every case of every system, in the order of the report."""
        outcomes = []
        for system in self.systems:
            wholes: dict[tuple[str, int], Outcome] = {}
            cases = list(self.cases(system))
            for case in cases:
                if case.nested and case.length == self.lengths[-1]:
                    wholes[case.task, case.seed] = done[system.key(case)]
            for case in cases:
                key = system.key(case)
                if self._nested(system, case):
                    outcomes.append(_within(wholes[case.task, case.seed], case, key))
                else:
                    outcomes.append(done[key])
        return outcomes


def automatic_tokens(settings: Settings) -> int:
    """Tokens per forward where no batch size is given."""
    return 8192 if models.resolve_device(settings.device) == "cpu" else 32768


def prepare(settings: Settings, tasks: Sequence[Task]) -> Plan:
    """Check the settings, choose texts and prompts; the weights are not touched.

    Raises:
        RopeExtError: something is unknown, missing, too short or in the way.
    """
    methods = checked_methods(
        settings.methods, settings.factor, settings.options, settings.adapter, settings.force
    )
    require_positive(batch_size=settings.batch_size, trained_length=settings.trained_length)
    if settings.dtype not in models.DTYPES:
        raise OptionError(
            f"dtype={settings.dtype!r} is not valid; it must be one of {', '.join(models.DTYPES)}"
        )
    models.require_attention(settings.attn)
    if not tasks:
        raise OptionError("no task is given, so there is nothing to measure; give --tasks some")
    if not settings.models:
        raise OptionError("no model to measure; give --model a folder or Hub id")
    if len(set(settings.models)) < len(settings.models):
        raise OptionError("a model is given twice; give --model each just once")
    if not settings.lengths:
        raise OptionError("no length to measure; give --lengths, such as 512,1024,2048")
    require_seed(settings.seed)
    device = models.resolve_device(settings.device)
    if settings.resume and settings.overwrite:
        raise OptionError("--resume and --overwrite contradict each other; give one of them")
    require_free(settings)
    Folder(settings.output).check(written(tasks))
    configs = {model: models.load_config(model) for model in settings.models}
    trained = {
        model: settings.trained_length or models.trained_length(config)
        for model, config in configs.items()
    }
    asked = tuple(sorted(set(settings.lengths)))
    lengths = tuple(sorted({*asked, *(n for n in trained.values() if n < max(asked))}))
    notes = list(beyond(methods, asked, trained, settings.force))
    notes += saved_otherwise(configs)
    frames = {
        model: Frame.of(models.load_tokenizer(model), settings.chat) for model in settings.models
    }
    try:
        questions = _questions(tasks, frames, lengths, settings.seed)
    except RopeExtError as error:
        if lengths == asked:
            raise
        # The trained length was our addition: do without it where a prompt does not fit.
        questions = _questions(tasks, frames, asked, settings.seed)
        notes.append(f"the cost within the trained length is not measured ({error})")
        lengths = asked
    notes += [note for built in questions.values() for note in built.notes]
    identities = {}
    for model, config in configs.items():
        identities[model] = {
            "model": models.identity(model, config),
            "adapter": settings.adapter and models.identity(settings.adapter, None),
            "trained_length": trained[model],
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
            "dtype": settings.dtype,
            "attn": settings.attn,
            "batch_size": settings.batch_size,
            "compose": settings.compose,
            "versions": versions(),
        }
    labels = _labels(settings.models)
    systems = []
    for model in settings.models:
        for method, options in {UNPATCHED: {}, **methods}.items():
            identity = dict(identities[model])
            if method == UNPATCHED:
                identity["adapter"] = None
            systems.append(
                System(
                    name=f"{labels[model]} {method}".strip(),
                    model=model,
                    method=method,
                    options=options,
                    trained=trained[model],
                    adapts=models.adapts(configs[model])
                    or (method != UNPATCHED and built(method, options).adapts),
                    identity=digest(identity, method, options),
                )
            )
    unique = tuple(dict.fromkeys(notes))
    return Plan(settings, tuple(tasks), lengths, tuple(systems), questions, identities, unique)


def _questions(
    tasks: Sequence[Task], frames: Mapping[str, Frame], lengths: Sequence[int], seed: int
) -> dict[tuple[str, str], Questions]:
    return {
        (model, task.name): task.questions(frame, lengths, seed)
        for model, frame in frames.items()
        for task in tasks
    }


def require_seed(seed: int) -> None:
    """Raise OptionError for a seed that some generator of random numbers does not take."""
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise OptionError(
            f"seed={seed!r} is not valid; it must be a whole number from 0 to {LARGEST_SEED}"
        )


def require_free(settings: Settings) -> None:
    """Raise MeasureError where there are results that nobody said what to do with."""
    if Folder(settings.output).logs and not (settings.resume or settings.overwrite):
        raise MeasureError(
            f"{settings.output} holds results already; give --resume to use and complete them, "
            f"--overwrite to delete them, or another --output"
        )


def written(tasks: Sequence[Task]) -> list[str]:
    """The files that a report of these tasks may consist of."""
    pictures = ["rates", *(task.name for task in tasks)]
    pictures += [f"{task.name}_positions" for task in tasks if task.kind == "loss"]
    return [RESULTS, *TABLES, PAGE, *(f"{name}.png" for name in pictures)]


def saved_otherwise(configs: Mapping[str, Any]) -> Iterator[str]:
    """A note for every model with its configuration that comes with a patch, which is undone."""
    for model, config in configs.items():
        record = models.saved_under(config)
        if record is not None:
            yield (
                f"{model} was saved under {record.call()}; {UNPATCHED} is without that: ask for "
                f"this method, with its factor and options, to measure it as it was saved"
            )


def beyond(
    methods: Mapping[str, Mapping[str, Any]],
    lengths: Sequence[int],
    trained: Mapping[str, int],
    force: bool,
) -> Iterator[str]:
    """A note for every method, and model with its trained length, whose reach is exceeded.

    Raises:
        OptionError: there is one, and no ``force``.
    """
    for model, length in trained.items():
        for method, options in methods.items():
            under = options.get("frequency")
            built(method, options).check(length if under is None else reach(under.factor, length))
            target = reach(options["factor"], length)
            far = [str(n) for n in lengths if n > target]
            if not far:
                continue
            note = (
                f"{', '.join(far)} tokens: beyond factor {options['factor']:g} x the trained "
                f"{length} tokens = {target} of {method} on {model}"
            )
            if not force:
                raise OptionError(
                    f"{note}; give a larger --factor, shorter --lengths, or --force to measure it "
                    f"all the same"
                )
            yield f"{note}, which is not meant to reach that far"


def _labels(names: Sequence[str]) -> dict[str, str]:
    """A short name for every model; none where there is only one."""
    if len(names) == 1:
        return {names[0]: ""}
    short = [Path(name).name for name in names]
    return {
        name: label if short.count(label) == 1 else name
        for name, label in zip(names, short, strict=True)
    }


def checked_methods(
    names: Sequence[str],
    factor: float,
    options: Mapping[str, Mapping[str, Any]],
    adapter: str | None = None,
    force: bool = False,
) -> dict[str, dict[str, Any]]:
    """Options of every method by its own name, after building each once to check them.

    Args:
        names: names or aliases; the unpatched model may be among them, or stand alone.
        factor: of every method but ``adapter``.
        options: further options, by name or alias.
        adapter: folder or Hub id; ``adapter`` among the names stands for the patch under which
            it was trained.
        force: accept another one.

    Raises:
        UnknownMethodError: there is no such method.
        OptionError: an option is unknown, missing, out of range, or of a method not in ``names``;
            or the adapter was trained under another patch.
        MeasureError: the adapter cannot be found.
    """
    if not factor > 1:
        raise OptionError(
            f"factor={factor:g} would not extend anything; give --factor a number above 1"
        )
    if ADAPTER in options:
        raise OptionError(f"--method {ADAPTER} has its options beside the adapter; give none")
    given = {method_class(name).name: dict(values) for name, values in options.items()}
    record = None if adapter is None else models.adapter_record(adapter)
    methods: dict[str, dict[str, Any]] = {}
    if ADAPTER in names:
        methods |= _of_adapter(adapter, record)
    for name in names:
        if name in (UNPATCHED, ADAPTER):
            continue
        name = method_class(name).name
        of_adapter = methods.get(name)
        methods[name] = {"factor": factor, **given.get(name, {})}
        try:
            method = build_method(name, **methods[name])
            method.check()
        except OptionError as error:
            raise OptionError(
                f"{error}; on the command line: --option {name}.NAME=VALUE, or leave {name} out"
            ) from None
        if record is not None and not _trained_under(record, method):
            same_name = "" if of_adapter is None else f" (and only one {name} fits into one run)"
            if not force or same_name:
                raise OptionError(
                    f"the adapter {adapter} was trained under {record.call()}, not under "
                    f"{method}{same_name}; give --method {ADAPTER} for that, or --force and "
                    f"{name} without {ADAPTER} to measure it all the same"
                )
        methods[name] = of_adapter or methods[name]
    unused = [name for name in given if name not in methods]
    if unused:
        raise OptionError(f"options are given for {', '.join(unused)}, which is not in use here")
    if not names:
        raise OptionError("no method is given; choose some, such as yarn,ntk,dynamic_yarn")
    return methods


def patched(
    model: Any, name: str, options: Mapping[str, Any], compose: bool, trained_length: int | None
) -> AbstractContextManager[Any]:
    """``model`` under a method of :func:`checked_methods`."""
    given = {"compose": compose, "original_max_position_embeddings": trained_length}
    return rope_ext.patched(model, name, **{**given, **options})


def built(name: str, options: Mapping[str, Any]) -> Method:
    """A method of :func:`checked_methods`."""
    return build_method(name, **{k: v for k, v in options.items() if k not in ARGUMENTS})


def _of_adapter(adapter: str | None, record: Record | None) -> dict[str, dict[str, Any]]:
    if record is None:
        where = "no --adapter is given" if adapter is None else f"{adapter} has none"
        raise OptionError(
            f"--method {ADAPTER} stands for the patch in the {SIDECAR} beside an adapter, and "
            f"{where}; give --method the name of a method"
        )
    beside = {k: v for k, v in record.arguments.items() if v != ARGUMENTS[k]}
    return {record.method.name: {**record.method.options(), **beside}}


def _trained_under(record: Record, method: Method) -> bool:
    """Whether ``method`` by itself is the patch of an adapter."""
    alone = all(
        record.arguments[name] == ARGUMENTS[name]
        for name in ("frequency", "sliding_layers", "precise")
    )
    return alone and method in (record.method, record.resolved)


def versions() -> dict[str, str]:
    """Versions of what computes an outcome, and a digest of this package's own sources."""
    root = Path(rope_ext.__file__).parent
    sources = sorted(path for path in root.rglob("*.py") if path.name not in _SHOWS_ONLY)
    return {
        "rope_ext": rope_ext.__version__,
        "rope_ext_sources": digest([path.read_text(encoding="utf-8") for path in sources]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Crew:
    """The processes that share the work, one per device: one, unless something launched more."""

    rank: int
    count: int
    device: str
    wait: Callable[[], None]

    @classmethod
    def join(cls, device: str) -> Crew:
        """Find this process among those that ``accelerate launch`` or ``torchrun`` started."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls(0, 1, device, lambda: None)
        from accelerate import PartialState

        # One process may be done long before another: the default of minutes would end the run.
        state = PartialState(cpu=device == "cpu", timeout=timedelta(days=7))
        chosen = str(state.device) if device == "auto" else device
        return cls(state.process_index, state.num_processes, chosen, state.wait_for_everyone)

    def share(self, batches: Sequence[Any]) -> list[Any]:
        """What this process does; batches are sorted by length, so that shares are alike."""
        return list(batches[self.rank :: self.count])


def run(
    plan: Plan, advance: Advance = lambda work: None, begin: Advance = lambda work: None
) -> list[Outcome] | None:
    """Measure what is left of ``plan``.

    Args:
        plan: from ``prepare``.
        advance: told the work done after every forward.
        begin: told the work there is, before the first.

    Returns:
        All outcomes of the plan, in its order; None in every process but the first.

    Raises:
        RopeExtError: a model cannot be loaded, or a method cannot be applied to it, or there is
            not enough memory.
    """
    crew = Crew.join(plan.settings.device)
    with plan.folder.held():
        if crew.rank == 0:
            require_free(plan.settings)  # another run may have ended since the plan was made
        crew.wait()  # nobody reads the logs before the folder is ours alone
        done = dict(plan.stored)
        work = {system: crew.share(plan.left(system)) for system in plan.systems}
        crew.wait()  # nobody changes the logs before everybody has read them
        if crew.rank == 0 and plan.settings.overwrite:
            plan.folder.clear()
        crew.wait()
        begin(sum(_work(batch) for batches in work.values() for batch in batches))
        _measure(plan, crew, work, done, advance)
        crew.wait()
        return None if crew.rank else _merged(plan, done)


def _measure(
    plan: Plan,
    crew: Crew,
    work: Mapping[System, Sequence[Sequence[Case]]],
    done: dict[str, Outcome],
    advance: Advance,
) -> None:
    """Do this process's share of the work; every outcome goes into its log and into ``done``."""
    settings = plan.settings
    with adding(settings.output / log_name(crew.rank)) as add:
        for name, systems in groupby(plan.systems, key=lambda system: system.model):
            systems = [system for system in systems if work[system]]
            if not systems:
                continue
            model = models.load_model(
                name, settings.dtype, crew.device, settings.attn, settings.adapter
            )
            runner = _Runner(model, name, settings)
            for system in systems:  # what cannot be applied shows before anything is measured
                with runner.applied(system):
                    pass
            for system in systems:
                with runner.applied(system):
                    for batch in work[system]:
                        if system.adapts:
                            runner.forget()
                        for case, result in zip(batch, runner.measure(batch), strict=True):
                            outcome = _outcome(system, case, result)
                            if outcome.key not in done:
                                add(outcome)
                                done[outcome.key] = outcome
                        advance(_work(batch))
            del model, runner  # before the next one is loaded


def _merged(plan: Plan, done: dict[str, Outcome]) -> list[Outcome]:
    """All outcomes of the plan; the logs of all processes become one, in that order."""
    logs = plan.folder.logs
    done |= read_outcomes(logs)
    outcomes = plan.collect(done)
    ours = {outcome.key: outcome for outcome in outcomes if outcome.key in done}
    others = [outcome for key, outcome in plan.stored.items() if key not in ours]
    path = plan.settings.output / LOG
    with writing(path, "make room; --resume keeps what is finished"):
        write_outcomes(path, [*ours.values(), *others])
        for log in logs:
            if log != path:
                log.unlink()
    return outcomes


def _out_of_memory(error: RuntimeError) -> bool:
    """Also on processors and Macs, where it is a plain RuntimeError."""
    places = ("MPS backend out of memory", "DefaultCPUAllocator: can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(p in str(error) for p in places)


def _work(batch: Sequence[Case]) -> float:
    return sum(cost(case.tokens) for case in batch)


@dataclass(frozen=True)
class _Result:
    value: float
    tokens: int
    written: str | None = None
    curve: tuple[tuple[int, float, int], ...] = ()


def _outcome(system: System, case: Case, result: _Result) -> Outcome:
    return Outcome(
        key=system.key(case),
        system=system.name,
        task=case.task,
        length=case.length,
        bin=case.bin,
        depth=case.depth,
        seed=case.seed,
        prompt=case.prompt,
        answers=case.answers,
        group=case.group,
        value=result.value,
        tokens=result.tokens,
        written=result.written,
        curve=result.curve,
    )


def _within(whole: Outcome, case: Case, key: str) -> Outcome:
    """The outcome of a window that begins another one, read off the other's curve."""
    total, count = next((total, count) for at, total, count in whole.curve if at == case.length)
    return replace(
        whole,
        key=key,
        length=case.length,
        prompt=case.prompt,
        value=total / count,
        tokens=count,
        curve=tuple(point for point in whole.curve if point[0] <= case.length),
    )


class _Runner:
    """One loaded model."""

    def __init__(self, model: Any, name: str, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.tokenizer = models.load_tokenizer(name)
        eos = model.generation_config.eos_token_id
        self.eos = self.tokenizer.eos_token_id if eos is None else eos
        pad = self.tokenizer.pad_token_id
        first = self.eos[0] if isinstance(self.eos, list) else self.eos
        self.pad = next(token for token in (pad, first, 0) if token is not None)

    def applied(self, system: System) -> AbstractContextManager[Any]:
        """The model under a method; the unpatched model goes without its adapter too."""
        if system.method == UNPATCHED:
            return self.model.disable_adapter() if self.settings.adapter else nullcontext()
        settings = self.settings
        return patched(
            self.model, system.method, system.options, settings.compose, settings.trained_length
        )

    def forget(self) -> None:
        """Let transformers' dynamic scaling forget the longest text that it has seen."""
        score(self.model, [[self.pad] * 2], 1, self.pad)

    def measure(self, batch: Sequence[Case]) -> list[_Result]:
        """The results of these cases, in one forward if memory allows it."""
        try:
            return self._written(batch) if batch[0].mode == "write" else self._scored(batch)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            if self.settings.batch_size is not None or len(batch) == 1:
                raise MeasureError(self._advice(batch)) from None
        # Halves depend on this batch alone, and so does what a resumed run computes.
        half = len(batch) // 2
        return self.measure(batch[:half]) + self.measure(batch[half:])

    def _advice(self, batch: Sequence[Case]) -> str:
        lower = ["shorter --lengths"]
        if self.settings.dtype not in ("bfloat16", "float16"):
            lower.insert(0, "--dtype bfloat16")
        if len(batch) > 1:
            lower.insert(0, f"--batch-size less than {len(batch)}")
        return (
            f"out of memory at {len(batch)} x {batch[0].length} tokens ({batch[0].task}); give "
            f"{' or '.join(lower)}, and --resume to keep what is finished"
        )

    def _written(self, batch: Sequence[Case]) -> list[_Result]:
        rows = [case.ids for case in batch]
        texts = write(self.model, rows, batch[0].count, self.pad, self.eos)
        decoded = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
        return [
            _Result(share_found(case, text), len(ids), text)
            for case, text, ids in zip(batch, decoded, texts, strict=True)
        ]

    def _scored(self, batch: Sequence[Case]) -> list[_Result]:
        tails = [_tail(case) for case in batch]
        losses, hits = score(self.model, [case.ids for case in batch], max(tails), self.pad)
        results = []
        for row, case in enumerate(batch):
            if case.mode == "argmax":
                found = bool(hits[row, -case.count :].all())
                results.append(_Result(float(found), case.count))
            else:
                results.append(_loss(case, losses[row, -tails[row] :].double()))
        return results


def _tail(case: Case) -> int:
    """Tokens at the end whose losses are needed."""
    if case.curve and not case.nested:
        return len(case.ids) - 1
    return len(case.ids) - min(case.only) if case.only else case.count


def _loss(case: Case, losses: torch.Tensor) -> _Result:
    """Mean loss of the scored tokens; one that is not a number counts as infinite."""
    losses = losses.nan_to_num(nan=math.inf, posinf=math.inf)
    first = len(case.ids) - len(losses)
    scored = losses[-case.count :]
    if case.only:
        scored = losses[torch.tensor(case.only, device="cpu") - first]
    sums = losses.cumsum(0)
    curve = tuple(
        (edge, float(sums[edge - first - 1]), edge - first) for edge in case.curve if edge > first
    )
    return _Result(float(scored.mean()), len(scored), curve=curve)


def share_found(case: Case, written: str) -> float:
    """Share of the answers in what was written, whatever their case (RULER, arXiv 2404.06654)."""
    if case.whole:
        return float(written.strip() == case.key)
    text = written.lower()
    return sum(answer.lower() in text for answer in case.answers) / len(case.answers)


def dump(data: Any) -> str:
    """JSON as this package writes it: sorted keys, so that equal results are equal bytes."""
    return json.dumps(data, indent=1, sort_keys=True, default=str) + "\n"
