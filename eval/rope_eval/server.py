"""Requests to OpenAI-compatible servers, and all reading of their answers.

A server may be broken or hostile. A request ends by its deadline, an answer has a bounded size, and
every value is checked before it is used. All else is a :class:`RequestError`.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import re
import reprlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from rope_ext.errors import MeasureError, OptionError, first_line
from rope_ext.quoting import printable

KEY = "OPENAI_API_KEY"
"""Environment variable with the server's API key, if it requires one."""
MOST_BYTES = 64 * 2**20
"""Size of the largest answer that is read."""
MOST_CONTAINERS = 2**21
"""Number of arrays and objects in the largest answer that is parsed; each takes 64 bytes."""
_SHOWN = 300  # characters to quote from an answer
_DIGITS = 19  # of the longest number that is read as an integer
_ROUNDING = 1e-3  # of a log-probability of 0 in 16 bits
_REPEATED = (408, 409, 425, 429)  # statuses, besides 5xx, after which a request is repeated
_HOPELESS = (401, 403, 404)  # statuses that every other request would get, too
_GET_SECONDS = 30.0
_FIRST_DELAY = 0.5  # seconds before the first repetition; it doubles
_LONGEST_DELAY = 8.0
_LONGEST_ASKED = 60.0  # seconds that a server may ask to wait
_LOCAL = re.compile(r"localhost|127\.[0-9.]+|::1")
_EXCERPT = reprlib.Repr()  # bounds depth and length
_EXCERPT.maxstring = _SHOWN


