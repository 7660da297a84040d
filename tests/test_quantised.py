"""Patches on quantised bases: torchao's 8-bit weights, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

import rope_ext
from eval.checks import changed, snapshot

METHODS = ("yarn", "dynamic_yarn", "ntk", "rerope")
Load = Callable[[], Any]


def quantised(config: Any) -> dict[str, Any]:
    return {"quantization_config": TorchAoConfig(config)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def load(base: Path) -> Load:
    """Loads the base in 8 bits."""
    return lambda: AutoModelForCausalLM.from_pretrained(base, **quantised(Int8WeightOnlyConfig()))


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def adapted(model: Any) -> PeftModel:
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


def in_8_bits(model: Any) -> bool:
    weights = [w for name, w in model.named_parameters() if name.endswith("k_proj.weight")]
    return bool(weights) and all(type(w).__name__ == "Int8Tensor" for w in weights)


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_model_comes_back_with_its_patch(tmp_path, ids, base, load, method) -> None:
    model = load()
    said, before = logits(model, ids), snapshot(model)
    rope_ext.patch(model, method, factor=4)
    extended = logits(model, ids)
    full = rope_ext.patch(AutoModelForCausalLM.from_pretrained(base), method, factor=4)
    assert in_8_bits(model) and not torch.equal(logits(full, ids), extended)
    assert not torch.equal(extended, said)
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    again = rope_ext.from_pretrained(tmp_path / "saved")
    assert in_8_bits(again) and torch.equal(logits(again, ids), extended)
    if method in ("yarn", "ntk"):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(logits(plain, ids), extended)
    rope_ext.unpatch(model)
    assert torch.equal(logits(model, ids), said)
    assert changed(before, snapshot(model)) <= {"config:dtype"}  # saving turned that into a word


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_on_a_quantised_base_comes_back(tmp_path, ids, load: Load, method: str) -> None:
    model = adapted(rope_ext.patch(load(), method, factor=4))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    said = logits(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    rope_ext.save_sidecar(model, tmp_path / "adapter")
    again = rope_ext.from_pretrained(tmp_path / "adapter", **quantised(Int8WeightOnlyConfig()))
    assert torch.equal(logits(again, ids), said)
    own = rope_ext.patch(load(), method, factor=4)
    again = rope_ext.load_adapter(own, tmp_path / "adapter", is_trainable=True).eval()
    assert torch.equal(logits(again, ids), said)
    with pytest.raises(rope_ext.AdapterError, match="not patched"):
        rope_ext.load_adapter(load(), tmp_path / "adapter")


def test_an_adapter_on_a_base_saved_in_8_bits_comes_back(tmp_path, ids, load: Load) -> None:
    load().save_pretrained(tmp_path / "small")
    model = adapted(
        rope_ext.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), "rerope", factor=4)
    )
    model.save_pretrained(tmp_path / "adapter")
    rope_ext.save_sidecar(model, tmp_path / "adapter")
    again = rope_ext.from_pretrained(tmp_path / "adapter")
    assert in_8_bits(again) and torch.equal(logits(again, ids), logits(model, ids))


_ELSEWHERE = """
import json, sys, torch, rope_ext
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig
for folder in sys.argv[1:]:
    adapter = folder.endswith("adapter")
    given = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())} if adapter else {}
    model = rope_ext.from_pretrained(folder, **given)
    with torch.no_grad():
        torch.save(model(torch.load(folder + "/ids.pt")).logits, folder + "/logits.pt")
"""


@pytest.mark.slow
def test_quantised_models_come_back_in_another_process(tmp_path, ids, load: Load) -> None:
    expected = {}
    for method in METHODS:
        model = rope_ext.patch(load(), method, factor=4)
        model.save_pretrained(tmp_path / method)
        expected[tmp_path / method] = logits(model, ids)
        model, folder = adapted(model), tmp_path / f"{method} adapter"
        model.save_pretrained(folder)
        rope_ext.save_sidecar(model, folder)
        expected[folder] = logits(model, ids)
    for folder in expected:
        torch.save(ids, folder / "ids.pt")
    subprocess.run([sys.executable, "-c", _ELSEWHERE, *map(str, expected)], check=True)
    for folder, said in expected.items():
        assert torch.equal(torch.load(folder / "logits.pt"), said), folder
