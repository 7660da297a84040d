"""The command line. Commands import transformers only when they run."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from rope_ext.command.arguments import command_words, parse_length
from rope_ext.command.cli_arguments import (
    Commands,
    Model,
    PatchOptions,
    Target,
    TrainedLength,
    command,
)
from rope_ext.command.terminal import show, stoppable, tell, tell_next, unused
from rope_ext.errors import ExportError
from rope_ext.quoting import shell_join
from rope_ext.version import __version__

app = typer.Typer(cls=Commands, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Extend the context length of RoPE models in Hugging Face transformers."""
    if version:
        print(f"rope-ext {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@command(app)
def describe(patch_options: PatchOptions) -> None:
    """Show a model's rotary embedding, before and after a patch."""
    import rope_ext

    patched = patch_options.patched()
    found = rope_ext.describe(patched)
    show(found)
    if found.method is None:
        tell_next(command_words("recommend", patch_options.model, length=4 * found.target_length))
    elif patch_options.method is None and found.serve:
        patch_options.tell_check()
    elif (Path(patch_options.model) / "adapter_config.json").exists():
        tell("done: use it in Python")  # an engine may run it once it is merged
    else:
        try:
            rope_ext.export(patched, "vllm")
            tell_next(patch_options.words("export", engine="vllm"))
        except ExportError:  # no engine runs it
            if patch_options.method is None:
                tell("done: use it in Python; no engine runs it")
            else:
                patch_options.tell_compare(found.length, found.target_length)


@command(app)
def recommend(
    model: Model,
    length: Target,
    finetune: bool = False,
    calibration: Path | None = None,
    engine: str | None = None,
    text: list[str] | None = None,
    trained_length: TrainedLength = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list all other methods that the model accepts.")
    ] = False,
) -> None:
    """Recommend a method for a target length, with reasons.

    Options:
        finetune: Assume that you fine-tune the model for this length.
        calibration: Output file or directory of `rope-ext calibrate`.
        engine: Only methods that it can run: vllm, sglang, llama.cpp, ollama, mlx, transformers.
        text: Text to evaluate on, for the next commands. Repeatable.
    """
    import rope_ext
    from rope_ext.config.record import option_texts

    found = rope_ext.recommend(
        model,
        parse_length(length),
        finetune=finetune,
        calibration=calibration,
        engine=engine,
        original_max_position_embeddings=trained_length,
    )
    show(found.full() if everything else found)
    best = found.method
    served = found.serve or found.method
    trained = found.original_max_position_embeddings
    patch_options = PatchOptions(
        model=model,
        method=best.name,
        factor=best.factor,
        option=None,
        compose=found.compose,
        trained_length=trained,
    )
    # What the calibration chose has been measured; anything else is compared first.
    calibrated = calibration is not None and found.calibrated and engine is None
    if calibrated and found.serve != best:
        tell(f"done: use it in Python: {found.call}")
    elif calibrated or engine is not None:
        texts = [one for one in option_texts(best) if not one.startswith("factor=")]
        patch_options = replace(patch_options, option=[f"{best.name}.{one}" for one in texts])
        tell_next(patch_options.words("export", engine=engine or found.engines[0]))
    else:
        if served not in (found.raised, best):  # their factor may differ
            patch_options = replace(patch_options, method=f"{best.name},{served.name}")
        lengths = (found.trained_length, found.target_length)
        patch_options.tell_compare(*lengths, finetune=finetune, text=text)


@command(app)
def memory(
    model: Model,
    length: Target,
    batch: int = 1,
    chunk: str | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    cache_bits: int = 16,
) -> None:
    """Estimate the memory of a prompt, without loading weights.

    It covers the weights, the KV cache and the prefill.

    Options:
        batch: Number of prompts per batch.
        chunk: Tokens per forward: `prefill_chunk_size` of generate. Default: all.
        dtype: Dtype of weights, activations and cache.
        cache_bits: Bits of a quantized KV cache: 8, 4 or 2. 16: not quantized.
    """
    import torch

    from rope_ext.advice import memory

    options = {"dtype": getattr(torch, dtype), "batch": batch, "cache_bits": cache_bits}
    tokens = None if chunk is None else parse_length(chunk, "--chunk")
    show(memory.memory(model, parse_length(length), chunk=tokens, **options))


@command(app)
def diagnose(patch_options: PatchOptions, length: str) -> None:
    """Show which rotary pairs leave the trained range at a length.

    Options:
        length: Context length in tokens, such as 32k.
    """
    import rope_ext

    tokens = parse_length(length)
    patched = patch_options.patched()
    found = rope_ext.diagnose(patched, tokens)
    show(found)
    if patch_options.method is not None:
        patch_options.tell_compare(found.trained_length, tokens)
    elif tokens > rope_ext.describe(patched).target_length:
        tell_next(command_words("recommend", patch_options.model, length=tokens))


