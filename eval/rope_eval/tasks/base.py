"""The base class and the registry of tasks.

A task is one file: its questions, their scores, and its options, which are the fields of a
dataclass. :func:`option` makes a field an option of the command line, too. Tasks know nothing about
methods, so every method gets identical questions.
"""

from __future__ import annotations

import importlib.util
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from rope_eval.cases import Questions
from rope_eval.data.prompts import Frame
from rope_eval.options import option, option_fields
from rope_eval.settings import Settings
from rope_ext.command.arguments import parse_length, split
from rope_ext.errors import Mistakes, OptionError, RopeExtError, nearest

Kind = Literal["rate", "loss"]


@dataclass(frozen=True)
class Task:
    """Base of all tasks; a subclass sets ``name`` and ``kind``, and builds the questions.

    ``kind`` is the type of the values: ``rate`` for fractions between 0 and 1; ``loss`` for nats
    per token, shown as perplexity. Tasks with the same ``suite`` also get an average;
    ``suite_size`` is the number of tasks in RULER, whose effective length is defined over all of
    them.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    suite: ClassVar[str | None] = None
    suite_size: ClassVar[int | None] = None

    @classmethod
    def from_options(cls, given: Mapping[str, Any], beside: Sequence[str] = ()) -> Task:
        """Build the task from options.

        Args:
            given: values from the command line, by field name.
            beside: names of all requested tasks, which may share options with this one.

        Raises:
            OptionError: an option is invalid.
        """
        return cls(**given)

    def parts(self, settings: Settings) -> Sequence[Task]:
        """The tasks to run, if this one is a group of tasks or depends on the settings.

        Raises:
            RopeExtError: an option conflicts with the settings, or a text cannot be read.
        """
        return [self]

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """All cases, identical for every method.

        Args:
            frame: tokenizer of a model, and its chat template around a prompt.
            lengths: context lengths, tokens, ascending.
            seed: must determine everything random.

        Raises:
            RopeExtError: a length is too short for a question.
        """
        raise NotImplementedError


T = TypeVar("T", bound=type[Task])
_REGISTRY: dict[str, type[Task]] = {}


def register(cls: T) -> T:
    """Class decorator: registers a task under its name. The same class may be defined again.

    Raises:
        RopeExtError: the name is taken, or ``kind`` is invalid.
    """
    holder = _REGISTRY.get(cls.name, cls)
    if (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
        raise RopeExtError(
            f"task name {cls.name!r} is taken by {holder.__name__}; give {cls.__name__} another"
        )
    if cls.kind not in typing.get_args(Kind):
        raise RopeExtError(
            f"{cls.__name__}.kind={cls.kind!r} is not valid; it must be one of "
            f"{', '.join(typing.get_args(Kind))}"
        )
    _REGISTRY[cls.name] = cls
    return cls


def unregister(cls: type[Task]) -> None:
    """Make a task unknown again."""
    del _REGISTRY[cls.name]


def from_file(path: str) -> list[str]:
    """Run a Python file and return the names of the tasks that it registers.

    Raises:
        OptionError: there is no such file, or it registers no task.
    """
    if not Path(path).is_file():
        raise OptionError(
            f"file {path} does not exist; pass one that registers a task, or a task name"
        )
    spec = importlib.util.spec_from_file_location(f"rope_ext_task_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is not a Python file; pass a .py file that registers a task")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [name for name, cls in _REGISTRY.items() if cls.__module__ == spec.name]
    if not names:
        raise OptionError(f"{path} registers no task; decorate one with @register")
    return names


def all_tasks() -> dict[str, type[Task]]:
    """Every registered task by name, in order of registration."""
    return dict(_REGISTRY)


def chosen(names: Sequence[str]) -> list[type[Task]]:
    """The tasks with these names, each once, in order of registration.

    Raises:
        OptionError: there is no such task.
    """
    for name in names:
        if name not in _REGISTRY:
            raise OptionError(
                f"unknown task {name!r}{nearest(name, _REGISTRY) or '.'} "
                f"Tasks: {', '.join(_REGISTRY)}"
            )
    return [cls for name, cls in _REGISTRY.items() if name in names]


def build(
    names: Sequence[str], given: Mapping[str, Any], mistakes: Mistakes | None = None
) -> list[Task | None]:
    """Build the tasks with these names, each with the options that it has.

    Args:
        names: of tasks.
        given: values of options, by field name.
        mistakes: collects errors, and a task with an error is None; if None, errors are raised.

    Raises:
        OptionError: there is no such task, or an option is invalid.
    """
    found = Mistakes() if mistakes is None else mistakes
    classes = found.check(chosen, names, default=[None])
    asked = [cls.name for cls in classes if cls]
    made = []
    for cls in classes:
        known = {one.name for one in option_fields(cls)} if cls else ()
        own = {k: v for k, v in given.items() if k in known}
        made.append(cls and found.check(cls.from_options, own, asked))
    if mistakes is None:
        found.report()
    return made


def answer_tokens(instead_of: str | None = None) -> Any:
    """The option for the maximum answer length, of a task with its own default or without."""
    own = "; part of the length" if instead_of is None else f"; default: {instead_of}"
    return option(None, f"maximum answer length in tokens{own}", parse_length)


def drawn(of: str = "rows of each data set", default: str = "all") -> Any:
    """The option for the number of samples from the task's data."""
    return option(None, f"number of {of}, sampled at random; default: {default}")


def named_parts(text: str, known: Iterable[str]) -> list[str]:
    """The names in ``known`` that ``text`` contains, in the order of ``known``.

    Args:
        text: comma-separated names, or ``all``.
        known: all valid names.

    Raises:
        OptionError: a name is unknown.
    """
    names, known = split(text), list(known)
    for name in names:
        if name not in known and name != "all":
            raise OptionError(
                f"unknown task {name!r}{nearest(name, known) or '.'} "
                f"Tasks: {', '.join(known)}, or all"
            )
    return [name for name in known if name in names or "all" in names]