class RequestError(MeasureError):
    """A request without a usable answer.

    ``hopeless``: every other request would fail, too. ``passing``: it may succeed if repeated,
    after ``delay`` seconds if the server asked for them. ``status`` is that of the answer.
    """

    def __init__(
        self,
        reason: str,
        hopeless: bool = False,
        passing: bool = False,
        delay: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.hopeless = hopeless
        self.passing = passing
        self.delay = delay
        self.status = status


def shown_url(url: str) -> str:
    """Return a URL without the places that may hold a key: user, password, query and fragment."""
    url = re.sub(r"^([a-zA-Z+.-]*://)?.*@", r"\1***@", url, flags=re.DOTALL)
    return printable(re.sub(r"[?#].*", "?***", url, flags=re.DOTALL))


def require_url(url: str, example: str) -> None:
    """Raise OptionError unless ``url`` is the address of a server, and nothing else."""
    try:
        address = urlsplit(url)
        port = address.port  # raises ValueError for a number that is no port
    except ValueError:
        address = urlsplit("")
        port = None
    if address.username is not None or "@" in address.netloc or address.query or address.fragment:
        raise OptionError(
            f"--url {shown_url(url)!r} holds a password or query, which reports would show; leave "
            f"it out, and set a key as {KEY} in the environment"
        )
    usable = address.scheme in ("http", "https") and address.hostname and port != 0
    if not usable or not url.isprintable() or " " in url:
        raise OptionError(f"--url {shown_url(url)!r} must be {example}; give it like that")


class Client:
    """Sends requests to one server; ``timeout`` is in seconds, for a request with its repetitions.

    It sends the key in the environment, follows no redirects, and uses the proxies of the
    environment for servers on other machines.
    """

    def __init__(self, url: str, timeout: float, retries: int = 0) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self.key = os.environ.get(KEY, "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            raise OptionError(f"{KEY} has characters that no key has; set it again")
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[Any] = set()

    def close(self) -> None:
        """End all requests that wait for an answer."""
        self._closed.set()
        with self._lock:
            for sock in self._sockets:
                _shut_down(sock)

    def get(self, path: str) -> Any:
        """Return the JSON answer to a GET request, which is short and not repeated."""
        return self._once(path, None, time.monotonic() + min(self.timeout, _GET_SECONDS))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON answer to a POST request of ``body``; repeat it after passing errors."""
        deadline = time.monotonic() + self.timeout
        data = json.dumps(body).encode()
        delay = _FIRST_DELAY
        for attempt in count():
            try:
                return self._once(path, data, deadline)
            except RequestError as error:
                wait = delay if error.delay is None else error.delay
                late = time.monotonic() + wait >= deadline
                if not error.passing or attempt == self.retries or late:
                    raise
                # ``close`` ends this wait, too.
                if self._closed.wait(wait):
                    raise
            delay = min(2 * delay, _LONGEST_DELAY)
        raise AssertionError

    def _once(self, path: str, data: bytes | None, deadline: float) -> Any:
        """Send a request once and return its JSON; ``deadline`` is a monotonic time in seconds."""
        left = deadline - time.monotonic()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with self._opener(deadline).open(request, timeout=left) as answer:
                return parsed(_body(answer, MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except TimeoutError:
            raise self._late() from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._late() from None
            reason = self._quoted(str(error.reason))
            raise RequestError(f"no connection: {reason}", hopeless=True, passing=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = self._quoted(f"{type(error).__name__}: {error}")
            raise RequestError(f"the answer was cut off ({reason})", passing=True) from None
        except UnicodeError as error:  # of a host name
            raise RequestError(f"no connection: {first_line(error)}", hopeless=True) from None

    def _late(self) -> RequestError:
        return RequestError(f"there was no answer within {self.timeout:g} seconds")

    def _refused(self, error: urllib.error.HTTPError) -> RequestError:
        """Return the error for an answer with a status other than 200."""
        status = error.code
        if 300 <= status < 400:
            where = shown_url(str(error.headers.get("Location", "")))
            return RequestError(
                f"it redirects to {where!r}, which is not followed; give --url the address of "
                f"the server itself",
                hopeless=True,
            )
        try:
            said = _body(error, 16 * _SHOWN, cut=True)
        except (RequestError, OSError, http.client.HTTPException):
            said = ""
        return RequestError(
            f"it returned status {status}: {self._quoted(said)}",
            hopeless=status in _HOPELESS,
            passing=status in _REPEATED or status >= 500,
            delay=_asked_delay(error.headers),
            status=status,
        )

    def _quoted(self, text: str) -> str:
        """Return foreign text for an error, without the key, which servers may repeat."""
        if self.key:
            text = text.replace(self.key, "***")
        return printable(text, _SHOWN)

    def _opener(self, deadline: float) -> urllib.request.OpenerDirector:
        local = _LOCAL.fullmatch(urlsplit(self.url).hostname or "") is not None
        proxies = urllib.request.ProxyHandler({} if local else None)
        return urllib.request.build_opener(
            proxies, _Handler(self, deadline), _SecureHandler(self, deadline), _NoRedirects()
        )

    def response(self, deadline: float, sock: Any, *given: Any, **more: Any) -> Any:
        """Return a response that is read from ``sock`` until the deadline or ``close``."""
        response = http.client.HTTPResponse(sock, *given, **more)
        # The timeout of its own reader is that of each read: a server that sends a byte now and
        # then would never end.
        response.fp.close()
        response.fp = io.BufferedReader(_TimedReader(sock, deadline, self._forget))
        with self._lock:
            self._sockets.add(sock)
        # ``close`` may have run since this request began.
        if self._closed.is_set():
            _shut_down(sock)
        return response

    def _forget(self, sock: Any) -> None:
        with self._lock:
            self._sockets.discard(sock)


class _TimedReader(io.RawIOBase):
    """Reads a socket until a deadline. A socket's own timeout is that of each read."""

    def __init__(self, sock: Any, deadline: float, forget: Callable[[Any], None]) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)  # keeps the connection open
        self._deadline = deadline
        self._on_close = forget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._on_close(self._sock)
            self._raw.close()
        super().close()


class _Handler(urllib.request.HTTPHandler):
    def __init__(self, client: Client, deadline: float) -> None:
        super().__init__()
        self._respond = partial(client.response, deadline)

    def _connection(self, kind: Any, host: str, **given: Any) -> Any:
        connection = kind(host, **given)
        connection.response_class = self._respond
        return connection

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), req)  # pyright: ignore[reportArgumentType]


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, client: Client, deadline: float) -> None:
        super().__init__()
        self._plain = _Handler(client, deadline)

    def https_open(self, req: urllib.request.Request) -> Any:
        connect = partial(self._plain._connection, http.client.HTTPSConnection)
        return self.do_open(connect, req)  # pyright: ignore[reportArgumentType]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves redirects to the handler of errors: prompts and the key go to no other host."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _shut_down(sock: Any) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # a thread that reads it gets the end of the answer


