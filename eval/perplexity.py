r"""Perplexity at several context lengths, each token scored once.

    python -m eval.perplexity --model checkpoints/tiny-512 --method yarn --factor 8 \
        --lengths 512,1k,2k,4k --stride 256 --text my_documents/

See ``rope_ext.measure.perplexity`` for what exactly is scored.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eval import options
from rope_ext.measure.perplexity import Perplexity


def task(args: argparse.Namespace) -> Perplexity:
    """The task that the options ask for."""
    protocol = args.protocol or ("ending" if args.stride is None else "sliding")
    return Perplexity.of(
        args.text or (),
        windows=args.windows,
        protocol=protocol,
        stride=args.stride,
        min_context=args.min_context,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = options.parser(__doc__, "runs/perplexity")
    options.add_perplexity(parser)
    options.main(parser.parse_args(arguments), lambda args: [task(args)])


if __name__ == "__main__":
    main()
