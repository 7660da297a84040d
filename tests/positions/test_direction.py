"""Attention in both directions: refused by position methods, whose maps look back only."""

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
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # what is computed by our own attention function
    "position method": ("rerope", {}),
    "encoding": ("alibi", {}),
    "encoding of inputs": ("sinusoidal", {}),
    "bias": ("yarn", {"bias": "alibi"}),
    "temperature by position": ("yarn", {"temperature": "log_n"}),
    "some layers": ("yarn", {"layers": [0]}),
}
ENCODERS = (
    "EuroBertModel",
    "ModernBertForMaskedLM",
    "NomicBertModel",
    "GteModel",
    "JinaEmbeddingsV3Model",
    "UltrabertModel",
    "EmbeddingGemma2Model",
)


def refused(model: PreTrainedModel, method: str, **options: Any) -> None:
    before = snapshot(model)
    with pytest.raises(rope_ext.UnsupportedModelError, match=BOTH):
        rope_ext.patch(model, method, factor=4, **options)
    assert changed(before, snapshot(model)) == set()


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_refused_by_position_methods_alone(name: str) -> None:
    model = tiny_of(getattr(transformers, name))
    refused(model, "rerope")
    for method in ("yarn", "dynamic_ntk"):
        with rope_ext.patched(model, method, factor=4):
            pass


@pytest.mark.parametrize("what", OWN)
def test_everything_that_attends_by_itself_refuses_an_encoder(what: str) -> None:
    method, options = OWN[what]
    refused(tiny_of(transformers.EuroBertModel), method, **options)


def test_a_constant_temperature_needs_no_direction() -> None:
    model = tiny_of(transformers.EuroBertModel)
    with rope_ext.patched(model, "yarn", factor=4, temperature=1.2):
        pass


@pytest.mark.parametrize(
    ("model_type", "setting"),
    [
        ("llama", {"is_causal": False}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"use_bidirectional_attention": True}),  # EmbeddingGemma
        ("gemma4_text", {"use_bidirectional_attention": "all"}),
    ],
)
def test_decoders_made_bidirectional_by_their_configuration_are_refused(
    model_type: str, setting: dict[str, Any]
) -> None:
    refused(tiny_model(model_type, **setting), "rerope")
    with rope_ext.patched(tiny_model(model_type), "rerope", factor=4):
        pass


def test_attention_modules_decide_too() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    refused(model, "rerope")


@pytest.mark.parametrize("how", ["keyword", "configuration", "modules"])
def test_a_call_in_both_directions_is_refused(how: str, ids) -> None:
    model = patch(tiny_llama(), "rerope", **WIDE["rerope"], **TOLD)
    before = logits(model, ids)
    given = {"is_causal": False} if how == "keyword" else {}
    if how == "configuration":
        model.config.is_causal = False
    elif how == "modules":
        model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(rope_ext.UnsupportedModelError, match=BOTH):
        logits(model, ids, **given)
    model.config.is_causal = model.model.layers[1].self_attn.is_causal = True
    torch.testing.assert_close(logits(model, ids, is_causal=True), before, **EXACT)


def test_a_frequency_method_takes_such_a_call(ids) -> None:
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    assert not torch.equal(logits(model, ids, is_causal=False), logits(model, ids))


@pytest.mark.slow
def test_a_compiled_call_in_both_directions_is_refused(ids, no_graphs) -> None:
    model = torch.compile(patch(tiny_llama(num_hidden_layers=1), "rerope", factor=4))
    logits(model, ids)
    with pytest.raises(rope_ext.UnsupportedModelError, match=BOTH):
        logits(model, ids, is_causal=False)


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
