"""The command line. What needs transformers is imported by the commands that use it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from rope_ext.errors import Mistakes, OptionError
from rope_ext.measure.arguments import parse_length, parse_lengths, parse_options, split
from rope_ext.measure.reports.terminal import clean_errors, quiet, stoppable, tell

app = typer.Typer(no_args_is_help=True, add_completion=False)

Model = Annotated[str, typer.Argument(help="Folder or Hub id.")]
Factor = Annotated[float, typer.Option(help="How many times the trained length.")]
PatchedWith = Annotated[str | None, typer.Option(help="Patch it with this method first.")]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="One option of one method, such as yarn.beta_fast=16, or all in a file, such as "
        "longrope=found.json; repeat.",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
TrainedLength = Annotated[
    int | None, typer.Option(help="If the configuration does not say it rightly.")
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        help="Text, .jsonl, .parquet or folder to read; repeat. Default: Python's own library."
    ),
]
TrainText = Annotated[
    list[str] | None,
    typer.Option(
        help="Text, .jsonl, .parquet or folder; repeat. Default: Python's own library, but for "
        "the part that is measured by default."
    ),
]
Target = Annotated[str, typer.Option(help="Context to reach in tokens, such as 32k.")]
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
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens, such as 512,4k.")],
    factor: Factor = 4.0,
    text: Text = None,
    windows: Annotated[int, typer.Option(help="Windows of text for each length.")] = 16,
    trials: Annotated[int, typer.Option(help="Passkeys for each length and depth.")] = 10,
    depths: Annotated[int, typer.Option(help="Depths of the passkey.")] = 5,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("rope-ext-compare"),
    resume: Annotated[bool, typer.Option("--resume", help="Use what --output holds.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete results in --output.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of texts, prompts and intervals.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch_size: Annotated[
        int | None, typer.Option(help="Rows for each forward. Default: as many as fit.")
    ] = None,
    trained_length: TrainedLength = None,
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Measure methods against the unpatched model: perplexity and passkey retrieval."""
    with clean_errors():
        from rope_ext.measure.evaluate import evaluate
        from rope_ext.measure.settings import Settings
        from rope_ext.measure.tasks import Passkey, Perplexity

        names, mistakes = tuple(split(methods)), Mistakes()
        settings = Settings(
            models=(model,),
            methods=names,
            lengths=mistakes.check(parse_lengths, lengths, default=(2,)),
            factor=factor,
            options=mistakes.check(parse_options, option, names, default={}),
            seed=seed,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            trained_length=trained_length,
            compose=compose,
            force=True,
            output=output,
            resume=resume,
            overwrite=overwrite,
        )
        tasks = [
            mistakes.check(lambda: Perplexity(text=text or (), windows=windows)),
            mistakes.check(lambda: Passkey(trials=trials, depths=depths)),
        ]
        evaluate(settings, tasks, mistakes)


@app.command(
    "eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def evaluate_tasks(context: typer.Context) -> None:
    """Measure tasks: perplexity, passkey, ruler, babilong and more; see `rope-ext eval -h`."""
    from rope_ext.measure import command

    command.call(context.args)


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
) -> None:
    """Print which method extends a model to a length, and why."""
    with clean_errors():
        import rope_ext

        quiet()
        print(rope_ext.recommend(model, parse_length(length), finetune, calibration))


