"""Arguments shared by several commands, and typer's group and command classes."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from rope_ext.command.arguments import (
    check_early,
    command_words,
    parse_compose,
    parse_length,
    parse_options,
    take,
)
from rope_ext.command.terminal import clean_errors, quiet, tell, tell_next, unused
from rope_ext.errors import OptionError


def _parse_trained_length(text: str) -> int:
    return parse_length(text, "--trained-length")


Model = Annotated[
    str,
    typer.Argument(
        help="Model directory, Hub ID or .gguf file (or DIRECTORY --gguf-file FILE); or --model."
    ),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        help="Method option, such as yarn.beta_fast=16, or a JSON file of options, such as "
        "longrope=found.json. Repeatable."
    ),
]
Target = Annotated[str, typer.Option(help="Target context length in tokens, such as 32k or 1m.")]
Compose = Annotated[
    Any,  # bool or "raise", as for `patch`
    typer.Option(
        parser=parse_compose,
        metavar="[stack|raise]",
        help="With existing RoPE scaling: apply on top of it (stack, or no value), or raise its "
        "factor.",
    ),
]

TrainedLength = Annotated[
    Any,  # int or None
    typer.Option(
        parser=_parse_trained_length,
        metavar="TOKENS",
        help="Override the trained length in the config, such as 32k.",
    ),
]


_EVALUATORS = "rope_eval"  # it depends on this package, so it is imported on demand
RUN_HERE = ("llama.cpp", "mlx", "transformers")
"""Engines that `verify` can start by itself."""


@dataclass(frozen=True)
class PatchOptions:
    """A model, and the patch requested with the options of a command."""

    model: Model
    method: Annotated[
        str | None,
        typer.Option("--method", "--methods", help="Patch the model with this method first."),
    ] = None
    factor: Annotated[
        float | None, typer.Option(help="Extension factor of --method: target / trained length.")
    ] = None
    option: Option = None
    compose: Compose = False
    trained_length: TrainedLength = None

    def words(self, command: str, **more: Any) -> list[str]:
        return command_words(command, **vars(self), **more)

    def build(self) -> Any:
        """Return the method, or None; raises OptionError for options that are not valid."""
        from rope_ext.command.method_options import checked_methods
        from rope_ext.methods import build_method

        if self.method is None:
            words = self.words("")[3:]
            if words:
                raise OptionError(f"{' '.join(words[:2])} needs --method")
            return None
        names = [self.method]
        checked = checked_methods(names, self.factor, parse_options(self.option, names))
        return next((build_method(name, **values) for name, values in checked.items()), None)

    def arguments(self) -> dict[str, Any]:
        return {"compose": self.compose, "original_max_position_embeddings": self.trained_length}

    def patched(self) -> Any:
        """Return the patched model without weights; without a method, the model's name."""
        from rope_ext.command.method_options import saved_otherwise
        from rope_ext.saving.checkpoints import load_config
        from rope_ext.saving.folder import model_of, patch_without_weights

        method = self.build()
        if method is None:
            return self.model
        for note in saved_otherwise({self.model: load_config(self.model)}):
            tell(f"note: {note}", "yellow")
        return patch_without_weights(model_of(self.model), method, self.arguments())

    def tell_compare(self, trained: int, target: int, **more: Any) -> None:
        """Print the command that compares the method with the unpatched model, if one does."""
        from rope_ext.saving.checkpoints import causal_class, load_config, purpose

        config = load_config(self.model)
        found = purpose(config, self.model)
        if found == "labels":
            return
        if found == "embeddings":
            given = {"tasks": "embedding", "lengths": target, "output": unused("embedding")}
            tell_next(self.words("eval", **given))
            return
        if causal_class(config) is None:
            return
        lengths = f"{trained},{target}"
        tell_next(self.words("compare", lengths=lengths, **more, output=unused("compared")))

    def tell_check(self, engine: str | None = None) -> None:
        """Print the command that checks an engine, if it can run a miniature."""
        from rope_ext.config.nested import text_of
        from rope_ext.engines.base import miniatures
        from rope_ext.saving.checkpoints import is_dynamic, load_config

        config = load_config(self.model)
        known = text_of(config).model_type in miniatures()
        if self.compose or not known or (self.method is None and is_dynamic(config)):
            tell("done: the settings above serve it")
            return
        here = engine in (None, "ollama", *RUN_HERE)
        engine = None if engine == "ollama" else engine
        tell_next(self.words("verify", engine=engine, write=None if here else unused("miniature")))


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Any]:
    """Decorator: add a command to ``app``, with option help from its docstring.

    A parameter of type :class:`PatchOptions` becomes one option or argument for each field.
    """

    def decorate(function: Callable[..., None]) -> Any:
        about, _, said = (inspect.getdoc(function) or "").partition("Options:\n")
        said = re.sub(r"\n {5,}", " ", said)
        helps = dict(line.strip().split(": ", 1) for line in said.splitlines())
        shown: list[inspect.Parameter] = []
        shared: dict[str, inspect.Parameter] = {}
        for one in inspect.signature(function, eval_str=True).parameters.values():
            kind = one.annotation
            if kind is PatchOptions:
                shared |= inspect.signature(PatchOptions, eval_str=True).parameters
                shown += shared.values()
                continue
            if get_origin(kind) is not Annotated:
                flags = [f"--{one.name.replace('_', '-')}"] if kind is bool else []
                kind = Annotated[kind, typer.Option(*flags, help=helps[one.name])]
            shown.append(one.replace(annotation=kind))
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shown]

        def run(**typed: Any) -> None:
            given = {name: typed.pop(name) for name in shared}
            function(*([PatchOptions(**given)] if shared else []), **typed)

        command: Any = run
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return app.command(name or function.__name__, cls=ModelCommand, help=about)(command)

    return decorate


