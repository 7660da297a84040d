"""Measures methods against each other on one model: perplexity and passkey retrieval.

``prepare`` checks everything that can be checked without the weights; ``run`` loads the model
and measures cell by cell, writing each one down as it is done.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

import rope_ext
from rope_ext.errors import MeasureError, OptionError
from rope_ext.measure import figures, models
from rope_ext.measure.cells import Cell, Task, digest, read_cells, write_cells
from rope_ext.measure.forward import Advance, cost
from rope_ext.measure.passkey import PasskeyCase, passed, passkey_grid
from rope_ext.measure.perplexity import Windows, choose_windows, window_losses
from rope_ext.measure.summary import UNPATCHED
from rope_ext.measure.text import python_library, read_texts
from rope_ext.methods.base import build_method, method_class

CELLS = "cells.jsonl"
_SHOWS_ONLY = {"cli.py", "figures.py", "report.py", "summary.py", "intervals.py"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to compare.

    Args:
        model: a folder or a Hub id.
        methods: names; the unpatched model is always measured too.
        lengths: context lengths, tokens.
        factor: of every method.
        options: further options, by method.
        texts: files for perplexity; none means the held-out part of Python's library.
        windows: of text, per length.
        trials: passkey prompts per length and depth bin.
        depths: bins of equal width for the place of the passkey.
        seed: of windows, prompts and bootstrap.
        dtype: ``auto``, ``float32`` or ``bfloat16``; see ``load_model``.
        device: a torch device or ``auto``.
        batch_tokens: tokens per forward.
        trained_length: trained context, tokens; None reads it from the configuration.
        compose: patch on top of the checkpoint's own scaling.
        output: folder for results.
        resume: use the cells that are in ``output`` already.
        overwrite: delete them.
    """

    model: str
    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    factor: float = 4.0
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    texts: tuple[Path, ...] = ()
    windows: int = 16
    trials: int = 10
    depths: int = 5
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    batch_tokens: int = 8192
    trained_length: int | None = None
    compose: bool = False
    output: Path = Path("rope-ext-compare")
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Plan:
    """A comparison whose settings are checked.

    Args:
        settings: as given.
        lengths: ascending, tokens.
        methods: the options of every method by its own name, the unpatched model first.
        trained: trained context, tokens.
        windows: texts for perplexity.
        cases: passkey prompts by (length, depth bin).
        identity: what all cells depend on besides method and data.
        notes: what a reader of the results should know.
    """

    settings: Settings
    lengths: tuple[int, ...]
    methods: Mapping[str, Mapping[str, Any]]
    trained: int
    windows: Windows
    cases: Mapping[tuple[int, int], Sequence[PasskeyCase]]
    identity: Mapping[str, Any]
    notes: tuple[str, ...]

    @cached_property
    def tasks(self) -> list[Task]:
        """All cells, in the order of measurement."""
        data = {
            ("perplexity", length, None): digest(self.windows.at(length), self.windows.scored)
            for length in self.lengths
        }
        for (length, depth), cases in self.cases.items():
            data["passkey", length, depth] = digest([(c.ids, c.answer_tokens) for c in cases])
        return [
            Task(digest(self.identity, method, options, place, rows), place[0], method, *place[1:])
            for method, options in self.methods.items()
            for place, rows in data.items()
        ]

    @cached_property
    def stored(self) -> dict[str, Cell]:
        """Cells of earlier runs, by key; some may belong to other settings."""
        path = self.settings.output / CELLS
        return read_cells(path) if self.settings.resume and path.exists() else {}

    @property
    def left(self) -> list[Task]:
        """The cells that no earlier run has measured."""
        return [task for task in self.tasks if task.key not in self.stored]

    @property
    def work(self) -> float:
        """The work left, in the unit that ``run`` reports."""
        return sum(
            sum(cost(len(ids)) for ids in self.windows.at(task.length))
            if task.kind == "perplexity"
            else sum(cost(len(case.ids)) for case in self.cases[task.length, task.depth])
            for task in self.left
        )


def prepare(settings: Settings) -> Plan:
    """Check the settings, choose texts and prompts; the weights are not touched.

    Raises:
        RopeExtError: something is unknown, missing, too short or in the way.
    """
    figures.require_matplotlib()
    methods = checked_methods(settings.methods, settings.factor, settings.options)
    for name in ("windows", "trials", "depths", "batch_tokens", "trained_length"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} is not valid; it must be at least 1")
    if settings.dtype not in models.DTYPES:
        raise OptionError(
            f"dtype={settings.dtype!r} is not valid; it must be one of {', '.join(models.DTYPES)}"
        )
    lengths = tuple(sorted(set(settings.lengths)))
    if not lengths:
        raise OptionError("no length to measure; give --lengths, such as 512,1024,2048")
    device = models.resolve_device(settings.device)
    if settings.resume and settings.overwrite:
        raise OptionError("--resume and --overwrite contradict each other; give one of them")
    if (settings.output / CELLS).exists() and not (settings.resume or settings.overwrite):
        raise MeasureError(
            f"{settings.output} holds results already; give --resume to use and complete them, "
            f"--overwrite to delete them, or another --output"
        )
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeasureError(
            f"cannot write to {settings.output}: {error.strerror}; give --output another folder"
        ) from None
    config = models.load_config(settings.model)
    trained = settings.trained_length or models.trained_length(config)
    tokenizer = models.load_tokenizer(settings.model)
    try:
        cases = passkey_grid(tokenizer, lengths, settings.depths, settings.trials, settings.seed)
    except ValueError as error:
        raise OptionError(f"{error}; give longer --lengths") from None
    texts = read_texts(settings.texts) if settings.texts else python_library("held_out")
    windows = choose_windows(
        tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"],
        lengths,
        settings.windows,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        settings.seed,
    )
    identity = {
        "model": models.identity(settings.model, config),
        "trained_length": trained,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "dtype": settings.dtype,
        "batch_tokens": settings.batch_tokens,
        "compose": settings.compose,
        "seed": settings.seed,
        "versions": versions(),
    }
    return Plan(
        settings,
        lengths,
        {UNPATCHED: {}, **methods},
        trained,
        windows,
        cases,
        identity,
        tuple(_notes(settings, lengths, trained, windows)),
    )


