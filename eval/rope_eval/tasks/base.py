"""The base classes and the registry of tasks.

Each task is one file, with its questions, scoring and options. Tasks do not depend on methods, so
every method gets identical questions.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from rope_eval.cases import Case, Questions, require_positive
from rope_eval.data.prompts import Frame, longest
from rope_eval.options import check_options, option, option_fields
from rope_eval.settings import Settings
from rope_ext.command.arguments import parse_length, parse_lengths, split
from rope_ext.errors import OptionError, nearest

Kind = Literal["rate", "loss"]


@dataclass(frozen=True)
class Task:
    """Base class of all tasks; a subclass sets ``name`` and ``kind``, and builds the questions.

    ``embeds`` is true for a task of cases in mode ``rank``, which loads the model as an embedder.
    ``kind`` is the type of the values: ``rate`` for fractions between 0 and 1; ``loss`` for nats
    per token, shown as perplexity. Tasks with the same ``suite`` also get an average;
    ``suite_size`` is the number of tasks in RULER, whose effective length is defined over all of
    them.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind] = "rate"
    suite: ClassVar[str | None] = None
    suite_size: ClassVar[int | None] = None
    embeds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    def parts(self, settings: Settings) -> Sequence[Task]:
        """Return the tasks to run, if this one is a group of tasks or depends on the settings."""
        return [self]

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        """Build all cases, identical for every method; ``seed`` determines everything random."""
        raise NotImplementedError


class Draw(NamedTuple):
    """The random parameters of a prompt, all generated from ``number``.

    ``depth`` is the position of the answer, from 0 (start) to 1 (end), sampled from its ``bin``.
    """

    index: int
    number: int
    depth: float | None = None
    bin: int | None = None


def draws(
    name: str, lengths: Sequence[int], seed: int, trials: int, depths: int = 0
) -> Iterator[tuple[int, Draw]]:
    """Yield ``trials`` draws for each length, and for each depth bin if there are any."""
    for length in lengths:
        for bin in range(depths or 1):
            at = f":{depths}:{bin}" if depths else ""
            # One for each length and bin: more lengths or trials leave the other prompts alone.
            rng = random.Random(f"{name}:{seed}:{length}{at}")
            for index in range(trials):
                depth = (bin + rng.random()) / depths if depths else None
                number = rng.randrange(2**40)
                drawn = Draw(index=index, number=number, depth=depth, bin=bin if depths else None)
                yield length, drawn


def number_of_prompts(trials: int, depths: int = 0) -> str:
    """Say how many prompts there are for each length, such as ``1 prompt at each of 2 depths``."""
    count = f"{trials} prompt{'s' * (trials != 1)}"
    if not depths:
        return count
    return f"{count} at each of {depths} depths" if depths > 1 else f"{count} at any depth"


@dataclass(frozen=True)
class Prompts(Task):
    """Base class of tasks with generated answers; subclasses build a prompt from a :class:`Draw`.

    Each length and depth bin has ``trials`` prompts; ``depths`` is the number of bins, and 0 places
    the answer anywhere. An answer has at most ``tokens`` tokens, which are part of the length.
    """

    name: str
    trials: int = 20
    tokens: int = 128
    depths: int = 0
    suite: str | None = field(default=None, kw_only=True)
    suite_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_positive(trials=self.trials, new_tokens=self.tokens, depths=self.depths or None)

    @property
    def about(self) -> str:
        raise NotImplementedError

    def prompt(self, frame: Frame, length: int, draw: Draw) -> Case:
        """Build one prompt of at most ``length`` tokens, including its answer."""
        raise NotImplementedError

    def notes(self, cases: Sequence[Case]) -> Iterator[str]:
        return iter(())

    def questions(self, frame: Frame, lengths: Sequence[int], seed: int) -> Questions:
        found = draws(self.name, lengths, seed, trials=self.trials, depths=self.depths)
        cases = [self.prompt(frame, length, draw) for length, draw in found]
        definition = f"{self.about}; {number_of_prompts(self.trials, self.depths)}, exact intervals"
        return Questions(cases, definition, tuple(self.notes(cases)))

    def fill(
        self, build: Callable[[int], Any], length: int, least: int = 0, most: int | None = None
    ) -> tuple[int, Any]:
        """Return the number of parts of the longest prompt with room for its answer, and its ids.

        ``length`` is in tokens, with the answer; see :func:`fill`.
        """
        return fill(self.name, build, length, tokens=self.tokens, least=least, most=most)

    def case(
        self, length: int, draw: Draw, ids: Any, answers: Sequence[str], judge: Any = None
    ) -> Case:
        """Return the case of a prompt ``ids``, to be answered by up to ``tokens`` new tokens."""
        return Case(
            task=self.name,
            length=length,
            seed=draw.number,
            mode="write",
            count=self.tokens,
            ids=ids,
            answers=tuple(answers),
            depth=draw.depth,
            bin=draw.bin,
            judge=judge,
        )


