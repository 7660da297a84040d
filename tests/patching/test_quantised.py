"""Patches on quantised bases on the CPU: torchao's 8-bit and bitsandbytes' 4-bit weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import rope_ext
from rope_ext.patching import current_patch
from tests.families.checks import changed, snapshot
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits

# An extra of their own, since transformers loads torchao, which warns, wherever it is installed.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quantisers")]

PATCHES = ("yarn", "rerope")
WEIGHTS = {"int8": "Int8Tensor", "nf4": "Params4bit", "nf4 packed": "Params4bit"}
# Rows in blocks of 32, columns in blocks of 64: what a packed layer has to divide into.
PACKABLE = {"intermediate_size": 128}
ROUNDED = 0.03
"""Mean change of a logit when packed constants are rounded to 8 bits again: 0.009 measured, where
a patch changes 0.8 and quantising itself 0.4."""


def options(kind: str) -> dict[str, Any]:
    """Of ``from_pretrained``, to quantise a base to ``kind``."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return {"quantization_config": config}


@pytest.fixture
def quantisers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("bitsandbytes")
    from tests.helpers import packed_nf4

    packed_nf4.use("nf4 packed" in request.node.name, monkeypatch.setattr)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_llama(**PACKABLE).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def same(found: torch.Tensor, expected: torch.Tensor, kind: str) -> bool:
    """Whether these are the logits of one model before and after it was saved."""
    if kind == "nf4 packed":
        return (found - expected).abs().mean().item() < ROUNDED
    return torch.equal(found, expected)


def kind_of(model: Any) -> set[str]:
    """Classes of the quantised weights."""
    ends = "k_proj.weight", "k_proj.base_layer.weight"
    return {type(w).__name__ for name, w in model.named_parameters() if name.endswith(ends)}


def adapted(model: Any) -> PeftModel:
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize("method", PATCHES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_quantised_model_comes_back_with_its_patch(tmp_path, ids, base, kind, method) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, **options(kind))
    assert kind_of(model) == {WEIGHTS[kind]}
    said, before = logits(model, ids), snapshot(model)
    rope_ext.patch(model, method, factor=4)
    extended = logits(model, ids)
    assert not torch.equal(extended, said)
    full = rope_ext.patch(AutoModelForCausalLM.from_pretrained(base), method, factor=4)
    assert not torch.equal(logits(full, ids), extended)
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    again = rope_ext.from_pretrained(tmp_path / "saved")
    assert kind_of(again) == {WEIGHTS[kind]}
    assert same(logits(again, ids), extended, kind)
    if current_patch(model).record.plain:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert same(logits(plain, ids), extended, kind)
    after = snapshot(rope_ext.unpatch(model))
    assert changed(before, after) <= {"config:dtype"}  # saving turned that into a word
    assert same(logits(model, ids), said, kind)


@pytest.mark.parametrize("method", PATCHES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_an_adapter_on_a_quantised_base_comes_back(tmp_path, ids, base, kind, method) -> None:
    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, **options(kind))

    model = adapted(rope_ext.patch(load(), method, factor=4))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    said = logits(model, ids)
    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    rope_ext.save_sidecar(model, folder)
    again = rope_ext.from_pretrained(folder, **options(kind))
    assert kind_of(again) == {WEIGHTS[kind]} and same(logits(again, ids), said, kind)
    again = rope_ext.load_adapter(rope_ext.patch(load(), method, factor=4), folder)
    assert same(logits(again, ids), said, kind)
    with pytest.raises(rope_ext.AdapterError, match="not patched"):
        rope_ext.load_adapter(load(), folder)
