"""`transformers serve` on saved folders: what it answers beyond the trained length."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext
from tests.helpers.checkpoint import TRAINED, save_checkpoint

TRANSFORMERS = "from transformers.cli.transformers import main; main()"  # the command's own
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEXT = "one of two and another, " * 30
WAIT = 500  # seconds


@pytest.fixture(autouse=True)
def _installed() -> None:
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("openai") is None:
        pytest.skip("what transformers serve needs is not there")


def saved(folder: Path, method: str | None, **options: Any) -> Path:
    """A tiny checkpoint under a method, with a template for chats."""
    save_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    if method is not None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        rope_ext.patch(model, method, **options).save_pretrained(folder)
    return folder


def command(folder: Path, port: int) -> list[str]:
    """The command on the page."""
    page = Path(__file__).parents[2] / "docs" / "engines" / "beside.md"
    words = re.search(r"\$ transformers (serve .*)", page.read_text(encoding="utf-8"))[1]
    given = [str(folder) if word == "FOLDER" else word for word in words.split()]
    return [sys.executable, "-c", TRANSFORMERS, *given, "--port", str(port)]


@contextmanager
def served(folder: Path, log: Path) -> Iterator[str]:
    """The address of a server, which is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(log, "w") as out:
        process = subprocess.Popen(
            command(folder, port),
            stdout=out,
            stderr=out,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
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
        process.wait(30)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        return json.load(answer)


@torch.no_grad()
def generated(folder: Path, text: str) -> str:
    """What a model says on, in this process."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(text, return_tensors="pt")
    assert 2 * TRAINED < ids.input_ids.shape[1] < 4 * TRAINED - 16
    out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_a_served_folder_answers_as_its_model_does(tmp_path: Path) -> None:
    folder = saved(tmp_path / "yarn", "yarn", factor=4)
    with served(folder, tmp_path / "log") as address:
        asked = {"model": str(folder), "max_tokens": 16, "temperature": 0.0}
        plain = post(f"{address}/v1/completions", asked | {"prompt": TEXT})
        messages = [{"role": "user", "content": TEXT}]
        chat = post(f"{address}/v1/chat/completions", asked | {"messages": messages})
    want = generated(folder, TEXT)
    assert want != generated(saved(tmp_path / "plain", None), TEXT)
    assert plain["choices"][0]["text"] == want
    assert chat["choices"][0]["message"]["content"] == want


@pytest.mark.slow
def test_a_folder_under_a_position_method_is_not_served(tmp_path: Path) -> None:
    folder = saved(tmp_path / "rerope", "rerope", factor=4)
    done = subprocess.run(command(folder, 0), capture_output=True, text=True, timeout=WAIT)
    assert done.returncode != 0
    assert "load with rope_ext.from_pretrained" in done.stderr
