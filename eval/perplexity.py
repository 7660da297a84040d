"""Perplexity at several lengths, each token once: ``rope-ext eval MODEL --tasks perplexity``.

python -m eval.perplexity MODEL --method yarn --factor 8 --lengths 512,1k,2k
"""

import sys

from rope_eval import command

if __name__ == "__main__":
    command.call(["--tasks", "perplexity", *sys.argv[1:]])