@app.command()
def search(
    model: Model,
    length: Target,
    output: Annotated[
        Path, typer.Option(help="The options found, a .json file; a search that is there goes on.")
    ],
    text: TrainText = None,
    iterations: Annotated[int, typer.Option(min=1, help="Of evolution.")] = 40,
    population: Annotated[int, typer.Option(min=4, help="Tables to begin with.")] = 64,
    mutations: Annotated[int, typer.Option(min=0, help="New tables of each iteration.")] = 16,
    crossovers: Annotated[int, typer.Option(min=0, help="Likewise, from two.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Windows of text that judge a table.")] = 5,
    scored: Annotated[
        str | None,
        typer.Option(
            help="Tokens at their ends that count, or `needles`: the answers of passkeys hidden in "
            "them and in filler. Default: half."
        ),
    ] = None,
    critical: Annotated[
        int | None,
        typer.Option(help="Search from this pair on, those below as of NTK. Default: all."),
    ] = None,
    attention_factor: Annotated[
        float | None, typer.Option(help="Of all tables. Default: it is searched along.")
    ] = None,
    start_tokens: Annotated[
        str, typer.Option(help="Numbers of tokens to choose from; more than 0 is not exportable.")
    ] = "0",
    seed: Annotated[int, typer.Option(help="Of windows and evolution.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trained_length: TrainedLength = None,
    compose: Compose = False,
) -> None:
    """Search the table of longrope by evolution. Killed, it goes on when it is run again."""
    with clean_errors(), stoppable("run the same command to continue"):
        import rope_ext
        from rope_ext.measure.models import load_model, load_tokenizer
        from rope_ext.measure.search import NEEDLES, summary
        from rope_ext.measure.text import python_library, read_texts

        quiet()
        tokens = parse_length(length)
        last = scored
        if scored not in (None, NEEDLES):
            last = parse_length(scored, "--scored")
        starts = parse_lengths(start_tokens, "--start-tokens")
        texts = read_texts(text) if text else python_library("train")
        tokenizer = load_tokenizer(model)
        found = rope_ext.search(
            load_model(model, dtype, device),
            tokenizer,
            texts,
            tokens,
            output=output,
            population=population,
            iterations=iterations,
            mutations=mutations,
            crossovers=crossovers,
            samples=samples,
            scored=last,
            critical=critical,
            attention_factor=attention_factor,
            start_tokens=starts,
            seed=seed,
            compose=compose,
            original_max_position_embeddings=trained_length,
        )
        print(summary(output))
        more = {"--dtype": dtype, "--device": device, "--trained-length": trained_length}
        print(_use_of(found, output, model, tokens, more, compose))


@app.command()
def calibrate(
    model: Annotated[str, typer.Option(help="Folder or Hub id of a causal language model.")],
    length: Target,
    output: Annotated[Path, typer.Option(help="Folder for what is found.")],
    methods: Annotated[str, typer.Option(help="Names, comma between.")] = "yarn",
    text: TrainText = None,
    options: Annotated[
        str | None,
        typer.Option(help="Those to find, such as attention_factor,window. Default: all."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --output holds.")] = (
        False
    ),
    samples: Annotated[int, typer.Option(help="Windows of text, of each half.")] = 8,
    prompts: Annotated[
        int, typer.Option(help="Passkeys, of each half and length; 0: the text alone.")
    ] = 8,
    scored: Annotated[
        str | None, typer.Option(help="Tokens that count far out. Default: a quarter.")
    ] = None,
    cost: Annotated[
        float, typer.Option(help="Largest rise of the loss within the trained length, as a share.")
    ] = 0.02,
    seed: Annotated[int, typer.Option(help="Of windows, prompts and intervals.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trained_length: TrainedLength = None,
    compose: Compose = False,
) -> None:
    """Find the temperature and the other scalars of methods for a model, on a text.

    One half of the text chooses, the other judges; what is not better beyond noise stays as it was
    published.
    """
    with clean_errors(), stoppable():
        import rope_ext
        from rope_ext.measure.models import load_model, load_tokenizer
        from rope_ext.measure.text import read_texts
        from rope_ext.methods import method_class

        quiet()
        tokens, names = parse_length(length), split(methods)
        last = None if scored is None else parse_length(scored, "--scored")
        for name in names:  # a mistake shows before the weights are loaded
            method_class(name)
        texts = read_texts(text) if text else None
        tokenizer = load_tokenizer(model)
        found = rope_ext.calibrate(
            load_model(model, dtype, device),
            tokenizer,
            tokens,
            texts,
            methods=names,
            options=None if options is None else split(options),
            output=output,
            resume=resume,
            samples=samples,
            prompts=prompts,
            scored=last,
            cost=cost,
            seed=seed,
            compose=compose,
            original_max_position_embeddings=trained_length,
        )
        print(found)
        tell(f"wrote {output}")


def _use_of(
    found: Any, output: Path, model: str, length: int, more: dict[str, Any], compose: bool
) -> str:
    """How to measure what was found, and how to use it."""
    words = ["rope-ext", "compare", "--model", model, "--methods", "longrope,yarn"]
    words += ["--option", f"longrope={output}", "--factor", found.factor, "--lengths", length]
    for name, value in more.items():
        words += [name, value] if value not in ("auto", None) else []
    words += ["--compose"] if compose else []
    trained = more["--trained-length"]
    options = f", original_max_position_embeddings={trained}" if trained else ""
    options += ", compose=True" if compose else ""
    return (
        f"measure it on another:\n  {shlex.join(map(str, words))}\nuse it:\n  "
        f'rope_ext.patch(model, "longrope", **json.load(open({str(output)!r})){options})'
    )


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
    with clean_errors():
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

        from rope_ext.engines import verifying
        from rope_ext.measure.models import load_config
        from rope_ext.measure.systems import checked_methods

        quiet()
        longest = parse_length(length)
        _check_verify(flags, factor_error, tolerance)
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
        miniature = verifying.Miniature.of(load_config(model), name, **values)
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


def _check_verify(flags: str | None, factor_error: float, tolerance: float | None) -> None:
    from rope_ext.engines import running

    if not 0 < factor_error < 1:
        raise OptionError(f"--factor-error {factor_error:g} has to be between 0 and 1, as 0.01")
    if tolerance is not None and not tolerance > 0:
        raise OptionError(f"--tolerance {tolerance:g} has to be above 0, as 0.002")
    given = running.overridden(shlex.split(flags or ""))
    if given:
        tell(
            f"note: {shlex.join(running.EXACT)} override {', '.join(given)} of --flags: the check "
            f"runs in float32, and does not measure what those flags change",
            "yellow",
        )


@app.command()
def plot(
    kind: Annotated[str, typer.Argument(help="See above.")],
    model: Annotated[
        str, typer.Argument(help="Folder or Hub id; weights are read for the last two pictures.")
    ],
    method: Annotated[str, typer.Option(help="Names, comma between: one line for each.")],
    output: Annotated[Path, typer.Option(help="The picture, a .png file.")],
    factor: Factor = 4.0,
    length: Annotated[
        str | None,
        typer.Option(help="Context in tokens, such as 32k. Default: what the methods reach."),
    ] = None,
    text: Text = None,
    windows: Annotated[int, typer.Option(help="Stretches of text, at most.")] = 4,
    device: Device = "auto",
    compose: Compose = False,
    option: Option = None,
) -> None:
    """Draw what methods change, one line each beside the unpatched model.

    spectrum: frequency of every rotary pair. angles: the largest angle of every pair, and those
    of training. decay: q.k of constant vectors by distance; of encodings, what they add to logits,
    as it begins or, of a model that was saved under one, as it was learned. distances: those that
    position methods put in place of the real ones. Over a text: weighted-decay: q.k of the model's
    own mean queries and keys by distance. attention: where the last 256 tokens look, by distance.
    """
    with clean_errors():
        from rope_ext.measure.systems import checked_methods
        from rope_ext.methods import build_method
        from rope_ext.plots import pictures

        quiet()
        names = split(method)
        options = checked_methods(names, factor, parse_options(option, names))
        methods = [build_method(name, **values) for name, values in options.items()]
        pictures.draw(
            kind,
            model,
            methods,
            output,
            length=None if length is None else parse_length(length),
            compose=compose,
            text=text,
            windows=windows,
            device=device,
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
    from rope_ext.measure.models import load_config, load_model
    from rope_ext.measure.systems import checked_methods, saved_otherwise

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
    from rope_ext.measure.reports.report import wide_console
    from rope_ext.methods import all_encodings

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
