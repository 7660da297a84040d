r"""Needles in a haystack that you choose: several needles, distractors, any text.

    python -m eval.needle --model checkpoints/tiny-512 --method yarn --factor 8 \
        --lengths 512,1k,2k --needles 2 --distractors 2 --haystack my_book.txt

The same as ``rope-ext eval needle``; see ``rope_eval.tasks.needle``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rope_eval import command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = command.parser(__doc__, "runs/needle", ["needle"])
    command.main(parser.parse_args(arguments), ["needle"])


if __name__ == "__main__":
    main()
