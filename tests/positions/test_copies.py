"""Copies, pickles and saved models carry their patch."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import METHODS, logits, patch


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
