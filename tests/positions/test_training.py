"""Gradients, adapters and checkpointing under position methods."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import rope_ext
from tests.families.zoo import tiny_model
from tests.helpers.both_directions import encoder
from tests.helpers.models import tiny_llama
from tests.helpers.positions import GEOMETRIES, gradients, logits, patch

MASKS = ("left", "packed", "jump")


@pytest.mark.parametrize(("mask", "name"), itertools.product(MASKS, GEOMETRIES))
def test_gradients_are_those_of_the_reference_and_survive_checkpointing(mask, name, ids) -> None:
    given: dict[str, Any] = {"use_cache": False}
    if mask == "left":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, :25] = 0
    elif mask == "packed":
        given["position_ids"] = torch.cat((torch.arange(33), torch.arange(57))).expand(2, -1)
    elif mask == "jump":
        given["position_ids"] = torch.cat((torch.arange(33), torch.arange(60, 117))).expand(2, -1)
        given["attention_mask"] = torch.ones_like(ids)
    right = gradients(patch(tiny_llama(), name, kernel="reference").double(), ids, **given)
    for checkpointing in (None, False, True) if mask == "left" else (True,):
        model = patch(tiny_llama(), name).train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        found = gradients(model, ids, **given)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_attention_dropout_is_refused_in_training_only(ids) -> None:
    model = patch(tiny_llama(attention_dropout=0.1))
    logits(model, ids)
    with pytest.raises(rope_ext.OptionError, match="attention_dropout = 0"):
        model.train()(ids)


def test_the_refusal_of_dropout_names_the_field_of_the_family(ids) -> None:
    model = patch(encoder("JinaEmbeddingsV3Model", attention_probs_dropout_prob=0.1))
    with pytest.raises(rope_ext.OptionError, match="attention_probs_dropout_prob = 0"):
        model.train()(ids)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "moshi"])
def test_a_layer_that_runs_again_without_its_forward_is_refused(family: str, reentrant, ids):
    """Moshi's layers rotate by themselves; a mask of one's own does not tell the forward."""
    model = patch(tiny_model(family)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    mask = torch.ones(1, 1, 90, 90, dtype=torch.bool).tril()
    loss = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.square().mean()
    with pytest.raises(rope_ext.UnsupportedModelError, match="checkpointing"):
        loss.backward()


def test_a_rotary_module_by_itself_does_not_rotate_as_trained(ids) -> None:
    model = patch(tiny_llama())
    positions = torch.arange(90)[None]
    with pytest.raises(rope_ext.UnsupportedModelError, match="by itself"):
        model.model.rotary_emb(torch.zeros(1, 90, 64), positions)
