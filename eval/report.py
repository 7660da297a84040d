"""Several tasks, methods and models in one report, as ``rope-ext eval``: for launchers."""

import sys

from rope_ext.cli import app

if __name__ == "__main__":
    app(["eval", *sys.argv[1:]])
