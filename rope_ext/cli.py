"""The command line. What needs transformers is imported by the commands that use it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from rope_ext.arguments import parse_length, parse_options
from rope_ext.cli_arguments import (
    Compose,
    Factor,
    Model,
    Option,
    PatchedWith,
    Target,
    TrainedLength,
)
from rope_ext.errors import Mistakes, OptionError
from rope_ext.evaluators import find
from rope_ext.terminal import clean_errors, quiet, stoppable, tell

app = typer.Typer(no_args_is_help=True, add_completion=False)
if (evaluators := find("cli")) is not None:
    app.registered_commands += evaluators.app.registered_commands


@app.callback()
def main() -> None:
    """Extend the context of RoPE models of Hugging Face transformers."""


@app.command()
def describe(
    model: Model,
    method: PatchedWith = None,
    factor: Factor = 4.0,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Print the rotary embedding of a model, before and after a patch."""
    with clean_errors():
        import rope_ext

        print(rope_ext.describe(_patched(model, method, factor, compose, option)))


@app.command()
def recommend(
    model: Annotated[str, typer.Argument(help="Folder or Hub id; no weights are read.")],
    length: Target,
    finetune: Annotated[
        bool, typer.Option("--finetune", help="The model will be fine-tuned for it.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="File or folder of `rope-ext calibrate`, to use.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Only methods that vllm, sglang, llama.cpp, ollama, mlx or transformers can run."
        ),
    ] = None,
) -> None:
    """Print which method extends a model to a length, and why."""
    with clean_errors():
        import rope_ext

        quiet()
        print(rope_ext.recommend(model, parse_length(length), finetune, calibration, engine))