@command(app)
def export(
    patch_options: PatchOptions,
    engine: str,
    legacy: bool = False,
    output: Path | None = None,
) -> None:
    """Print the settings that make an engine run a method.

    Without --method, of the patch that the model was saved with.

    Options:
        engine: vllm, sglang, llama.cpp, ollama, mlx or transformers.
        legacy: transformers: also write the legacy key names.
        output: Directory of the saved model; write the engine's files there.
    """
    import rope_ext

    exported = rope_ext.export(
        patch_options.patched(), engine, **({"legacy": True} if legacy else {})
    )
    written = [] if output is None else exported.write(output)
    show(exported)
    for path in written:
        tell(f"wrote {path}")
    if (Path(patch_options.model) / "adapter_config.json").exists():
        tell_next(["python", "recipes/merge.py", patch_options.model, "--output", unused("merged")])
    else:
        patch_options.tell_check(engine)


@command(app)
def serve(
    patch_options: PatchOptions,
    continuous_batching: bool = False,
    blocks: int | None = None,
    batch_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    host: str = "localhost",
    port: int = 8000,
) -> None:
    """Serve a patched model over the OpenAI API.

    With transformers' server, so with every method. Without --method, with the patch that the
    model was saved with. `rope-ext export` shows engines that run some methods faster.

    Options:
        continuous_batching: Answer requests together, on a paged cache.
        blocks: Pages of the cache of --continuous-batching. Default: as memory allows.
        batch_tokens: Tokens of a batch of --continuous-batching. Default: as memory allows.
        device: Device, such as cuda:1 or cpu.
        dtype: Dtype of the weights, such as bfloat16. Default: as saved.
        host: Address to listen on.
        port: Port to listen on.
    """
    import rope_ext
    from rope_ext.engines import transformers_server

    method = patch_options.build()
    patch_options.patched()  # reports what cannot be patched before the weights are loaded
    apply_patch = None
    if method is not None:
        apply_patch = partial(rope_ext.patch, method=method, **patch_options.arguments())
    with stoppable("start the same command again"):
        transformers_server.run(
            patch_options.model,
            apply_patch,
            continuous_batching=continuous_batching,
            cb_num_blocks=blocks,
            cb_max_batch_tokens=batch_tokens,
            device=device,
            dtype=dtype,
            host=host,
            port=port,
        )


@command(app)
def card(model: Model, base: str | None = None, report: Path | None = None) -> None:
    """Write a model card into the directory of a saved model.

    Options:
        base: Hub ID of the model that was extended.
        report: Output directory of `rope-ext compare` or `rope-ext eval` to include.
    """
    from rope_ext.advice.describe import write_card

    tell(f"wrote {write_card(model, base, report)}")
    tell_next(["hf", "upload", "USER/NAME", model])


@command(app)
def gguf(
    patch_options: PatchOptions,
    file: Annotated[
        str | None, typer.Argument(help="GGUF file of the model, if that is a patched directory.")
    ] = None,
    *,
    output: Path,
) -> None:
    """Write GGUF metadata, plus a frequency tensor when needed.

    Options:
        output: Output file.
    """
    with stoppable("nothing was written; run the same command again"):
        from rope_ext.engines import llama_cpp
        from rope_ext.saving.folder import read_saved

        if file is None and patch_options.method is None:
            raise ExportError(
                f"no method for {patch_options.model}; give --method and --factor, or the folder "
                f"of a patched model before the file"
            )
        if file is None:
            plan = llama_cpp.extended(
                path=patch_options.model,
                output=output,
                method=patch_options.build(),
                trained_length=patch_options.trained_length,
            )
        else:
            patched = patch_options.patched()
            model = read_saved(patched).model if isinstance(patched, str) else patched
            plan = llama_cpp.following(model, file, output)
        tell(f"wrote {output}")
        print(shell_join(["llama-server", "--model", output, *plan.in_file]))


@command(app, "methods")
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
    encodings = all_encodings()
    console.print(table)
    adding = [cls for cls in encodings if issubclass(cls, Encoding) and cls.adds()]
    for note in (
        f"Every method also takes {', '.join(every)}. Options without a default are required.",
        f"Encodings that replace RoPE: {', '.join(cls.name for cls in encodings)}.",
        f"Biases to add to RoPE with bias=: {', '.join(cls.name for cls in adding)}.",
    ):
        console.print(note, style="dim")
    tell_next(command_words("recommend", "MODEL", length="128k"))
