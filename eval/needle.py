"""Needles in a haystack that you choose: ``rope-ext eval MODEL --tasks needle``.

python -m eval.needle MODEL --method yarn --factor 8 --lengths 512,1k,2k
"""

import sys

from rope_eval import command

if __name__ == "__main__":
    command.call(["--tasks", "needle", *sys.argv[1:]])
