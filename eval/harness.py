r"""Tasks of lm-evaluation-harness on a patched model, with the window of the patch.

    pip install lm-eval
    python -m eval.harness --model checkpoints/tiny-512 --method yarn --factor 8 \
        --tasks ruler_vt,ruler_fwe --metadata '{"max_seq_lengths": [2048]}' --limit 20

The harness truncates prompts on the LEFT to the window of the model, without an error. Here the
window is ``factor`` times the trained length for every method and for the unpatched model, so that
all of them get identical prompts. The table shows the harness's standard errors; ``harness.json``
in ``--output`` has its full results, without the samples.

``ruler_vt`` needs no download, ``ruler_cwe`` needs wonderwords, and ``ruler_fwe`` scipy. The
``niah`` tasks of the harness download data (those of ``rope-ext eval ruler`` do not).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rope_eval import command
from rope_eval.settings import trained_length
from rope_eval.systems import beyond, under
from rope_eval.versions import versions
from rope_ext.command.arguments import parse_options, split
from rope_ext.command.method_options import UNPATCHED, checked_methods, saved_otherwise
from rope_ext.command.terminal import tell
from rope_ext.errors import MeasureError, OptionError
from rope_ext.methods import reach
from rope_ext.saving import checkpoints as models


def parser() -> argparse.ArgumentParser:
    """The command."""
    made = command.bare(__doc__, "runs/harness")
    made.set_defaults(batch_size="1")
    add = made.add_argument_group("lm-evaluation-harness").add_argument
    add("--tasks", required=True, help="names the harness knows, comma between")
    add("--include-path", type=Path, help="folder with tasks of one's own")
    add("--metadata", help='JSON for the tasks, such as {"max_seq_lengths": [8192]}')
    add("--limit", type=int, help="documents of each task")
    add("--num-fewshot", type=int, help="examples before each question")
    add("--max-length", type=command.tokens, help="window; default: factor x trained length")
    add("--force", action="store_true", help="measure an adapter under another method")
    add("--chat", action="store_true", help="use the chat template")
    return made


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """The harness's results for the unpatched model and every method, by method.

    Raises:
        RopeExtError: something is unknown, missing or cannot be loaded.
    """
    name, names = command.only_model(args), split(args.method or ())
    given = parse_options(args.option, names)
    methods = checked_methods(names, args.factor, given, args.adapter, args.force)
    metadata = _metadata(args.metadata)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MeasureError(
            "lm-evaluation-harness is not installed; install it with: "
            'pip install "rope-ext[harness]"'
        ) from None
    config = models.load_config(name)
    asked = trained_length(args.trained_length)
    trained = asked or models.trained_length(config)
    factor = max((values["factor"] for values in methods.values()), default=args.factor)
    window = args.max_length or reach(factor, trained)
    notes = beyond(methods, [window], {name: trained}, force=True)
    for note in (*notes, *saved_otherwise({name: config})):
        tell(f"note: {note}", "yellow")
    include = None if args.include_path is None else str(args.include_path)
    manager = TaskManager(include_path=include, metadata={"pretrained": name, **metadata})
    tasks = _known(split(args.tasks), manager)
    tokenizer = models.load_tokenizer(name)
    tokenizer.model_max_length = max(window, tokenizer.model_max_length)
    model = models.load_model(name, args.dtype, args.device, args.attn, args.adapter)
    results = {}
    for method, values in {UNPATCHED: {}, **methods}.items():
        if method == UNPATCHED:
            applied = model.disable_adapter() if args.adapter else nullcontext()
        else:
            applied = under(model, method, values, args.compose, asked)
        with applied:
            harness = HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                max_length=window,
                batch_size=args.batch_size,
            )
            found = simple_evaluate(
                harness,
                tasks=tasks,
                task_manager=manager,
                num_fewshot=args.num_fewshot,
                limit=args.limit,
                log_samples=False,
                apply_chat_template=args.chat,
                random_seed=args.seed,
                numpy_random_seed=args.seed,
                torch_random_seed=args.seed,
                fewshot_random_seed=args.seed,
                bootstrap_iters=1000,
                metadata=metadata,
            )
        results[method] = found["results"]
    return {
        "results": results,
        "model": name,
        "methods": methods,
        "trained_length": trained,
        "max_length": window,
        "versions": versions(),
    }


def _metadata(text: str | None) -> dict[str, Any]:
    try:
        data = json.loads(text or "{}")
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise OptionError(f'--metadata {text!r} is not a JSON object, such as {{"name": 1}}')
    return data


def _known(names: Sequence[str], manager: Any) -> list[str]:
    if not names:
        raise OptionError("no task is given; choose some, such as --tasks ruler_vt")
    for name in names:
        if not manager.match_tasks([name]):
            raise OptionError(
                f"unknown task {name!r}; `lm_eval ls tasks` lists what the harness knows, "
                f"--include-path adds tasks of your own"
            )
    return list(names)


def show(data: dict[str, Any]) -> None:
    """Print one table: tasks and metrics down, methods across."""
    table = Table(
        title=f"{data['model']}, window {data['max_length']} tokens", title_justify="left"
    )
    for name in ("task", "metric", *data["results"]):
        table.add_column(name)
    first = next(iter(data["results"].values()))
    for task, metrics in first.items():
        for metric, value in metrics.items():
            if not isinstance(value, (int, float)) or "stderr" in metric or "," not in metric:
                continue
            if all(results[task][metric] == -1 for results in data["results"].values()):
                continue  # what the RULER tasks give for lengths that were not asked for
            cells = []
            for results in data["results"].values():
                name, _, kind = metric.partition(",")
                error = results[task].get(f"{name}_stderr,{kind}")
                spread = f" ± {error:.3f}" if isinstance(error, float) else ""
                cells.append(f"{results[task][metric]:.4g}{spread}")
            table.add_row(task, metric, *cells)
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    command.run(parser().parse_args(arguments), evaluate, show, "harness.json")


if __name__ == "__main__":
    main()
