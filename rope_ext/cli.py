"""The command line. What needs transformers is imported by the commands that use it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from rope_ext.errors import OptionError, RopeExtError

app = typer.Typer(no_args_is_help=True, add_completion=False)
_err = Console(stderr=True, highlight=False)

Option = Annotated[
    list[str] | None,
    typer.Option("--option", help="One option of one method, such as yarn.beta_fast=16; repeat."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps ...")]
Compose = Annotated[
    bool, typer.Option(help="Go on although the checkpoint scales its own rotary embedding.")
]


@app.callback()
def main() -> None:
    """Extend the context of RoPE models of Hugging Face transformers."""


@app.command()
def compare(
    model: Annotated[str, typer.Option(help="Folder or Hub id of a causal language model.")],
    methods: Annotated[str, typer.Option(help="Names, comma between; see `rope-ext methods`.")],
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens, comma between.")],
    factor: Annotated[float, typer.Option(help="How many times the trained length.")] = 4.0,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text or .jsonl for perplexity; repeat. Default: Python's own library."),
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text for each length.")] = 16,
    trials: Annotated[int, typer.Option(help="Passkeys for each length and depth.")] = 10,
    depths: Annotated[int, typer.Option(help="Depths of the passkey.")] = 5,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("rope-ext-compare"),
    resume: Annotated[bool, typer.Option("--resume", help="Use what --output holds.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete what --output holds.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of texts, prompts and intervals.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU), float32 or bfloat16.")
    ] = "auto",
    device: Device = "auto",
    batch_tokens: Annotated[int, typer.Option(help="Tokens for each forward.")] = 8192,
    trained_length: Annotated[
        int | None, typer.Option(help="If the configuration does not say it rightly.")
    ] = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Measure methods against the unpatched model: perplexity and passkey retrieval."""
    with _clean_errors():
        from rope_ext.measure.compare import Settings, prepare, run
        from rope_ext.measure.report import Report

        _quiet()
        plan = prepare(
            Settings(
                model=model,
                methods=tuple(_split(methods)),
                lengths=_lengths(lengths),
                factor=factor,
                options=_options(option),
                texts=tuple(text or ()),
                windows=windows,
                trials=trials,
                depths=depths,
                seed=seed,
                dtype=dtype,
                device=device,
                batch_tokens=batch_tokens,
                trained_length=trained_length,
                compose=compose,
                output=output,
                resume=resume,
                overwrite=overwrite,
            )
        )
        for note in plan.notes:
            _tell(f"note: {note}", "yellow")
        known = len(plan.tasks) - len(plan.left)
        known_too = f" ({known} more are known)" if known else ""
        with _progress() as progress:
            bar = progress.add_task(f"{len(plan.left)} cells{known_too}", total=plan.work)
            try:
                cells = run(plan, lambda work: progress.advance(bar, work))
            except KeyboardInterrupt:
                progress.stop()
                _tell(f"stopped; finished cells are in {output}, --resume goes on from there")
                raise typer.Exit(130) from None
        report = Report(plan, cells)
        report.print()
        for path in report.write():
            _tell(f"wrote {path}")


@app.command()
def describe(
    model: Annotated[str, typer.Argument(help="Folder or Hub id.")],
    method: Annotated[str | None, typer.Option(help="Patch it with this method first.")] = None,
    factor: Annotated[float, typer.Option(help="How many times the trained length.")] = 4.0,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Print the rotary embedding of a model, before and after a patch."""
    with _clean_errors():
        import rope_ext
        from rope_ext.measure.compare import checked_methods
        from rope_ext.measure.models import load_model

        _quiet()
        options = _options(option)
        methods = checked_methods([method], factor, options) if method is not None else {}
        loaded = load_model(model, device="cpu")
        for name, values in methods.items():
            rope_ext.patch(loaded, name, compose=compose, **values)
        print(rope_ext.describe(loaded))


@app.command("methods")
def show_methods() -> None:
    """List the methods, their options and when to use them."""
    import rope_ext
    from rope_ext.measure.report import wide_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "options", "use", "paper"):
        table.add_column(column, no_wrap=column in ("method", "paper"), overflow="fold")
    for info in rope_ext.methods():
        options = [k if v is ... else f"{k}={v}" for k, v in info.options.items()]
        table.add_row(info.name, ", ".join(options), info.use, info.paper)
    console = wide_console(160)
    console.print(table)
    console.print("Options without a value must be given.", style="dim")


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Errors made by the user as one line, exit code 2."""
    try:
        yield
    except RopeExtError as error:
        _tell(f"error: {error}", "red")
        raise typer.Exit(2) from None


def _tell(line: str, style: str | None = None) -> None:
    _err.print(line, style=style, markup=False, soft_wrap=True)


def _quiet() -> None:
    """No log lines and loading bars in the middle of ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _progress() -> Progress:
    # Long forwards report seldom: look back far enough for a steady estimate.
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    return Progress(*columns, TimeRemainingColumn(), console=_err, speed_estimate_period=600)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in _split(text))
    except ValueError:
        raise OptionError(
            f"--lengths {text!r} is not a list of whole numbers; give it as 512,1024,2048"
        ) from None


def _options(texts: list[str] | None) -> dict[str, dict[str, Any]]:
    """``yarn.beta_fast=16`` becomes ``{"yarn": {"beta_fast": 16}}``."""
    options: dict[str, dict[str, Any]] = {}
    for text in texts or ():
        place, equals, value = text.partition("=")
        method, dot, name = place.partition(".")
        if not (equals and dot and method and name):
            raise OptionError(
                f"--option {text!r} is not valid; give METHOD.NAME=VALUE, such as yarn.beta_fast=16"
            )
        options.setdefault(method, {})[name] = _value(value)
    return options


def _value(text: str) -> Any:
    """A number, list, true, false or none; anything else is a word."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