@app.command()
def diagnose(
    model: Model,
    length: Annotated[str, typer.Option(help="Context in tokens, such as 32k.")],
    method: PatchedWith = None,
    factor: Factor = 4.0,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Print which rotary pairs meet angles at a length that they were not trained on."""
    with clean_errors():
        import rope_ext

        tokens = parse_length(length)
        print(rope_ext.diagnose(_patched(model, method, factor, compose, option), tokens))


@app.command()
def export(
    model: Model,
    method: Annotated[str, typer.Option(help="Method of the patch to export.")],
    engine: Annotated[
        str, typer.Option(help="vllm, sglang, llama.cpp, ollama, mlx or transformers.")
    ],
    factor: Factor = 4.0,
    legacy: Annotated[
        bool, typer.Option("--legacy", help="transformers: add the names of older readers.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the saved model: write the engine's files there.")
    ] = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Print the settings with which another engine runs a model under a method."""
    with clean_errors():
        import rope_ext

        options = {"legacy": True} if legacy else {}
        rope_ext.engines.build_engine(engine, **options)  # mistakes show before the weights do
        patched = _patched(model, method, factor, compose, option, as_stored=True)
        made = rope_ext.export(patched, engine, **options)
        print(made)
        for path in [] if output is None else made.write(output):
            tell(f"wrote {path}")


@app.command()
def gguf(
    source: Annotated[
        str, typer.Argument(help="FILE.gguf; or the folder of a patched model, and its file next.")
    ],
    file: Annotated[str | None, typer.Argument(help="FILE.gguf of the folder's model.")] = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = ...,
    method: PatchedWith = None,
    factor: Factor = 4.0,
    trained_length: TrainedLength = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Write a patch into a file of llama.cpp: keys, and a tensor where they cannot say it."""
    with clean_errors(), stoppable("nothing was written; run the same command again"):
        from rope_ext.engines import gguf_file

        if file is None:
            made = gguf_file.extended(source, output, method, factor, trained_length, option)
        else:
            model = _patched(source, method, factor, compose, option)
            made = gguf_file.following(model, file, output)
        tell(f"wrote {output}")
        print(shlex.join(["llama-server", "--model", str(output), *made.in_file]))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="Folder or Hub id; no weights are read.")],
    engine: Annotated[str, typer.Option(help="llama.cpp, mlx or transformers.")] = "llama.cpp",
    method: PatchedWith = None,
    factor: Factor = 4.0,
    flags: Annotated[
        str | None,
        typer.Option(help="Of llama-server, for an unscaled file, instead of those of `export`."),
    ] = None,
    as_saved: Annotated[
        bool, typer.Option("--as-saved", help="mlx: the folder without the file of `export`.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the unpatched miniature to this folder; print the commands that serve it."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A server of the written miniature, http://HOST:PORT.")
    ] = None,
    served_as: Annotated[str | None, typer.Option(help="Its name on that server.")] = None,
    length: Annotated[str, typer.Option(help="Longest prompt in tokens.")] = "2k",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Root mean square difference of log-probabilities that counts as rounding. "
            "Default: 0.002; for a --url, three times that of transformers in bfloat16."
        ),
    ] = None,
    factor_error: Annotated[
        float, typer.Option(help="Relative error of the factor to tell from the right one.")
    ] = 0.01,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.")] = None,
    trained_length: TrainedLength = None,
    option: Option = None,
) -> None:
    """Run a miniature in an engine and report what it computes.

    The miniature has the rotary embedding of the model, under --method or as it was saved.

    Exit code 0: the engine computes the patch; 1: it does not; 2: it could not be run; 3: its
    answers do not decide between the patch and something else.
    """
    with clean_errors():
        import tempfile

        from rope_ext.checkpoints import load_config
        from rope_ext.engines import verifying
        from rope_ext.method_options import checked_methods

        quiet()
        longest = parse_length(length)
        _check_verify(flags, factor_error, tolerance, url, write)
        if url is None and write is None and engine not in verifying.ENGINES:
            raise OptionError(
                f"--engine {engine!r} is not run here; give one of "
                f"{', '.join(verifying.ENGINES)}, or for others --write FOLDER, serve that, and "
                f"--url http://HOST:PORT"
            )
        if method is None and option:
            raise OptionError(f"--option {option[0]} is for a method; give --method, too")
        names = [] if method is None else [method]
        methods = checked_methods(names, factor, parse_options(option, names)) if names else {}
        ((name, values),) = methods.items() if methods else ((None, {}),)
        if name is not None and trained_length is not None:
            values = {**values, "original_max_position_embeddings": trained_length}
        miniature = verifying.Miniature.from_config(load_config(model), name, **values)
        if write is not None:
            commands, refusals = verifying.write(miniature, write)
            tell(f"wrote {write}; serve it by one of these commands, then ask it with --url")
            for command in commands.values():
                print(command)
            for refusal in refusals:
                tell(f"note: {refusal}", "yellow")
            return
        with tempfile.TemporaryDirectory() as folder:
            if url is None:
                given = "" if as_saved else flags
                run = verifying.in_process(miniature, engine, Path(folder), given)
            else:
                run, engine = verifying.endpoint(url, served_as), url
            if url is None and tolerance is None:
                tolerance = verifying.TOLERANCE
            found = verifying.verify(miniature, run, engine, longest, tolerance, factor_error)
        print(found)
        for note in found.notes:
            tell(f"note: {note}", "yellow")
        if json is not None:
            json.write_text(found.to_json(), encoding="utf-8")
        sys.exit(found.exit_code)


def _check_verify(
    flags: str | None,
    factor_error: float,
    tolerance: float | None,
    url: str | None,
    write: Path | None,
) -> None:
    from rope_ext.engines import running

    mistakes = Mistakes()
    if not 0 < factor_error < 1:
        mistakes.add(
            OptionError(f"--factor-error {factor_error:g} has to be between 0 and 1, as 0.01")
        )
    if tolerance is not None and not tolerance > 0:
        mistakes.add(OptionError(f"--tolerance {tolerance:g} has to be above 0, as 0.002"))
    if url is not None and write is not None:
        mistakes.add(
            OptionError("--write comes first; serve what it wrote, then give --url without --write")
        )
    if url is not None and not url.startswith(("http://", "https://")):
        mistakes.add(OptionError(f"--url {url!r} is no address; give one as http://HOST:PORT"))
    words: list[str] = []
    try:
        words = shlex.split(flags or "")
    except ValueError as error:
        mistakes.add(OptionError(f"--flags {flags!r} cannot be split into words: {error}"))
    mistakes.report()
    given = running.overridden(words)
    if given:
        tell(
            f"note: {shlex.join(running.EXACT)} override {', '.join(given)} of --flags: the check "
            f"runs in float32, and does not measure what those flags change",
            "yellow",
        )


def _patched(
    model: str,
    method: str | None,
    factor: float,
    compose: bool,
    option: list[str] | None,
    as_stored: bool = False,
) -> Any:
    """The loaded model, under the method if there is one; ``as_stored``: in its own dtype."""
    import rope_ext
    from rope_ext.checkpoints import load_config, load_model
    from rope_ext.method_options import checked_methods, saved_otherwise

    quiet()
    if method is None and option:
        raise OptionError(f"--option {option[0]} is for a method; give --method, too")
    names = [] if method is None else [method]
    options = parse_options(option, names)
    methods = checked_methods(names, factor, options) if names else {}
    config = load_config(model)
    dtype = str(config.dtype).removeprefix("torch.") if as_stored and config.dtype else "auto"
    loaded = load_model(model, dtype, device="cpu", as_saved=method is None)
    for note in saved_otherwise({model: config} if names else {}):
        tell(f"note: {note}", "yellow")
    for name, values in methods.items():
        rope_ext.patch(loaded, name, compose=compose, **values)
    return loaded


@app.command("methods")
def show_methods() -> None:
    """List the methods, their options and when to use them."""
    import rope_ext
    from rope_ext.methods import all_encodings
    from rope_ext.terminal import wide_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "options", "use", "paper"):
        table.add_column(column, no_wrap=column in ("method", "paper"), overflow="fold")
    for info in rope_ext.methods():
        options = [k if v is ... else f"{k}={v}" for k, v in info.options.items()]
        table.add_row(info.name, ", ".join(options), info.use, info.paper)
    console = wide_console(160)
    console.print(table)
    console.print("Options without a value must be given.", style="dim")
    names = ", ".join(cls.name for cls in all_encodings())
    console.print(f"In the rotation's place, by the same patch: {names}.", style="dim")
    names = ", ".join(cls.name for cls in all_encodings() if cls.adds())
    console.print(f"Beside a rotation that stays, by bias=: {names}.", style="dim")
