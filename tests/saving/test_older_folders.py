"""Folders that an earlier version saved, in tests/saving/older: they load with the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rope_ext

OLDER = Path(__file__).parent / "older"
IDS = torch.arange(3, 99)[None] % 29 + 3
CASES = {  # the method of each folder
    "fixed": "yarn",
    "dynamic": "dynamic_yarn",
    "position": "rerope",  # over ntk
    "learned": "t5",
    "learned_in_shards": "rope",
    "marked_by_its_experts": "self_extend",
    "nested_parameters": "self_extend",
    "adapter": None,
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits[0, -8:].float()


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_an_earlier_version_loads_with_equal_logits(case: str) -> None:
    folder = OLDER / case
    want = load_file(folder / "expected.safetensors")["logits"]
    model = rope_ext.from_pretrained(folder, base=folder / "base" if case == "adapter" else None)
    if case != "adapter":
        assert rope_ext.describe(folder).method == CASES[case]
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "adapter"])
def test_plain_transformers_loads_it_as_it_was_saved_or_refuses(case: str) -> None:
    folder = OLDER / case
    if not json.loads((folder / "config.json").read_text()).get("rope_ext"):
        want = load_file(folder / "expected.safetensors")["logits"]
        plain = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits(plain), want, rtol=0, atol=1e-5)
        return
    with pytest.raises((KeyError, ValueError), match=r"load with rope_ext\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(folder)
