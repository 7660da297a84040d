r"""Perplexity at several context lengths, each token scored once.

    python -m eval.perplexity --model checkpoints/tiny-512 --method yarn --factor 8 \
        --lengths 512,1k,2k,4k --stride 256 --text my_documents/

The same as ``rope-ext eval perplexity``, or ``perplexity longppl`` with --longppl; see
``rope_eval.tasks.perplexity`` for the details of scoring.
"""

from __future__ import annotations

from collections.abc import Sequence

from rope_eval import command

LONGPPL_HELP = "also of the tokens alone that need long contexts"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = command.parser(__doc__, "runs/perplexity", ["perplexity", "longppl"])
    parser.add_argument("--longppl", action="store_true", help=LONGPPL_HELP)
    args = parser.parse_args(arguments)
    command.main(args, ["perplexity", "longppl"] if args.longppl else ["perplexity"])


if __name__ == "__main__":
    main()
