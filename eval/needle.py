"""Needles in a haystack that you choose: ``rope-ext eval MODEL --tasks needle``."""

import sys

from rope_eval.command import call

if __name__ == "__main__":
    call(["--tasks", "needle", *sys.argv[1:]])