def _asked_delay(headers: Message) -> float | None:
    """Return how long a server asks to wait, in seconds; None if it does not, or too long."""
    for name, unit in (("Retry-After-Ms", 1e-3), ("Retry-After", 1.0)):
        with suppress(ValueError):
            seconds = unit * float(headers.get(name, "none"))
            if 0 <= seconds <= _LONGEST_ASKED:
                return seconds
    return None


def _body(answer: Any, most: int, cut: bool = False) -> str:
    """Return the text of a response; raise RequestError if it is too large, unless it is cut."""
    coding = (answer.headers.get("Content-Encoding") or "identity").strip().lower()
    if coding != "identity":
        raise RequestError(f"the answer is compressed ({printable(coding, 20)}), unasked")
    data = answer.read(most + 1)
    if len(data) > most and not cut:
        raise RequestError(f"the answer has more than {most >> 20} MB")
    if getattr(answer, "length", None) and not cut:  # what is missing
        raise RequestError("the answer was cut off", passing=True)
    return data[:most].decode(errors="replace")


def parsed(text: str) -> Any:
    """Parse JSON from a server; raise RequestError for what is not JSON, too deep or too large."""
    containers = text.count("[") + text.count("{")
    if containers > MOST_CONTAINERS:
        raise RequestError(f"the answer has {containers} arrays and objects, which is too many")
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else "not JSON"
        raise RequestError(f"the answer is {reason}: {printable(text, _SHOWN)}") from None


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:  # Python may take minutes to read a longer one
        raise ValueError("a number is too large")
    return int(digits)


