r"""Passkey retrieval over a grid of lengths and depths.

    python -m eval.passkey --model checkpoints/tiny-512 --method yarn,dynamic_yarn --factor 8 \
        --lengths 512,1k,2k,4k

See ``rope_ext.measure.passkey`` for the prompt and how it is scored.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eval import options
from rope_ext.measure.passkey import Passkey


def task(args: argparse.Namespace) -> Passkey:
    """The task that the options ask for."""
    return Passkey(args.trials, args.depths, args.digits, args.generate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = options.parser(__doc__, "runs/passkey")
    options.add_grid(parser)
    options.add_passkey(parser)
    options.main(parser.parse_args(arguments), lambda args: [task(args)])


if __name__ == "__main__":
    main()
