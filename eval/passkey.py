r"""Passkey retrieval over a grid of lengths and depths.

    python -m eval.passkey --model checkpoints/tiny-512 --method yarn,dynamic_yarn --factor 8 \
        --lengths 512,1k,2k,4k

The same as ``rope-ext eval passkey``; see ``rope_eval.tasks.passkey`` for the prompt and its
scoring.
"""

from __future__ import annotations

from collections.abc import Sequence

from rope_eval import command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = command.parser(__doc__, "runs/passkey", ["passkey"])
    command.main(parser.parse_args(arguments), ["passkey"])


if __name__ == "__main__":
    main()
