"""Commands that measure, which ``rope_ext.cli`` adds to its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rope_eval.options import command_options, read_options
from rope_eval.tune.options import CalibrationOptions, Loading, SearchOptions
from rope_ext.command.arguments import command_words, parse_length, parse_options, split
from rope_ext.command.cli_arguments import (
    RUN_HERE,
    Compose,
    Model,
    ModelCommand,
    Option,
    PatchOptions,
    Target,
    TrainedLength,
    command,
)
from rope_ext.command.terminal import show, stoppable, tell, tell_next, unused
from rope_ext.errors import ExportError, MeasureError, OptionError, RopeExtError, first_line
from rope_ext.quoting import shell_join

if TYPE_CHECKING:
    from rope_eval.engines.verifying import Miniature

app = typer.Typer(rich_markup_mode=None)


class Evaluation(ModelCommand):
    """A command with the options of its tasks, which are known only once the tasks are parsed."""

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        from rope_eval import command

        inner = command.command_for(str(self.name), args)
        return inner.make_context(info_name, args, parent, **extra)


@app.command(cls=Evaluation)
def compare() -> None:
    """Compare methods with the unpatched model, and write one report."""


@app.command("eval", cls=Evaluation)
def evaluate_tasks() -> None:
    """Measure any tasks, and write one report.

    See `rope-ext eval --help` for the tasks.
    """


@command(app)
@command_options(Loading, SearchOptions)
def search(model: Model, length: Target, output: Path, **options: Any) -> None:
    """Search a LongRoPE table by evolution.

    Resumes if interrupted.

    Options:
        output: JSON file to write; resumes an interrupted search.
    """
    with stoppable("run the same command to continue"):
        import rope_ext
        from rope_eval.tune.search import check_output, summary

        tokens = parse_length(length)
        given = read_options(SearchOptions, options)
        SearchOptions(target_length=tokens, **given)  # reports mistakes before loading weights
        check_output(output)
        how = Loading(**read_options(Loading, options))
        loaded, tokenizer, texts = how.load(model)
        found = rope_ext.search(loaded, tokenizer, tokens, texts, output=output, **given)
        show(summary(output))
        trained = options["original_max_position_embeddings"]
        beside = f", original_max_position_embeddings={trained}" if trained else ""
        beside += ", compose=True" if options["compose"] else ""
        table = f"**json.load(open({str(output)!r}))"
        show(f'use it: rope_ext.patch(model, "longrope", {table}{beside})')
        same = {"compose": options["compose"], "dtype": how.dtype, "device": how.device}
        same |= {"trained_length": trained, "output": unused("compared")}
        patch_options = {"method": "longrope,yarn", "option": [f"longrope={output}"]}
        patch_options |= {"factor": found.factor, "lengths": tokens}
        tell_next(command_words("compare", model, **patch_options, **same))


@command(app)
@command_options(Loading, CalibrationOptions)
def calibrate(
    model: Model,
    length: Target,
    output: Path,
    methods: Annotated[
        str, typer.Option("--methods", "--method", help="Method names, separated by commas.")
    ] = "yarn",
    resume: bool = False,
    finetune: bool = False,
    **options: Any,
) -> None:
    """Find the best temperature and other options of methods.

    One half of the text selects values, the other half tests them. An option keeps its published
    value unless another value is significantly better.

    Options:
        output: Directory for the results.
        resume: Resume the calibration in --output.
        finetune: Print the training command as the next step.
    """
    with stoppable():
        import rope_ext
        from rope_eval.tune.calibrate import RESULT, require_free
        from rope_ext.methods import method_class
        from rope_ext.saving.checkpoints import resolve_device

        tokens = parse_length(length)
        names = split(methods)
        given = read_options(CalibrationOptions, options)
        CalibrationOptions(target_length=tokens, **given)  # reports mistakes before loading weights
        for name in names:
            method_class(name)
        require_free(output, resume=resume, cure="--resume", output="--output")
        given |= {"methods": names, "output": output, "resume": resume}
        how = Loading(**read_options(Loading, options))
        loaded, tokenizer, texts = how.load(model)
        found = rope_ext.calibrate(loaded, tokenizer, tokens, texts, **given)
        show(found)
        tell(f"wrote {output}")
        if finetune:
            from rope_eval.reports.advice import training_command

            words = training_command(
                model=model,
                method=found.method.name,
                trained=found.trained_length,
                target=tokens,
                options=str(output / RESULT),
                compose=options["compose"],
                text=how.text[0] if how.text else None,
                cpu=resolve_device(how.device) == "cpu",
            )
        else:
            words = command_words(
                "recommend",
                model,
                length=tokens,
                trained_length=given.get("original_max_position_embeddings"),
                calibration=output,
            )
        tell_next(words)


def _without_verdict(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator: any error is one line and exit code 2, since 1 is a verdict on the engine."""

    @functools.wraps(function)
    def run(patch_options: PatchOptions, **options: Any) -> None:
        try:
            with stoppable("run the same command again"):
                function(patch_options, **options)
        except (RopeExtError, OSError):
            raise
        except Exception as error:  # of the model's or the engine's code, on sizes that do not fit
            raise MeasureError(
                f"a miniature of {patch_options.model} cannot be built and run "
                f"({type(error).__name__}: {first_line(error)}); correct its config.json, or "
                f"download it again"
            ) from error

    return run


