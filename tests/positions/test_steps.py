"""A step of decoding: what all layers share is decided once."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from rope_ext.attention import sizes
from tests.helpers.models import tiny_llama
from tests.helpers.positions import EXACT, decoded, patch


def test_a_step_with_a_sink_and_more_keys_than_are_turned_at_a_time(
    monkeypatch: pytest.MonkeyPatch, ids
) -> None:
    """As the general path, which every layer takes while gradients are wanted."""
    monkeypatch.setattr(sizes, "ROTATED", 4)
    model = patch(tiny_llama(), "self_extend")
    right = decoded(model, ids, [40, *[1] * 50])
    cache = DynamicCache(config=model.config)
    said = [model(part, past_key_values=cache).logits for part in ids.split([40, *[1] * 50], 1)]
    torch.testing.assert_close(torch.cat(said, 1), right, **EXACT)
