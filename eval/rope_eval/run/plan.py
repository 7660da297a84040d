"""Checks everything that can be checked without weights, and chooses all cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from rope_eval.cases import Case, Outcome, Questions, digest, read_outcomes
from rope_eval.data.prompts import Frame
from rope_eval.folder import HEADER, Folder
from rope_eval.options import check_options, refuse
from rope_eval.run.served import require_server, served_identity
from rope_eval.settings import BEFORE, Settings, require_seed
from rope_eval.systems import System, beyond, built, label, short_name
from rope_eval.tasks.base import Task
from rope_eval.versions import versions
from rope_ext.command.arguments import UNPATCHED
from rope_ext.command.method_options import ADAPTER, checked_methods, saved_otherwise
from rope_ext.config.nested import text_of
from rope_ext.config.settings import all_settings
from rope_ext.errors import MeasureError, RopeExtError
from rope_ext.methods import method_class
from rope_ext.saving import checkpoints as models

# Label suffixes of an adapter's method if it is measured without and with the adapter's weights.
BEFORE_TRAINING = ", before training"
TRAINED = ", trained"
RESULTS = "results.json"
PAGE = "report.html"
TABLES = ("cells.csv", "table.md")


@dataclass(frozen=True)
class Plan:
    """Checked settings, and all cases.

    ``lengths`` ascend and have the trained ones, and of ``systems``, the rows of the report, the
    unpatched one comes first of each model. ``questions`` are by model and name of a task. ``chat``
    says whether prompts use a chat template, by model; it is empty if no task has prompts.
    ``run`` fills ``refused``, why a model cannot take a method, by the name of the system, and
    ``harness``, the keys of what lm-evaluation-harness measured.
    """

    settings: Settings
    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    systems: tuple[System, ...]
    questions: Mapping[tuple[str, str], Questions]
    identities: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    chat: Mapping[str, bool] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    harness: dict[str, list[str]] = field(default_factory=dict)

    def measured(self) -> Plan:
        """The plan without the refused systems, whose reasons are among its notes."""
        systems = tuple(system for system in self.systems if system.name not in self.refused)
        settings = replace(
            self.settings,
            methods=tuple(filter(self.takes, self.settings.methods)),
            options={name: v for name, v in self.settings.options.items() if self.takes(name)},
        )
        notes = (*self.notes, *self.refusals)
        return replace(self, settings=settings, systems=systems, notes=notes)

    def takes(self, method: str, model: str | None = None) -> bool:
        """Whether a model, or any, takes a method, by a name or alias of it."""
        taken = {
            system.method
            for system in self.systems
            if system.name not in self.refused and model in (None, system.model)
        }
        return method in (UNPATCHED, ADAPTER, BEFORE) or method_class(method).name in taken

    @property
    def refusals(self) -> list[str]:
        return [f"{name} is not measured: {reason}" for name, reason in self.refused.items()]

    def cases(self, system: System) -> Iterator[Case]:
        for task in self.tasks:
            yield from self.questions[system.model, task.name].cases

    def batches(self, system: System) -> list[list[Case]]:
        """Return the forwards of ``system``, longest first; rows of a batch are similar."""
        groups: dict[tuple, list[Case]] = {}
        # The longest first: if memory does not suffice, the run ends early.
        for case in sorted(self.cases(system), key=lambda case: (-case.length, -case.tokens)):
            # Rows that are generated together write up to the same number of tokens.
            written = case.count if case.mode == "write" else None
            groups.setdefault((case.length, case.task, case.mode, written), []).append(case)
        batches = []
        for (length, _, mode, _), cases in groups.items():
            size = rows_per_forward(self.settings, length)
            size = 1 if self.settings.url else size  # a server makes its own batches
            size = len(cases) if mode == "rank" else size  # they share documents
            batches += [cases[i : i + size] for i in range(0, len(cases), size)]
        return batches

    @cached_property
    def folder(self) -> Folder:
        return Folder(self.settings.output)

    @cached_property
    def stored(self) -> dict[str, Outcome]:
        """Outcomes of earlier runs, by key; some may belong to other settings."""
        return read_outcomes(self.folder.logs) if self.settings.resume else {}

    def left(self, system: System) -> list[list[Case]]:
        """Return the batches of ``system`` that no earlier run has finished."""
        return [
            batch
            for batch in self.batches(system)
            # The whole batch: how rows are put together changes rounding, and so what is measured.
            if any(system.key(case) not in self.stored for case in batch)
        ]

    def collect(self, done: Mapping[str, Outcome]) -> list[Outcome]:
        outcomes = []
        for system in self.systems:
            if system.name not in self.refused:
                keys = [*map(system.key, self.cases(system)), *self.harness.get(system.name, ())]
                # A resumed run with more models, or another factor, has other row names.
                outcomes += [replace(done[key], system=system.name) for key in keys]
        return outcomes


def automatic_tokens(settings: Settings) -> int:
    return 8192 if models.resolve_device(settings.device) == "cpu" else 32768


def rows_per_forward(settings: Settings, length: int) -> int:
    """Return how many rows of this length a forward has, as asked for or automatically."""
    return settings.batch_size or max(1, automatic_tokens(settings) // length)


def prepare(settings: Settings, tasks: Sequence[Task]) -> Plan:
    """Check the settings, choose texts and prompts; the weights are not touched."""
    _check(settings)
    methods = checked_methods(
        tuple(name for name in settings.methods if name != BEFORE),
        factor=settings.factor,
        options=settings.options,
        adapter=settings.adapter,
        force=settings.force,
    )
    parts = _parts(tasks, settings)
    # Before tokenizers and texts are read, which takes longer.
    require_free(settings)
    Folder(settings.output).check(written(parts))
    read = {model: _read(model, settings) for model in settings.models}
    configs = {model: config for model, (config, _) in read.items()}
    trained = {model: length for model, (_, length) in read.items()}
    _require_purpose(settings, parts, configs)
    requested = tuple(sorted(set(settings.lengths)))
    notes = list(beyond(methods, lengths=requested, trained=trained, force=settings.force))
    if not settings.url:
        notes += saved_otherwise(configs)
        notes += _scaled(configs)
    frames = {model: _frame(model, settings) for model in settings.models}
    chosen = _chosen(frames, parts, requested, trained=trained.values(), seed=settings.seed)
    notes += chosen.notes
    identities = _identities(settings, configs, trained)
    systems = list(_systems(settings, methods, configs, identities=identities))
    if _embeds(parts):
        longest = max(chosen.lengths)
        systems = [one for system in systems for one in _with_cut(system, longest)]
    return Plan(
        settings=settings,
        tasks=parts,
        lengths=chosen.lengths,
        systems=tuple(systems),
        questions=chosen.questions,
        identities=identities,
        notes=tuple(dict.fromkeys(notes)),
        chat=_chat(frames, parts),
    )


def _embeds(tasks: Sequence[Task]) -> bool:
    return any(task.embeds for task in tasks)


def _require_purpose(settings: Settings, tasks: Sequence[Task], configs: Mapping[str, Any]) -> None:
    """Raise OptionError for a model that does not give what the tasks measure."""
    require = models.require_measurable if _embeds(tasks) else models.require_causal
    for model, config in configs.items():
        if not settings.url:
            require(model, config)


def _chat(frames: Mapping[str, Frame], tasks: Sequence[Task]) -> dict[str, bool]:
    """Say for each model whether prompts use its chat template; empty if no task has prompts."""
    prompted = any(task.kind == "rate" for task in tasks) and not _embeds(tasks)
    return {model: frame.around is not None for model, frame in frames.items() if prompted}


def _frame(model: str, settings: Settings) -> Frame:
    """Return how prompts of a model begin and end, with its tokenizer."""
    frame = Frame.from_tokenizer(models.load_tokenizer(model), settings.chat)
    return replace(frame, model=model)


class _Chosen(NamedTuple):
    """Texts and prompts by model and task, their lengths in tokens, and notes about them."""

    questions: dict[tuple[str, str], Questions]
    lengths: tuple[int, ...]
    notes: list[str]


def _chosen(
    frames: Mapping[str, Frame],
    tasks: Sequence[Task],
    requested: tuple[int, ...],
    trained: Iterable[int],
    seed: int,
) -> _Chosen:
    """Choose texts and prompts of the lengths ``requested``, and of shorter trained lengths."""
    lengths = tuple(
        sorted({*requested, *(length for length in trained if length < max(requested))})
    )
    notes = []
    try:
        questions = _questions(frames, tasks, lengths, seed=seed)
    except RopeExtError as error:
        if lengths == requested:
            raise
        # The trained length was added by us: drop it if a prompt does not fit.
        lengths = requested
        questions = _questions(frames, tasks, lengths, seed=seed)
        notes.append(f"the cost within the trained length is not measured ({error})")
    for one in questions.values():
        notes += one.notes
    return _Chosen(questions, lengths, notes)


def _questions(
    frames: Mapping[str, Frame], tasks: Sequence[Task], lengths: tuple[int, ...], seed: int
) -> dict[tuple[str, str], Questions]:
    """Choose texts and prompts of these lengths in tokens, by model and task."""
    return {
        (model, task.name): task.questions(frame, lengths, seed)
        for model, frame in frames.items()
        for task in tasks
    }


def _read(model: str, settings: Settings) -> tuple[Any, int]:
    """Return the configuration of a model, which a server's may lack, and its trained length."""
    try:
        config = models.load_config(model)
    except MeasureError:
        if settings.url is None:
            raise
        return None, settings.trained_length or max(settings.lengths)
    return config, settings.trained_length or models.trained_length(config)