@command(app)
@_without_verdict
def verify(
    patch_options: PatchOptions,
    engine: Literal["llama.cpp", "mlx", "transformers", "vllm", "sglang"] | None = None,
    flags: str | None = None,
    as_saved: bool = False,
    write: Path | None = None,
    url: str | None = None,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", "--served-as", help="Model name on the server."),
    ] = None,
    length: str | None = None,
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
    json: Path | None = None,
) -> None:
    """Check that an engine applies a patch, with a miniature model.

    The miniature has the rotary embedding of the model, patched with --method or as saved.

    Exit codes: 0, the engine applies the patch; 1, it does not; 2, it could not be run; 3, the
    results are inconclusive, or no prompt is longer than the trained length.

    Options:
        engine: Engine to run: llama.cpp (default), mlx or transformers; with --write and --url,
            the one that serves.
        flags: llama-server flags for an unscaled file, instead of those from `export`.
        as_saved: mlx: load the saved directory without the file from `export`.
        write: Write the unpatched miniature to this directory and print commands to serve it.
        url: URL of a server that runs the written miniature, http://HOST:PORT.
        length: Length of the longest prompt in tokens. Default: 2k, or beyond the trained length
            if that is at most 8k.
        json: Write all results to this JSON file.
    """
    import tempfile

    import rope_ext
    from rope_eval.engines import verifying
    from rope_ext.engines.llama_cpp import already_scaled
    from rope_ext.saving.checkpoints import load_config
    from rope_ext.saving.drafts import may_replace

    longest = None if length is None else parse_length(length)
    if longest is not None and longest < 2:
        raise OptionError(f"--length {length} is not valid; it must be at least 2")
    run_by = engine or "llama.cpp"
    _require_one_place(run_by, url, write)
    method = patch_options.build()
    arguments = patch_options.arguments()
    config = load_config(patch_options.model)
    miniature = verifying.Miniature.from_config(config, method, **arguments)
    if write is not None:
        _write_miniature(patch_options, miniature, write, server=engine, length=length)
        return
    if run_by == "llama.cpp" and (reason := already_scaled(config)) is not None:
        raise ExportError(f"llama.cpp cannot run this patch: {reason}")
    if json is not None:
        begun = json.exists() and not json.stat().st_size  # by a run that was killed
        if not (begun or may_replace(json, '"program": "rope_ext"')):
            raise MeasureError(
                f"{json} exists, and rope-ext verify did not write it; give --json another file"
            )
        json.open("a").close()  # fails before the run
    with tempfile.TemporaryDirectory() as folder:
        if url is None:
            tolerance = tolerance or verifying.TOLERANCE
            given = "" if as_saved else flags
            run = verifying.in_process(miniature, run_by, folder=Path(folder), flags=given)
            where = run_by
        else:
            run = verifying.endpoint(url, served_model_name)
            where = url
        found = verifying.verify(
            miniature,
            run,
            engine=where,
            longest=longest,
            tolerance=tolerance,
            factor_error=factor_error,
        )
    show(found)
    for note in found.notes:
        tell(f"note: {note}", "yellow")
    if json is not None:
        json.write_text(found.to_json(), encoding="utf-8")
    if found.passed:
        served = "serve the model with the same options"
        if engine or url is None:
            with suppress(RopeExtError):  # the model may not be extended
                exported = rope_ext.export(patch_options.patched(), run_by)
                words = shell_join(patch_options.words("export", engine=run_by, output="FOLDER"))
                served = f"use it: {words if exported.files else exported.command}"
        tell(f"done: {served}")
    sys.exit(found.exit_code)


