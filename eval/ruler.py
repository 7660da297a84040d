"""RULER's 13 tasks, implemented from their description: ``rope-ext eval MODEL --tasks ruler``.

python -m eval.ruler MODEL --method yarn --factor 8 --lengths 512,1k,2k
"""

import sys

from rope_eval import command

if __name__ == "__main__":
    command.call(["--tasks", "ruler", *sys.argv[1:]])
