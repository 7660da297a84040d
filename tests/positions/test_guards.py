"""What would be wrong without a word is refused with the cure."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import (
    CACHES,
    EXACT,
    FAMILIES,
    NEW,
    SCALE,
    decoded,
    logits,
    padded,
    patch,
)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_implementation_is_refused_with_the_cure(implementation, ids) -> None:
    model = patch(tiny_llama())
    right = logits(model, ids)
    model.set_attn_implementation(implementation)
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"rope_ext\.unpatch.*replace=True"):
        logits(model, ids)
    patch(model, replace=True)
    torch.testing.assert_close(logits(model, ids), right, **EXACT)
    rope_ext.unpatch(model)
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(logits(model, ids), logits(tiny_llama(), ids), **EXACT)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_cache_begun_unpatched_is_refused_with_the_cure(make, model, ids) -> None:
    cache = make(model.config)
    logits(model, ids[:, :50], past_key_values=cache)
    patch(model)
    with pytest.raises(rope_ext.CacheError, match=r"started before the model.*empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_cache_is_not_continued_under_another_patch(make, model, ids) -> None:
    patch(model)
    right = logits(model, ids)
    cache = make(model.config)
    logits(model, ids[:, :50], past_key_values=cache)
    patch(model, group=4, replace=True)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)
    patch(model, replace=True)
    torch.testing.assert_close(decoded(model, ids, [50, 40], make(model.config)), right, **EXACT)


def test_a_cache_is_not_continued_where_other_layers_are_patched(ids) -> None:
    model, cache = patch(FAMILIES["gemma2"].model(), **SCALE), DynamicCache()
    logits(model, ids[:, :50], past_key_values=cache)
    patch(model, replace=True)
    with pytest.raises(rope_ext.CacheError, match="empty cache"):
        logits(model, ids[:, 50:], past_key_values=cache)


@pytest.mark.parametrize(
    ("what", "compiled"),
    [
        *((what, False) for what in ("fewer", "swapped", "repeated")),
        pytest.param("repeated", True, marks=pytest.mark.slow),
    ],
)
def test_a_padded_cache_of_other_rows_is_right(what: str, compiled: bool, ids, no_graphs) -> None:
    model = patch(tiny_llama(num_hidden_layers=1))
    rows = [ids[0, :80], ids[1, :41]]
    batch, mask, positions = padded(rows, "left")
    cache = DynamicCache(config=model.config)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    logits(run, batch, attention_mask=mask, position_ids=positions, past_key_values=cache)
    order = {"fewer": [1], "swapped": [1, 0], "repeated": [0, 0, 1, 1]}[what]
    if what == "fewer":
        cache.batch_select_indices(torch.tensor(order))
    elif what == "swapped":
        cache.reorder_cache(torch.tensor(order))
    else:
        cache.batch_repeat_interleave(2)
    given = {
        "attention_mask": torch.cat((mask[order], torch.ones(len(order), 1, dtype=torch.long)), 1),
        "position_ids": positions[order][:, -1:] + 1,
    }
    said = logits(model, ids[order, :1], past_key_values=cache, **given)
    for i, row in enumerate(order):
        alone = logits(model, torch.cat((rows[row], ids[row, :1]))[None])[0, -1]
        torch.testing.assert_close(said[i, -1], alone, **EXACT)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generation_behind_padding_on_the_right_is_refused_with_the_cure(how, ids) -> None:
    model = patch(tiny_llama())
    batch, mask, _ = padded([ids[0], ids[1, :61]], "right")
    with pytest.raises(rope_ext.UnsupportedModelError, match="padding_side='left'"):
        model.generate(batch, attention_mask=mask, **NEW, **how)


def test_packed_documents_of_a_family_that_mixes_them_are_refused_with_the_cure(ids) -> None:
    """Transformers itself lets gpt_oss attend from one document to another."""
    model = patch(FAMILIES["gpt_oss"].model())
    places = torch.cat([torch.arange(30), torch.arange(60)])[None]
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"rows of their own.*gpt_oss"):
        model(ids[:1], position_ids=places, use_cache=False)
    model(ids[:1, 30:], use_cache=False)


def test_prefix_tuning_is_refused_with_the_cure(ids) -> None:
    from peft import PrefixTuningConfig, get_peft_model

    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    for model in (
        get_peft_model(patch(tiny_llama()), config),
        patch(get_peft_model(tiny_llama(), config)),
    ):
        with pytest.raises(rope_ext.CacheError, match=r"prefix tuning.*'yarn'"):
            model(ids)


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "self_extend"])
def test_a_call_without_tokens_is_refused(method: str) -> None:
    model = rope_ext.patch(tiny_llama(), method, factor=4)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()


def test_a_layer_run_by_itself_is_refused(ids) -> None:
    model = patch(tiny_llama())
    x = torch.zeros(1, 4, 64)
    turn = torch.ones(1, 4, 16), torch.zeros(1, 4, 16)
    with pytest.raises(rope_ext.UnsupportedModelError, match="call the whole model"):
        model.model.layers[0](x, position_embeddings=turn)


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend", "alibi"])
def test_forward_called_by_itself_is_the_model(method: str, ids) -> None:
    model = tiny_llama()
    rope_ext.patch(model, method, **({} if method == "alibi" else {"factor": 4}))
    right = logits(model, ids)
    torch.testing.assert_close(model.forward(ids).logits, right, **EXACT)
    states = model.model(ids).last_hidden_state
    torch.testing.assert_close(model.model.forward(ids).last_hidden_state, states, **EXACT)
    one, other = DynamicCache(), DynamicCache()
    for part in ids.split([60, ids.shape[1] - 60], 1):
        last = model.model.forward(part, past_key_values=one).last_hidden_state
        right = model.model(part, past_key_values=other).last_hidden_state
        torch.testing.assert_close(last, right, **EXACT)
    rope_ext.unpatch(model)
    assert "forward" not in vars(model.model)