def _require_one_place(engine: str, url: str | None, write: Path | None) -> None:
    """Raise OptionError unless the engine can be run here, or a server at ``url`` is asked."""
    from rope_eval.server import require_url

    if url is not None:
        require_url(url, "http://HOST:PORT")
    if url is not None and write is not None:
        raise OptionError(
            f"--url {url!r} must be given without --write, whose folder the server serves"
        )
    if url is None and write is None and engine not in RUN_HERE:
        raise OptionError(
            f"--engine {engine!r} cannot be run here; use one of {', '.join(RUN_HERE)}, or run "
            f"with --write FOLDER, serve that folder, then run with --url http://HOST:PORT"
        )


def _write_miniature(
    patch_options: PatchOptions,
    miniature: Miniature,
    folder: Path,
    server: str | None,
    length: str | None,
) -> None:
    """Write the miniature, and print how to serve it and what to run then."""
    from rope_eval.engines import verifying

    commands, refusals = verifying.write(miniature, folder)
    tell(f"wrote {folder}; serve it with one of these commands, then run again with --url")
    show("\n".join(commands.values()))
    for refusal in refusals:
        tell(f"note: {refusal}", "yellow")
    for name in [server] if server in commands else list(commands)[:1]:
        address = f"http://localhost:{verifying.SERVERS[str(name)]}"
        tell_next(patch_options.words("verify", engine=name, url=address, length=length))


@command(app)
def plot(
    kind: Annotated[str, typer.Argument(help="Kind of plot; see above.")],
    model: Annotated[str, typer.Argument(help="Model directory or Hub ID; weights are not read.")],
    method: Annotated[
        str, typer.Option("--method", "--methods", help="Method names, separated by commas.")
    ],
    output: Path,
    factor: float = 4.0,
    length: str | None = None,
    compose: Compose = False,
    trained_length: TrainedLength = None,
    option: Option = None,
) -> None:
    """Plot the effect of methods and of the unpatched model.

    spectrum: frequency of every rotary pair. angles: largest angle of every pair, compared with
    training. decay: q.k of constant vectors by distance, and biases of encodings. distances:
    effective distances of position methods.

    Options:
        output: Output file (.png).
        factor: Extension factor: target length / trained length.
        length: Context length in tokens, such as 32k. Default: the target length.
    """
    from rope_eval.plots import pictures
    from rope_ext.command.method_options import checked_methods
    from rope_ext.methods import build_method, extended_length
    from rope_ext.saving import checkpoints

    names = split(method)
    options = checked_methods(names, factor, parse_options(option, names))
    methods = [build_method(name, **values) for name, values in options.items()]
    tokens = parse_length(length) if length else None
    pictures.draw(
        kind,
        model,
        shown=methods,
        path=output,
        length=tokens,
        compose=compose,
        trained_length=trained_length,
    )
    tell(f"wrote {output}")
    trained = trained_length or checkpoints.trained_length(checkpoints.load_config(model))
    target = tokens or extended_length(factor, trained)
    patch_options = {
        "method": ",".join(names),
        "factor": factor,
        "option": option,
        "compose": compose,
        "trained_length": trained_length,
    }
    if all(one.kind in ("frequency", "position") for one in methods):  # not an encoding
        more = {"lengths": f"{trained},{target}", "output": unused("compared")}
        tell_next(command_words("compare", model, **patch_options, **more))
