"""Perplexity at several lengths, each token once: ``rope-ext eval MODEL --tasks perplexity``."""

import sys

from rope_eval.command import call

if __name__ == "__main__":
    call(["--tasks", "perplexity", *sys.argv[1:]])
