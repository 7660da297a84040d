"""Passkey retrieval over a grid of lengths and depths: ``rope-ext eval MODEL --tasks passkey``.

python -m eval.passkey MODEL --method yarn --factor 8 --lengths 512,1k,2k
"""

import sys

from rope_eval import command

if __name__ == "__main__":
    command.call(["--tasks", "passkey", *sys.argv[1:]])
