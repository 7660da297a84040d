"""PEFT and Trainer with patched models: what is saved beside an adapter, and compared before."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import rope_ext
from tests.helpers.models import tiny_llama


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def loaded(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def with_adapter(model: Any) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "rerope"])
def test_an_adapter_is_saved_with_its_patch(
    method: str, base: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = with_adapter(rope_ext.patch(loaded(base), method, factor=4)).eval()
    model.save_pretrained(tmp_path / "adapter")
    again = rope_ext.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert rope_ext.describe(again).method == method


def test_every_saved_adapter_has_the_patch_and_no_other_process_writes_it(
    base: Path, tmp_path: Path
) -> None:
    model = with_adapter(rope_ext.patch(loaded(base), "yarn", factor=4))
    model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "both")
    for folder in (tmp_path / "both", tmp_path / "both" / "second"):
        assert rope_ext.describe(rope_ext.from_pretrained(folder)).method == "yarn"
    model.save_pretrained(str(tmp_path / "one"), selected_adapters=["second"])
    assert [file.parent.name for file in (tmp_path / "one").rglob("rope_ext.json")] == ["second"]
    model.save_pretrained(tmp_path / "worker", is_main_process=False)
    assert not list((tmp_path / "worker").rglob("rope_ext.json"))
    model.save_pretrained(str(tmp_path / "other"))
    rope_ext.unpatch(model)
    model.save_pretrained(str(tmp_path / "unpatched"))
    assert not (tmp_path / "unpatched" / "rope_ext.json").exists()


def trainer_of(model: Any, folder: Path, **more: Any) -> Trainer:
    """A trainer of one step, with what trainers of TRL have."""
    args = TrainingArguments(str(folder), max_steps=1, report_to=[], use_cpu=True)
    args.use_vllm = more.pop("use_vllm", False)  # pyright: ignore[reportAttributeAccessIssue]
    row = {"input_ids": list(range(3, 20)), "labels": list(range(3, 20))}
    made = Trainer(model=model, args=args, train_dataset=[row] * 8)  # pyright: ignore
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_reference_with_another_patch_is_refused_before_the_first_step(
    base: Path, tmp_path: Path
) -> None:
    model = rope_ext.patch(loaded(base), "yarn", factor=4)
    before = copy.deepcopy(model.state_dict())
    for reference in (loaded(base), rope_ext.patch(loaded(base), "yarn", factor=2)):
        with pytest.raises(rope_ext.AdapterError, match="reference model"):
            trainer_of(model, tmp_path / "run", ref_model=reference).train()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.save_pretrained(tmp_path / "long")
    for reference in (copy.deepcopy(model), loaded(tmp_path / "long"), None):
        assert trainer_of(model, tmp_path / "run", ref_model=reference).train().global_step == 1


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_rollouts_of_a_folder_with_another_patch_are_refused_before_the_first_step(
    method: str, base: Path, tmp_path: Path
) -> None:
    model = rope_ext.patch(loaded(base), method, factor=4)
    for each in (model, with_adapter(rope_ext.patch(loaded(base), method, factor=4))):
        with pytest.raises(rope_ext.AdapterError, match="vLLM generates with"):
            trainer_of(each, tmp_path / "run", use_vllm=True).train()
    model.save_pretrained(tmp_path / "long")
    for each in (
        rope_ext.from_pretrained(tmp_path / "long"),
        with_adapter(rope_ext.from_pretrained(tmp_path / "long")),
    ):
        assert trainer_of(each, tmp_path / "run", use_vllm=True).train().global_step == 1
    other = rope_ext.patch(loaded(base), "yarn", factor=2)
    other.name_or_path = str(tmp_path / "long")
    with pytest.raises(rope_ext.AdapterError, match="vLLM generates with"):
        trainer_of(other, tmp_path / "run", use_vllm=True).train()
    unpatched = loaded(base)
    assert trainer_of(unpatched, tmp_path / "run", use_vllm=True).train().global_step == 1


@contextmanager
def serving(root: Any) -> Iterator[SimpleNamespace]:
    """TRL's client of a vLLM server that says it loaded the folder ``root``."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            card = {"id": "model", "object": "model", "root": root, "max_model_len": 512}
            self.wfile.write(json.dumps({"object": "list", "data": [card]}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("trainer", ["grpo", "online dpo"])
def test_a_server_of_a_folder_with_another_patch_is_refused_before_the_first_step(
    trainer: str, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says which folder it loaded; the trainer's own may have the right patch."""

    def train(client: Any, model: Any) -> int:
        more = {"vllm_client": client}
        if trainer == "grpo":
            more = {"vllm_generation": SimpleNamespace(vllm_client=client)}
        return trainer_of(model, tmp_path / "run", use_vllm=True, **more).train().global_step

    rope_ext.patch(loaded(base), "rerope", factor=4).save_pretrained(tmp_path / "long")
    model = rope_ext.from_pretrained(tmp_path / "long")
    with serving(str(base)) as client, pytest.raises(rope_ext.AdapterError, match="base"):
        train(client, model)
    with serving(str(tmp_path / "long")) as client:
        assert train(client, model) == 1
        unsaved = rope_ext.patch(loaded(base), "rerope", factor=4)
        assert train(client, unsaved) == 1  # only the server generates
    assert "cannot be known" not in caplog.text
    for root in ("/another/machine/long", None):
        with serving(root) as client:
            assert train(client, model) == 1
        assert "cannot be known" in caplog.text
        caplog.clear()


def test_a_trainer_of_any_other_model_trains_after_a_patch(tmp_path: Path) -> None:
    class Line(torch.nn.Module):  # no configuration, and no RoPE
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.weight * x).square().mean()}

    rope_ext.patch(tiny_llama(), "yarn", factor=2)  # wraps Trainer.train
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none"
    )
    model = Line()
    data = [{"x": torch.ones(())}] * 2
    Trainer(model=model, args=arguments, train_dataset=data).train()
    assert model.weight != 1
