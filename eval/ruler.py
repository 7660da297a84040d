"""RULER's 13 tasks, implemented from their description: ``rope-ext eval MODEL --tasks ruler``."""

import sys

from rope_eval.command import call

if __name__ == "__main__":
    call(["--tasks", "ruler", *sys.argv[1:]])
