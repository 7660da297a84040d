"""The command line. Commands import transformers only when they run."""

from __future__ import annotations

import functools
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from rope_ext.command.arguments import command_words, parse_length, parse_options
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
from rope_ext.command.terminal import stoppable, tell, tell_next, unused
from rope_ext.errors import ExportError, OptionError, RopeExtError
from rope_ext.version import __version__

EngineName = Literal["vllm", "sglang", "llama.cpp", "ollama", "mlx", "transformers"]
RUNS_HERE = ("llama.cpp", "mlx", "transformers")

app = typer.Typer(cls=Commands, rich_markup_mode=None)
command = functools.partial(app.command, cls=ModelCommand)


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


@dataclass(frozen=True)
class _Asked:
    """A model, and the patch that the options of a command ask for."""

    model: str
    method: str | None
    factor: float | None = None
    option: list[str] | None = None
    compose: Any = False
    trained_length: int | None = None

    def words(self, command: str, **more: Any) -> list[str]:
        """``rope-ext COMMAND MODEL`` with the patch and further options, as it is typed."""
        return command_words(command, **vars(self), **more)

    def methods(self) -> dict[str, dict[str, Any]]:
        """The method and its options; without a method, where the others would do nothing, none."""
        from rope_ext.command.method_options import checked_methods

        if self.method is None:
            words = self.words("")[3:]
            if words:
                raise OptionError(f"{' '.join(words[:2])} needs --method")
            return {}
        names = [self.method]
        return checked_methods(names, self.factor, parse_options(self.option, names))

    def build(self) -> Any:
        from rope_ext.methods import build_method

        ((name, values),) = self.methods().items()
        return build_method(name, **values)

    def patched(self) -> Any:
        """The model without weights under the method; without one, its name, to read as saved."""
        from rope_ext.advice.building import model_of
        from rope_ext.command.method_options import saved_otherwise
        from rope_ext.saving.checkpoints import load_config
        from rope_ext.saving.folder import patch_without_weights

        if not self.methods():
            return self.model
        for note in saved_otherwise({self.model: load_config(self.model)}):
            tell(f"note: {note}", "yellow")
        return patch_without_weights(model_of(self.model), self.build(), {"compose": self.compose})

    def tell_check(self, engine: str | None = None) -> None:
        """Print the command that checks an engine, unless there is no miniature to run in it."""
        from rope_ext.engines.families import miniatures
        from rope_ext.saving.checkpoints import is_dynamic, load_config

        config = load_config(self.model)
        known = config.get_text_config(decoder=True).model_type in miniatures()
        if self.compose or not known or (self.method is None and is_dynamic(config)):
            tell("done: the settings above serve it")
            return
        here = engine in (None, "ollama", *RUNS_HERE)
        engine = None if engine == "ollama" else engine
        tell_next(self.words("verify", engine=engine, write=None if here else unused("miniature")))


