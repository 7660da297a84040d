"""Passkey retrieval over a grid of lengths and depths: ``rope-ext eval MODEL --tasks passkey``."""

import sys

from rope_eval.command import call

if __name__ == "__main__":
    call(["--tasks", "passkey", *sys.argv[1:]])
