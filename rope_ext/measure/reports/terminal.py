"""What all commands have in common: errors, messages and progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rope_ext.errors import RopeExtError, first_line
from rope_ext.measure.folder import first_process

_err = Console(stderr=True, highlight=False)


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
