"""What is learned in front of the layers is part of the model, and so is the measured scale."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import rope_ext
from tests.helpers.inputs import first_of, parameters, patch
from tests.helpers.models import tiny_llama
from tests.helpers.positions import logits
from tests.helpers.promises import learns

LEARNED = ["learned", "multiplicative", "floater"]

SOME = first_of(*LEARNED)


@pytest.mark.parametrize("name", SOME)
def test_an_optimizer_trains_it(name: str, ids) -> None:
    model = patch(tiny_llama(), name)
    learns(model, parameters(model), ids, tokens=30, lr=0.1)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_rows_train(name: str, tokens: int, ids) -> None:
    model = patch(tiny_llama(), name)
    model(ids[:, :tokens]).logits.sin().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :tokens]).logits, model(ids).logits[:, :tokens])


def test_weights_that_lack_it_are_refused(tmp_path) -> None:
    patch(tiny_llama(), "sinusoidal").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if "rope_ext" not in key}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(rope_ext.LoadError, match=r"contain rope_ext_input\.scale, the"):
        rope_ext.from_pretrained(tmp_path)


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
