"""`rope-ext eval` and `rope-ext compare`: their options and those of the tasks.

torch is imported when something is measured: `--help` must not wait for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, cast

from rope_eval.cases import dump
from rope_eval.folder import Folder
from rope_eval.options import flag_of, option_fields
from rope_eval.settings import (
    ASKED,
    MEASURED,
    RUN,
    SERVED,
    UNPATCHED,
    Settings,
    require_seed,
)
from rope_eval.tasks import all_tasks, build, chosen, from_file, options
from rope_eval.tasks.harness import Harness
from rope_ext.command.arguments import parse_length, split, take
from rope_ext.command.terminal import clean_errors, quiet, stoppable, tell
from rope_ext.errors import Mistakes, OptionError


@dataclass(frozen=True)
class Preset:
    """A command that is ``rope-ext eval`` with its tasks and some defaults chosen.

    Args:
        tasks: names.
        output: default directory for the results.
        about: the help text.
        defaults: of shared options.
    """

    tasks: tuple[str, ...]
    output: str
    about: str
    defaults: Mapping[str, Any]


COMPARE = Preset(
    ("perplexity", "passkey"),
    "rope-ext-compare",
    "Measure methods against the unpatched model: perplexity and passkey retrieval.",
    {"force": True},  # every length that is asked for
)


class _Parser(argparse.ArgumentParser):
    """Takes the model as the first word or as ``--model``, and says what is wrong in one line."""

    needs_model = True

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words, file = take("--gguf-file", sys.argv[1:] if args is None else args)
        models = _leading(words)
        words = [word for model in models for word in ("--model", model)] + words[len(models) :]
        parsed = super().parse_args(words, namespace)
        if file is not None and parsed.model is not None:
            parsed.model = [f"{model}/{file}" for model in parsed.model]
        served = getattr(parsed, "url", None) is not None
        if self.needs_model and parsed.model is None and not served:
            self.error("no model is given; give a directory, Hub ID or .gguf file first")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; the usage would be a page long."""
        tell(f"error: {message}; see {self.prog.removesuffix(' MODEL')} --help", "red")
        sys.exit(2)


def _leading(words: Sequence[str]) -> list[str]:
    """The words before the first option."""
    return list(takewhile(lambda word: not word.startswith("-"), words))


