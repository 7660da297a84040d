"""Gradients, adapters and checkpointing under position methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import (
    FAMILIES,
    GEOMETRIES,
    METHODS,
    by_formula,
    by_geometry,
    gradients,
    logits,
    patch,
)


@pytest.mark.parametrize(("mask", "name"), by_geometry("left", "none", "packed", "jump"))
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
    every = mask == "left" and name in GEOMETRIES
    for checkpointing in (None, False, True) if every else (True,):
        model = patch(tiny_llama(), name).train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        found = gradients(model, ids, **given)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss scaled", "gemma2"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_are_those_of_the_papers_distances(kind: str, name: str, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    with by_formula(model, family, name, torch.arange(90)[None], **METHODS[name]):
        right = gradients(model, ids)
    for one, other in zip(gradients(patch(model, name, **family.options), ids), right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_lora_adapter_trains_and_is_the_same_patched_before_or_after(ids) -> None:
    from peft import LoraConfig, get_peft_model

    losses, said = [], []
    for order in ("before", "after"):
        model = patch(tiny_llama()) if order == "before" else tiny_llama()
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj"], r=4)).train()
        if order == "after":
            patch(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        said.append(logits(model.eval(), ids))
        plain = logits(rope_ext.unpatch(model), ids)
        assert (said[-1] - plain).abs().max() > 0.1
    assert losses[:3] == losses[3:] and losses[0] > losses[1] > losses[2]
    assert torch.equal(*said)


def test_attention_dropout_is_refused_in_training_only(ids) -> None:
    model = patch(tiny_llama(attention_dropout=0.1))
    logits(model, ids)
    with pytest.raises(rope_ext.OptionError, match="attention_dropout = 0"):
        model.train()(ids)
