"""Renders chat templates, which are programs from elsewhere, with bounded time and memory."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rope_ext.errors import OptionError, RopeExtError, first_line

SECONDS = 20.0
"""Time for one call."""
MOST_MEMORY = 512 * 2**20
"""Bytes that templates may take in addition to those of this process."""
MOST_TEXT = 4 * 2**20
"""Bytes of an answer, in addition to ``_TIMES`` the bytes of its messages."""
_TIMES = 16
# First byte of a child's answer; its size and a JSON value, or the reason, follow.
_DONE = b"d"
_FAILED = b"f"
_TOO_LARGE = b"m"
_HEAD = struct.Struct("=cQ")


class TemplateError(RopeExtError):
    """A chat template fails, or needs more time, memory or text than it may."""


class RejectionError(TemplateError):
    """A chat template raises an error, as it does on purpose for messages that it cannot write."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return ``messages`` in the chat template of ``tokenizer``, as text.

    Raises OptionError if the template fails, does not end, or needs too much memory.
    """
    with Templates(tokenizer.apply_chat_template) as templates:
        try:
            return templates(list(messages), tokenize=False, **options)
        except TemplateError as error:
            raise OptionError(f"{error}; give --chat no") from None


class Templates:
    """Calls a function that renders chat templates, in a process with limits.

        with Templates(tokenizer.apply_chat_template) as templates:
            text = templates(messages, tokenize=False)

    The process is a copy of this one, made by the first call, and lives until ``close`` or until
    this object is deleted. What the function returns must be a JSON value. Where Python cannot fork
    (Windows), the function runs in this process, and only its time is limited.

    A call raises RejectionError if the function raises an error, and another TemplateError if it
    exceeds a limit.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._child: _Child | None = None
        self._lock = threading.Lock()  # a question and its answer are of one thread

    def __enter__(self) -> Templates:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        child = self._child
        self._child = None
        if child is not None:
            child.end()

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Return what the function returns for these arguments."""
        if not hasattr(os, "fork"):
            return self._call_here(*given, **options)
        with self._lock:
            if self._child is None or not self._child.is_mine():
                self._child = _Child(self._function)
            try:
                kind, answer = self._child.ask(pickle.dumps((given, options)))
            except BaseException:  # also Ctrl-C: the next answer would be that of this question
                self.close()
                raise
        if kind == _DONE:
            return json.loads(answer)
        if kind == _FAILED:
            raise RejectionError(f"the chat template fails ({answer})")
        self.close()
        raise TemplateError(
            f"the chat template needs more than {MOST_MEMORY >> 20} MB, or gives more than "
            f"{MOST_TEXT >> 20} MB of text"
        )

    def _call_here(self, *given: Any, **options: Any) -> Any:
        try:
            with _limited(SECONDS):
                return self._function(*given, **options)
        except TemplateError:
            raise
        except Exception as error:  # it is a program, so it may raise any
            raise RejectionError(f"the chat template fails ({first_line(error)})") from error


def with_limits(model: Any) -> Any:
    """Return a subclass of a model of lm-eval that renders its chat template with limits."""

    class Limited(model):
        _templates: Templates | None = None

        def apply_chat_template(self, *given: Any, **options: Any) -> str:
            if self._templates is None:
                self._templates = Templates(super().apply_chat_template)
            try:
                return self._templates(*given, **options)
            except TemplateError as error:
                raise OptionError(
                    f"{error}; give --chat no, or leave out --apply_chat_template"
                ) from None

    return Limited


class _Child:
    """A copy of this process that calls a function, and can be stopped inside of one operation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._socket, theirs = socket.socketpair()
        self._owner = os.getpid()
        process = os.fork()
        if process == 0:
            _serve(function, theirs)
        theirs.close()
        # Also if its owner is deleted, or this program ends.
        self.end = weakref.finalize(self, _end, process, self._owner, self._socket)

    def is_mine(self) -> bool:
        """Whether this process made it, and not one from which this process was copied."""
        return self._owner == os.getpid()

    def ask(self, question: bytes) -> tuple[bytes, str]:
        """Return the kind of the answer to pickled arguments, and the answer."""
        deadline = time.monotonic() + SECONDS
        try:
            self._socket.settimeout(SECONDS)
            self._socket.sendall(struct.pack("=Q", len(question)) + question)
            kind, size = _HEAD.unpack(_read(self._socket, _HEAD.size, deadline))
            if size > MOST_TEXT + _TIMES * len(question):
                return _TOO_LARGE, ""
            answer = _read(self._socket, size, deadline)
        except TimeoutError:
            raise TemplateError(
                f"the chat template does not end within {SECONDS:g} seconds"
            ) from None
        except (EOFError, OSError):
            raise TemplateError("the chat template fails (its process ended)") from None
        return kind, answer.decode(errors="surrogatepass")


def _end(process: int, owner: int, connection: socket.socket) -> None:
    connection.close()
    if os.getpid() == owner:  # a copy of the owner leaves the process to it
        os.kill(process, signal.SIGKILL)  # it may have ended, but nobody has waited for it yet
        os.waitpid(process, 0)


def _read(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Read ``size`` bytes; raises TimeoutError after the deadline and EOFError at the end."""
    found = bytearray()
    while len(found) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        part = connection.recv(min(size - len(found), 2**16))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _serve(function: Callable[..., Any], connection: socket.socket) -> NoReturn:
    """Answer questions until the other side ends, and end this process without cleaning up."""
    with suppress(BaseException):  # this copy must not return to its caller
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which ends this
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The threads of the library are not in this copy. It reads this for every text.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _limit_memory()
        connection.settimeout(None)
        while True:
            (size,) = struct.unpack("=Q", _read(connection, 8))
            kind, answer = _answer(function, _read(connection, size))
            connection.sendall(_HEAD.pack(kind, len(answer)) + answer)
    os._exit(0)


def _answer(function: Callable[..., Any], question: bytes) -> tuple[bytes, bytes]:
    """Return the kind of an answer, and what the function returns or raises."""
    try:
        given, options = pickle.loads(question)  # of our own process
        result = function(*given, **options)
        text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
        return _DONE, text.encode(errors="surrogatepass")
    except MemoryError:
        return _TOO_LARGE, b""
    except Exception as error:  # it is a program, so it may raise any
        return _FAILED, first_line(error).encode(errors="replace")


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


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TemplateError if the block, Python code such as that of a template, runs longer."""
    deadline = time.monotonic() + seconds

    def watch(frame: FrameType, event: str, given: Any) -> Any:
        if time.monotonic() > deadline:
            raise TemplateError(f"the chat template does not end within {seconds:g} seconds")
        return watch

    before = sys.gettrace()  # of this thread, as is the change
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
