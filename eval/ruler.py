r"""RULER's 13 tasks, implemented from their description.

    python -m eval.ruler --model checkpoints/tiny-512 --method yarn --factor 8 \
        --lengths 1k,2k,4k --trials 20 --tasks niah_single_1,vt

The same as ``rope-ext eval ruler``, where --tasks is --ruler-tasks; see
``rope_eval.tasks.ruler`` for the tasks and their differences from the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence

from rope_eval import command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = command.parser(__doc__, "runs/ruler", ["ruler"], {"ruler_tasks": "--tasks"})
    command.main(parser.parse_args(arguments), ["ruler"])


if __name__ == "__main__":
    main()
