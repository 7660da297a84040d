"""Several tasks, methods and models in one report: ``rope-ext eval``, for launchers of processes.

accelerate launch --num_processes 4 -m eval.report MODEL --tasks perplexity,passkey ...
"""

import sys

from rope_eval import command

if __name__ == "__main__":
    command.call(sys.argv[1:])
