"""Attention in both directions: what has no meaning there is refused, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import rope_ext
from rope_ext.position.attend import NAME
from rope_ext.rotary.context import attending
from tests.families.checks import changed, snapshot
from tests.families.zoo import tiny_model, tiny_of
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, TOLD, WIDE, logits, patch

BOTH = "both directions"
CAUSAL_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks": ("dual_chunk", {}),
    "groups by the query": ("jet_long", {}),
    "more first tokens than window": ("lm_infinite", {"window": 4, "sinks": 5}),
    "encoding": ("cope", {}),
    "decay": ("xpos", {}),
    "no order": ("swan", {}),
    "bias": ("yarn", {"bias": "fire"}),
}


def refused(model: PreTrainedModel, method: str, **options: Any) -> None:
    before = snapshot(model)
    with pytest.raises(rope_ext.UnsupportedModelError, match=BOTH):
        rope_ext.patch(model, method, factor=4, **options)
    assert changed(before, snapshot(model)) == set()


@pytest.mark.every
@pytest.mark.parametrize("what", CAUSAL_ONLY)
def test_what_is_defined_by_earlier_keys_refuses_an_encoder(what: str) -> None:
    method, options = CAUSAL_ONLY[what]
    refused(tiny_of(transformers.EuroBertModel), method, **options)


def test_an_encoder_called_as_causal_is_refused(ids) -> None:
    model = rope_ext.patch(tiny_of(transformers.EuroBertModel), "rerope", factor=4)
    with pytest.raises(rope_ext.UnsupportedModelError, match="mask"), torch.no_grad():
        model(ids, is_causal=True)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_a_model_that_generates_is_not_read_in_both_directions(model_type: str) -> None:
    """Its modules alone are not causal, as in PaliGemma, whose prompts are not and texts are."""
    refused(tiny_model(model_type, use_bidirectional_attention=True), "rerope")
    with rope_ext.patched(tiny_model(model_type), "rerope", factor=4):
        pass


def test_layers_that_disagree_are_refused(ids) -> None:
    model = patch(tiny_llama(), "rerope", **WIDE["rerope"], **TOLD)
    before = logits(model, ids)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(rope_ext.UnsupportedModelError, match="is_causal"):
        logits(model, ids)
    model.model.layers[1].self_attn.is_causal = True
    torch.testing.assert_close(logits(model, ids), before, **EXACT)


@pytest.mark.parametrize("how", ["keyword", "configuration"])
def test_a_call_that_has_no_meaning_in_both_directions_is_refused(how: str, ids) -> None:
    model = patch(tiny_llama(), "dual_chunk", **WIDE["dual_chunk"], **TOLD)
    before = logits(model, ids)
    given = {"is_causal": False} if how == "keyword" else {}
    if how == "configuration":
        model.config.is_causal = False
    with pytest.raises(rope_ext.UnsupportedModelError, match=BOTH):
        logits(model, ids, **given)
    torch.testing.assert_close(logits(model, ids, is_causal=True), before, **EXACT)


def test_a_cache_is_not_continued_in_both_directions(ids) -> None:
    model = patch(tiny_llama(), "rerope")
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(rope_ext.CacheError, match=BOTH):
        logits(model, ids, past_key_values=cache, is_causal=False)


def test_a_frequency_method_takes_such_a_call(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    assert not torch.equal(logits(model, ids, is_causal=False), logits(model, ids))


@pytest.mark.slow
def test_a_compiled_call_in_both_directions_runs_eagerly(ids, no_graphs) -> None:
    model = patch(tiny_llama(num_hidden_layers=1), "rerope")
    wanted = logits(model, ids, is_causal=False)
    compiled = torch.compile(model)
    logits(compiled, ids)
    torch.testing.assert_close(logits(compiled, ids, is_causal=False), wanted, **EXACT)


@pytest.mark.parametrize("padded", [False, True])
def test_weights_of_an_unpatched_encoder_are_in_both_directions(padded: bool, ids) -> None:
    """Those that our attention function shows to an observer, which have no mask."""
    model = tiny_of(transformers.EuroBertModel)
    seen = []
    mask = torch.ones_like(ids)
    mask[:, -5:] = 0 if padded else 1
    with torch.no_grad(), attending(model, NAME, lambda module, dense, _: seen.append(dense)):
        model(ids, attention_mask=mask if padded else None)
    weights = seen[0].weights()[..., : -5 if padded else None]
    assert weights.shape[-1] == int(mask[0].sum()) and bool((weights > 0).all())
