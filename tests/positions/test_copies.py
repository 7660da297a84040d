"""Copies, pickles and saved models carry their patch."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import rope_ext
from tests.helpers.models import tiny_llama
from tests.helpers.positions import METHODS, logits, patch


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
