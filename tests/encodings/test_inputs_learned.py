"""What is learned in front of the layers is part of the model, and so is the measured scale."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.inputs import CHOSEN, first_of, parameters, patch
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits
from tests.helpers.promises import an_adapter_trains_it_along, checkpointing_changes_nothing, learns

LEARNED = ["learned", "multiplicative", "floater"]
KEPT = ["sinusoidal", *LEARNED]
RELOADED = [*first_of(*KEPT), "discrete"]

SOME = first_of(*LEARNED)


@pytest.mark.parametrize("name", first_of(*CHOSEN))
def test_unpatching_takes_it_out_bit_for_bit(name: str, ids) -> None:
    model = tiny_llama()
    before, plain = dict(model.state_dict()), logits(model, ids[:, :20])
    patch(model, name)
    added = set(model.state_dict()) - set(before)
    assert bool(added) == (name in KEPT)
    assert all(key.startswith("model.rope_ext_input.") for key in added)
    rope_ext.unpatch(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert torch.equal(logits(model, ids[:, :20]), plain)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("name", SOME)
def test_an_optimizer_trains_it(name: str, ids) -> None:
    model = patch(tiny_llama(), name)
    learns(model, parameters(model), ids, tokens=30, lr=0.1)


@pytest.mark.parametrize("reentrant", first_of(False, True))
@pytest.mark.parametrize("name", first_of("floater", "learned"))
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool, ids) -> None:
    checkpointing_changes_nothing(lambda: patch(tiny_llama(), name), reentrant, ids)


@pytest.mark.parametrize("name", RELOADED)
def test_reloaded_to_the_bit(name: str, ids, tmp_path, capfd) -> None:
    model = patch(tiny_llama(), name)
    with torch.no_grad():  # as training would; a scale measured again would be another
        model.model.embed_tokens.weight.mul_(1.5)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="unknown to plain transformers"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), want)
    assert "unexpected" not in "".join(capfd.readouterr()).lower()


def test_a_decoder_without_a_head_is_reloaded(ids, tmp_path, capfd) -> None:
    model = patch(tiny_llama(), "learned").model
    want = model(ids)[0]
    model.save_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    assert torch.equal(again(ids)[0], want)
    assert "unexpected" not in "".join(capfd.readouterr()).lower()


def test_weights_that_lack_it_are_refused(tmp_path) -> None:
    patch(tiny_llama(), "sinusoidal").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if "rope_ext" not in key}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(rope_ext.LoadError, match=r"contain model\.rope_ext_input\.scale, the"):
        rope_ext.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", SOME)
def test_an_adapter_can_train_it_along(name: str, ids, tmp_path) -> None:
    def patch(base: torch.nn.Module) -> torch.nn.Module:
        return rope_ext.patch(base, name, factor=2)

    an_adapter_trains_it_along(tiny_llama(), patch, ["rope_ext_input"], ids, tmp_path, std=0.1)


def test_copies_have_their_own(ids) -> None:
    model = patch(tiny_llama(), "learned")
    want = logits(model, ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        parameters(other)["table"].zero_()
    assert torch.equal(logits(model, ids), want)
    assert not torch.equal(logits(other, ids), want)


def test_a_trained_table_is_extended_by_patching_again(ids) -> None:
    model = patch(tiny_llama(), "learned", length=64)
    table, short = parameters(model)["table"], logits(model, ids[:, :64])
    rope_ext.patch(model, "learned", factor=4, extend="hierarchical", replace=True)
    assert parameters(model)["table"] is table  # an optimizer goes on with it
    torch.testing.assert_close(logits(model, ids[:, :64]), short)  # added in another order
    logits(model, ids)


@pytest.mark.parametrize("name", first_of("learned", "t5"))
def test_what_was_learned_outlives_a_patch_in_between(name: str, ids) -> None:
    """One that is refused, and one for the length of a block."""
    model = rope_ext.patch(tiny_llama(), name, factor=2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "rope_ext" in key:
                parameter.normal_()
    want = logits(model, ids)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "multiplicative", length=2, replace=True)
    assert torch.equal(logits(model, ids), want)
    with rope_ext.patched(model, "alibi", replace=True):
        assert not torch.equal(logits(model, ids), want)
    assert torch.equal(logits(model, ids), want)


def test_layers_run_by_themselves_are_refused(ids) -> None:
    model = patch(tiny_llama(), "learned")
    x = model.get_input_embeddings()(ids)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"run by itself under learned"):
        model.model.layers[0](x)


@pytest.mark.slow
def test_offloaded_weights_and_layers_of_a_nested_decoder(ids) -> None:
    want = logits(patch(tiny_llama(), "learned"), ids)
    offloaded = accelerate.cpu_offload(tiny_llama(), execution_device="cpu")
    assert torch.equal(logits(patch(offloaded, "learned"), ids), want)
    nested = tiny_model("llama4_text")
    patch(nested, "learned", sliding_layers="scale")
    assert len(nested.model.layers[0]._forward_pre_hooks) == 1
    assert not any(layer._forward_pre_hooks for layer in nested.model.layers[1:])


@pytest.mark.slow
def test_a_path_is_no_coarser_under_autocast(ids) -> None:
    model = patch(tiny_llama(), "floater")
    seen = []
    module = model.model.rope_ext_input
    handle = module.register_forward_hook(lambda *args: seen.append(args[-1]))
    logits(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits(model, ids)
        model.train()(ids)  # where the path is made again
    handle.remove()
    assert len(seen) == 3 and seen[0].shape == (1, 90, 64)
    assert all(torch.equal(p, seen[0]) for p in seen)
