"""`rope-ext eval`: the options that all evaluations share, and those of the tasks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from rope_eval.cases import dump
from rope_eval.evaluate import evaluate
from rope_eval.folder import Folder
from rope_eval.settings import Settings, require_seed
from rope_eval.tasks import all_tasks, build, chosen, from_file, options
from rope_ext.arguments import parse_length, parse_lengths, parse_options, split
from rope_ext.checkpoints import DTYPES
from rope_ext.errors import Mistakes, OptionError
from rope_ext.terminal import clean_errors, quiet, stoppable, tell

METHOD_HELP = "names, comma between, or repeat; 'none'; 'adapter': what it was trained under"
OPTION_HELP = "METHOD.NAME=VALUE, NAME=VALUE of a single method, or METHOD=FILE.json"
_COMPARED = ("perplexity", "passkey")
FORCE_HELP = "measure lengths beyond what a method reaches, an adapter under another method"


def bare(description: str, output: str, model: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options of everything that runs a model under methods.

    Args:
        description: the docstring of the module; its command line stands there too.
        output: default folder for results.
        model: that is meant where none is given; None: one has to be.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subject = made.add_argument_group("what is measured")
    add = subject.add_argument
    which = "folder or Hub id; repeat for several" + (f" ({model} if left out)" if model else "")
    add("--model", action="append", required=model is None, help=which)
    add("--adapter", help="PEFT adapter, in use wherever a method is")
    add("--method", "--methods", action="append", help=METHOD_HELP)
    add("--factor", type=float, default=4.0, help="how many times the trained length")
    add("--option", action="append", help=OPTION_HELP)
    add("--trained-length", help="tokens, if the configuration does not say it rightly")
    add("--compose", action="store_true", help="patch on top of the checkpoint's own scaling")
    running = made.add_argument_group("how it is run")
    add = running.add_argument
    add("--dtype", default="auto", help=f"{', '.join(DTYPES)}; auto: float32 on a CPU")
    add("--attn", help="attention implementation, such as sdpa, eager, flash_attention_2")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ...")
    add("--batch-size", default="auto", help="rows per forward, or auto")
    add("--seed", type=int, default=0, help="of texts, prompts and intervals")
    add("--output", type=Path, default=Path(output), help="folder for results")
    return made


def parser(
    description: str,
    output: str,
    tasks: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> argparse.ArgumentParser:
    """A parser with the options that all evaluations share, and those of some tasks.

    Args:
        description: see ``bare``.
        output: likewise.
        tasks: names; what two of them call alike is one option.
        renamed: an option that is typed otherwise, by the name of the field.

    Raises:
        OptionError: there is no such task, or a field of it is called as a shared option is.
    """
    made = bare(description, output)
    add = made.add_argument_group("what is asked").add_argument
    add("--lengths", required=True, action="append", help="context lengths, such as 512,4k,8k")
    add("--chat", choices=("auto", "yes", "no"), default="auto", help="use the chat template")
    add("--force", action="store_true", help=FORCE_HELP)
    add("--resume", action="store_true", help="use what --output holds and complete it")
    add("--overwrite", action="store_true", help="delete results that are in --output")
    known: set[str] = set()
    for cls in chosen(tasks):
        group = made.add_argument_group(cls.name)
        for option in options(cls):
            if option.name in known:
                continue
            known.add(option.name)
            typed = (renamed or {}).get(option.name, "--" + option.name.replace("_", "-"))
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
    methods = tuple(split(args.method or ()))
    made = Settings(
        models=tuple(args.model),
        methods=methods,
        lengths=found.check(parse_lengths, args.lengths, default=(2,)),
        factor=args.factor,
        options=found.check(parse_options, args.option, methods, default={}),
        adapter=args.adapter,
        seed=args.seed,
        dtype=args.dtype,
        attn=args.attn,
        device=args.device,
        batch_size=found.check(batch_size, args.batch_size),
        chat=args.chat,
        trained_length=found.check(trained_length, args.trained_length),
        compose=args.compose,
        force=args.force,
        output=args.output,
        resume=args.resume,
        overwrite=args.overwrite,
    )
    if mistakes is None:
        found.report()
    return made


def tokens(text: str) -> int:
    """``1k`` as 1024, for options that are one number of tokens."""
    return parse_length(text)


def trained_length(text: str | None) -> int | None:
    """``--trained-length`` in tokens, where it is given.

    Raises:
        OptionError: it is no whole number.
    """
    return None if text is None else parse_length(text, "--trained-length")


def only_model(args: argparse.Namespace) -> str:
    """The one model that is given.

    Raises:
        OptionError: there are several.
    """
    if len(args.model) > 1:
        raise OptionError("several models are given; give --model just once here")
    return args.model[0]


def batch_size(text: str) -> int | None:
    """``auto`` as None.

    Raises:
        OptionError: it is neither that nor a number.
    """
    if text == "auto":
        return None
    if not re.fullmatch("[0-9]{1,15}", text):
        raise OptionError(f"--batch-size {text!r} is not valid; give auto or a number of rows")
    return int(text)


def main(args: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Check, measure, print and write; all mistakes are reported at once.

    Args:
        args: from ``parser``.
        tasks: names of what is to be measured.
    """
    with clean_errors():
        mistakes = Mistakes()
        given = settings(args, mistakes)
        evaluate(given, build(tasks, vars(args), mistakes), mistakes)


def call(words: Sequence[str]) -> None:
    """``rope-ext eval`` with these words: the tasks first, by name or in a file, then options.

    Exits as argparse does where an option is unknown or missing, or help is asked for.
    """
    tasks = list(takewhile(lambda word: not word.startswith("-"), words))
    given = list(words[len(tasks) :])
    with clean_errors():
        names = []
        for task in split(tasks):
            names += from_file(task) if task.endswith(".py") else [task]
        known = ", ".join(all_tasks())
        about = f"Measure {', '.join(names) or 'some tasks'} in one report.\n\n"
        about += f"Tasks, to be given first: {known}, or FILE.py that registers some."
        made = parser(about, "runs/eval", names)
    made.prog = f"rope-ext eval {' '.join(tasks) or 'TASK...'}"
    if not (names or {"-h", "--help"} & {*given}):
        made.error(f"give the tasks first, some of {known}")
    main(made.parse_args(given), names)


def compare(words: Sequence[str]) -> None:
    """``rope-ext compare``: ``rope-ext eval perplexity passkey`` at every length that is asked."""
    with clean_errors():
        about = "Measure methods against the unpatched model: perplexity and passkey retrieval."
        made = parser(about, "rope-ext-compare", _COMPARED)
    made.prog = "rope-ext compare"
    made.set_defaults(force=True)
    main(made.parse_args(words), _COMPARED)


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