def _check(settings: Settings) -> None:
    """Raise OptionError for invalid settings, and MeasureError for a missing device."""
    check_options(settings)
    models.require_attention(settings.attn)
    require_seed(settings.seed)
    models.resolve_device(settings.device)
    several = len(set(settings.models)) < len(settings.models)
    adapter = ADAPTER in settings.methods
    refuse(
        (not settings.models and not settings.url, "no model is given; give a directory, Hub ID or "
         ".gguf file first"),
        (several, "a model is given twice; give --model each just once"),
        (not settings.lengths, "no length to measure; give --lengths, such as 512,1024,2048"),
        (settings.resume and settings.overwrite, "--resume and --overwrite contradict each other; "
         "give one of them"),
        (BEFORE in settings.methods and not adapter, f"--method {BEFORE} needs {ADAPTER} beside "
         f"it; give --method {BEFORE},{ADAPTER}"),
    )  # fmt: skip
    require_server(settings)


def _parts(tasks: Sequence[Task], settings: Settings) -> tuple[Task, ...]:
    """Return the parts of all tasks; raises OptionError for tasks that exclude each other."""
    parts = tuple(part for task in tasks for part in task.parts(settings))
    names = [task.name for task in parts]
    twice = [name for name in names if names.count(name) > 1]
    embedding = [task.name for task in parts if task.embeds]
    alone = f"the task {', '.join(embedding[:1])} measures embeddings"
    refuse(
        (0 < len(embedding) < len(parts), f"{alone}, and others of --tasks measure generated text; "
         f"run them separately"),
        (bool(embedding and settings.url), f"{alone}, which --url does not return; leave it out"),
        (bool(embedding and settings.adapter), f"{alone} without an adapter; merge it with "
         f"recipes/merge.py of the repository, then measure the merged model"),
        (not parts, "no task is given, so there is nothing to measure; give --tasks some"),
        (bool(twice), f"the task {', '.join(twice[:1])} is given twice; measure one of them at a "
         f"time"),
    )  # fmt: skip
    return parts


