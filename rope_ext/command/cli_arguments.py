"""Arguments shared by several commands."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rope_ext.command.arguments import parse_compose, take
from rope_ext.command.evaluators import find
from rope_ext.command.terminal import clean_errors, quiet, tell

Model = Annotated[
    str,
    typer.Argument(
        help="Model directory, Hub ID or .gguf file (or DIRECTORY --gguf-file FILE); or --model."
    ),
]
Factor = Annotated[float, typer.Option(help="Extension factor: target length / trained length.")]
OneFactor = Annotated[
    float | None,
    typer.Option("--factor", help="Extension factor of --method: target length / trained length."),
]
PatchedWith = Annotated[
    str | None,
    typer.Option("--method", "--methods", help="Patch the model with this method first."),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="Method option, such as yarn.beta_fast=16, or a JSON file of options, such as "
        "longrope=found.json. Repeatable.",
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Dtype: auto (float32 on CPU), float32, bfloat16 or float16.")
]
TrainedLength = Annotated[
    int | None, typer.Option(help="Override the trained length in the config.")
]
_TEXT = "Text file, .jsonl, .parquet or directory. Repeatable. Default: the Python standard library"
Text = Annotated[list[str] | None, typer.Option(help=f"{_TEXT}.")]
TrainText = Annotated[
    list[str] | None,
    typer.Option(help=f"{_TEXT}, without the files that evaluation uses by default."),
]
Target = Annotated[str, typer.Option(help="Target context length in tokens, such as 32k or 1m.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1, mps ...")]
Compose = Annotated[
    Any,  # of `patch`: a bool, or "raise"
    typer.Option(
        parser=parse_compose,
        metavar="[stack|raise]",
        help="With existing RoPE scaling: apply on top of it (stack, or no value), or raise its "
        "factor.",
    ),
]


class Commands(TyperGroup):
    """All commands, with those of the evaluators; a wrong option is told in one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        self._add_evaluators()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; the evaluators are imported for one that is not of this package."""
        if cmd_name not in self.commands:
            self._add_evaluators()
        return super().get_command(ctx, cmd_name)

    def _add_evaluators(self) -> None:
        if (evaluators := find("cli")) is not None:
            self.commands.update(typer.main.get_group(evaluators.app).commands)

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run and exit; without ``standalone_mode``, return the status or raise."""
        try:
            with clean_errors():
                status = super().main(*args, standalone_mode=False, **options)
        except Exception as error:
            described = getattr(error, "format_message", None)  # of click, whose copy typer has
            if described is None or not standalone_mode:
                raise
            context = getattr(error, "ctx", None)
            path = "" if context is None else context.command_path
            message = " ".join(described().split()).rstrip(".").replace("Value error, ", "")
            name = f"rope-ext {path.partition(' ')[2]}".rstrip()
            tell(f"error: {message}; see {name} --help", "red")
            status = 2
        return sys.exit(status if isinstance(status, int) else 0) if standalone_mode else status


class ModelCommand(TyperCommand):
    """A command whose positional ``model`` may also be given as ``--model``, as in `compare`."""

    def invoke(self, ctx: Any) -> Any:
        """Run it, without the log lines of transformers."""
        quiet()
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``--model`` where the argument is expected, and a value after ``--compose``."""
        words, file = take("--gguf-file", args)
        words, model = take("--model", words)
        if any(one.name == "compose" and not getattr(one, "is_flag", False) for one in self.params):
            for place, word in enumerate(words):
                valued = words[place + 1 : place + 2] in (["stack"], ["raise"])
                if word == "--compose" and not valued:
                    words[place] = "--compose=stack"
        if model is not None:  # before a file that follows it, after the kind of a plot
            last = any(one.name == "kind" for one in self.params)
            words = [*words, model] if last else [model, *words]
        rest = super().parse_args(ctx, words)
        if file is not None and ctx.params.get("model") is not None:
            ctx.params["model"] = f"{ctx.params['model']}/{file}"
        return rest
