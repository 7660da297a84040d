"""Runs evaluations in several processes, some of which are killed; imports modules once.

Run by: python tests/helpers/ranks.py RUNS, where RUNS is a JSON file with a list of
``[processes, who dies, after how many lines of its log, the words of rope-ext eval]``: a rank, or
``"all"``. As launchers do, this one ends the others when one has died. Prints statuses as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import accelerate  # noqa: F401  # for all processes, once
import pytest

from rope_eval import cases
from rope_ext.cli import app
from tests.helpers import pictures


def dying(lines: int) -> None:
    """Leave half a line in the log after a number of lines, and then be killed."""
    whole, calls = cases.Outcome.to_line, []

    def line(outcome: cases.Outcome) -> bytes:
        calls.append(outcome)
        if len(calls) == lines + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(outcome)[: 30 if len(calls) == lines + 1 else None]

    cases.Outcome.to_line = line


def run(processes: int, victim: int | str | None, lines: int, words: list[str]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {}
    for rank in range(processes):
        process = os.fork()
        if process == 0:
            ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in ours.items()}}
            if rank == (0 if victim == "all" else victim):
                dying(lines)
            status = 0
            try:
                app(["eval", *words], standalone_mode=False)
            except BaseException:
                traceback.print_exc()
                status = 1
            os._exit(status)
        ranks[process] = rank
    statuses = {}
    while len(statuses) < processes:
        process, status = os.wait()
        statuses[ranks.pop(process)] = os.waitstatus_to_exitcode(status)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL if victim == "all" else signal.SIGTERM)
    return [statuses[rank] for rank in range(processes)]


if __name__ == "__main__":
    assert "matplotlib" not in sys.modules  # measuring needs none
    pictures.draw_small(pytest.MonkeyPatch())
    runs = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([run(*one) for one in runs]))
