"""What a patch leaves behind, what it says of itself, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from tests.families.checks import changed, snapshot
from tests.helpers.models import tiny_llama
from tests.helpers.positions import METHODS, logits, patch


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


def patched(model: torch.nn.Module, name: str) -> torch.nn.Module:
    return patch(model, name) if name in METHODS else rope_ext.patch(model, name, factor=4)


@pytest.mark.parametrize("name", [*METHODS, "dynamic_ntk", "yarn"])
def test_copies_and_pickles_carry_the_patch(name: str, ids) -> None:
    model = patched(tiny_llama(), name)
    right, plain = logits(model, ids), logits(tiny_llama(), ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        rope_ext.patch(model, "pi", factor=2, replace=True)  # must not reach the copy
        assert torch.equal(logits(twin, ids), right)
        assert torch.equal(logits(rope_ext.unpatch(twin), ids), plain)
        assert vars(twin.model.rotary_emb).keys() == vars(tiny_llama().model.rotary_emb).keys()
        assert torch.equal(logits(patched(twin, name), ids), right)
