"""Folders that an earlier version saved, in tests/saving/older: they load with the same logits.

``python -m tests.saving.test_older_folders FOLDER`` writes them with the version that it runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import rope_ext

OLDER = Path(__file__).parent / "older"
IDS = torch.arange(3, 99)[None] % 29 + 3
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, **LAYERS)),
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fixed": ("llama", "yarn", {}),
    "dynamic": ("llama", "dynamic_yarn", {}),
    "position": ("llama", "rerope", {"window": 8, "frequency": rope_ext.NTK(factor=2)}),
    "learned": ("llama", "t5", {"num_buckets": 8}),
    "learned in shards": ("llama", "rope", {"bias": "kerple_log", "temperature": "ssmax"}),
    "marked by its experts": ("phi3", "self_extend", {}),
    "nested parameters": ("gemma3", "self_extend", {}),
    "adapter": ("llama", "rerope", {}),
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits[0, -8:].float()


def write(folder: Path, case: str) -> None:
    family, method, options = CASES[case]
    torch.manual_seed(0)
    model: Any = BUILD[family]()
    if case == "adapter":
        model.save_pretrained(folder / "base")
    if "bias" not in options:
        options = {"factor": 4, **options}
    rope_ext.patch(model, method, **options)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "rope_ext" in name:
                value += torch.linspace(0, 0.3, value.numel()).view_as(value)
    if case == "adapter":
        lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora)
        rope_ext.save_sidecar(model, folder)
    model.save_pretrained(folder, max_shard_size="4KB" if "shards" in case else "1GB")
    save_file({"logits": logits(model)}, folder / "expected.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_an_earlier_version_loads_with_equal_logits(case: str) -> None:
    folder = OLDER / case.replace(" ", "_")
    want = load_file(folder / "expected.safetensors")["logits"]
    model = rope_ext.from_pretrained(folder, base=folder / "base" if case == "adapter" else None)
    if case != "adapter":
        assert rope_ext.describe(folder).method == CASES[case][1]
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "adapter"])
def test_plain_transformers_loads_it_as_it_was_saved_or_refuses(case: str) -> None:
    folder = OLDER / case.replace(" ", "_")
    if not json.loads((folder / "config.json").read_text()).get("rope_ext"):
        want = load_file(folder / "expected.safetensors")["logits"]
        plain = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits(plain), want, rtol=0, atol=1e-5)
        return
    with pytest.raises((KeyError, ValueError), match=r"load with rope_ext\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(folder)


if __name__ == "__main__":
    for name in CASES:
        write(Path(sys.argv[1]) / name.replace(" ", "_"), name)
