"""Starts servers in processes."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

WAIT = 500  # seconds


@contextmanager
def running(words: Sequence[str], log: Path, **environment: str) -> Iterator[str]:
    """Start a server with ``words`` and a free ``--port``; yields its address when ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, "--port", str(port)], stdout=out, stderr=out, env={**os.environ, **environment}
        )
    address = f"http://localhost:{port}"
    try:
        for _ in range(WAIT):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)
