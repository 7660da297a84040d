"""Runs commands and stops them with signals while they measure; imports modules once.

Run by: python tests/helpers/stopped.py RUNS, where RUNS is a JSON file with a list of
``[program, words, signals, ignored]``: rope-ext or a module, its arguments, the names of the
signals to send, in order, and of those that its parent ignores, like nohup. Signals are sent
once it has started to measure, which then never ends. Prints each run's exit status, as in a
shell, and standard error, as JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import matplotlib.figure  # noqa: F401  # for all processes, once

from rope_eval.run import runner as run
from rope_eval.tune import fitness
from rope_ext.cli import app


def measuring(beginning: int) -> None:
    """Replace measuring by a function that reports its start and never ends."""

    def never(*args: object, **options: object) -> None:
        os.write(beginning, b".")
        time.sleep(3600)

    run.Runner.measure = fitness.score = never


def stopped(
    module: str, words: list[str], signals: list[str], ignored: list[str]
) -> tuple[int, str]:
    """Return the exit status of one run, and its standard error."""
    begun, beginning = os.pipe()
    told, telling = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(telling, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by `&` in a shell
        for name in ("SIGHUP", "SIGTERM"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        for name in ignored:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        measuring(beginning)
        sys.argv = [module, *words]
        status = 1
        try:
            app() if module == "rope-ext" else runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(beginning)
    os.close(telling)
    if os.read(begun, 1):  # otherwise it has already ended
        for name in signals:
            os.kill(process, getattr(signal, name))
    with os.fdopen(told, "rb") as errors:
        text = errors.read().decode()
    _, status = os.waitpid(process, 0)
    status = os.waitstatus_to_exitcode(status)
    os.close(begun)
    return (128 - status if status < 0 else status), text


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([stopped(*one) for one in runs]))
