"""SWAN: layers without positions beside layers that rotate as trained, in a window."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import rope_ext
from rope_ext.position.forward import SPARE
from tests.helpers.encodings import ALL
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.positions import EXACT, NEW, logits

GIVEN, WINDOW = ALL["swan"].options, 7

KEPT = WINDOW - 1 + SPARE  # keys of a layer with a window


def swan(**options: object) -> nn.Module:
    return rope_ext.patch(tiny_llama(num_hidden_layers=4), "swan", **{**GIVEN, **options})


def test_within_the_window_the_other_layers_are_as_trained(ids) -> None:
    """And every layer without positions is that of ``nope``, bit for bit."""
    model, other = swan(window=LENGTH, temperature=2), tiny_llama(num_hidden_layers=4)
    rope_ext.patch(other, "nope", layers=[0, 2], factor=4, temperature=2)
    few = ids[:, :LENGTH]
    torch.testing.assert_close(logits(model, few), logits(other, few), **EXACT)
    assert (logits(model, ids) - logits(other, ids)).abs().max() > 0.01  # longer than the window


def test_a_cache_keeps_the_window_of_layers_that_have_one(ids) -> None:
    model = swan()
    for cache in (DynamicCache(config=model.config), DynamicCache(), None):
        with torch.no_grad():
            cache = model(ids, past_key_values=cache).past_key_values
        assert [layer.keys.shape[2] for layer in cache.layers] == [90, KEPT, 90, KEPT]
        assert cache.get_seq_length() == 90


def test_drafts_that_are_taken_back_leave_no_trace(ids) -> None:
    model, prompt = swan(), ids[:1, :70]
    right = model.generate(prompt, **NEW, use_cache=False)
    assert torch.equal(model.generate(prompt, **NEW, prompt_lookup_num_tokens=3), right)
    for assistant in (swan(), tiny_llama()):  # right drafts, and wrong ones that are taken back
        assert torch.equal(model.generate(prompt, **NEW, assistant_model=assistant), right)


def test_a_cache_that_was_reset_serves_another_model(ids) -> None:
    cache, other = DynamicCache(), tiny_llama(num_hidden_layers=4)
    logits(swan(), ids, past_key_values=cache)
    cache.reset()
    parts = [logits(other, part, past_key_values=cache) for part in ids.split(100, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits(other, ids), **EXACT)


def test_more_tokens_than_are_spare_are_not_taken_back(ids) -> None:
    model, cache, other = swan(), DynamicCache(), DynamicCache()
    right = logits(model, ids, past_key_values=other)
    logits(model, ids, past_key_values=cache)
    with pytest.raises(rope_ext.CacheError, match=f"{SPARE + 1} of them cannot be taken back"):
        other.crop(-SPARE - 1)
    cache.crop(-SPARE)
    cached = logits(model, ids[:, -SPARE:], past_key_values=cache)
    torch.testing.assert_close(cached, right[:, -SPARE:], **EXACT)