def bare(description: str, output: str, model: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options of everything that runs a model under methods.

    Args:
        description: the docstring of the module; its command line stands there too.
        output: default folder for results.
        model: that is meant where none is given; None: one has to be.
    """
    made = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.needs_model = model is None
    _add_options(made, (MEASURED, RUN), output, model)
    return made


def _add_options(
    made: argparse.ArgumentParser, groups: Sequence[str], output: str = "", model: str | None = None
) -> None:
    """Add the options of ``Settings`` in these groups."""
    for title in groups:
        group = made.add_argument_group(title)
        for field in option_fields(Settings):
            words = dict(field.metadata["words"])
            if words.pop("group") != title:
                continue
            words["default"] = words.pop("typed", field.default)
            flags = [flag_of(field), *filter(None, [words.pop("also", None)])]
            if field.default is False and "nargs" not in words:
                words["action"] = "store_true"
            elif field.default is MISSING or words.get("action") == "append":
                words["default"] = None
            if field.name == "output":
                words["default"] = Path(output)
            help = field.metadata["help"]
            if field.name == "models":
                help += f" (default: {model})" if model else ""
            group.add_argument(*flags, help=help, **words)


def parser(
    description: str,
    output: str,
    tasks: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """A parser with the options that all evaluations share, and those of some tasks.

    Args:
        description: see ``bare``.
        output: likewise.
        tasks: names; what two of them call alike is one option.

    Raises:
        OptionError: there is no such task, or a field of it is called as a shared option is.
    """
    made = bare(description, output)
    _add_options(made, (ASKED, SERVED))
    known: set[str] = set()
    for cls in chosen(tasks):
        group = made.add_argument_group(cls.name)
        for option in options(cls):
            if option.name in known:
                continue
            known.add(option.name)
            typed = "--" + option.name.replace("_", "-")
            try:
                group.add_argument(
                    typed, dest=option.name, default=argparse.SUPPRESS, **option.words
                )
            except argparse.ArgumentError:
                raise OptionError(
                    f"the task {cls.name} has a field {option.name}, and {typed} is an option of "
                    f"every evaluation; give the field another name"
                ) from None
    return made


def settings(args: argparse.Namespace, mistakes: Mistakes | None = None) -> Settings:
    """The shared options as settings.

    Args:
        args: from ``parser``.
        mistakes: collects options that cannot be read; without it they are raised.

    Raises:
        OptionError: one of them cannot be read.
    """
    found = Mistakes() if mistakes is None else mistakes
    values: dict[str, Any] = {}
    for field in option_fields(Settings):
        typed, read = getattr(args, flag_of(field)[2:].replace("-", "_")), field.metadata["read"]
        if field.name == "options":
            values["options"] = found.check(read, typed, values["methods"], default={})
        elif read is None:
            values[field.name] = typed
        else:  # after a mistake any length will do: nothing is measured
            fallback = (2,) if field.name == "lengths" else None
            values[field.name] = found.check(read, typed, default=fallback)
    if values["url"] is not None:
        if values["models"] or values["methods"] or values["adapter"]:
            found.add(
                OptionError(
                    "--url measures the model on the server; leave out --model, --method and "
                    "--adapter, and give --tokenizer"
                )
            )
        values |= {"models": tuple(filter(None, [values["tokenizer"]])), "methods": (UNPATCHED,)}
    made = Settings(**values)
    if mistakes is None:
        found.report()
    return made


def tokens(text: str) -> int:
    """``1k`` as 1024, for options that are one number of tokens."""
    return parse_length(text)


def only_model(args: argparse.Namespace) -> str:
    """The one model that is given.

    Raises:
        OptionError: there are several.
    """
    if len(args.model) > 1:
        raise OptionError("this command takes one model; give --model once")
    return args.model[0]


def main(args: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Check, measure, print and write; all mistakes are reported at once.

    Args:
        args: from ``parser``.
        tasks: names of what is to be measured.
    """
    with clean_errors():
        from rope_eval.evaluate import evaluate

        mistakes = Mistakes()
        given = settings(args, mistakes)
        evaluate(given, build(tasks, vars(args), mistakes), mistakes)


def call(words: Sequence[str]) -> None:
    """``rope-ext eval MODEL --tasks ...`` with these words.

    A task that is not one of ours is one of lm-evaluation-harness. Tasks may come first as well.
    Exits with status 2 where an option is unknown or missing.
    """
    first = _leading(words)
    asked = _Parser("rope-ext eval", add_help=False, allow_abbrev=False)
    asked.add_argument("--tasks", action="append", default=[])
    found, rest = asked.parse_known_args(list(words[len(first) :]))
    ours = all_tasks()
    apart = {word.partition("=")[0] for word in rest} & {"--model", "--url"}
    tasks = [
        word
        for word in first
        if apart or all(one in ours or one.endswith(".py") for one in split(word))
    ]
    models = [word for word in first if word not in tasks]
    names, others = [], []
    with clean_errors():
        for task in split([*tasks, *found.tasks]):
            names += from_file(task) if task.endswith(".py") else [task]
        others = [name for name in names if name not in all_tasks()]
        names = [name for name in names if name in all_tasks()]
        if others:
            names.append(Harness.name)
            rest += ["--harness-tasks", ",".join(others)]
        about = f"Measure {', '.join(names) or 'tasks'} and write one report.\n\n"
        made = parser(about, "runs/eval", names)
    known = ", ".join(name for name in ours if name != Harness.name)
    known += ", a task of lm-evaluation-harness, or FILE.py that registers a task"
    made.add_argument("--tasks", help=f"separated by commas: {known}; --help shows their options")
    made.prog = "rope-ext eval MODEL"
    if not (names or {"-h", "--help"} & {*rest}):
        made.error(f"give --tasks some of {known}")
    main(made.parse_args([*models, *rest]), names)


def call_preset(name: str, preset: Preset, words: Sequence[str]) -> None:
    """``rope-ext NAME MODEL``: ``rope-ext eval`` with the tasks and defaults of the preset."""
    with clean_errors():
        made = parser(preset.about, preset.output, preset.tasks)
    made.prog = f"rope-ext {name} MODEL"
    made.set_defaults(**preset.defaults)
    main(made.parse_args(words), preset.tasks)


def run(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any] | Iterable[dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
    name: str,
    pages: Mapping[str, Callable[[dict[str, Any]], str]] | None = None,
) -> None:
    """As ``main``, for what measures by itself: print, and write JSON.

    Args:
        args: from ``bare``.
        measure: called with ``args`` for the data, or for what there is of it after each part,
            which is written as it comes.
        show: prints them.
        name: of the file in ``--output``.
        pages: other files there, by name, and what writes the data down for each.
    """
    pages = pages or {}
    with clean_errors(), stoppable("run the same command to measure again"):
        quiet()
        require_seed(args.seed)
        folder = Folder(args.output)
        folder.check([name, *pages])
        with folder.lock():
            found, data = measure(args), {}
            parts = [found] if isinstance(found, dict) else found
            for data in cast("Iterable[dict[str, Any]]", parts):
                made = {page: write(data).encode() for page, write in pages.items()}
                paths = folder.write({name: dump(data).encode(), **made})
        show(data)
        for path in paths:
            tell(f"wrote {path}")
