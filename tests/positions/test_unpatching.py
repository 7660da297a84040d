"""What a patch leaves behind, what it says of itself, and what it leaves alone."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_model
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, by_geometry, logits, patch


@pytest.mark.parametrize(
    ("kind", "name"), by_geometry("llama", "gemma2", "gemma3_text scaled", "gpt_oss", "phi3")
)
def test_unpatch_restores_everything_bit_for_bit(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    said, before = logits(model, ids), snapshot(model)
    patch(model, name, **family.options)
    assert not torch.equal(logits(model, ids), said)
    model.generate(ids[:, :8], max_new_tokens=4, do_sample=False)
    rope_ext.unpatch(model)
    assert changed(before, snapshot(model)) == set()
    assert torch.equal(logits(model, ids), said)


def test_an_error_within_a_forward_leaves_the_model_as_it_was(model, ids) -> None:
    before = snapshot(model)
    with pytest.raises(KeyError), rope_ext.patched(model, "rerope", factor=4, window=5):
        right = logits(model, ids)

        def fail(*args: Any) -> None:
            raise KeyError

        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            logits(model, ids)
        handle.remove()
        torch.testing.assert_close(logits(model, ids), right)
        raise KeyError
    assert changed(before, snapshot(model)) == set()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_forward_is_kept_when_it_is_over(model, ids, fails: bool) -> None:
    patch(model)
    cache = DynamicCache(config=model.config)
    gone = weakref.ref(cache)
    if fails:
        with pytest.raises(rope_ext.OptionError):
            model.model.layers[1].self_attn.attention_dropout = 0.1
            model.train()(ids, past_key_values=cache)
    else:
        model(ids, past_key_values=cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_refused_replacement_leaves_the_earlier_patch_in_force(ids) -> None:
    model = patch(tiny_llama(), "rerope")
    said = logits(model, ids)
    with pytest.raises(rope_ext.OptionError):
        rope_ext.patch(model, "string", factor=4, replace=True)
    assert rope_ext.describe(model).method == "rerope"
    assert torch.equal(logits(model, ids), said)
    with rope_ext.patched(model, "yarn", factor=4, replace=True):
        assert rope_ext.describe(model).method == "yarn"
    assert torch.equal(logits(model, ids), said)


@pytest.mark.parametrize(
    ("name", "factor", "shown"),
    [
        ("rerope", 4, "64 -> 256 tokens by rerope(factor=4, log_n=True, window=32)"),
        ("leaky_rerope", 4, f"log_n=True, window=8, k={248 / 56})"),
        ("self_extend", 8, "64 -> 512 tokens by self_extend(factor=8, window=16, group=19)"),
        ("dual_chunk", 4, "64 -> 256 tokens by dual_chunk(factor=4, chunk=48, local=8)"),
        ("string", 1.5, "64 -> 96 tokens by string(factor=1.5, shift=36, window=4)"),
        ("lm_infinite", 4, "lm_infinite(factor=4, window=64, sinks=10)"),
    ],
)
def test_describe_shows_what_was_chosen(model, name: str, factor: float, shown: str) -> None:
    rope_ext.patch(model, name, factor=factor)
    description = rope_ext.describe(model)
    assert shown in str(description)
    assert "positions: changed in 2 of 2 attention layers" in str(description)
    assert description.sites[0].status == "positions changed"
    assert model.config.max_position_embeddings == math.ceil(factor * LENGTH)


def test_describe_says_which_layers_stay() -> None:
    model = rope_ext.patch(tiny_model("gemma2"), "rerope", factor=4)
    assert "positions: changed in 1 of 2 attention layers" in str(rope_ext.describe(model))
    assert "sliding layers: 1 see a limited window and stay" in str(rope_ext.describe(model))


@pytest.mark.parametrize("kind", ["llama", "smollm3"])
def test_unusual_arguments_change_nothing(kind: str, ids) -> None:
    model = FAMILIES[kind].model()
    patch(model)
    right = logits(model, ids)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == len(model.model.layers) + 1
    assert torch.equal(output.logits, right)
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(logits(model, None, inputs_embeds=embeds), right, **EXACT)
    torch.testing.assert_close(logits(model, ids, logits_to_keep=3), right[:, -3:], **EXACT)
    from_seven = torch.arange(7, 97)[None]
    said = logits(model, ids, position_ids=from_seven, use_cache=False)
    torch.testing.assert_close(said, right, **EXACT)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, right, **EXACT)
