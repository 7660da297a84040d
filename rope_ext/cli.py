"""The command line. Commands import transformers only when they run."""

from __future__ import annotations

import functools
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from rope_ext.command.arguments import command_words, compose_words, parse_length, parse_options
from rope_ext.command.cli_arguments import (
    Commands,
    Compose,
    Model,
    ModelCommand,
    OneFactor,
    Option,
    PatchedWith,
    Target,
    TrainedLength,
)
from rope_ext.command.evaluators import find
from rope_ext.command.terminal import clean_errors, quiet, stoppable, tell, tell_next, unused
from rope_ext.errors import ExportError, Mistakes, OptionError, RopeExtError
from rope_ext.version import __version__

app = typer.Typer(cls=Commands, rich_markup_mode=None)
command = functools.partial(app.command, cls=ModelCommand)
if (evaluators := find("cli")) is not None:
    app.registered_commands += evaluators.app.registered_commands


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rope-ext {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[  # its callback does the work
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    """Extend the context length of RoPE models in Hugging Face transformers."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@command()
def describe(
    model: Model,
    method: PatchedWith = None,
    factor: OneFactor = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Show a model's rotary embedding, before and after a patch."""
    with clean_errors():
        import rope_ext

        patched = _patched(model, method, factor, compose, option)
        found = rope_ext.describe(patched)
        print(found)
        if found.method is None:
            tell_next(command_words("recommend", model, length=4 * found.target_length))
        elif method is None and found.serve:
            _check_next(model, [], [])
        elif method is None:
            tell("done: use it in Python; no engine runs it")
        else:
            patch = {"method": method, "factor": factor, "compose": compose, "option": option}
            try:
                rope_ext.export(patched, "vllm")
                tell_next(command_words("export", model, **patch, engine="vllm"))
            except ExportError:  # then it is for Python, where it can be compared
                lengths = f"{found.length},{found.target_length}"
                tell_next(command_words("compare", model, **patch, lengths=lengths))


@command()
def recommend(
    model: Model,
    length: Target,
    finetune: Annotated[
        bool,
        typer.Option("--finetune", help="Assume that you fine-tune the model for this length."),
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Output file or directory of `rope-ext calibrate`.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Only methods that vllm, sglang, llama.cpp, ollama, mlx or transformers can run."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text to evaluate on, for the next commands. Repeatable."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list all other methods that the model accepts.")
    ] = False,
) -> None:
    """Recommend a method for a target length, and explain the choice."""
    with clean_errors():
        import rope_ext
        from rope_ext.config.record import option_texts

        quiet()
        found = rope_ext.recommend(model, parse_length(length), finetune, calibration, engine)
        print(found.full() if everything else found)
        if calibration is not None and not (finetune or engine):  # which follows a comparison
            if found.serve != found.method:
                tell(f"done: use it in Python: {found.call}")
                return
            engine = found.engines[0]
        if engine is not None:
            options = [f"{found.method.name}.{one}" for one in option_texts(found.method)]
            options = [one for one in options if ".factor=" not in one]
            patch = {"method": found.method.name, "factor": found.method.factor}
            patch |= {"compose": found.compose, "option": options, "engine": engine}
            tell_next(command_words("export", model, **patch))
            return
        lengths = f"{found.trained_length},{found.target_length}"
        words = command_words("compare", model, finetune=finetune, lengths=lengths, text=text)
        served = found.serve or found.method
        apart = served == found.raised != found.method  # its factor is another
        names = [found.method.name]
        names += [served.name] * (not apart and served != found.method)
        patch = _typed(",".join(names), found.method.factor, found.compose, None)
        tell_next([*words, "--output", unused("compared"), *patch])
        if apart:
            patch = _typed(served.name, served.factor, "raise", None)
            tell_next([*words, "--output", unused("compared-raised"), *patch])


@command()
def memory(
    model: Model,
    length: Target,
    batch: Annotated[int, typer.Option(help="Prompts at a time.")] = 1,
    chunk: Annotated[
        str | None,
        typer.Option(help="Tokens per forward: `prefill_chunk_size` of generate. Default: all."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype: bfloat16, float16 or float32.")] = "bfloat16",
    cache_bits: Annotated[
        int, typer.Option(help="Bits of a quantized KV cache: 8, 4 or 2. 16: not quantized.")
    ] = 16,
) -> None:
    """Estimate the memory of a prompt: weights, KV cache and prefill, without loading weights."""
    with clean_errors():
        import torch

        from rope_ext.advice import memory

        quiet()
        if dtype not in ("bfloat16", "float16", "float32"):
            raise OptionError(f"--dtype {dtype} is not valid; use bfloat16, float16 or float32")
        options = {"dtype": getattr(torch, dtype), "batch": batch, "cache_bits": cache_bits}
        tokens = None if chunk is None else parse_length(chunk)
        print(memory.memory(model, parse_length(length), chunk=tokens, **options))


@command()
def diagnose(
    model: Model,
    length: Annotated[str, typer.Option(help="Context length in tokens, such as 32k.")],
    method: PatchedWith = None,
    factor: OneFactor = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Show which rotary pairs reach angles outside the trained range at a given length."""
    with clean_errors():
        import rope_ext

        tokens = parse_length(length)
        found = rope_ext.diagnose(_patched(model, method, factor, compose, option), tokens)
        print(found)
        if method is None and tokens > found.trained_length:
            tell_next(command_words("recommend", model, length=tokens))
        elif method is not None:
            patch = {"method": method, "factor": factor, "compose": compose, "option": option}
            lengths = f"{found.trained_length},{tokens}"
            tell_next(command_words("compare", model, **patch, lengths=lengths))


@command()
def export(
    model: Model,
    engine: Annotated[
        str,
        typer.Option(help="Target engine: vllm, sglang, llama.cpp, ollama, mlx or transformers."),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "--methods",
            help="Method to export. Default: the one a saved or merged model has.",
        ),
    ] = None,
    factor: OneFactor = None,
    legacy: Annotated[
        bool, typer.Option("--legacy", help="transformers: also write the legacy key names.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory of the saved model; write the engine's files there."),
    ] = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Print the settings that make another engine run a method."""
    with clean_errors():
        import rope_ext
        from rope_ext.engines import build_engine

        options = {"legacy": True} if legacy else {}
        build_engine(engine, **options)  # report mistakes before loading weights
        patched = _patched(model, method, factor, compose, option)
        made = rope_ext.export(patched, engine, **options)
        print(made)
        for path in [] if output is None else made.write(output):
            tell(f"wrote {path}")
        patch = [] if method is None else _typed(method, factor, compose, option)
        runs_here = engine in ("llama.cpp", "mlx", "transformers")
        where = [] if engine == "ollama" else ["--engine", engine]
        where += [] if runs_here or engine == "ollama" else ["--write", unused("miniature")]
        if (Path(model) / "adapter_config.json").exists():
            tell_next(["python", "recipes/merge.py", model, "--output", unused("merged")])
        elif compose:  # which `verify` has no option for
            tell("done: the settings above serve it")
        else:
            _check_next(model, patch, where)


@command()
def card(
    model: Model,
    base: Annotated[str | None, typer.Option(help="Hub ID of the model that was extended.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Output directory of `rope-ext compare` or `rope-ext eval` to include."),
    ] = None,
) -> None:
    """Write a model card (README.md) into the directory of a saved or merged model."""
    with clean_errors():
        from rope_ext.advice.card import write_card

        quiet()
        tell(f"wrote {write_card(model, base, report)}")
        tell_next(["hf", "upload", "USER/NAME", model])


@command()
def gguf(
    source: Annotated[
        str,
        typer.Argument(
            help="FILE.gguf, or the directory of a patched model followed by its FILE.gguf."
        ),
    ],
    file: Annotated[str | None, typer.Argument(help="GGUF file of the patched model.")] = None,
    *,
    output: Annotated[Path, typer.Option(help="Output file.")],
    method: PatchedWith = None,
    factor: OneFactor = None,
    trained_length: TrainedLength = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Write GGUF metadata, plus a frequency tensor when needed."""
    with clean_errors(), stoppable("nothing was written; run the same command again"):
        from rope_ext.engines import gguf_file
        from rope_ext.saving.folder import read_saved

        if file is None and method is None:
            raise ExportError(
                f"no method for {source}; give --method and --factor, or the folder of a patched "
                f"model before the file"
            )
        if file is None:
            given = _method(method, factor, option)
            made = gguf_file.extended(source, output, given, trained_length)
        else:
            patched = _patched(source, method, factor, compose, option)
            model = read_saved(source).model if method is None else patched
            made = gguf_file.following(model, file, output)
        tell(f"wrote {output}")
        print(shlex.join(["llama-server", "--model", str(output), *made.in_file]))


@command()
def verify(
    model: Model,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine to run: llama.cpp (default), mlx or transformers; with --write and --url, "
            "the one that serves."
        ),
    ] = None,
    method: PatchedWith = None,
    factor: OneFactor = None,
    flags: Annotated[
        str | None,
        typer.Option(
            help="llama-server flags for an unscaled file, instead of those from `export`."
        ),
    ] = None,
    as_saved: Annotated[
        bool,
        typer.Option(
            "--as-saved", help="mlx: load the saved directory without the file from `export`."
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the unpatched miniature to this directory and print commands to serve it."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="URL of a server that runs the written miniature, http://HOST:PORT."),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", "--served-as", help="Model name on that server."),
    ] = None,
    length: Annotated[str, typer.Option(help="Length of the longest prompt in tokens.")] = "2k",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest RMS difference of log-probabilities that counts as rounding error. "
            "Default: 0.002; with --url, three times that of transformers in bfloat16."
        ),
    ] = None,
    factor_error: Annotated[
        float, typer.Option(help="Smallest relative error of the factor to detect.")
    ] = 0.01,
    json: Annotated[Path | None, typer.Option(help="Write all results to this JSON file.")] = None,
    trained_length: TrainedLength = None,
    option: Option = None,
) -> None:
    """Run a miniature model in an engine and check that it applies the patch.

    The miniature has the rotary embedding of the model, patched with --method or as saved.

    Exit codes: 0, the engine applies the patch; 1, it does not; 2, it could not be run; 3, the
    results are inconclusive.
    """
    with clean_errors():
        import tempfile

        import rope_ext
        from rope_ext.command.method_options import checked_methods
        from rope_ext.engines import verifying
        from rope_ext.saving.checkpoints import load_config

        quiet()
        longest, server = parse_length(length), engine
        engine = engine or "llama.cpp"
        _check_verify(flags, factor_error, tolerance, url, write)
        if url is None and write is None and engine not in verifying.ENGINES:
            raise OptionError(
                f"--engine {engine!r} cannot be run here; use one of "
                f"{', '.join(verifying.ENGINES)}; for others, run with --write FOLDER, serve that "
                f"folder, then run with --url http://HOST:PORT"
            )
        if method is None:
            _refuse_without_method(factor, False, option, trained_length)
        names = [] if method is None else [method]
        methods = checked_methods(names, factor, parse_options(option, names)) if names else {}
        ((name, values),) = methods.items() if methods else ((None, {}),)
        if name is not None and trained_length is not None:
            values = {**values, "original_max_position_embeddings": trained_length}
        miniature = verifying.Miniature.from_config(load_config(model), name, **values)
        patch = [] if method is None else _typed(method, factor, False, option)
        patch += [] if trained_length is None else ["--trained-length", str(trained_length)]
        if write is not None:
            commands, refusals = verifying.write(miniature, write)
            tell(f"wrote {write}; serve it with one of these commands, then run again with --url")
            for command in commands.values():
                print(command)
            for refusal in refusals:
                tell(f"note: {refusal}", "yellow")
            for name in [server] if server in commands else list(commands)[:1]:
                words = ["rope-ext", "verify", model, *patch, "--engine", name]
                tell_next([*words, "--url", f"http://localhost:{verifying.SERVERS[name]}"])
            return
        with tempfile.TemporaryDirectory() as folder:
            if url is None:
                given = "" if as_saved else flags
                run = verifying.in_process(miniature, engine, Path(folder), given)
            else:
                run, engine = verifying.endpoint(url, served_model_name), url
            if url is None and tolerance is None:
                tolerance = verifying.TOLERANCE
            found = verifying.verify(miniature, run, engine, longest, tolerance, factor_error)
        print(found)
        for note in found.notes:
            tell(f"note: {note}", "yellow")
        if json is not None:
            json.write_text(found.to_json(), encoding="utf-8")
        if found.exit_code == 0:
            served = "serve the model with the same options"
            if trained_length is None and (server or url is None):
                patched = _patched(model, method, factor, False, option)
                with suppress(RopeExtError):  # of a model that is not extended
                    served = f"use it: {rope_ext.export(patched, server or engine).command}"
            tell(f"done: {served}")
        sys.exit(found.exit_code)


def _check_verify(
    flags: str | None,
    factor_error: float,
    tolerance: float | None,
    url: str | None,
    write: Path | None,
) -> None:
    mistakes = Mistakes()
    if not 0 < factor_error < 1:
        mistakes.add(
            OptionError(f"--factor-error {factor_error:g} must be between 0 and 1, such as 0.01")
        )
    if tolerance is not None and not tolerance > 0:
        mistakes.add(OptionError(f"--tolerance {tolerance:g} must be positive, such as 0.002"))
    if url is not None and write is not None:
        mistakes.add(
            OptionError(
                "--write and --url cannot be combined; run with --write, serve the folder, then "
                "run with --url"
            )
        )
    if url is not None and not url.startswith(("http://", "https://")):
        mistakes.add(OptionError(f"--url {url!r} is not a valid URL; use http://HOST:PORT"))
    try:
        shlex.split(flags or "")
    except ValueError as error:
        mistakes.add(OptionError(f"--flags {flags!r} cannot be parsed: {error}"))
    mistakes.report()


def _check_next(model: str, patch: list[str], where: list[str]) -> None:
    """Print the command that checks an engine, unless there is no miniature to run in it."""
    from rope_ext.engines.families import miniatures
    from rope_ext.saving.checkpoints import is_dynamic, load_config

    config = load_config(model)
    known = config.get_text_config(decoder=True).model_type in miniatures()
    if known and (patch or not is_dynamic(config)):
        tell_next(["rope-ext", "verify", model, *patch, *where])
    else:
        tell("done: the settings above serve it")


def _typed(
    method: str, factor: float | None, compose: bool | str, option: list[str] | None
) -> list[str]:
    """The options that name a patch, as they are typed."""
    options = {"method": method, "factor": factor, "compose": compose, "option": option}
    return command_words("", "", **options)[3:]


def _refuse_without_method(
    factor: float | None,
    compose: bool | str,
    option: list[str] | None,
    trained_length: int | None = None,
) -> None:
    """Raise if settings of a patch were given without a method, where they would do nothing."""
    words = [] if factor is None else [f"--factor {factor:g}"]
    words += [] if trained_length is None else [f"--trained-length {trained_length}"]
    words += [] if not compose else [" ".join(compose_words(compose))]
    words += [f"--option {one}" for one in option or []]
    if words:
        raise OptionError(f"{words[0]} needs --method")


def _patched(
    model: str,
    method: str | None,
    factor: float | None,
    compose: bool | str,
    option: list[str] | None,
) -> Any:
    """The model without weights under the method; without one, its name, to read as saved."""
    from rope_ext.advice.building import model_of
    from rope_ext.command.method_options import saved_otherwise
    from rope_ext.saving.checkpoints import load_config
    from rope_ext.saving.folder import patch_without_weights

    quiet()
    if method is None:
        _refuse_without_method(factor, compose, option)
        return model
    made = _method(method, factor, option)
    for note in saved_otherwise({model: load_config(model)}):
        tell(f"note: {note}", "yellow")
    built = model_of(model)
    return patch_without_weights(built, made, {"compose": compose})


def _method(name: str | None, factor: float | None, option: list[str] | None) -> Any:
    from rope_ext.command.method_options import checked_methods
    from rope_ext.methods import build_method

    names = [name] if name is not None else []
    ((name, values),) = checked_methods(names, factor, parse_options(option, names)).items()
    return build_method(name, **values)


@command("methods")
def show_methods() -> None:
    """List methods with their options and when to use them."""
    import rope_ext
    from rope_ext.command.terminal import wide_console
    from rope_ext.encodings import Encoding
    from rope_ext.methods import all_encodings

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("use, source and options", overflow="fold")
    every = {"factor": ..., "attention_factor": None, "temperature": None}
    for info in rope_ext.methods():
        own = {k: v for k, v in info.options.items() if (k, v) not in every.items()}
        options = [k if v is ... else f"{k}={v}" for k, v in own.items()]
        more = escape(": ".join(filter(None, [info.paper, ", ".join(options)])))
        table.add_row(info.name, f"{escape(info.summary)}\n[dim]{more}[/dim]")
    console = wide_console(80)
    console.print(table)
    note = f"Every method also takes {', '.join(every)}. Options without a default are required."
    console.print(note, style="dim")
    names = ", ".join(cls.name for cls in all_encodings())
    console.print(f"Encodings that replace RoPE: {names}.", style="dim")
    adding = [cls for cls in all_encodings() if issubclass(cls, Encoding) and cls.adds()]
    names = ", ".join(cls.name for cls in adding)
    console.print(f"Biases to add to RoPE with bias=: {names}.", style="dim")
    tell_next(command_words("recommend", "MODEL", length="128k"))
