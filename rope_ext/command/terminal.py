"""Errors and messages of all commands."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from rope_ext.errors import RopeExtError, first_line
from rope_ext.quoting import command_line, printable, printable_lines

stderr = Console(stderr=True, highlight=False)


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
        for line in f"error: {error}".split("\n"):  # one for each of several mistakes
            tell(line, "red")
        sys.exit(2)
    except OSError as error:
        # Discard further output, so that the flush at exit cannot fail.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        where = "" if error.filename is None else f" ({printable(error.filename)})"
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
        stderr.print(plain(printable(text)), style=style, soft_wrap=True)


def show(text: object) -> None:
    """Print text to standard output. It may contain names and strings from elsewhere."""
    print(printable_lines(text))


def plain(text: object, style: str = "") -> Text:
    """Return text for a rich table or console, which takes it literally."""
    return Text(printable_lines(text), style=style)


def tell_next(*commands: Sequence[object], when: str = "next") -> None:
    """Print commands to standard error, ready to paste."""
    for words in commands:
        tell(f"{when}: {command_line(words)}")


def unused(path: str | Path) -> str:
    """Return an unused output path: ``path``, or with ``-2``, ``-3`` ... added."""
    names = chain([str(path)], (f"{path}-{number}" for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))


def quiet() -> None:
    """Silence transformers' log lines and loading bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def wide_console(width: int) -> Console:
    """Return a console: the terminal, or at least ``width`` columns if output is redirected."""
    console = Console()
    return console if console.is_terminal else Console(width=max(width, console.width))
