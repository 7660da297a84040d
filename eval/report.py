r"""Several evaluators, methods and models in one report.

    python -m eval.report --model checkpoints/tiny-512 --factor 8 --lengths 512,1k,2k,4k \
        --method dynamic_yarn,yarn,dynamic_ntk,ntk,llama3 --trials 20

Writes ``results.json`` (settings, versions, all numbers), ``cells.csv``, ``table.md`` for a model
card, pictures, ``report.html``, which holds everything and opens without a network, and
``cases.jsonl``, one line for every single case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from eval import needle, options, passkey, perplexity, ruler
from rope_ext import OptionError
from rope_ext.errors import nearest
from rope_ext.measure.run import Task

EVALUATORS: dict[str, Callable[[argparse.Namespace], list[Task]]] = {
    "perplexity": perplexity.tasks,
    "passkey": lambda args: [passkey.task(args)],
    "needle": lambda args: [needle.task(args)],
    "ruler": ruler.tasks,
}


def tasks(args: argparse.Namespace) -> list[Task]:
    """The tasks that the options ask for.

    Raises:
        OptionError: there is no such evaluator.
    """
    names = options.split(args.tasks)
    for name in names:
        if name not in EVALUATORS:
            raise OptionError(
                f"unknown task {name!r}{nearest(name, EVALUATORS)}; choose of "
                f"{', '.join(EVALUATORS)}"
            )
    return [task for name, make in EVALUATORS.items() if name in names for task in make(args)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = options.parser(__doc__, "runs/report")
    parser.add_argument("--tasks", default="perplexity,passkey", help=f"of {', '.join(EVALUATORS)}")
    parser.add_argument("--ruler-tasks", default="all", help=f"of {', '.join(ruler.TASKS)}, or all")
    options.add_grid(parser)
    options.add_passkey(parser)
    options.add_perplexity(parser)
    needle.add(parser)
    options.main(parser.parse_args(arguments), tasks)


if __name__ == "__main__":
    main()