@dataclass(frozen=True)
class Completion:
    """A checked answer to a request for a completion.

    ``model`` is the name that the server gives, ``read`` and ``written`` are the numbers of tokens
    that it counts; None: it does not say. ``text`` is what it wrote, and ``logprobs`` is unchecked.
    """

    model: str | None
    read: int | None
    written: int | None
    choice: Mapping[str, Any]

    @classmethod
    def from_json(cls, answer: Any) -> Completion:
        """Check the JSON of an answer; raises RequestError if it is not that of a completion."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            raise RequestError(f"the answer has no choices: {_cited(answer)}")
        model = answer.get("model")
        if not isinstance(model, str | None):
            raise RequestError(f"the name of the model is no text: {_cited(model)}")
        usage = answer.get("usage")
        if not isinstance(usage, dict | None):
            raise RequestError(f"the counts of tokens are no object: {_cited(usage)}")
        counts = []
        for kind in ("prompt", "completion"):
            number = (usage or {}).get(f"{kind}_tokens")
            if number is not None and (type(number) is not int or number < 0):
                raise RequestError(f"the number of {kind} tokens is {_cited(number)}")
            counts.append(number or None)
        return cls(model=model or None, read=counts[0], written=counts[1], choice=choice)

    def text(self) -> str:
        """Return the text of the answer."""
        text = self.choice.get("text")
        if not isinstance(text, str):
            raise RequestError(f"the answer has no text: {_cited(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"the text is not valid Unicode: {_cited(text)}") from None
        return text

    def prompt_log_probs(self, length: int, added: int = 0) -> list[float]:
        """Return the log-probabilities of a prompt of ``length`` tokens, without the first.

        ``added`` is the number of tokens that the server put before the prompt. The list begins
        with null, since nothing precedes the first token; without it, every value would count for
        another token.
        """
        given = self._logprobs().get("token_logprobs")
        if not isinstance(given, list | None):
            raise RequestError(f"token_logprobs is no list: {_cited(given)}")
        count = added + length
        absent = not given or len(given) < length - 1 or all(one is None for one in given[1:])
        if given is None or absent:
            raise RequestError(
                "it does not return the log-probabilities of a prompt (echo=True, logprobs=1)"
            )
        # The token that it writes may follow.
        if given[0] is not None or len(given) not in (count, count + 1):
            raise RequestError(
                f"its log-probabilities are not those of the prompt: {len(given)} for {count} "
                f"tokens, the first {_cited(given[0])} instead of null"
            )
        found = given[added + 1 : count]
        wrong = [value for value in found if not _log_prob(value) or math.isinf(value)]
        if wrong:
            raise RequestError(f"a log-probability of the prompt is {_cited(wrong[0])}")
        return found

    def next_log_probs(self, vocabulary: int) -> dict[int, float]:
        """Return log-probabilities of the first token written, by token ID.

        The server identifies tokens by IDs, or by names of a miniature: ``t17``, ``token_id:17``.
        """
        given = self._logprobs()
        named = _top(given, "content")
        if named is not None:
            entries = _list_of(dict, named.get("top_logprobs"))
            pairs = [(one.get("id", one.get("token")), one.get("logprob")) for one in entries]
        else:
            pairs = list((_top(given, "top_logprobs") or {}).items())
        if not pairs:
            raise RequestError(f"it returned no log-probabilities: {_cited(self.choice)}")
        found = {}
        for token, value in pairs:
            if not _log_prob(value):
                raise RequestError(f"the log-probability of {_cited(token)} is {_cited(value)}")
            number = _token_id(token)
            if number is None:
                continue
            if not 0 <= number < vocabulary:
                raise RequestError(
                    f"it returned token {_cited(token)}, and the model has {vocabulary} tokens"
                )
            found[number] = float(value)
        if not found:
            raise RequestError(f"it identifies no token: {_cited(pairs)}")
        return found

    def _logprobs(self) -> dict[str, Any]:
        given = self.choice.get("logprobs")
        if not isinstance(given, dict | None):
            raise RequestError(f"logprobs is no object: {_cited(given)}")
        return given or {}


def served_context(answer: Any, name: str) -> int | None:
    """Return the longest prompt of a served model by a list of models; None: it does not say."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    for model in listed if isinstance(listed, list) else ():
        if isinstance(model, dict) and model.get("id") == name:
            most = model.get("max_model_len")  # of vLLM and SGLang
            return most if type(most) is int and most > 0 else None
    return None


def _top(given: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the first of the objects in a field, or None if there is no such field."""
    entries = given.get(name)
    return None if entries is None else _list_of(dict, entries)[0]


def _list_of(kind: type, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise RequestError(f"it returned no log-probabilities: {_cited(values)}")
    if not all(isinstance(value, kind) for value in values):
        raise RequestError(f"its log-probabilities are not readable: {_cited(values)}")
    return values


def _token_id(token: Any) -> int | None:
    """Return the ID of a token that is identified by it or by a name; None: by neither."""
    if type(token) is int:
        return token
    if not isinstance(token, str):
        raise RequestError(f"a token is {_cited(token)}")
    digits = re.search("[0-9]+$", token)
    if digits is None:  # special tokens may be empty text
        return None
    return int(digits[0]) if len(digits[0]) <= _DIGITS else 10**_DIGITS


def _log_prob(value: Any) -> bool:
    """Whether a value may be a log-probability; minus infinity may."""
    return type(value) in (int, float) and value <= _ROUNDING  # NaN is not


def _cited(value: Any) -> str:
    """Return a foreign value for an error."""
    return printable(_EXCERPT.repr(value), _SHOWN)
