"""Copies, pickles and saved models carry their patch."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, FAMILIES, METHODS, logits, patch


@pytest.mark.parametrize("name", METHODS)
def test_copies_and_pickles_carry_the_patch(name: str, ids) -> None:
    model = patch(tiny_llama(), name)
    right, plain = logits(model, ids), logits(tiny_llama(), ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        rope_ext.patch(model, "pi", factor=2, replace=True)  # must not reach the copy
        assert torch.equal(logits(twin, ids), right)
        assert torch.equal(logits(rope_ext.unpatch(twin), ids), plain)
        assert torch.equal(logits(patch(twin, name), ids), right)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text"])
def test_a_saved_model_loads_with_its_patch_only(kind: str, tmp_path, ids) -> None:
    family = FAMILIES[kind]
    model = family.model()
    plain = logits(model, ids)
    right = logits(patch(model, "rerope", window=None), ids)
    model.save_pretrained(tmp_path)
    with pytest.raises(KeyError, match=r"rope_ext\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    again = rope_ext.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, ids), right, **EXACT)
    assert rope_ext.describe(again).options == rope_ext.describe(model).options
    torch.testing.assert_close(logits(rope_ext.unpatch(again), ids), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_saved_model_loads_onto_the_disk(kind: str, tmp_path, ids) -> None:
    model = patch(FAMILIES[kind].model())
    right = logits(model, ids)
    model.save_pretrained(tmp_path / "model")
    again = rope_ext.from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    assert all(parameter.is_meta for parameter in again.parameters())
    torch.testing.assert_close(logits(again, ids), right, **EXACT)
