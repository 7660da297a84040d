"""What an encoding learns is part of the model: trained, saved, reloaded and taken out again."""

from __future__ import annotations

import copy

import accelerate
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rope_ext
from tests.helpers.biases import FORMULAS, LEARNED, parameters, patch
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits
from tests.helpers.promises import an_adapter_trains_it_along, learns


@pytest.mark.parametrize("name", FORMULAS)
def test_unpatching_takes_it_out_bit_for_bit(name: str, ids) -> None:
    model = tiny_llama()
    before, plain = dict(model.state_dict()), logits(model, ids)
    patch(model, name)
    assert set(parameters(model)) == set(model.state_dict()) - set(before)
    rope_ext.unpatch(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(after[key] is before[key] or
        torch.equal(after[key], before[key]) for key in before)  # fmt: skip
    assert torch.equal(logits(model, ids), plain)


def test_shared_parameters_are_there_once() -> None:
    assert len(parameters(patch(tiny_llama(), "t5"))) == 1
    layers = tiny_llama().config.num_hidden_layers
    assert len(parameters(patch(tiny_llama(), "kerple"))) == 2 * layers > 2


@pytest.mark.parametrize("name", LEARNED)
def test_an_optimizer_trains_it(name: str, ids) -> None:
    model = patch(tiny_llama(), name)
    learns(model, parameters(model), ids, tokens=60, lr=0.5)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "30KB"}])
@pytest.mark.parametrize("name", ["alibi", *LEARNED])
def test_reloaded_to_the_bit(name: str, shards: dict, ids, tmp_path, capfd) -> None:
    model = patch(tiny_llama(), name, factor=2)
    want = logits(model, ids)
    model.save_pretrained(tmp_path, **shards)
    with pytest.raises(Exception, match="unknown to plain transformers"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), want)
    assert "unexpected" not in "".join(capfd.readouterr()).lower()


def test_weights_that_lack_it_are_refused(tmp_path) -> None:
    patch(tiny_llama(), "t5").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    kept = {key: value for key, value in weights.items() if "rope_ext_bias" not in key}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(rope_ext.LoadError, match=r"does not contain model\.rope_ext_bias\.beta"):
        rope_ext.from_pretrained(tmp_path)


def test_an_adapter_can_train_it_along(ids, tmp_path) -> None:
    def patch(base: torch.nn.Module) -> torch.nn.Module:
        return rope_ext.patch(base, "t5")

    names = an_adapter_trains_it_along(tiny_llama(), patch, ["rope_ext_bias"], ids, tmp_path)
    assert len(names) == 1


def test_copies_have_their_own(ids) -> None:
    model = patch(tiny_llama(), "t5")
    want = logits(model, ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(parameters(other).values())).add_(torch.randn(1))
        parameters(other)[next(iter(parameters(other)))][0, 3] += 1
    assert torch.equal(logits(model, ids), want)
    assert not torch.equal(logits(other, ids), want)


def test_engines_refuse_it() -> None:
    model = patch(tiny_llama(), "alibi", factor=2)
    for engine in ("vllm", "llama.cpp", "transformers"):
        with pytest.raises(rope_ext.ExportError, match="positions of queries and keys"):
            rope_ext.export(model, engine)


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


@pytest.mark.parametrize("name", ["kerple_log", "t5", "floater"])
def test_changes_through_data_are_seen(name: str, ids) -> None:
    """As averages of weights are put in place of those that were trained."""
    found = []
    for asked_before in (True, False):
        torch.manual_seed(0)
        model = rope_ext.patch(tiny_llama(), name)
        if asked_before:
            logits(model, ids)
        for path, value in model.named_parameters():
            if "rope_ext_" in path:
                value.data.add_(0.01)
        found.append(logits(model, ids))
    assert torch.equal(*found)


def test_threads_do_not_get_each_others_lengths(ids) -> None:
    """Another thread puts a shorter bias there while one is made for a longer text."""
    model = rope_ext.patch(tiny_llama(), "alibi")
    right = logits(model, ids)
    model = rope_ext.patch(tiny_llama(), "alibi")
    module = next(m for n, m in model.named_modules() if n.endswith("rope_ext_bias"))
    kind, made = type(module), []

    class Slow(kind):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_made" and not made:
                made.append(name)
                kind.forward(self, 4, torch.device("cpu"), torch.float32)
                super().__setattr__(name, (*value[:-1], value[-1][:, :8]))

    module.__class__ = Slow
    torch.testing.assert_close(logits(model, ids), right)
    assert made


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


@pytest.mark.parametrize("name", ["t5", "shaw", "kerple_log"])
def test_offloaded_weights(name: str, ids) -> None:
    """Whose parameters are on the meta device, where what is learned would have no values."""
    found = []
    for offloaded in (False, True):
        model = tiny_llama()
        model = accelerate.cpu_offload(model, execution_device="cpu") if offloaded else model
        torch.manual_seed(0)
        found.append(logits(rope_ext.patch(model, name), ids))
    torch.testing.assert_close(*found)


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
