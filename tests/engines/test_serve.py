"""`transformers serve` on saved folders: what it answers beyond the trained length."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.checkpoint import TRAINED
from tests.helpers.servers import WAIT, running
from tests.helpers.transformers_serve import command, saved

TEXT = "one of two and another, " * 30


@pytest.fixture(autouse=True)
def _installed() -> None:
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("openai") is None:
        pytest.skip("what transformers serve needs is not there")


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
    with running(command(folder), tmp_path / "log") as address:
        asked = {"model": str(folder), "max_tokens": 16, "temperature": 0.0}
        plain = post(f"{address}/v1/completions", asked | {"prompt": TEXT})
        messages = [{"role": "user", "content": TEXT}]
        chat = post(f"{address}/v1/chat/completions", asked | {"messages": messages})
    want = generated(folder, TEXT)
    assert want != generated(saved(tmp_path / "plain", None), TEXT)
    assert plain["choices"][0]["text"] == want
    assert chat["choices"][0]["message"]["content"] == want
