"""Several tasks, methods and models in one report, as ``rope-ext eval``: for launchers."""

import sys

from rope_eval.command import call

if __name__ == "__main__":
    call(sys.argv[1:])