def _identities(
    settings: Settings, configs: Mapping[str, Any], trained: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Return what a model's outcomes depend on, besides the case and the method."""
    device = models.resolve_device(settings.device)
    return {
        model: {
            "model": models.identity(model, config),
            "adapter": settings.adapter and models.identity(settings.adapter, None),
            "trained_length": trained[model],
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
            "dtype": settings.dtype,
            "attn": settings.attn,
            "batch_size": settings.batch_size,
            "compose": settings.compose,
            "versions": versions(),
            **served_identity(settings),
        }
        for model, config in configs.items()
    }


def _scaled(configs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each model with a scaling that plain transformers loads.

    The configuration doesn't say whether it was trained so, or saved under an untrained patch.
    """
    for model, config in configs.items():
        if models.saved_under(config) is not None:
            continue
        found = {one.rope_type: one for one in all_settings(text_of(config)).values()}
        for kind, one in found.items():
            if kind != "default":
                of = f" with factor {one.factor:g}" if one.factor else ""
                yield (
                    f"{model} is scaled by its configuration (rope_type {kind!r}{of}), and "
                    f"{UNPATCHED} keeps that; if it was not trained so, measure the checkpoint "
                    f"without it"
                )


def _systems(
    settings: Settings,
    methods: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, Any],
    identities: Mapping[str, Mapping[str, Any]],
) -> Iterator[System]:
    """Yield systems: each model unpatched and with each method; each server is one system."""
    for server in settings.servers:
        model = settings.models[0]
        name = server.label
        identity = {**identities[model], "url": server.url, "served_as": server.served_model_name}
        key = digest(identity, UNPATCHED, {})
        trained = identity["trained_length"]
        yield System(
            name=name,
            label=name,
            model=model,
            method=UNPATCHED,
            options={},
            trained=trained,
            is_dynamic=False,
            identity=key,
        )
    shorts = list(map(short_name, settings.models))
    for model, short in zip([] if settings.servers else settings.models, shorts, strict=False):
        first = ""
        if len(shorts) > 1:  # by the last part of its path, if no other model has the same
            first = f"{short if shorts.count(short) == 1 else model} "
        for method, options, adapted, stage in _rows(settings, methods):
            identity = dict(identities[model])
            # What is measured without the adapter also counts beside another one.
            if not adapted:
                identity["adapter"] = None
            named = label(method, options, settings.factor) + stage
            dynamic = method != UNPATCHED and built(method, options).is_dynamic
            dynamic = dynamic or models.is_dynamic(configs[model])
            key = digest(identity, method, options)
            trained = identity["trained_length"]
            yield System(
                name=first + named,
                label=named,
                model=model,
                method=method,
                options=options,
                trained=trained,
                is_dynamic=dynamic,
                identity=key,
                adapted=adapted,
            )


def _with_cut(system: System, longest: int) -> Iterator[System]:
    """Yield the system and, after an unpatched one, the same with every text cut at its window."""
    yield system
    if system.method == UNPATCHED and longest > system.trained:
        stage = f", cut at {system.trained} tokens"
        name = system.name + stage
        label = system.label + stage
        yield replace(system, name=name, label=label, cut=system.trained)


def _rows(
    settings: Settings, methods: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Mapping[str, Any], bool, str]]:
    """Yield (method, options, whether the adapter is used, label suffix)."""
    yield UNPATCHED, {}, False, ""
    adapted = settings.adapter is not None
    for index, (method, options) in enumerate(methods.items()):
        if index == 0 and BEFORE in settings.methods:  # the adapter's own is the first
            yield method, options, False, BEFORE_TRAINING
            yield method, options, adapted, TRAINED
        else:
            yield method, options, adapted, ""


def require_free(settings: Settings) -> None:
    """Raise MeasureError if there are results, without --resume or --overwrite."""
    results = any(log.stat().st_size > len(HEADER) for log in Folder(settings.output).logs)
    if results and not (settings.resume or settings.overwrite):
        raise MeasureError(
            f"{settings.output} holds results already; give --resume to use and complete them, "
            f"--overwrite to delete them, or another --output"
        )


def written(tasks: Sequence[Task]) -> list[str]:
    """Return the files that a report of these tasks may consist of."""
    pictures = ["rates", *(task.name for task in tasks)]
    return [RESULTS, *TABLES, PAGE, *(f"{name}.png" for name in pictures)]
