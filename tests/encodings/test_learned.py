"""What an encoding learns is part of the model: trained, saved, reloaded and taken out again."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import rope_ext
from tests.helpers.biases import LEARNED, parameters, patch
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits
from tests.helpers.promises import an_adapter_trains_it_along, learns


def test_shared_parameters_are_there_once() -> None:
    assert len(parameters(patch(tiny_llama(), "t5"))) == 1
    layers = tiny_llama().config.num_hidden_layers
    assert len(parameters(patch(tiny_llama(), "kerple"))) == 2 * layers > 2


@pytest.mark.parametrize("name", LEARNED)
def test_an_optimizer_trains_it(name: str, ids) -> None:
    model = patch(tiny_llama(), name)
    learns(model, parameters(model), ids, tokens=60, lr=0.5)


def test_weights_that_lack_it_are_refused(tmp_path) -> None:
    patch(tiny_llama(), "t5").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    kept = {key: value for key, value in weights.items() if "rope_ext_bias" not in key}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(rope_ext.LoadError, match=r"does not contain rope_ext_bias\.beta"):
        rope_ext.from_pretrained(tmp_path)


def test_an_adapter_can_train_it_along(ids, tmp_path) -> None:
    def patch(base: torch.nn.Module) -> torch.nn.Module:
        return rope_ext.patch(base, "t5")

    names = an_adapter_trains_it_along(tiny_llama(), patch, ["rope_ext_bias"], ids, tmp_path)
    assert len(names) == 1


@pytest.mark.parametrize("given", [("t5", {}), ("rope", {"bias": "t5"})], ids=lambda x: x[0])
def test_a_patch_that_comes_back_has_what_it_had_learned(given: tuple, ids) -> None:
    """After another was refused in its place, and after one for the length of a block."""
    name, options = given
    model = patch(tiny_llama(), name, **options)
    want, before = logits(model, ids), parameters(model)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "longrope", factor=4, long_factor=[1.0] * 8, replace=True)
    with rope_ext.patched(model, "nope", replace=True):
        assert not torch.equal(logits(model, ids), want)
    after = parameters(model)
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)  # which optimizers hold
    assert torch.equal(logits(model, ids), want)


@pytest.mark.parametrize("name", ["kerple_log", "learned"])
def test_what_an_adapter_trained_outlives_another_patch(name: str, ids) -> None:
    options = {"length": 128} if name == "learned" else {}
    model = rope_ext.patch(tiny_llama(), name, **options)
    saved = ["rope_ext_bias", "rope_ext_input"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    adapted = peft.get_peft_model(model, config).eval()
    for path, value in adapted.named_parameters():
        if "rope_ext_" in path and value.requires_grad:
            value.data.add_(0.3)
    right, names = logits(adapted, ids), list(adapted.state_dict())
    with rope_ext.patched(adapted, "alibi", replace=True):
        assert not torch.equal(logits(adapted, ids), right)
    assert torch.equal(logits(adapted, ids), right)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(adapted, "alibi", layers=[99], replace=True)
    assert torch.equal(logits(adapted, ids), right)
    rope_ext.patch(adapted, name, **options, temperature=2.0, replace=True)
    rope_ext.patch(adapted, name, **options, replace=True)
    assert torch.equal(logits(adapted, ids), right)
    assert sorted(adapted.state_dict()) == sorted(names)
    rope_ext.unpatch(adapted)
    assert not any("rope_ext_" in path for path, _ in adapted.named_modules())


def test_a_shared_table_goes_along_to_other_layers() -> None:
    model = patch(tiny_llama(), "t5")
    (table,) = parameters(model).values()
    rope_ext.patch(model, "t5", layers=[1], replace=True)
    assert next(iter(parameters(model).values())) is table


@pytest.mark.parametrize("name", ["fire", "cope", "floater", "repo"])
def test_a_patch_in_inference_mode_can_be_trained_afterwards(name: str, ids) -> None:
    model = tiny_llama()
    with torch.inference_mode():
        rope_ext.patch(model, name)
    model(input_ids=ids[:1, :20]).logits.sum().backward()
    learned = [p for n, p in model.named_parameters() if "rope_ext_" in n]
    assert learned and all(parameter.grad is not None for parameter in learned)
