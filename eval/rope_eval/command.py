"""`rope-ext eval` and `rope-ext compare`, with the options that all evaluations share and of tasks.

torch is imported only for measuring, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rope_eval.options import command_options, option, option_fields, read_options
from rope_eval.settings import Settings
from rope_eval.tasks import Task, all_tasks, build, chosen, from_file
from rope_eval.tasks.harness import Harness
from rope_ext.command.arguments import UNPATCHED, parse_options, split
from rope_ext.command.cli_arguments import ModelCommand
from rope_ext.errors import OptionError

COMPARED = ("perplexity", "passkey")
"""The tasks of `rope-ext compare`, which is `rope-ext eval` with tasks and some defaults chosen."""
EMBEDDED = ("embedding",)
"""Its tasks for embedders."""
COMPARE = {"output": Path("rope-ext-compare"), "force": True}  # all requested lengths
KNOWN = ", ".join(name for name in all_tasks() if name != Harness.name)
Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="Model directory, Hub ID or .gguf file (or DIRECTORY --gguf-file FILE); or --model, "
        "repeated for several."
    ),
]


@dataclass
class TaskOptions:
    """The tasks that `rope-ext eval` measures."""

    tasks: tuple[str, ...] = option(
        (),
        f"separated by commas: {KNOWN}, a task of lm-evaluation-harness, or FILE.py that registers "
        f"a task; --help shows their options",
    )


def command_for(name: str, words: Sequence[str]) -> TyperCommand:
    """The command ``eval``, whose tasks are among ``words``, or ``compare``, with its options."""
    comparing = name == "compare"
    tasks, harness = (COMPARED, {}) if comparing else _requested(words)
    classes = chosen([*tasks, *EMBEDDED] if comparing else tasks)
    _refuse_shared(classes)

    def run(models: Models = None, **typed: Any) -> None:
        from rope_eval.evaluate import evaluate

        # Names of tasks may come first, among the models; `compare` takes none.
        words = [word for word in models or () if comparing or not _names_tasks(word)]
        given = settings(words, typed, **(COMPARE if comparing else {}))
        own = dict[str, Any]()
        for cls in classes:
            # Of tasks that share an option, the first one parses it, as in command_options.
            own = read_options(cls, typed | harness) | own
        evaluate(given, build(_compared(given, own) if comparing else tasks, own))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    options = (Settings, *classes) if comparing else (TaskOptions, Settings, *classes)
    # What `compare` sets by itself is no option of it, unless it is a name that may change.
    fixed = [option for option in COMPARE if option != "output"] if comparing else []
    register = app.command(name, cls=ModelCommand, help=_help(tasks, comparing))
    register(command_options(*options, without=fixed)(run))
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand)
    return command


def _requested(words: Sequence[str]) -> tuple[Sequence[str], dict[str, str]]:
    """Return the tasks that the words of ``eval`` name, and options of the harness's among them."""
    names = _named(words)
    tasks = [one for one in names if one in all_tasks()]
    others = [one for one in names if one not in all_tasks()]
    if not others:
        return tasks, {}
    return [*tasks, Harness.name], {"harness_tasks": ",".join(others)}


def _named(words: Sequence[str]) -> list[str]:
    """Return the tasks that the words of ``eval`` name, those of a file for the file.

    Raises:
        OptionError: none is named, and the words do not ask for help.
    """
    first = takewhile(lambda word: not word.startswith("-"), words)
    task_words = [*filter(_names_tasks, first)]
    task_words += [value for word, value in pairwise(words) if word in ("--tasks", "--task")]
    task_words += [word.removeprefix("--tasks=") for word in words if word.startswith("--tasks=")]
    names: list[str] = []
    for one in split(task_words):
        names += from_file(one) if one.endswith(".py") else [one]
    if not (names or "--help" in words):
        raise OptionError(f"give --tasks some of {KNOWN}; see rope-ext eval --help")
    return names


def _help(tasks: Sequence[str], comparing: bool) -> str:
    """Return the first line of a command's help."""
    what = f"{', '.join(tasks[:-1])} and {tasks[-1]}" if len(tasks) > 1 else "".join(tasks)
    if comparing:
        what += ", or embedding for embedders"
    return f"Measure {what or 'any tasks'}, and write one report."


def _compared(given: Settings, own: Mapping[str, Any]) -> Sequence[str]:
    """Return the tasks of ``compare`` for these models; raises OptionError for others' options."""
    from rope_ext.saving.checkpoints import load_config, require_measurable

    embeds = False
    if given.models and given.lengths and not given.url:
        found = {require_measurable(model, load_config(model)) for model in given.models}
        embeds = found == {"embeddings"}
    tasks, others = (EMBEDDED, COMPARED) if embeds else (COMPARED, EMBEDDED)
    known = {field.name for cls in chosen(tasks) for field in option_fields(cls)}
    for cls in chosen(others):
        wrong = [
            one.name for one in option_fields(cls) if one.name in own and one.name not in known
        ]
        if wrong:
            kind = "an embedder" if embeds else "a language model"
            raise OptionError(
                f"--{wrong[0].replace('_', '-')} is an option of {cls.name}, which is not measured "
                f"on {kind}; leave it out"
            )
    return tasks


def _names_tasks(word: str) -> bool:
    return all(one.endswith(".py") or one in all_tasks() for one in split(word))


def _refuse_shared(classes: Sequence[type[Task]]) -> None:
    shared = {field.name for field in option_fields(Settings)}
    for cls in classes:
        for field in option_fields(cls):
            if field.name in shared:
                raise OptionError(
                    f"the field {field.name} of the task {cls.name} is called as an option of "
                    f"every evaluation; give it another name"
                )


def settings(models: Sequence[str], typed: Mapping[str, Any], **defaults: Any) -> Settings:
    """The shared options as settings; ``defaults`` override those of ``Settings``."""
    values = {"models": tuple(models), "methods": (), "lengths": (), **defaults}
    values |= read_options(Settings, typed)
    values["options"] = parse_options(values.get("options"), values["methods"])
    if values.get("url"):
        if models or values["methods"] or values.get("adapter"):
            raise OptionError(
                "--url measures a server; leave out --model, --method, --adapter; give --tokenizer"
            )
        tokenizer = values.get("tokenizer")
        values |= {"models": (tokenizer,) if tokenizer else (), "methods": (UNPATCHED,)}
    return Settings(**values)
