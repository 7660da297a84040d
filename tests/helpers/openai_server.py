"""A small OpenAI-compatible server over a model in this process, with faults on request."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import torch


@dataclass
class Fake:
    """Recorded requests, and how to respond.

    Args:
        model: model that answers greedily.
        tokenizer: its tokenizer.
        faults: HTTP statuses of the next requests, in order; 0: a normal response.
        logprobs: whether to return log-probabilities of the prompt.
        spoils: changes to the next responses, in order; text is sent as HTML.
        models: response to requests for the list of models.
    """

    model: Any
    tokenizer: Any
    faults: list[int] = field(default_factory=list)
    logprobs: bool = True
    spoils: list[Callable[[dict[str, Any]], Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.asked.append(body)
            fault = self.faults.pop(0) if self.faults else 0
        if fault:
            return fault, {"error": {"message": f"fault {fault}"}}
        ids = self._ids(body["prompt"])
        with self.lock:  # one forward at a time
            self.prompts.append(ids)
            text, logprobs = self._run(ids, body)
        choice = {"index": 0, "finish_reason": "length", "logprobs": None, "text": text}
        if logprobs is not None and self.logprobs:
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [], "text_offset": []}
        made = {"id": "1", "object": "text_completion", "created": 1, "model": body["model"]}
        made["usage"] = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": 0}
        with self.lock:
            spoil = self.spoils.pop(0) if self.spoils else dict
        return 200, spoil({**made, "choices": [choice]})

    def _ids(self, prompt: Any) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    @torch.no_grad()
    def _run(self, ids: list[int], body: dict[str, Any]) -> tuple[str, list[Any] | None]:
        if body.get("echo"):
            logits = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            return "", [None, *[float(logits[at, token]) for at, token in enumerate(ids[1:])], -1.0]
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=body["max_tokens"], do_sample=False
        )
        return self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True), None


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """Serve ``fake`` on this machine; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(*fake.answer(body))

        def do_GET(self) -> None:
            self.send(200, {"object": "list", "data": fake.models})

        def send(self, status: int, answer: Any) -> None:
            html = isinstance(answer, str)
            data = (answer if html else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if html else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


Sent = Callable[[Callable[[bytes], None]], None]
"""Writes a whole HTTP response by a function that sends bytes."""


@contextmanager
def sending(send: Sent, heard: list[bytes] | None = None) -> Iterator[str]:
    """Serve whatever ``send`` sends after each request, which goes into ``heard``."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            request = self.connection.recv(65536)
            if heard is not None:
                heard.append(request)
            with suppress(OSError):  # the client hangs up
                send(self.connection.sendall)

    server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


START = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def endless(send: Callable[[bytes], None]) -> None:
    send(START + b"\r\n")
    while True:
        send(b" " * 2**20)


def slow(send: Callable[[bytes], None]) -> None:
    send(START + b"\r\n")
    while True:
        send(b" ")
        time.sleep(0.1)


def slow_headers(send: Callable[[bytes], None]) -> None:
    send(START)
    while True:
        send(b"A")
        time.sleep(0.1)


def compressed(send: Callable[[bytes], None]) -> None:
    body = gzip.compress(b" " * 2**20)
    send(START + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def cut_off(send: Callable[[bytes], None]) -> None:
    send(START + b"Content-Length: 100\r\n\r\n{")


def no_http(send: Callable[[bytes], None]) -> None:
    send(b"\x1b[31mhello\r\n\r\n")
