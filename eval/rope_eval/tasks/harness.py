"""Tasks of lm-evaluation-harness: its prompts and scores, with our patches and reports.

    rope-ext eval MODEL --tasks longbench,babilong --method yarn --factor 4 --lengths 16k

At each length the harness gets a window of that many tokens, the same for every method, and leaves
out the beginning of a prompt that is longer. A task counts by its first metric that is a mean of
values from 0 to 1. For its other metrics there is ``python -m rope_eval.lm_eval``.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from rope_eval.cases import Outcome, Questions, digest
from rope_eval.data.prompts import Frame
from rope_eval.data.templates import with_limits
from rope_eval.settings import Settings
from rope_eval.tasks.base import Task, all_tasks, option, register, unknown
from rope_ext.command.arguments import split
from rope_ext.errors import MeasureError, OptionError, first_line


def _read_metadata(text: str | None) -> dict[str, Any]:
    try:
        data = json.loads(text or "{}")
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise OptionError(f'--metadata {text!r} is not a JSON object, such as {{"name": 1}}')
    return data


@cache
def _manager(include_path: str | None, metadata: str) -> Any:
    """Return the index of all tasks, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, metadata=json.loads(metadata))


@register
@dataclass(frozen=True)
class Harness(Task):
    """Tasks and groups of lm-evaluation-harness."""

    name: ClassVar[str] = "lm-eval"

    harness_tasks: str = option("", "names of the harness; --tasks takes them, too")
    limit: int | None = option(None, "number of documents of each task; default: all")
    num_fewshot: int | None = option(
        None, "examples before a question; default: of the task", least=0
    )
    include_path: str | None = option(None, "directory with further tasks of the harness")
    metadata: dict[str, Any] | None = option(  # noqa: RUF009
        None, 'JSON for its tasks, such as {"max_seq_lengths": "16k"}', _read_metadata
    )

    @property
    def manager(self) -> Any:
        try:
            # As text, since arguments of a cached function are hashed.
            return _manager(self.include_path, json.dumps(self.metadata or {}))
        except ImportError:
            raise MeasureError(
                f"{unknown(self.harness_tasks, all_tasks())}; those of lm-evaluation-harness need: "
                f'pip install "rope-ext[harness]"'
            ) from None

    def parts(self, settings: Settings) -> Sequence[Task]:
        """Return every task, with the group in which it is averaged."""
        if settings.url is not None:
            raise OptionError(
                "tasks of lm-evaluation-harness need the model in this process; leave them out "
                "with --url, or run `lm_eval --model local-completions`"
            )
        tasks: dict[str, Task] = {}
        given = {field.name: getattr(self, field.name) for field in fields(Harness)}
        for name in split(self.harness_tasks):
            if not self.manager.match_tasks([name]):
                raise unknown(name, all_tasks(), ", and those that `lm_eval ls tasks` lists")
            try:
                found = self.manager.load([name])["tasks"]
            except Exception as error:  # from whatever reads its data
                raise MeasureError(
                    f"cannot read the data of {name} ({type(error).__name__}: {first_line(error)})"
                ) from None
            suite = name if len(found) > 1 else None
            for own, task in found.items():
                metric = _mean(own, task)
                tasks.setdefault(own, HarnessTask(**given, name=own, metric=metric, suite=suite))
        return list(tasks.values())


def _mean(name: str, task: Any) -> str:
    from lm_eval.api.metrics import mean

    metric = next((metric for metric, how in task.aggregation().items() if how is mean), None)
    if metric is None:
        raise OptionError(
            f"no metric of the task {name} is a mean; measure it with python -m rope_eval.lm_eval"
        )
    return metric


@dataclass(frozen=True)
class HarnessTask(Harness):
    """One harness task: its metric, and its group as ``suite``; the harness has the questions."""

    name: str = ""
    metric: str = ""
    suite: str | None = None

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """Return no cases: the harness asks its own questions."""
        return Questions(
            (),
            f"mean of {self.metric} as lm-evaluation-harness computes it, exact intervals; the "
            f"beginning of a prompt that is longer than the window is left out",
        )


