"""The options that all evaluators share, and how an evaluator is run from the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rope_ext import OptionError
from rope_ext.measure.arguments import parse_length, parse_lengths, parse_options, split
from rope_ext.measure.folder import Folder
from rope_ext.measure.models import DTYPES
from rope_ext.measure.run import Settings, Task, dump, require_seed
from rope_ext.measure.terminal import clean_errors, evaluate, quiet, tell

METHOD_HELP = "names, comma between, or repeat; 'none'; 'adapter': what it was trained under"
OPTION_HELP = "METHOD.NAME=VALUE, NAME=VALUE of a single method, or METHOD=FILE.json"
FORCE_HELP = "measure lengths beyond what a method reaches, an adapter under another method"


def bare(description: str, output: str) -> argparse.ArgumentParser:
    """A parser with the options of everything that runs a model under methods.

    Args:
        description: the docstring of the module; its command line stands there too.
        output: default folder for results.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subject = made.add_argument_group("what is measured")
    add = subject.add_argument
    add("--model", action="append", required=True, help="folder or Hub id; repeat for several")
    add("--adapter", help="PEFT adapter, in use wherever a method is")
    add("--method", action="append", help=METHOD_HELP)
    add("--factor", type=float, default=4.0, help="how many times the trained length")
    add("--option", action="append", help=OPTION_HELP)
    add("--trained-length", type=tokens, help="if the configuration does not say it rightly")
    add("--compose", action="store_true", help="patch on top of the checkpoint's own scaling")
    running = made.add_argument_group("how it is run")
    add = running.add_argument
    add("--dtype", default="auto", choices=DTYPES, help="auto: float32 on a CPU")
    add("--attn", help="attention implementation, such as sdpa, eager, flash_attention_2")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ...")
    add("--batch-size", default="auto", help="rows per forward, or auto")
    add("--seed", type=int, default=0, help="of texts, prompts and intervals")
    add("--output", type=Path, default=Path(output), help="folder for results")
    return made


def parser(description: str, output: str) -> argparse.ArgumentParser:
    """A parser with the options that all evaluators share; see ``bare``."""
    made = bare(description, output)
    add = made.add_argument_group("what is asked").add_argument
    add("--lengths", required=True, action="append", help="context lengths, such as 512,4k,8k")
    add("--chat", choices=("auto", "yes", "no"), default="auto", help="use the chat template")
    add("--force", action="store_true", help=FORCE_HELP)
    add("--resume", action="store_true", help="use what --output holds and complete it")
    add("--overwrite", action="store_true", help="delete results that are in --output")
    return made


def settings(args: argparse.Namespace) -> Settings:
    """The shared options as settings.

    Raises:
        OptionError: one of them cannot be read.
    """
    methods = tuple(split(args.method or ()))
    return Settings(
        models=tuple(args.model),
        methods=methods,
        lengths=parse_lengths(args.lengths),
        factor=args.factor,
        options=parse_options(args.option, methods),
        adapter=args.adapter,
        seed=args.seed,
        dtype=args.dtype,
        attn=args.attn,
        device=args.device,
        batch_size=batch_size(args.batch_size),
        chat=args.chat,
        trained_length=args.trained_length,
        compose=args.compose,
        force=args.force,
        output=args.output,
        resume=args.resume,
        overwrite=args.overwrite,
    )


def tokens(text: str) -> int:
    """``1k`` as 1024, for options that are one number of tokens."""
    return parse_length(text)


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


def add_grid(made: argparse.ArgumentParser) -> None:
    """Trials and depths."""
    add = made.add_argument_group("grid").add_argument
    add("--trials", type=int, default=10, help="prompts for each length and depth")
    add("--depths", type=int, default=5, help="depth bins of equal width")


def add_passkey(made: argparse.ArgumentParser) -> None:
    """The options of the passkeys."""
    add = made.add_argument_group("passkey").add_argument
    add("--digits", type=int, default=5, help="of each key, such as 5 or 10")
    add("--generate", action="store_true", help="decode with a cache, instead of teacher-forcing")


def add_perplexity(made: argparse.ArgumentParser) -> None:
    """The options of perplexity."""
    add = made.add_argument_group("perplexity").add_argument
    add(
        "--text",
        action="append",
        help="file (txt, md, jsonl, parquet), folder or hf:ID/CONFIG:SPLIT; repeat. Default: the "
        "held-out part of Python's library",
    )
    add("--windows", type=int, default=16, help="stretches of text, at most")
    add(
        "--protocol",
        default=None,
        help="ending (the same tokens after more and more context; default), sliding or start",
    )
    add("--stride", type=tokens, help="tokens a window moves by; makes the protocol sliding")
    add("--min-context", type=tokens, default=0, help="of sliding and start: tokens not scored")
    add("--longppl", action="store_true", help="also of the tokens alone that need long contexts")
    add("--evaluator", help="model that chooses those tokens; default: that of the first method")
    add("--short-context", type=tokens, default=4096, help="tokens that are not enough for them")


def main(args: argparse.Namespace, tasks: Callable[[argparse.Namespace], Sequence[Task]]) -> None:
    """Check, measure, print and write; mistakes are told in one line.

    Args:
        args: from ``parser``.
        tasks: called with ``args`` for the tasks to measure.
    """
    with clean_errors():
        evaluate(settings(args), tasks(args))


def run(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    name: str,
) -> None:
    """As ``main``, for what measures by itself: print, and write JSON.

    Args:
        args: from ``bare``.
        measure: called with ``args`` for the data.
        show: prints them.
        name: of the file in ``--output``.
    """
    with clean_errors():
        quiet()
        require_seed(args.seed)
        folder = Folder(args.output)
        folder.check([name])
        with folder.held():
            data = measure(args)
            [path] = folder.write({name: dump(data).encode()})
        show(data)
        tell(f"wrote {path}")
