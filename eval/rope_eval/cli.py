"""Evaluation commands, which ``rope_ext.cli`` adds to its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rope_eval.options import command_options, read_options
from rope_eval.tune.options import CalibrationOptions, SearchOptions
from rope_ext.command import cli_arguments
from rope_ext.command.arguments import command_words, parse_length, parse_options, split
from rope_ext.command.terminal import quiet, stoppable, tell, tell_next, unused

app = typer.Typer(rich_markup_mode=None)


class Evaluation(cli_arguments.ModelCommand):
    """A command with the options of its tasks, which are known only once the tasks are parsed."""

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        from rope_eval import command

        made = command.command_for(str(self.name), args)
        return made.make_context(info_name, args, parent, **extra)


@app.command(cls=Evaluation)
def compare() -> None:
    """Measure methods against the unpatched model: perplexity and passkey retrieval."""


@app.command("eval", cls=Evaluation)
def evaluate_tasks() -> None:
    """Measure tasks: perplexity, passkey, ruler, babilong and more; see `rope-ext eval --help`."""


@app.command(cls=cli_arguments.ModelCommand)
@command_options(SearchOptions)
def search(
    model: cli_arguments.Model,
    length: cli_arguments.Target,
    output: Annotated[
        Path, typer.Option(help="JSON file to write; resumes an interrupted search.")
    ],
    text: cli_arguments.TrainText = None,
    dtype: cli_arguments.Dtype = "auto",
    device: cli_arguments.Device = "auto",
    **options: Any,
) -> None:
    """Search LongRoPE factors by evolution. Resumes if interrupted."""
    with stoppable("run the same command to continue"):
        import rope_ext
        from rope_eval.data.text import python_library, read_texts
        from rope_eval.tune.search import check_output, summary
        from rope_ext.saving.checkpoints import load_model, load_tokenizer

        quiet()
        tokens, given = parse_length(length), read_options(SearchOptions, options)
        check_output(output)
        texts = read_texts(text) if text else python_library("train")
        tokenizer = load_tokenizer(model)
        loaded = load_model(model, dtype, device)
        found = rope_ext.search(loaded, tokenizer, tokens, texts, output=output, **given)
        print(summary(output))
        trained = options["original_max_position_embeddings"]
        beside = f", original_max_position_embeddings={trained}" if trained else ""
        beside += ", compose=True" if options["compose"] else ""
        table = f"**json.load(open({str(output)!r}))"
        print(f'use it: rope_ext.patch(model, "longrope", {table}{beside})')
        same = {"compose": options["compose"], "dtype": dtype, "device": device}
        same |= {"trained_length": trained, "output": unused("compared")}
        patch = {"method": "longrope,yarn", "option": [f"longrope={output}"]}
        patch |= {"factor": found.factor, "lengths": tokens}
        tell_next(command_words("compare", model, **patch, **same))


@app.command(cls=cli_arguments.ModelCommand)
@command_options(CalibrationOptions)
def calibrate(
    model: cli_arguments.Model,
    length: cli_arguments.Target,
    output: Annotated[Path, typer.Option(help="Directory for the results.")],
    methods: Annotated[
        str, typer.Option("--methods", "--method", help="Method names, separated by commas.")
    ] = "yarn",
    text: cli_arguments.TrainText = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the calibration in --output.")
    ] = False,
    finetune: Annotated[
        bool,
        typer.Option("--finetune", help="Print the training command as the next step."),
    ] = False,
    dtype: cli_arguments.Dtype = "auto",
    device: cli_arguments.Device = "auto",
    **options: Any,
) -> None:
    """Find the best temperature and other scalar options of methods for a model.

    One half of the text selects values, the other half tests them. An option keeps its published
    value unless another value is significantly better.
    """
    with stoppable():
        import rope_ext
        from rope_eval.data.text import read_texts
        from rope_eval.tune.calibrate import RESULT, require_free
        from rope_ext.methods import method_class
        from rope_ext.saving.checkpoints import load_model, load_tokenizer, resolve_device

        quiet()
        tokens, names = parse_length(length), split(methods)
        given = read_options(CalibrationOptions, options)
        for name in names:  # report mistakes before loading weights
            method_class(name)
        require_free(output, resume, "--resume", "--output")
        texts = read_texts(text) if text else None
        tokenizer = load_tokenizer(model)
        given |= {"methods": names, "output": output, "resume": resume}
        loaded = load_model(model, dtype, device)
        found = rope_ext.calibrate(loaded, tokenizer, tokens, texts, **given)
        print(found)
        tell(f"wrote {output}")
        if finetune:
            from rope_eval.reports.advice import training_command

            words = training_command(
                *(model, found.method.name, found.trained_length, tokens),
                options=str(output / RESULT),
                compose=options["compose"],
                text=text[0] if text else None,
                cpu=resolve_device(device) == "cpu",
            )
        else:
            words = command_words("recommend", model, length=tokens, calibration=output)
        tell_next(words)


@app.command(cls=cli_arguments.ModelCommand)
def plot(
    kind: Annotated[str, typer.Argument(help="Kind of plot; see above.")],
    model: Annotated[str, typer.Argument(help="Model directory or Hub ID; weights are not read.")],
    method: Annotated[
        str, typer.Option("--method", "--methods", help="Method names, separated by commas.")
    ],
    output: Annotated[Path, typer.Option(help="Output file (.png).")],
    factor: cli_arguments.Factor = 4.0,
    length: Annotated[
        str | None,
        typer.Option(help="Context length in tokens, such as 32k. Default: the target length."),
    ] = None,
    compose: cli_arguments.Compose = False,
    option: cli_arguments.Option = None,
) -> None:
    """Plot the effect of methods, one line per method and one for the unpatched model.

    spectrum: frequency of every rotary pair. angles: largest angle of every pair, compared with
    training. decay: q.k of constant vectors by distance, and biases of encodings. distances:
    effective distances of position methods.
    """
    from rope_eval.plots import pictures
    from rope_ext.command.method_options import checked_methods
    from rope_ext.methods import build_method, reach
    from rope_ext.saving.checkpoints import load_config, trained_length

    quiet()
    names = split(method)
    options = checked_methods(names, factor, parse_options(option, names))
    methods = [build_method(name, **values) for name, values in options.items()]
    tokens = parse_length(length) if length else None
    pictures.draw(kind, model, methods, output, tokens, compose)
    tell(f"wrote {output}")
    trained = trained_length(load_config(model))
    target = tokens or reach(factor, trained)
    patch = {"method": ",".join(names), "factor": factor, "option": option, "compose": compose}
    if all(one.kind in ("frequency", "position") for one in methods):  # not an encoding
        more = {"lengths": f"{trained},{target}", "output": unused("compared")}
        tell_next(command_words("compare", model, **patch, **more))