def _unknown_answers(file: Path) -> MeasureError:
    return MeasureError(
        f"{file} holds no answers of this program; give --overwrite, or another --output"
    )


def _require_table(file: Path) -> None:
    """Raise MeasureError if a database has more than a table: a view may be a query without end."""
    if not file.exists():
        return
    try:
        with closing(sqlite3.connect(file)) as answers:
            kinds = {kind for (kind,) in answers.execute("SELECT type FROM sqlite_master")}
    except sqlite3.DatabaseError:
        raise _unknown_answers(file) from None
    if kinds - {"table", "index"}:
        raise _unknown_answers(file)


def _remembering(model: Any, answers: Path) -> Any:
    """Return a model of the harness that keeps its answers in a file, and reads them from there.

    The harness's own cache contains pickles, which execute code when they are read; a folder of
    results may come from elsewhere. These answers are JSON.
    """
    from lm_eval.api.model import LM, CachingLM
    from sqlitedict import SqliteDict  # a dependency of the harness

    def decode(text: str | bytes) -> Any:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            raise _unknown_answers(answers) from None
        return tuple(answer) if isinstance(answer, list) else answer

    _require_table(answers)

    class Remembering(CachingLM):
        """Wraps the model as the harness does with ``use_cache``."""

        def __init__(self) -> None:
            super().__init__(model, str(answers))
            self.dbdict.close()
            self.dbdict = SqliteDict(
                str(answers), autocommit=True, encode=json.dumps, decode=decode
            )
            model.set_cache_hook(self.get_cache_hook())

    LM.register(Remembering)  # the harness accepts no other model
    return Remembering()


def outcomes(
    tasks: Sequence[HarnessTask],
    window: Mapping[str, Any],
    chat: bool,
    seed: int,
    cache: Path,
    system: Any,
) -> Iterator[Outcome]:
    """Run ``tasks`` of one ``Harness``; yields a result for each document.

    ``window`` has its model arguments: ``pretrained``, ``tokenizer``, ``max_length`` and
    ``batch_size``; an interrupted run resumes from the answers in the folder ``cache``.
    """
    import lm_eval
    from lm_eval.models import huggingface

    harness: Any = lm_eval  # its decorators hide types
    library: Any = huggingface

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings concern intended behavior
    length = window["max_length"]
    tokenizer = window["tokenizer"]
    tokenizer.model_max_length = max(length, tokenizer.model_max_length)
    first = tasks[0]
    seeds = ("random", "numpy_random", "torch_random", "fewshot_random")
    answers = cache / f"{digest(system.identity, length)}.db"
    found = harness.simple_evaluate(
        _remembering(with_limits(library.HFLM)(**window), answers),
        tasks=[task.name for task in tasks],
        task_manager=first.manager,
        num_fewshot=first.num_fewshot,
        limit=first.limit,
        # Intervals are our own.
        bootstrap_iters=0,
        apply_chat_template=chat,
        metadata=first.metadata,
        **{f"{name}_seed": seed for name in seeds},
    )
    for task in tasks:
        samples = found["samples"][task.name]
        for sample in samples:
            # A task may read an answer in several ways; a document counts once.
            if sample["filter"] != samples[0]["filter"]:
                continue
            value = float(sample[task.metric])
            number = sample["doc_id"]
            if not 0 <= value <= 1:
                raise MeasureError(
                    f"{task.metric} of {task.name} is {value:g}, not within 0 and 1; measure it "
                    f"with python -m rope_eval.lm_eval"
                )
            prompt = sample["prompt_hash"][:16]
            how = (task.metric, sample["filter"], version("lm_eval"))
            key = digest(system.identity, task.name, length, number, prompt, how)
            # The same documents are asked about at every length.
            known = {"bin": None, "depth": None, "seed": number, "group": 1 + number, "tokens": 1}
            known |= {"prompt": prompt, "answers": (str(sample["target"]),), "value": value}
            known |= {"written": str(sample["filtered_resps"][0])}
            yield Outcome(key=key, system=system.name, task=task.name, length=length, **known)
