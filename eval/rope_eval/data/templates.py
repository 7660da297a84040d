"""Renders chat templates, which are programs from elsewhere, with bounded time and memory."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rope_ext.errors import OptionError, first_line

SECONDS = 20.0
MOST_MEMORY = 512 * 2**20
"""Bytes that a template may take in addition to those of this process."""
MOST_TEXT = 4 * 2**20
"""Bytes of a rendered text."""
_DONE, _FAILED, _TOO_LARGE = b"d", b"f", b"m"
"""First byte of a child's answer; the text follows."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return ``messages`` in the chat template of ``tokenizer``, as text.

    Raises OptionError if the template fails, does not end, or needs too much memory. Where Python
    cannot fork (Windows), only its time is limited.
    """

    def rendered() -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)

    if hasattr(os, "fork"):
        return _rendered_in_child(rendered)
    try:
        with _limited(SECONDS):
            return rendered()
    except OptionError:
        raise
    except Exception as error:  # it is a program, so it may raise any
        raise _failure(first_line(error)) from error


def _failure(reason: str) -> OptionError:
    return OptionError(f"the chat template fails ({reason}); give --chat no")


def _endless() -> OptionError:
    return OptionError(f"the chat template does not end within {SECONDS:g} seconds; give --chat no")


def _rendered_in_child(rendered: Callable[[], str]) -> str:
    """Call ``rendered`` in a copy of this process, which can be stopped inside of one operation."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(rendered, writer)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + SECONDS)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # it may have ended, but nobody has waited for it yet
        os.waitpid(child, 0)
    kind, text = answer[:1], answer[1:].decode(errors="surrogatepass")
    if kind == _TOO_LARGE or len(answer) > MOST_TEXT:
        raise OptionError(
            f"the chat template needs more than {MOST_MEMORY >> 20} MB, or gives more than "
            f"{MOST_TEXT >> 20} MB of text; give --chat no"
        )
    if kind != _DONE:
        raise _failure(text or "its process ended")
    return text


def _answer(rendered: Callable[[], str], writer: int) -> NoReturn:
    """Write what ``rendered`` returns or raises, and end this process without cleaning up."""
    try:
        _limit_memory()
        answer = _DONE + rendered().encode(errors="surrogatepass")
    except MemoryError:
        answer = _TOO_LARGE
    except Exception as error:  # it is a program, so it may raise any
        answer = _FAILED + first_line(error).encode(errors="replace")
    except BaseException:  # this copy must not return to its caller
        answer = _FAILED
    with suppress(OSError):  # nobody reads more than MOST_TEXT
        while answer:
            answer = answer[os.write(writer, answer) :]
    os._exit(0)


def _limit_memory() -> None:
    """Let this process allocate no more than ``MOST_MEMORY``, where Linux counts it."""
    with suppress(OSError, ValueError):
        import resource  # not on Windows

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = pages * resource.getpagesize() + MOST_MEMORY
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _read(reader: int, deadline: float) -> bytes:
    """Read to the end, or to ``MOST_TEXT``."""
    answer = bytearray()
    while len(answer) <= MOST_TEXT:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            raise _endless()
        part = os.read(reader, 2**16)
        if not part:
            break
        answer += part
    return bytes(answer)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise OptionError if the block, Python code such as that of a chat template, runs longer."""
    deadline = time.monotonic() + seconds

    def watch(frame: FrameType, event: str, given: Any) -> Any:
        if time.monotonic() > deadline:
            raise _endless()
        return watch

    before = sys.gettrace()  # of this thread, as is the change
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
