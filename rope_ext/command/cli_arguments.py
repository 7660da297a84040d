"""Arguments shared by several commands."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rope_ext.command.arguments import parse_compose, split_gguf_file
from rope_ext.command.evaluators import find
from rope_ext.command.terminal import tell

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
Text = Annotated[
    list[str] | None,
    typer.Option(
        help="Text file, .jsonl, .parquet or directory. Repeatable. Default: the Python standard "
        "library."
    ),
]
TrainText = Annotated[
    list[str] | None,
    typer.Option(
        help="Text file, .jsonl, .parquet or directory. Repeatable. Default: the Python standard "
        "library, without the files that evaluation uses by default."
    ),
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
        """Run, and exit with status 2 where an option is unknown, missing or not valid."""
        try:
            status = super().main(*args, standalone_mode=False, **options)
        except Exception as error:
            described = getattr(error, "format_message", None)  # of click, whose copy typer has
            if described is None or not standalone_mode:
                raise
            context = getattr(error, "ctx", None)
            path = "" if context is None else context.command_path
            name = f"rope-ext {path.partition(' ')[2]}".rstrip()
            message = " ".join(described().split()).rstrip(".")
            tell(f"error: {message}; see {name} --help", "red")
            sys.exit(2)
        return sys.exit(status if isinstance(status, int) else 0) if standalone_mode else status


class ModelCommand(TyperCommand):
    """A command whose positional ``model`` may also be given as ``--model``, as in `compare`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``--model`` where the argument is expected, and a value after ``--compose``."""
        names = [one.name for one in self.params if one.param_type_name == "argument"]
        (words, file), model = split_gguf_file(args), None
        for place, word in enumerate(words):
            if word == "--model" and place + 1 < len(words):
                model = words[place + 1]
                del words[place : place + 2]
                break
            if word.startswith("--model="):
                model = words.pop(place).removeprefix("--model=")
                break
        valued = any(p.name == "compose" and not getattr(p, "is_flag", False) for p in self.params)
        for place, word in enumerate(words if valued else ()):
            if word == "--compose" and words[place + 1 : place + 2] not in (["stack"], ["raise"]):
                words[place] = "--compose=stack"
        if model is not None:  # before a file that follows it, after a word that precedes it
            first = names[:1] != ["kind"]
            words = [model, *words] if first else [*words, model]
        rest = super().parse_args(ctx, words)
        if file is not None and ctx.params.get("model") is not None:
            ctx.params["model"] = f"{ctx.params['model']}/{file}"
        return rest