@command()
def describe(
    model: Model,
    method: PatchedWith = None,
    factor: OneFactor = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Show a model's rotary embedding, before and after a patch."""
    import rope_ext

    asked = _Asked(model, method, factor, option, compose)
    patched = asked.patched()
    found = rope_ext.describe(patched)
    print(found)
    if found.method is None:
        tell_next(command_words("recommend", model, length=4 * found.target_length))
    elif method is None and found.serve:
        asked.tell_check()
    elif method is None:
        tell("done: use it in Python; no engine runs it")
    else:
        try:
            rope_ext.export(patched, "vllm")
            tell_next(asked.words("export", engine="vllm"))
        except ExportError:  # then it is for Python, where it can be compared
            lengths = f"{found.length},{found.target_length}"
            tell_next(asked.words("compare", lengths=lengths, output=unused("compared")))


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
        EngineName | None, typer.Option(help="Only methods that this engine can run.")
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
    import rope_ext
    from rope_ext.config.record import option_texts

    found = rope_ext.recommend(model, parse_length(length), finetune, calibration, engine)
    print(found.full() if everything else found)
    name, factor, compose = found.method.name, found.method.factor, found.compose
    serving: str | None = engine
    if calibration is not None and not (finetune or engine):  # which follows a comparison
        if found.serve != found.method:
            tell(f"done: use it in Python: {found.call}")
            return
        serving = found.engines[0]
    if serving is not None:
        texts = [one for one in option_texts(found.method) if not one.startswith("factor=")]
        asked = _Asked(model, name, factor, [f"{name}.{one}" for one in texts], compose)
        tell_next(asked.words("export", engine=serving))
        return
    lengths = f"{found.trained_length},{found.target_length}"
    more = {"finetune": finetune, "lengths": lengths, "text": text}
    served = found.serve or found.method
    apart = served in (found.raised, found.method)  # whose factor is another
    names = name if apart else f"{name},{served.name}"
    asked = _Asked(model, names, factor, None, compose)
    tell_next(asked.words("compare", **more, output=unused("compared")))


@command()
def memory(
    model: Model,
    length: Target,
    batch: Annotated[int, typer.Option(help="Prompts at a time.")] = 1,
    chunk: Annotated[
        str | None,
        typer.Option(help="Tokens per forward: `prefill_chunk_size` of generate. Default: all."),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Dtype.")
    ] = "bfloat16",
    cache_bits: Annotated[
        int, typer.Option(help="Bits of a quantized KV cache: 8, 4 or 2. 16: not quantized.")
    ] = 16,
) -> None:
    """Estimate the memory of a prompt: weights, KV cache and prefill, without loading weights."""
    import torch

    from rope_ext.advice import memory

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
    import rope_ext

    tokens, asked = parse_length(length), _Asked(model, method, factor, option, compose)
    found = rope_ext.diagnose(asked.patched(), tokens)
    print(found)
    if method is not None:
        lengths = f"{found.trained_length},{tokens}"
        tell_next(asked.words("compare", lengths=lengths, output=unused("compared")))
    elif tokens > found.trained_length:
        tell_next(command_words("recommend", model, length=tokens))


@command()
def export(
    model: Model,
    engine: Annotated[EngineName, typer.Option(help="Target engine.")],
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
    import rope_ext

    asked = _Asked(model, method, factor, option, compose)
    made = rope_ext.export(asked.patched(), engine, **({"legacy": True} if legacy else {}))
    print(made)
    for path in [] if output is None else made.write(output):
        tell(f"wrote {path}")
    if (Path(model) / "adapter_config.json").exists():
        tell_next(["python", "recipes/merge.py", model, "--output", unused("merged")])
    else:
        asked.tell_check(engine)


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
    from rope_ext.advice.card import write_card

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
    with stoppable("nothing was written; run the same command again"):
        from rope_ext.engines import gguf_file
        from rope_ext.saving.folder import read_saved

        asked = _Asked(source, method, factor, option, compose)
        if file is None and method is None:
            raise ExportError(
                f"no method for {source}; give --method and --factor, or the folder of a patched "
                f"model before the file"
            )
        if file is None:
            made = gguf_file.extended(source, output, asked.build(), trained_length)
        else:
            patched = asked.patched()
            model = read_saved(source).model if method is None else patched
            made = gguf_file.following(model, file, output)
        tell(f"wrote {output}")
        print(shlex.join(["llama-server", "--model", str(output), *made.in_file]))


@command()
def verify(
    model: Model,
    engine: Annotated[
        Literal["llama.cpp", "mlx", "transformers", "vllm", "sglang"] | None,
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
            "Default: 0.002; with --url, three times that of transformers in bfloat16.",
            min=1e-9,
        ),
    ] = None,
    factor_error: Annotated[
        float,
        typer.Option(help="Smallest relative error of the factor to detect.", min=1e-6, max=1),
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
    import tempfile

    import rope_ext
    from rope_ext.engines import verifying
    from rope_ext.saving.checkpoints import load_config

    longest, server, engine = parse_length(length), engine, engine or "llama.cpp"
    if longest < 2:
        raise OptionError(f"--length {length} is not valid; it must be at least 2")
    if url is not None and (write is not None or not url.startswith(("http://", "https://"))):
        raise OptionError(
            f"--url {url!r} must be http://HOST:PORT, without --write: run with --write, serve the "
            f"folder, then run with --url"
        )
    if url is None and write is None and engine not in RUNS_HERE:
        raise OptionError(
            f"--engine {engine!r} cannot be run here; use one of {', '.join(RUNS_HERE)}; for "
            f"others, run with --write FOLDER, serve that folder, then run with --url "
            f"http://HOST:PORT"
        )
    asked = _Asked(model, method, factor, option, trained_length=trained_length)
    ((name, values),) = asked.methods().items() or [(None, {})]
    if trained_length is not None:
        values = {**values, "original_max_position_embeddings": trained_length}
    miniature = verifying.Miniature.from_config(load_config(model), name, **values)
    if write is not None:
        commands, refusals = verifying.write(miniature, write)
        tell(f"wrote {write}; serve it with one of these commands, then run again with --url")
        print("\n".join(commands.values()))
        for refusal in refusals:
            tell(f"note: {refusal}", "yellow")
        for name in [server] if server in commands else list(commands)[:1]:
            address = f"http://localhost:{verifying.SERVERS[str(name)]}"
            tell_next(asked.words("verify", engine=name, url=address))
        return
    with tempfile.TemporaryDirectory() as folder:
        if url is None:
            tolerance = tolerance or verifying.TOLERANCE
            given = "" if as_saved else flags
            run, where = verifying.in_process(miniature, engine, Path(folder), given), engine
        else:
            run, where = verifying.endpoint(url, served_model_name), url
        found = verifying.verify(miniature, run, where, longest, tolerance, factor_error)
    print(found)
    for note in found.notes:
        tell(f"note: {note}", "yellow")
    if json is not None:
        json.write_text(found.to_json(), encoding="utf-8")
    if found.passed:
        served = "serve the model with the same options"
        if trained_length is None and (server or url is None):
            with suppress(RopeExtError):  # of a model that is not extended
                made = rope_ext.export(asked.patched(), engine)
                words = shlex.join(asked.words("export", engine=engine, output="FOLDER"))
                served = f"use it: {words if made.files else made.command}"
        tell(f"done: {served}")
    sys.exit(found.exit_code)


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
    console, encodings = wide_console(80), all_encodings()
    console.print(table)
    adding = [cls for cls in encodings if issubclass(cls, Encoding) and cls.adds()]
    for note in (
        f"Every method also takes {', '.join(every)}. Options without a default are required.",
        f"Encodings that replace RoPE: {', '.join(cls.name for cls in encodings)}.",
        f"Biases to add to RoPE with bias=: {', '.join(cls.name for cls in adding)}.",
    ):
        console.print(note, style="dim")
    tell_next(command_words("recommend", "MODEL", length="128k"))
