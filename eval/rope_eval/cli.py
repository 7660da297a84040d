"""The commands that measure, which ``rope_ext.cli`` adds to its own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_ext.arguments import parse_length, parse_lengths, parse_options, split
from rope_ext.cli_arguments import (
    Compose,
    Device,
    Dtype,
    Factor,
    Model,
    Option,
    Target,
    Text,
    TrainedLength,
    TrainText,
)
from rope_ext.terminal import clean_errors, quiet, stoppable, tell

app = typer.Typer()


_OF_ARGPARSE: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
"""Of commands whose options are those of their tasks."""


@app.command(**_OF_ARGPARSE)
def compare(context: typer.Context) -> None:
    """Measure methods against the unpatched model: perplexity and passkey retrieval."""
    from rope_eval import command

    command.compare(context.args)


@app.command("eval", **_OF_ARGPARSE)
def evaluate_tasks(context: typer.Context) -> None:
    """Measure tasks: perplexity, passkey, ruler, babilong and more; see `rope-ext eval -h`."""
    from rope_eval import command

    command.call(context.args)


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
        from rope_eval.data.text import python_library, read_texts
        from rope_eval.tune.search import NEEDLES, summary
        from rope_ext.checkpoints import load_model, load_tokenizer

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
        from rope_eval.data.text import read_texts
        from rope_ext.checkpoints import load_model, load_tokenizer
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
        from rope_eval.plots import pictures
        from rope_ext.method_options import checked_methods
        from rope_ext.methods import build_method

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
