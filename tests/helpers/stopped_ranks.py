"""A process of an evaluation in several, of which all but the first never finish a batch.

Run by a launcher: tests/helpers/stopped_ranks.py WORDS, the words of rope-ext eval. Each of the
others prints a line once it measures; the first then waits for them.
"""

from __future__ import annotations

import os
import sys
import time

from rope_eval import command
from rope_eval.run import runner as run


def never(*args: object) -> None:
    print("measuring", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        run.Runner.measure = never
    command.call(sys.argv[1:])
