r"""Several evaluators, methods and models in one report.

    python -m eval.report --model checkpoints/tiny-512 --factor 8 --lengths 512,1k,2k,4k \
        --method dynamic_yarn,yarn,dynamic_ntk,ntk,llama3 --trials 20

The same as ``rope-ext eval`` with several tasks. Writes ``results.json`` (settings, versions, all
numbers), ``cells.csv``, ``table.md`` for a model card, pictures, ``report.html``, which contains
everything and works offline, and ``cases.jsonl`` with one line per case.
"""

from __future__ import annotations

from collections.abc import Sequence

from rope_eval import command
from rope_ext.command.arguments import split

TASKS = ["perplexity", "passkey", "needle", "ruler"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = command.parser(__doc__, "runs/report", [*TASKS, "longppl"])
    parser.add_argument("--tasks", default="perplexity,passkey", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--longppl", action="store_true", help="also of key tokens")
    parser.set_defaults(trials=10)  # of RULER, too
    args = parser.parse_args(arguments)
    names = split(args.tasks)
    command.main(args, [*names, "longppl"] if args.longppl and "perplexity" in names else names)


if __name__ == "__main__":
    main()