def run(plan: Plan, advance: Advance = lambda work: None) -> list[Cell]:
    """Measure what is left of ``plan`` and return all of its cells, in its order.

    Args:
        plan: from ``prepare``.
        advance: told the work done after every forward; it adds up to ``plan.work``.

    Raises:
        RopeExtError: the model cannot be loaded, or a method cannot be applied to it.
    """
    settings = plan.settings
    path = settings.output / CELLS
    left, done = plan.left, dict(plan.stored)
    write_cells(path, list(done.values()))
    if left:
        model = models.load_model(settings.model, settings.dtype, settings.device)
        for method in plan.methods:  # what cannot be applied shows before anything is measured
            with _applied(model, plan, method):
                pass
        with path.open("a", encoding="utf-8") as log:
            for method, tasks in groupby(left, key=lambda task: task.method):
                with _applied(model, plan, method):
                    for task in tasks:
                        cell = _measure(model, plan, task, advance)
                        log.write(json.dumps(cell.to_json()) + "\n")
                        log.flush()
                        done[cell.key] = cell
    return [done[task.key] for task in plan.tasks]


def checked_methods(
    names: Sequence[str], factor: float, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Options of every method by its own name, after building each once to check them.

    Args:
        names: names or aliases; the unpatched model may be among them and is left out.
        factor: of every method.
        options: further options, by name or alias.

    Raises:
        UnknownMethodError: there is no such method.
        OptionError: an option is unknown, missing, out of range, or of a method not in ``names``.
    """
    if not factor > 1:
        raise OptionError(
            f"factor={factor:g} would not extend anything; give --factor a number above 1"
        )
    given = {method_class(name).name: dict(values) for name, values in options.items()}
    methods: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == UNPATCHED:
            continue
        name = method_class(name).name
        methods[name] = {"factor": factor, **given.get(name, {})}
        try:
            build_method(name, **methods[name])
        except OptionError as error:
            raise OptionError(
                f"{error}; on the command line: --option {name}.NAME=VALUE, or leave {name} out"
            ) from None
    unused = [name for name in given if name not in methods]
    if unused:
        raise OptionError(f"options are given for {', '.join(unused)}, which is not in use here")
    if not methods:
        raise OptionError("no method is given; choose some, such as yarn,ntk,dynamic_yarn")
    return methods


def versions() -> dict[str, str]:
    """Versions of what computes a cell, and a digest of this package's own sources."""
    root = Path(rope_ext.__file__).parent
    sources = sorted(path for path in root.rglob("*.py") if path.name not in _SHOWS_ONLY)
    return {
        "rope_ext": rope_ext.__version__,
        "rope_ext_sources": digest([path.read_text(encoding="utf-8") for path in sources]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _notes(
    settings: Settings, lengths: Sequence[int], trained: int, windows: Windows
) -> Iterator[str]:
    target = settings.factor * trained
    far = [str(length) for length in lengths if length > target]
    if far:
        yield (
            f"{', '.join(far)} tokens: beyond factor {settings.factor:g} x the trained {trained} "
            f"tokens = {target:g}, so no method is meant to reach that far"
        )
    if windows.joined:
        yield (
            f"too few documents of {lengths[-1]} tokens: documents are joined, so that a window "
            f"may hold unrelated texts"
        )
    if len(windows.texts) < settings.windows:
        yield (
            f"the text gives only {len(windows.texts)} windows of {lengths[-1]} tokens "
            f"({settings.windows} asked for)"
        )


def _applied(model: Any, plan: Plan, method: str) -> AbstractContextManager[Any]:
    if method == UNPATCHED:
        return nullcontext()
    return rope_ext.patched(
        model,
        method,
        compose=plan.settings.compose,
        original_max_position_embeddings=plan.settings.trained_length,
        **plan.methods[method],
    )


def _measure(model: Any, plan: Plan, task: Task, advance: Advance) -> Cell:
    start = time.perf_counter()
    batch_tokens = plan.settings.batch_tokens
    try:
        if task.kind == "perplexity":
            rows = plan.windows.at(task.length)
            values = window_losses(model, rows, plan.windows.scored, batch_tokens, advance)
        else:
            cases = plan.cases[task.length, task.depth]
            values = [int(x) for x in passed(model, cases, batch_tokens, advance)]
    except torch.OutOfMemoryError:
        raise MeasureError(
            f"out of memory at {task.length} tokens; give --batch-tokens less than {batch_tokens}, "
            f"--dtype bfloat16 or shorter --lengths, and --resume to keep what is finished"
        ) from None
    seconds = round(time.perf_counter() - start, 3)
    return Cell(**dataclasses.asdict(task), values=tuple(values), seconds=seconds)
