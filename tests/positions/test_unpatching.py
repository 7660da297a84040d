"""What a patch leaves behind, what it says of itself, and what it leaves alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from tests.families.checks import changed, snapshot
from tests.helpers.positions import logits, patch


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