def fill(
    name: str,
    build: Callable[[int], Any],
    length: int,
    tokens: int = 0,
    least: int = 0,
    most: int | None = None,
) -> tuple[int, Any]:
    """Like :func:`longest`, with room for an answer of ``tokens`` tokens."""
    parts, ids = longest(build, budget=length - tokens, least=least, most=most)
    if len(ids) + tokens > length:
        raise OptionError(
            f"a {name} prompt needs at least {len(ids) + tokens} tokens with this tokenizer, got "
            f"length {length}; give longer --lengths"
        )
    return parts, ids


T = TypeVar("T", bound=type[Task])
_REGISTRY: dict[str, type[Task]] = {}


def register(cls: T) -> T:
    """Class decorator: registers a task under its name. The same class may be defined again."""
    holder = _REGISTRY.get(cls.name, cls)
    if (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
        raise OptionError(
            f"task name {cls.name!r} is taken by {holder.__name__}; give {cls.__name__} another"
        )
    _REGISTRY[cls.name] = cls
    return cls


def unregister(cls: type[Task]) -> None:
    del _REGISTRY[cls.name]


def from_file(path: str) -> list[str]:
    """Run a Python file and return the names of the tasks that it registers."""
    if not Path(path).is_file():
        raise OptionError(
            f"file {path} does not exist; pass one that registers a task, or a task name"
        )
    spec = importlib.util.spec_from_file_location(f"rope_ext_task_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None  # of a .py file
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [name for name, cls in _REGISTRY.items() if cls.__module__ == spec.name]
    if not names:
        raise OptionError(f"{path} registers no task; decorate one with @register")
    return names


def all_tasks() -> dict[str, type[Task]]:
    return dict(_REGISTRY)


def chosen(names: Sequence[str]) -> list[type[Task]]:
    """Return the tasks with these names, each once, in order of registration."""
    for name in names:
        if name not in _REGISTRY:
            raise unknown(name, _REGISTRY)
    return [cls for name, cls in _REGISTRY.items() if name in names]


def unknown(name: str, known: Iterable[str], more: str = "") -> OptionError:
    """Return the error for a name that is not ``known``; ``more`` follows the list of those."""
    known = list(known)
    guess = nearest(name, known) or "."
    return OptionError(f"unknown task {name!r}{guess} Tasks: {', '.join(known)}{more}")


def build(names: Sequence[str], given: Mapping[str, Any]) -> list[Task]:
    """Build the tasks with these names, each with the ``given`` options that it supports."""
    tasks = []
    for cls in chosen(names):
        known = {one.name for one in option_fields(cls)}
        tasks.append(cls(**{name: value for name, value in given.items() if name in known}))
    return tasks


def answer_tokens(instead_of: str | None = None) -> Any:
    """Return the option for the maximum answer length, for a task with or without a default."""
    own = "; part of the length" if instead_of is None else f"; default: {instead_of}"
    return option(None, f"maximum answer length in tokens{own}", parse_length)


def drawn(of: str = "rows of each data set", default: str = "all") -> Any:
    """Return the option for the number of samples from a task's data."""
    return option(None, f"number of {of}, sampled at random; default: {default}")


def named_parts(text: str, known: Iterable[str]) -> list[str]:
    """Return the ``known`` names in ``text`` (comma-separated, or ``all``), in its order."""
    names = split(text)
    known = list(known)
    for name in names:
        if name not in known and name != "all":
            raise unknown(name, known, ", or all")
    return [name for name in known if name in names or "all" in names]


def counts(text: str, name: str) -> list[int]:
    """Parse a comma-separated list of numbers, each once, in order."""
    found = sorted(set(parse_lengths(text, "--" + name.replace("_", "-"))))
    if not found or found[0] < 1:
        raise OptionError(f"{name}={text!r} is not valid; give numbers from 1 on, as 1,2,4")
    return found
