r"""Needles in a haystack of one's own: several needles, distractors, any text.

    python -m eval.needle --model checkpoints/tiny-512 --method yarn --factor 8 \
        --lengths 512,1k,2k --needles 2 --distractors 2 --haystack my_book.txt

The first needle goes through all depths, the others lie anywhere; the score is the share of the
asked-for numbers that the model writes down. Distractors look the same and are not asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eval import options
from eval.haystack import Needles
from rope_ext import OptionError
from rope_ext.measure.text import read_texts, sentences


def add(made: argparse.ArgumentParser) -> None:
    """The options of the needles."""
    option = made.add_argument_group("needles").add_argument
    option("--needles", type=int, default=1, help="numbers that are asked for")
    option("--distractors", type=int, default=0, help="needles that are not asked for")
    option(
        "--haystack",
        action="append",
        help="file, folder or hf:ID/CONFIG:SPLIT; repeat. Default: Python's documentation",
    )
    option("--new-tokens", type=options.tokens, help="that the model may write; part of the length")


def haystack(args: argparse.Namespace) -> dict[str, object]:
    """The sentences of the haystack and where they are from.

    Raises:
        MeasureError: a text is missing or empty.
    """
    if not args.haystack:
        return {}
    text = [sentence for part in read_texts(args.haystack) for sentence in sentences(part)]
    return {"text": text, "source": ", ".join(args.haystack)}


def task(args: argparse.Namespace) -> Needles:
    """The task that the options ask for."""
    if args.distractors < 0:
        raise OptionError(f"distractors={args.distractors} is not valid; it must be at least 0")
    return Needles(
        "needle",
        keys=args.needles + args.distractors,
        queries=args.needles,
        trials=args.trials,
        depths=args.depths,
        tokens=16 + 16 * args.needles if args.new_tokens is None else args.new_tokens,
        **haystack(args),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = options.parser(__doc__, "runs/needle")
    options.add_grid(parser)
    add(parser)
    options.main(parser.parse_args(arguments), lambda args: [task(args)])


if __name__ == "__main__":
    main()
