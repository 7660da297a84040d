"""A second load by the name in a patched model's configuration carries the patch."""

from __future__ import annotations

import copy
import gc
import json
import logging
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_llama().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def loaded(folder: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder)


METHODS = {
    "yarn": {"factor": 4},
    "dynamic_yarn": {"factor": 4},
    "rerope": {"factor": 4},
    "t5": {"factor": 4},
    "rope": {"bias": "alibi"},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_load_by_the_name_in_the_configuration_is_patched_alike(
    method: str, folder: str, ids: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = rope_ext.patch(loaded(folder), method, **METHODS[method])
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "rope_ext" in name:
                value += 0.1  # what was learned since
    plain = loaded(folder)  # by a name of the caller's
    assert not torch.equal(logits(model, ids), logits(plain, ids))
    with caplog.at_level(logging.WARNING, "rope_ext"):
        # As TRL's DPOTrainer does.
        again = LlamaForCausalLM.from_pretrained(
            model.config._name_or_path,
            attn_implementation=model.config._attn_implementation,
            dtype=model.dtype,
        ).eval()
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert "loaded again" in caplog.text
    assert torch.equal(logits(rope_ext.unpatch(again), ids), logits(plain, ids))
    rope_ext.unpatch(model)
    again = loaded(model.config._name_or_path)
    assert torch.equal(logits(again, ids), logits(plain, ids))


def test_every_way_to_load_by_it(folder: str, ids: torch.Tensor) -> None:
    model = rope_ext.patch(loaded(folder), "yarn", factor=4)
    right = logits(model, ids)
    again, _ = AutoModelForCausalLM.from_pretrained(model.name_or_path, output_loading_info=True)
    assert torch.equal(logits(again.eval(), ids), right)
    body = LlamaModel.from_pretrained(pretrained_model_name_or_path=str(model.config._name_or_path))
    assert rope_ext.describe(body).method == "yarn"
    third = loaded(again.config._name_or_path)  # of a model that was patched so itself
    assert torch.equal(logits(third, ids), right)


def test_the_name_is_the_string_that_it_was(folder: str) -> None:
    model = rope_ext.patch(loaded(folder), "yarn", factor=4)
    name = model.config._name_or_path
    assert type(name) is str and name == folder == model.name_or_path
    assert json.dumps(name) == json.dumps(folder) and yaml.dump(name) == yaml.dump(folder)
    adapter = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).peft_config["default"]
    assert adapter.base_model_name_or_path == folder


def test_copies_are_known_and_what_is_gone_is_not(folder: str, ids: torch.Tensor) -> None:
    model = rope_ext.patch(loaded(folder), "yarn", factor=4)
    right, twin = logits(model, ids), copy.deepcopy(model)
    name = model.config._name_or_path
    rope_ext.unpatch(model)
    assert torch.equal(logits(loaded(twin.config._name_or_path), ids), right)
    del model, twin
    gc.collect()
    with pytest.raises(rope_ext.NotPatchedError):
        rope_ext.unpatch(loaded(name))


def test_a_model_without_a_name_is_patched_as_well() -> None:
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    assert model.config._name_or_path == ""


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_our_own_loader_follows_what_was_saved(
    method: str, folder: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    model = rope_ext.patch(loaded(folder), method, factor=4)
    assert rope_ext.describe(model).method == method
    with pytest.raises(rope_ext.NotPatchedError):
        rope_ext.unpatch(rope_ext.from_pretrained(model.config._name_or_path))
    model.save_pretrained(tmp_path / "patched")
    again = rope_ext.from_pretrained(tmp_path / "patched")
    twice = rope_ext.from_pretrained(again.config._name_or_path)
    assert torch.equal(logits(twice, ids), logits(again, ids))
    reference = loaded(again.config._name_or_path)  # as TRL does
    assert torch.equal(logits(reference, ids), logits(again, ids))
