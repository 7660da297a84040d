"""Errors, messages and progress bars shared by all commands."""

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from rope_ext.errors import RopeExtError, first_line

_err = Console(stderr=True, highlight=False)


def first_process() -> bool:
    """Whether this is rank 0 of the launched processes, or the only process."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def clean_errors() -> Iterator[None]:
    """Print user errors as one line and exit with code 2.

    If the reader closes standard output early, as ``| head`` does, print nothing and exit
    with code 1, as other Python programs do.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except RopeExtError as error:
        tell(f"error: {error}", "red")
        sys.exit(2)
    except OSError as error:
        # Discard further output, so that the flush at exit cannot fail.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        where = "" if error.filename is None else f" ({error.filename})"
        tell(f"error: {error.strerror or first_line(error)}{where}; fix this and try again", "red")
        sys.exit(2)


@contextmanager
def stoppable(
    advice: str | Callable[[], str] = "run the same command with --resume to continue",
) -> Iterator[None]:
    """Stop on Ctrl-C, SIGTERM and SIGHUP with a one-line message and status 128 + signal.

    Signals that are ignored (SIGHUP under ``nohup``) or already have a handler stay as they are.
    Threads other than the main thread change nothing, since they cannot handle signals. ``advice``
    is how to continue; a function is called when it stops.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt  # so that locks are released and logs are closed

    main = threading.current_thread() is threading.main_thread()
    named = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [one for one in named if main and signal.getsignal(one) == signal.SIG_DFL]
    for one in ours:
        signal.signal(one, stop)
    try:
        yield
    except BaseException as error:
        # A closed terminal or a process of the group may have raised a different error by now.
        if not (received or isinstance(error, KeyboardInterrupt)):
            raise
        for one in ours:  # launchers forward a signal that this process already received
            signal.signal(one, signal.SIG_IGN)
        with suppress(OSError):
            tell(f"stopped; {advice() if callable(advice) else advice}")
        sys.exit(128 + (received[0] if received else signal.SIGINT))
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


def tell(text: str, style: str | None = None) -> None:
    """Print a line to standard error, from rank 0 only."""
    if first_process():
        _err.print(text, style=style, markup=False, soft_wrap=True)


def tell_next(*commands: Sequence[object], optional: Sequence[Sequence[object]] = ()) -> None:
    """Print next commands to standard error, ready to paste; ``optional`` ones first."""
    for words in optional:
        tell(f"optional: {shlex.join(map(str, words))}")
    for words in commands:
        tell(f"next: {shlex.join(map(str, words))}")


def unused(path: str | Path) -> str:
    """Return an unused output path: ``path``, or with ``-2``, ``-3`` ... added."""
    names = chain([str(path)], (f"{path}-{number}" for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))


def quiet() -> None:
    """Silence transformers' log lines and loading bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


class _Lines(Progress):
    """Reports progress in a log file, with a line every ``every`` seconds."""

    def __init__(self, every: float) -> None:
        super().__init__(console=_err, speed_estimate_period=600, disable=True)
        self._every = every
        self._told = -math.inf  # report the first forward at once, with its time estimate

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        self.update(task_id, advance=advance)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        task = next(task for task in self.tasks if task.id == task_id)
        if time.monotonic() - self._told < self._every or not (task.total and task.completed):
            return
        self._told = time.monotonic()
        share = (task.remaining or 0) / task.completed  # before there is an estimate
        left = timedelta(seconds=round(task.time_remaining or (task.elapsed or 0) * share))
        tell(f"{task.description} {task.percentage:.0f} %, {left} left".lstrip())


def progress(every: float = 30) -> Progress:
    """Return a progress bar for rank 0; without a terminal, a line ``every`` so many seconds."""
    if not (_err.is_terminal or _err.is_jupyter):
        return _Lines(every)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    options = {"speed_estimate_period": 600, "disable": not first_process()}  # forwards are long
    return Progress(*columns, TimeRemainingColumn(), console=_err, **options)


def wide_console(width: int) -> Console:
    """Return a console: the terminal, or at least ``width`` columns if output is redirected."""
    console = Console()
    return console if console.is_terminal else Console(width=max(width, console.width))
