"""What all commands have in common: errors, messages and progress."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rope_ext.errors import RopeExtError, first_line

_err = Console(stderr=True, highlight=False)


def first_process() -> bool:
    """Whether this is the first, or only, of the processes that were launched together."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def clean_errors() -> Iterator[None]:
    """Errors made by the user as one line, exit code 2.

    Where standard output is closed before everything is printed, as ``| head`` does, nothing is
    told, and the exit code is 1, as it is of other Python programs.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except RopeExtError as error:
        tell(f"error: {error}", "red")
        sys.exit(2)
    except BrokenPipeError:
        _print_no_more()
        sys.exit(1)
    except OSError as error:
        _print_no_more()
        where = "" if error.filename is None else f" ({error.filename})"
        reason = error.strerror or first_line(error)
        tell(f"error: {reason}{where}; mend that and try again", "red")
        sys.exit(2)


class _Stopped(KeyboardInterrupt):
    """Raised where a signal arrives, so that locks are released and logs are closed."""


@contextmanager
def stoppable(advice: str = "run the same command with --resume to continue") -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the block in one line, exit status 128 + the signal.

    A signal that is ignored, as SIGHUP is under ``nohup``, or that has a handler stays as it is.
    Python runs handlers in the main thread only; in another one nothing changes but Ctrl-C.

    Args:
        advice: how to go on, after ``stopped;``.
    """
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise _Stopped

    main = threading.current_thread() is threading.main_thread()
    named = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [one for one in named if main and signal.getsignal(one) == signal.SIG_DFL]
    for one in ours:
        signal.signal(one, stop)
    try:
        yield
    except BaseException as error:
        # A lost terminal or process of the group may have raised an error of its own by now.
        if not (came or isinstance(error, KeyboardInterrupt)):
            raise
        for one in ours:  # launchers pass on a signal that this process got itself
            signal.signal(one, signal.SIG_IGN)
        with suppress(OSError):
            tell(f"stopped; {advice}")
        sys.exit(128 + (came[0] if came else signal.SIGINT))
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


def _print_no_more() -> None:
    """Nothing is left to fail when Python itself flushes at its end."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process


def tell(text: str, style: str | None = None) -> None:
    """A line on standard error, from the first process only."""
    if first_process():
        _err.print(text, style=style, markup=False, soft_wrap=True)


def quiet() -> None:
    """No log lines and loading bars in the middle of ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def progress() -> Progress:
    """A bar with an estimate; in the first process only."""
    # Long forwards report seldom: look back far enough for a steady estimate.
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    remaining = TimeRemainingColumn()
    return Progress(
        *columns, remaining, console=_err, speed_estimate_period=600, disable=not first_process()
    )


def wide_console(width: int) -> Console:
    """The terminal; or, where the output goes elsewhere, lines of at least ``width``."""
    console = Console()
    return console if console.is_terminal else Console(width=max(width, console.width))