class Commands(TyperGroup):
    """All commands, including the evaluators'; invalid options are reported in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if importlib.util.find_spec(_EVALUATORS):  # not where rope_ext is not installed
            evaluators = importlib.import_module(f"{_EVALUATORS}.cli").app
            self.commands.update(typer.main.get_group(evaluators).commands)

    def main(self, args: Any = None, *, standalone_mode: bool = True, **options: Any) -> Any:
        """Run and exit; without ``standalone_mode``, return the status or raise."""
        try:
            with clean_errors():
                status = super().main(args, standalone_mode=False, **options)
        except Exception as error:
            described = getattr(error, "format_message", None)  # typer vendors click
            if described is None or not standalone_mode:
                raise
            message = " ".join(described().split()).rstrip(".").replace("Value error, ", "")
            words = sys.argv[1:] if args is None else args
            name = next((word for word in words[:1] if word in self.commands), "")
            tell(f"error: {message}; see {f'rope-ext {name}'.rstrip()} --help", "red")
            status = 2
        return sys.exit(status if isinstance(status, int) else 0) if standalone_mode else status


class ModelCommand(TyperCommand):
    """A command that takes its models as arguments or, like `compare`, each as ``--model``."""

    def invoke(self, ctx: Any) -> Any:
        check_early(ctx.params)
        quiet()  # imports transformers
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn ``--model`` into an argument, and add the default value to a bare ``--compose``."""
        words, files = take("--gguf-file", args)
        words, models = take("--model", words)
        if any(one.name == "compose" and not getattr(one, "is_flag", False) for one in self.params):
            for place, word in enumerate(words):
                valued = words[place + 1 : place + 2] in (["stack"], ["raise"])
                if word == "--compose" and not valued:
                    words[place] = "--compose=stack"
        last = any(one.name == "kind" for one in self.params)  # of a plot, which comes first
        rest = super().parse_args(ctx, [*words, *models] if last else [*models, *words])
        for file in files[-1:]:
            if ctx.params.get("model") is not None:
                ctx.params["model"] = f"{ctx.params['model']}/{file}"
            if ctx.params.get("models"):
                ctx.params["models"] = [f"{model}/{file}" for model in ctx.params["models"]]
        return rest
