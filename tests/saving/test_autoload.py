"""Plain ``from_pretrained`` of transformers after ``import rope_ext``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.modules import module as torch_module
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import rope_ext
from rope_ext.patching import current_patch
from rope_ext.saving.configuration import without_rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.models import tiny_llama

CASES = {
    "position": ("llama", "rerope", {}),
    "two rotary modules with copies of the configuration": ("olmo3", "rerope", {}),
    "nested rope_parameters": ("gemma3_text", "self_extend", {}),
    "frequencies per sequence": ("llama", "dynamic_yarn", {}),
    "learned bias": ("llama", "t5", {}),
    "softmax scale of latent attention": ("deepseek_v3", "rerope", {}),
}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 100, (1, 150), generator=torch.Generator().manual_seed(0))


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def saved(folder, family: str, method: str, options: dict) -> torch.nn.Module:
    model = tiny_llama() if family == "llama" else tiny_model(family)
    rope_ext.patch(model, method, factor=4, **options)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_plain_from_pretrained_loads_the_patch(tmp_path, ids, capfd, case: str) -> None:
    model = saved(tmp_path, *CASES[case])
    hooks = dict(torch_module._global_module_registration_hooks)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch_module._global_module_registration_hooks == hooks
    assert "train" not in vars(again) and not again.training
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert str(rope_ext.describe(again)) == str(rope_ext.describe(model))
    assert "unexpected" not in "".join(capfd.readouterr()).lower()
    rope_ext.unpatch(again)
    assert again.config.to_json_string() == rope_ext.unpatch(model).config.to_json_string()


def test_the_decoder_alone_gets_the_learned_parameters_too(tmp_path, ids) -> None:
    model = saved(tmp_path, "llama", "t5", {})
    again = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        want = model.model(ids).last_hidden_state
        assert torch.equal(again(ids).last_hidden_state, want)


def test_a_model_of_the_configuration_alone_is_patched_by_its_first_eval(tmp_path) -> None:
    saved(tmp_path, "llama", "rerope", {})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert current_patch(model) is None
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"rerope.*call model\.eval\(\)"):
        model(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"call model\.eval\(\)"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=1)
    assert current_patch(model.eval()).method.name == "rerope"
    assert not model._forward_pre_hooks
    model(torch.ones(1, 4, dtype=torch.long))


def test_a_model_without_weights_runs_before_it_is_patched(tmp_path) -> None:
    saved(tmp_path, "llama", "rerope", {})
    with torch.device("meta"):
        plan = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    plan(torch.ones(1, 4, dtype=torch.long, device="meta"))


def test_a_patch_of_the_callers_own_takes_the_place_of_a_saved_one(tmp_path) -> None:
    saved(tmp_path, "llama", "rerope", {})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    rope_ext.patch(model, "yarn", factor=4)
    model(torch.ones(1, 4, dtype=torch.long))
    assert current_patch(model.eval()).method.name == "yarn"


def test_a_configuration_of_no_folder_does_not_have_learned_parameters() -> None:
    config = rope_ext.patch(tiny_llama(), "t5").config
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with pytest.raises(rope_ext.LoadError, match=r"not read from a folder.*rope_ext_bias"):
        model.eval()


def test_a_load_that_failed_leaves_the_next_one_alone(tmp_path, ids) -> None:
    model = saved(tmp_path / "patched", "llama", "rerope", {})
    tiny_llama().save_pretrained(tmp_path / "plain")
    (tmp_path / "patched" / "model.safetensors").rename(tmp_path / "weights")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert current_patch(plain) is None
    (tmp_path / "weights").rename(tmp_path / "patched" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_a_folder_without_its_record_is_refused_with_the_cure(tmp_path) -> None:
    saved(tmp_path, "llama", "rerope", {})
    config = AutoConfig.from_pretrained(tmp_path)
    del config.rope_ext
    with pytest.raises(KeyError, match=r"load with rope_ext\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


def test_without_the_import_it_is_refused(tmp_path) -> None:
    saved(tmp_path, "llama", "rerope", {})
    with (
        without_rope_ext(),
        pytest.raises(KeyError, match=r"load with rope_ext\.from_pretrained"),
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
