"""Runs rope-ext, and reports when it starts to measure, which then never ends.

Run by: ``python -m tests.helpers.stopped FD WORDS...``; a byte is written to the file descriptor
``FD`` when measuring starts. Without a stop within ``SECONDS``, it ends with tracebacks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time

from rope_eval.run import runner
from rope_eval.tune import fitness
from rope_ext.cli import app

SECONDS = 240


def never(*args: object, **options: object) -> None:
    """Report the start, and wait."""
    os.write(int(sys.argv[1]), b".")
    time.sleep(3600)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    runner.Runner.measure = fitness.score = never
    app(sys.argv[2:])
